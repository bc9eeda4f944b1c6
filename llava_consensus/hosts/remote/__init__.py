"""Models whose code is neither in transformers nor in the official `llava` package: the first Qwen-VL and CogVLM, whose
checkpoints carry it, and InternVL-Chat, whose authors keep their own `llava` package. It is run only if the
user says `--trust-remote-code`, and none of it is here.
"""
