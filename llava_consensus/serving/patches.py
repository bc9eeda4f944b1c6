"""Replaces functions of vLLM that have no extension point, only in processes of reduced models."""

import os

REDUCES = "LLAVA_CONSENSUS_REDUCES"  # variable that a process sets for its engine when a reduced model is configured


def patch() -> None:
    """Installs the patches in this process and in those that it starts."""
    from llava_consensus.serving.scheduling import count_tower_work
    from llava_consensus.serving.wire import send_once

    os.environ[REDUCES] = "1"
    send_once()
    count_tower_work()
