"""Loads a checkpoint with LLaVA's own loader."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch

from llava_consensus.errors import ConsensusError, DataError, MissingDependency, OptionError
from llava_consensus.hosts.checkpoints import DTYPES, without_unused_report
from llava_consensus.hosts.llava.checks import check_sizes, tower_beside
from llava_consensus.hosts.llava.own_tower import FLAG, load_own_tower, trains_tower
from llava_consensus.hosts.weights import refuse_incomplete, refuse_not_finite, tensors_recorded
from llava_consensus.reduction.checks import choose


def load_official(path: str, device: str = "auto", dtype: str = "auto") -> tuple[Any, Any, Any]:
    """Model, tokenizer and image processor of a checkpoint, by LLaVA's own loader (`llava.model.builder`).

    A vision tower named in the checkpoint's config is looked for beside the checkpoint too, so that it is found from
    any folder.

    Raises:
        DataError: for a folder that is not there or cannot be loaded, whose weights are not those of its config.json,
            or hold NaN or infinity.
        OptionError: for a name LLaVA's loader would take for another model, or a bad device or dtype.
    """
    choose("dtype", dtype, DTYPES)
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if place.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError(f"device={device!r}: no CUDA device here, use cpu or auto")
    try:
        import llava.model.builder  # noqa: F401
        from llava.mm_utils import get_model_name_from_path
    except ImportError as error:
        raise MissingDependency(
            f"official LLaVA: {error}. Type: pip install --no-deps llava-torch==1.2.2.post1"
        ) from error
    name = get_model_name_from_path(path)
    if "llava" not in name.lower() or "lora" in name.lower():
        raise OptionError(
            f"model={path!r}: LLaVA's loader goes by the folder's name, "
            "which must contain 'llava' and not 'lora' (merge first)"
        )
    check_sizes(path)
    own_tower = trains_tower(path)
    changes: dict[str, Any] = {**tower_beside(path), **({FLAG: False} if own_tower else {})}
    with tensors_recorded() as loaded:
        model, tokenizer, processor = _load(path, name, place, changes)
    refuse_incomplete(path, loaded)
    if own_tower:
        load_own_tower(path, model)
    if dtype != "auto" or place == "cpu":
        model.to(torch.float32 if dtype == "auto" else getattr(torch, dtype))
    refuse_not_finite(path, model)
    return model.eval(), tokenizer, processor


def _load(path: str, name: str, device: str, changes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Model, tokenizer and image processor by LLaVA's loader, whose own printing is nobody's business."""
    from llava.model.builder import load_pretrained_model

    try:
        with contextlib.redirect_stdout(io.StringIO()), without_unused_report():
            tokenizer, model, processor, _ = load_pretrained_model(path, None, name, device=device, **changes)
    except ConsensusError:
        raise
    except Exception as error:  # a damaged checkpoint breaks foreign code in any way
        raise DataError(f"model={path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return model, tokenizer, processor
