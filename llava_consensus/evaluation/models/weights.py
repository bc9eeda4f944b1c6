"""Refuses a checkpoint whose weights are not the model's: tensors that are missing, misshapen, left over or not finite.

transformers fills what a checkpoint lacks with random numbers and only logs it, so a damaged checkpoint would answer
at random.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from llava_consensus.errors import DataError

NAMED = 8  # names in a message
# Left over on purpose: the text side of a CLIP checkpoint of which the tower is one side, a tower that LLaVA reads from
# a folder of its own, and buffers that older versions of transformers stored.
UNREAD = re.compile(
    r"(^|\.)(text_model|text_projection|visual_projection|vision_tower)\.|(^|\.)logit_scale$"
    r"|rotary_emb\.inv_freq$|position_ids$|(^|\.)masked_bias$"
)
_LOADING = threading.Lock()  # `from_pretrained` is replaced for the whole process


@contextmanager
def incomplete_refused() -> Iterator[None]:
    """Inside, every model that foreign code loads is held against its weights (`refuse_incomplete`); one thread at a
    time.
    """
    with _LOADING:
        dtype = torch.get_default_dtype()  # transformers 4 does not set it back when a loading fails
        official = PreTrainedModel.__dict__["from_pretrained"]

        def checked(cls: type, path: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = kwargs.pop("output_loading_info", False)
            kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # else they are counted, not named
            try:
                model, info = official.__func__(cls, path, *args, **kwargs)
            except NotImplementedError:  # of transformers 4, which cannot place a model with a misshapen tensor
                plain = {
                    name: value for name, value in kwargs.items() if name not in ("low_cpu_mem_usage", "device_map")
                }
                model, info = official.__func__(cls, path, *args, **plain)
            refuse_incomplete(str(path), cls, info)
            return (model, info) if wanted else model

        PreTrainedModel.from_pretrained = classmethod(checked)
        try:
            yield
        finally:
            PreTrainedModel.from_pretrained = official
            torch.set_default_dtype(dtype)


def refuse_incomplete(path: str, model: type, info: Mapping[str, Any]) -> None:
    """Raises DataError where a tensor is missing, of another shape, or left over although the model is of its kind.

    Args:
        path: of the checkpoint, for the message.
        model: class that was loaded.
        info: what transformers says of the loading (`output_loading_info`).
    """
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")  # of a misshapen tensor the shapes come along
    missing, mismatched, unexpected = (
        sorted(key if isinstance(key, str) else str(key[0]) for key in info.get(kind, ())) for kind in kinds
    )
    problems = {
        "missing (they would be random)": [name for name in missing if name not in mismatched],
        "of another shape than config.json says": mismatched,
        "left over, the model has no place for them": [name for name in unexpected if not UNREAD.search(name)],
    }
    found = [
        f"{model.__name__}: {len(names)} tensors {problem}: {_listed(names)}"
        for problem, names in problems.items()
        if names
    ]
    if found:
        raise DataError(
            f"model={path!r}: the weights do not fit config.json. {'; '.join(found)}. "
            "Fetch the whole checkpoint again, or mend its config.json"
        )


def refuse_not_finite(path: str, model: torch.nn.Module) -> None:
    """Raises DataError where a weight is NaN or infinite in the type the model is run in; quantised ones are whole
    numbers.
    """
    names = [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and not bool(torch.isfinite(weight).all())
    ]
    if names:
        kinds = sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()})
        raise DataError(
            f"model={path!r}: NaN or infinity in {len(names)} tensors (as {', '.join(kinds)}): {_listed(names)}. "
            "Fetch the checkpoint again; if only --dtype float16 says so, take bfloat16 or float32"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
