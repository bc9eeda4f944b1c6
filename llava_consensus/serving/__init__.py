"""Any method that acts after the vision tower, inside vLLM, without a fork of it: a plugin that vLLM finds by itself.

    LLM(model, **llava_consensus.vllm(method="visionzip", tokens=64))        llava-consensus serve MODEL --tokens 64

vLLM gets one argument, its `hf_overrides`: a class of ours in place of the model's own, with method, budget and options
(`setting.py`). That class (`models.py`) is vLLM's with another way from images to embeddings (`engine.py`); its
processor (`processors.py`) puts one placeholder for each token that is kept (`plan.py`). Methods get their inputs from
`hosts.inputs`, and tokens are put in place by `hosts.rows`, as in `attach`.

Nothing heavy is imported here: vLLM calls `register` in each of its processes, also for models that are not reduced.
"""

import os

from llava_consensus.serving.parent import end_with_parent
from llava_consensus.serving.patches import REDUCES, patch
from llava_consensus.serving.supported import FAMILIES, installed


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
        patch(os.environ[REDUCES])
