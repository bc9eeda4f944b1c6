"""Loads a checkpoint of transformers with its processor, as the harness wants it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from llava_consensus.errors import DataError, MissingDependency, missing_extra
from llava_consensus.evaluation.models.weights import refuse_incomplete, refuse_not_finite
from llava_consensus.hosts.hf.checks import check_version
from llava_consensus.hosts.hf.harness import ProcessorHost
from llava_consensus.hosts.hf.host import view_of
from llava_consensus.hosts.loading import Loading


def load(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> ProcessorHost:
    """A checkpoint with its processor.

    Args:
        path: folder of the checkpoint.
        loading: how, with nothing left open.
        view: the family's view, as `file:class`.
        options: all options of the host.
    Raises:
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
        MissingDependency: for a processor that needs a package which is not installed.
        OptionError: for a version of transformers or a processor that is not adapted.
    """
    check_version(transformers.__version__)
    code = {"trust_remote_code": True} if loading.trust_remote_code else {}
    try:
        processor = _processor(path, code)
        config = transformers.AutoConfig.from_pretrained(path, **code)
        cls: Any = getattr(transformers, (config.architectures or ["AutoModelForImageTextToText"])[0])
        model, info = cls.from_pretrained(path, dtype=loading.numbers(), output_loading_info=True, **loading.told())
    except MissingDependency:
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise DataError(f"model={path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    refuse_incomplete(path, cls, info)
    refuse_not_finite(path, model)
    text_side = next(Path(path).glob("official/*/config.json"), None)
    if text_side is not None:  # the CLIP model that `convert` has put beside the weights
        model.config.vision_config._name_or_path = str(text_side.parent)
    if loading.device_map is None and loading.bits is None:  # else it stands where it should
        model.to(loading.device)
    host = ProcessorHost(view_of(model.eval(), view, options), processor)
    host.check_prompts()
    return host


def _processor(path: str, code: dict[str, Any]) -> Any:
    """The processor of a checkpoint; those of models that know videos need torchvision, that of SmolVLM num2words."""
    try:
        return transformers.AutoProcessor.from_pretrained(path, **code)
    except ImportError as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise missing_extra(f"model={path!r} cannot be loaded: {reason}", "processors") from error
