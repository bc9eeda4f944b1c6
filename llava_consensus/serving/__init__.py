"""Any method that acts after the vision tower, inside vLLM, without a fork of it: a plugin that vLLM finds by itself.

    LLM(model, **llava_consensus.vllm(method="visionzip", tokens=64))        llava-consensus serve MODEL --tokens 64

vLLM gets one argument, its `hf_overrides`: a class of ours in place of the model's own, with method, budget and options
(`setting.py`). That class (`models.py`) is vLLM's with another way from pictures to embeddings (`engine.py`); its
processor (`processors.py`) puts one placeholder for each token that is kept (`plan.py`). The reduction itself is
`hosts.reduce`, as everywhere.

Nothing heavy is imported here: vLLM calls `register` in each of its processes, also for models that are not reduced.
"""

import os

from llava_consensus.serving.parent import end_with_parent
from llava_consensus.serving.supported import FAMILIES, installed

REDUCES = "LLAVA_CONSENSUS_REDUCES"  # variable that a process sets for its engine when a reduced model is configured


def register() -> None:
    """Registers our model classes, which are imported when a model asks for them. vLLM's functions stay as they are
    until a reduced model is configured.
    """
    end_with_parent()
    if installed() is None:
        return
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from llava_consensus.serving.server import Configured

    for name in FAMILIES.values():
        ModelRegistry.register_model(name, f"{__name__}.models:{name}")
        MODELS_CONFIG_MAP[name] = Configured
    if REDUCES in os.environ:  # this is a process of an engine
        patch()


def patch() -> None:
    """Replaces what vLLM offers no extension point for, in this process and in those that it starts."""
    from llava_consensus.serving.scheduling import count_tower_work
    from llava_consensus.serving.wire import send_once

    os.environ[REDUCES] = "1"
    send_once()
    count_tower_work()
