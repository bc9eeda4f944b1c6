"""Refuses a checkpoint whose weights are not the model's: tensors that are missing, misshapen, left over or not finite.

transformers fills what a checkpoint lacks with random numbers and only logs it, so a damaged checkpoint would answer
at random. `with tensors_recorded() as loaded: ...` notes what each loading found; `refuse_incomplete(path, loaded)`
and `refuse_not_finite(path, model)` raise before anything is answered.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from llava_consensus.errors import DataError

SHOWN = 8  # names in a message
# Left over on purpose: the text side of a CLIP checkpoint of which the tower is one side, a tower that LLaVA reads from
# a folder of its own, and buffers that older versions of transformers stored.
UNREAD = re.compile(
    r"(^|\.)(text_model|text_projection|visual_projection|vision_tower)\.|(^|\.)logit_scale$"
    r"|rotary_emb\.inv_freq$|position_ids$|(^|\.)masked_bias$"
)
_LOADING = threading.Lock()  # `from_pretrained` is replaced for the whole process


class Loaded(NamedTuple):
    """What one loading found: the class that was loaded, and names of tensors."""

    model: str
    missing: list[str]
    mismatched: list[str]
    unexpected: list[str]

    @classmethod
    def of(cls, model: type, info: Mapping[str, Any]) -> "Loaded":
        """From what transformers says of a loading (`output_loading_info`)."""
        kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")
        missing, mismatched, unexpected = (_names(info.get(kind, ())) for kind in kinds)
        return cls(model.__name__, [name for name in missing if name not in mismatched], mismatched, unexpected)


@contextmanager
def tensors_recorded() -> Iterator[list[Loaded]]:
    """Notes for every model that is loaded inside what transformers says of its tensors; one thread at a time."""
    loadings: list[Loaded] = []
    with _LOADING:
        dtype = torch.get_default_dtype()  # transformers 4 does not set it back when a loading fails
        official = PreTrainedModel.__dict__["from_pretrained"]

        def recording(cls: type, *args: Any, **kwargs: Any) -> Any:
            wanted = kwargs.pop("output_loading_info", False)
            load = partial(official.__func__, cls, *args)
            try:
                model, info = load(**kwargs, output_loading_info=True)
            except (RuntimeError, ValueError):
                refuse_incomplete(str(args[0]), [_misshapen(load, cls, kwargs)])
                raise
            loadings.append(Loaded.of(cls, info))
            return (model, info) if wanted else model

        PreTrainedModel.from_pretrained = classmethod(recording)
        try:
            yield loadings
        finally:
            PreTrainedModel.from_pretrained = official
            torch.set_default_dtype(dtype)


def refuse_incomplete(path: str, loaded: Iterable[Loaded]) -> None:
    """Raises DataError where a tensor is missing, of another shape, or left over although the model is of its kind."""
    problems = []
    for loading in loaded:
        surplus = [name for name in loading.unexpected if not UNREAD.search(name)]
        for problem, names in (
            ("missing (they would be random)", loading.missing),
            ("of another shape than config.json says", loading.mismatched),
            ("left over, the model has no place for them", surplus),
        ):
            problems += [f"{loading.model}: {len(names)} tensors {problem}: {_shown(names)}"] if names else []
    if problems:
        raise DataError(
            f"model={path!r}: the weights do not fit config.json. {'; '.join(problems)}. "
            "Fetch the whole checkpoint again, or mend its config.json"
        )


def refuse_not_finite(path: str, model: torch.nn.Module) -> None:
    """Raises DataError where a weight is NaN or infinite in the type the model is run in."""
    names = [name for name, weight in model.named_parameters() if not _finite(weight)]
    if names:
        kinds = sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()})
        raise DataError(
            f"model={path!r}: NaN or infinity in {len(names)} tensors (as {', '.join(kinds)}): {_shown(names)}. "
            "Fetch the checkpoint again; if only --dtype float16 says so, take bfloat16 or float32"
        )


def _misshapen(load: Callable[..., Any], cls: type, kwargs: dict[str, Any]) -> Loaded:
    """What another loading, that goes on past a misshapen tensor, says of them: the first only says there are some."""
    plain = {name: value for name, value in kwargs.items() if name not in ("low_cpu_mem_usage", "device_map")}
    try:
        _, info = load(**plain, output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception:  # the first failure was of another kind, and is raised
        return Loaded(cls.__name__, [], [], [])
    return Loaded.of(cls, info)


def _finite(weight: torch.Tensor) -> bool:
    if not weight.is_floating_point():  # quantized: whole numbers
        return True
    return bool(torch.isfinite(weight).all())


def _names(keys: Iterable[Any]) -> list[str]:
    """Names of tensors; of a misshapen one transformers gives its shapes too."""
    return sorted(key if isinstance(key, str) else str(key[0]) for key in keys)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
