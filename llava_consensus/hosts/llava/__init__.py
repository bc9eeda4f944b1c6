"""Official LLaVA 1.5 and 1.6 (the `llava` package), with Llama and Mistral language models."""
