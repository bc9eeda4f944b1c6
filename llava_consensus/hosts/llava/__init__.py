"""Official LLaVA 1.5 and 1.6."""
