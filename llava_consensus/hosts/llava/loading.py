"""Loads a checkpoint with LLaVA's own loader."""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava_consensus.errors import ConsensusError, DataError, MissingDependency, OptionError
from llava_consensus.evaluation.models.checkpoint import hub_name
from llava_consensus.evaluation.models.weights import incomplete_refused, refuse_not_finite
from llava_consensus.hosts.clip_text import without_unused_report
from llava_consensus.hosts.llava.checks import check_sizes, tower_beside, tower_of_hub
from llava_consensus.hosts.llava.host import LlavaHost
from llava_consensus.hosts.llava.own_tower import FLAG, load_own_tower, trains_tower
from llava_consensus.hosts.loading import Loading


def load(path: str, loading: Loading, options: Mapping[str, str]) -> LlavaHost:
    """The host of a checkpoint, see `load_official`, with all options of the host."""
    return LlavaHost(*load_official(path, loading), options=options)


def load_official(path: str, loading: Loading) -> tuple[Any, Any, Any]:
    """Model, tokenizer and image processor of a checkpoint, by LLaVA's own loader (`llava.model.builder`).

    A vision tower named in the checkpoint's config is looked for beside the checkpoint too, so that it is found from
    any folder.

    Args:
        path: folder of the checkpoint.
        loading: how, with nothing left open.
    Raises:
        DataError: for a folder that is not there or cannot be loaded, whose weights are not those of its config.json,
            or hold NaN or infinity.
        OptionError: for a name LLaVA's loader would take for another model.
    """
    path = str(Path(path).expanduser())
    if loading.device_map not in (None, "auto"):
        raise OptionError(
            f"device_map={loading.device_map!r}: official LLaVA places its vision tower by auto alone. Take auto"
        )
    try:
        import llava.model.builder  # noqa: F401
        from llava.mm_utils import get_model_name_from_path
    except ImportError as error:
        raise MissingDependency(
            f"official LLaVA: {error}. Type: pip install --no-deps llava-torch==1.2.2.post1"
        ) from error
    named = hub_name(Path(path)) or path
    name = get_model_name_from_path(named)
    if "llava" not in name.lower() or "lora" in name.lower():
        raise OptionError(
            f"model={named!r}: LLaVA's loader goes by the model's name, "
            "which must contain 'llava' and not 'lora' (merge first)"
        )
    check_sizes(path)
    own_tower = trains_tower(path)
    changes: dict[str, Any] = {**_tower(path), **({FLAG: False} if own_tower else {}), **_told(loading)}
    with incomplete_refused():
        model, tokenizer, processor = _load(path, name, "cuda" if loading.device_map else loading.device, changes)
    if own_tower:
        load_own_tower(path, model)
    loading.cast(model)
    refuse_not_finite(path, model)
    return model.eval(), tokenizer, processor


def _tower(path: str) -> dict[str, str]:
    """Config changes that point the loader at the folder of the vision tower, downloaded where it is one of the hub."""
    tower = tower_of_hub(path)
    if tower is None:
        return tower_beside(path)
    tower.files()
    return {"mm_vision_tower": str(tower.folder)}


def _told(loading: Loading) -> dict[str, Any]:
    """What LLaVA's loader hands on to transformers; where the model stands is its own to say."""
    return {name: value for name, value in loading.told().items() if name != "device_map" or value == "auto"}


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
