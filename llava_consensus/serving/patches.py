"""Replaces functions of vLLM that have no extension point, only in processes of reduced models."""

import os

REDUCES = "LLAVA_CONSENSUS_REDUCES"  # variable that a process sets for its engine when a reduced model is configured
PROMPT = "prompt"  # its value if the method reads the prompt


def patch(kind: str) -> None:
    """Installs the patches here and in processes started later. Only methods that read prompts send images together."""
    from llava_consensus.serving.scheduling import count_tower_work
    from llava_consensus.serving.wire import send_once

    os.environ[REDUCES] = kind
    count_tower_work()
    if kind == PROMPT:
        send_once()
