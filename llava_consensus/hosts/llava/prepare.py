"""What takes the place of official LLaVA's `prepare_inputs_labels_for_multimodal` while a method is attached.

What the official function makes of a prompt is known from its structure (`structure.py`): the full sequence is gathered
accordingly, its visual rows are reduced, and what the official function returns is made of the rest. Where nothing is
reduced, the official function assembles the sequence itself.
"""

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from llava_consensus.hosts.base import Tiles
from llava_consensus.hosts.layout import Layout, fingerprints
from llava_consensus.hosts.layouts import STOCK, check_tiles
from llava_consensus.hosts.llava.structure import IGNORE, Arguments, Official, Structure
from llava_consensus.hosts.sequence import Channel, Rule, Sequence, pad_left
from llava_consensus.hosts.shadow import uncompiled
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.tokens import Need, Stopwatch

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment
    from llava_consensus.hosts.call import Call
    from llava_consensus.hosts.llava.adapter import LlavaModel

PREPARE = "prepare_inputs_labels_for_multimodal"
LIMIT = "tokenizer_model_max_length"  # entry of the configuration: rows a sequence is cut to


class View:
    """A model with some attributes replaced for one call; the model itself stays as it is."""

    def __init__(self, model: Any, **replaced: Any) -> None:
        vars(self).update(replaced, _model=model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def generate(attachment: "Attachment", *args: Any, **kwargs: Any) -> Any:
    """`generate` as the class has it, as one call."""
    if not attachment.current(fresh=False).scoped:
        with attachment.call():
            return generate(attachment, *args, **kwargs)
    model = attachment.here.module
    return type(model).generate(model, *args, **kwargs)


def prepare(attachment: "Attachment", *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Takes the place of the official function on this instance: same arguments, same six results."""
    return prepared(attachment, getattr(type(attachment.here.module), PREPARE), Arguments(*args, **kwargs))


@uncompiled
def prepared(attachment: "Attachment", official: Official, arguments: Arguments) -> tuple[Any, ...]:
    """What the official function returns, with the pictures reduced."""
    view = cast("LlavaModel", attachment.here)
    model = view.module
    step = arguments.input_ids.shape[1] == 1
    call = attachment.current(fresh=not step)
    tower = None if step or arguments.images is None else attachment.here.tower
    if tower is None:
        return official(model, *arguments)
    watch = Stopwatch(arguments.input_ids.device)
    cuts = attachment.method.place is Place.DECODER
    if view.layout != STOCK:
        check_tiles(arguments.tiles)
    config = changed(view.config, call.given.settings)
    with watch.time("layout"):
        uncut = config if cuts else changed(config, {LIMIT: None})
        structure = view.structure(attachment, official, arguments, uncut)
        layout = attachment.layout(structure.kinds)
    if layout.reduced() and not cuts:
        return _reduced(attachment, call, arguments, structure, layout, config, watch)
    replaced: dict[str, Any] = {"config": config}
    tiles: list[Tiles] = []

    def encode(pixels: Tensor) -> Tensor:
        tiles.extend(view.seen(attachment.encode(pixels, arguments.tiles)))
        return joined(tiles)

    if cuts or call.given.encoded is not None or attachment.method.acts_inside:
        replaced["encode_images"] = encode
    result = official(View(model, **replaced), *arguments)
    attachment.arm(call, layout, result[4], tiles, limit=None if cuts else getattr(config, LIMIT, None))
    return result


def _reduced(
    attachment: "Attachment",
    call: "Call",
    arguments: Arguments,
    structure: Structure,
    layout: Layout,
    config: Any,
    watch: Stopwatch,
) -> tuple[Any, ...]:
    """The six results after the visual rows of the full sequence were reduced. Truncation judges the reduced length."""
    view = cast("LlavaModel", attachment.here)
    model = view.module
    tiles = view.seen(attachment.encode(arguments.pixels, arguments.tiles))
    projected = joined(tiles)
    embeds = structure.embeddings(model, arguments.input_ids, projected)
    device, channels = embeds.device, {}
    if arguments.labels is not None:
        targets = structure.labels(arguments.labels, projected.shape[0] * projected.shape[1])
        channels["labels"] = Channel(targets, IGNORE, Rule.BLANK)
    full = Sequence(embeds, layout.real.to(device), layout.positions.to(device), channels)
    limit = getattr(config, LIMIT, None)
    prompts = prompt_fingerprints(arguments) if Need.FINGERPRINT in attachment.method.needs else None
    out = attachment.reduce(call, full, layout, tiles, prompts, limit, watch)
    if getattr(config, "tokenizer_padding_side", "right") == "left":
        out = pad_left(out)
    positions: Tensor | None = out.positions
    if attachment.method.positions == "renumber":
        given = arguments.position_ids
        positions = None if given is None else _like((out.real.cumsum(1) - 1).clamp_min(0) * out.real, given)
    mask = _like(out.real, arguments.attention_mask)
    labels = out.channels["labels"].values if channels else None
    return None, positions, mask, arguments.past_key_values, out.embeds, labels


def joined(tiles: list[Tiles]) -> Tensor:
    """Projected tokens of all pictures, tile by tile: [T, N, D]."""
    return tiles[0].projected if len(tiles) == 1 else torch.cat([picture.projected for picture in tiles])


def prompt_fingerprints(arguments: Arguments) -> Tensor:
    """A number for each prompt of the batch, the same wherever padding stands: int64 [R]."""
    ids, mask = arguments.input_ids, arguments.attention_mask
    return fingerprints(ids, torch.ones_like(ids) if mask is None else mask)


def changed(config: Any, *changes: Any) -> Any:
    """A copy of a configuration with changes; the original is never written to."""
    altered = copy.copy(config)
    for name, value in ((name, value) for part in changes for name, value in part.items()):
        setattr(altered, name, value)
    return altered


def _like(values: Tensor, argument: Tensor | None) -> Tensor | None:
    """None where the caller gave None, else the values in the caller's dtype: what the official function does."""
    return None if argument is None else values.to(argument.dtype)
