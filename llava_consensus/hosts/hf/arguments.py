"""What reduced prompts become for the model: shortened `input_ids`, `attention_mask`, `position_ids`, token types and
labels, and the reduced features as `mm_encoder_outputs`. Transformers before 5.19 does not take those and gets
`inputs_embeds` in place of ids.
"""

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch
import transformers

from llava_consensus.errors import OptionError
from llava_consensus.hosts.sequence import Sequence

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment
    from llava_consensus.hosts.hf.model import HfModel

FEATURES_TAKEN = (5, 19)  # the version of transformers from which on models take features of pictures
EMBEDDED = (
    "this version of transformers (< 5.19) takes no reduced features of pictures: prompts are handed to the model as "
    "inputs_embeds, and processors of ids, such as a repetition penalty, see the answer alone"
)
TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments that go with the rows


def reduced_arguments(
    attachment: "Attachment", inputs: dict[str, Any], out: Sequence, modalities: list[str], used_names: set[str]
) -> dict[str, Any]:
    """The arguments for the reduced prompts, without those the encoders have used."""
    view: Any = attachment.here
    values = {name: channel.values for name, channel in out.channels.items()}
    planes = [value for name, value in values.items() if name.startswith("plane ")]
    ids, arguments = values["ids"], {name: value for name, value in inputs.items() if name not in used_names}
    arguments.pop("position_ids", None)
    arguments |= {name: value for name, value in values.items() if name in (*TYPES, "labels")}
    arguments |= {"input_ids": ids, "attention_mask": out.real.long()}
    if view.keeps_positions or attachment.method.positions != "renumber":
        arguments |= view.placing(inputs, out.positions, out.real)
    elif inputs.get("position_ids") is not None:
        arguments["position_ids"] = (out.real.cumsum(1) - 1).clamp_min(0)
    if not takes_features(transformers.__version__):
        return _embedded(view, arguments, out, bool(planes))
    encoded = {}
    for modality in modalities:
        at_placeholder = (ids == view.placeholder(modality)) & out.real
        filled = at_placeholder.any(1).tolist()
        parts = [
            [part[row][at_placeholder[row]] for row, has_rows in enumerate(filled) if has_rows]
            for part in (out.embeds, *planes)
        ]
        encoded[modality] = view.output(parts[0], parts[1:])
    return {**arguments, "mm_encoder_outputs": encoded}


def takes_features(version: str) -> bool:
    """Whether this version of transformers takes pictures that were encoded before (`mm_encoder_outputs`)."""
    return tuple(int(part) for part in version.split(".")[:2]) >= FEATURES_TAKEN


def _embedded(view: "HfModel", arguments: dict[str, Any], out: Sequence, layered: bool) -> dict[str, Any]:
    """The arguments with embeddings in place of ids. OptionError for a model that adds features between its layers, or
    whose `generate` starts with ids alone.
    """
    starts_with = inspect.signature(view.module.prepare_inputs_for_generation).parameters
    if layered or "inputs_embeds" not in starts_with:
        raise OptionError(
            f"transformers {transformers.__version__}: reduced pictures reach {type(view.module).__name__} as features "
            "alone, which this version does not take. Type: pip install -U 'transformers>=5.19'"
        )
    warnings.warn(EMBEDDED, stacklevel=2)  # Python says it once
    return {**{name: value for name, value in arguments.items() if name != "input_ids"}, "inputs_embeds": out.embeds}


def contained(view: "HfModel", kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with features in the container this model takes."""
    encoded = kwargs.get("mm_encoder_outputs") or {}
    lists = [name for name in view.tensors if encoded.get(name) is not None]
    lists = [name for name in lists if isinstance(encoded[name].pooler_output, list)]
    if not lists:
        return kwargs
    tensors = {name: view.output(torch.cat(encoded[name].pooler_output)[None], []) for name in lists}
    return {**kwargs, "mm_encoder_outputs": {**encoded, **tensors}}
