"""InternVL-Chat of 2023 (`internvl_chat_llava`): LLaVA 1.1 with InternViT-6B for its tower and Vicuna behind it, run by
its authors' own `llava` package, which is installed in place of the official one.
"""
