"""What takes the place of official LLaVA's `prepare_inputs_labels_for_multimodal` while a method is attached.

The official function still assembles the full sequence, every branch of it. Called once more on a stand-in with one
channel it tells which rows are visual; the assembled rows are then reduced, and what the official function returns is
made of the rest. Nothing of LLaVA is copied.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.base import Tiles
from llava_consensus.hosts.sequence.layout import Layout, RowKinds, fingerprints
from llava_consensus.hosts.sequence.splice import Channel, Rule, Sequence, pad_left
from llava_consensus.hosts.tower.inside import acts_inside
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.stopwatch import Stopwatch

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment
    from llava_consensus.hosts.call import Call

PREPARE = "prepare_inputs_labels_for_multimodal"
LIMIT = "tokenizer_model_max_length"  # entry of the configuration: rows a sequence is cut to
IGNORE = -100  # label of rows without a target
Official = Callable[..., tuple[Any, ...]]


class Arguments(NamedTuple):
    """The arguments of the official function, in its own order."""

    input_ids: Tensor
    position_ids: Tensor | None
    attention_mask: Tensor | None
    past_key_values: Any
    labels: Tensor | None
    images: Any
    image_sizes: Any = None

    @property
    def tiles(self) -> list[int]:
        """Tiles of each picture."""
        if isinstance(self.images, list):
            return [1 if image.ndim == 3 else image.shape[0] for image in self.images]
        count: list[int] = [self.images.shape[1] if self.images.ndim == 5 else 1] * self.images.shape[0]
        return count

    @property
    def without_pixels(self) -> Any:
        """Pictures of no pixels that take the same branches of the official function."""
        if isinstance(self.images, list):
            return [torch.empty(*image.shape[:-2], 0, 0) for image in self.images]
        return torch.empty(*self.images.shape[:-2], 0, 0)


class View:
    """A model with some attributes replaced for one call; the model itself stays as it is."""

    def __init__(self, model: Any, **replaced: Any) -> None:
        vars(self).update(replaced, _model=model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def generate(attachment: "Attachment", *args: Any, **kwargs: Any) -> Any:
    """`generate` as the class has it, as one call."""
    model = attachment.here.module
    if attachment.current(fresh=False).scoped:
        return type(model).generate(model, *args, **kwargs)
    with attachment.call():
        return type(model).generate(model, *args, **kwargs)


@torch.compiler.disable
def prepare(attachment: "Attachment", *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Takes the place of the official function on this instance: same arguments, same six results."""
    arguments, model = Arguments(*args, **kwargs), attachment.here.module
    official: Official = getattr(type(model), PREPARE)
    step = arguments.input_ids.shape[1] == 1
    call = attachment.current(fresh=not step)
    if model.get_vision_tower() is None or arguments.images is None or step:
        return official(model, *arguments)
    watch = Stopwatch(arguments.input_ids.device)
    cuts = attachment.method.place is Place.DECODER
    with watch.time("layout"):
        config = changed(model.config, call.settings, {} if cuts else {LIMIT: None})
        layout = attachment.layout(row_kinds(official, model, arguments, config))
    if layout.reduced() and not cuts:
        call.watch = watch
        return _reduced(attachment, call, official, arguments, layout)
    replaced: dict[str, Any] = {"config": changed(model.config, call.settings)} if call.settings else {}
    if call.encoded is not None or acts_inside(attachment.method):
        replaced["encode_images"] = lambda pixels: joined(attachment.encode(pixels, arguments.tiles))
    result = official(View(model, **replaced) if replaced else model, *arguments)
    attachment.arm(call, layout, result[4], limit=None if cuts else getattr(model.config, LIMIT, None))
    return result


def _reduced(
    attachment: "Attachment", call: "Call", official: Official, arguments: Arguments, layout: Layout
) -> tuple[Any, ...]:
    """The six results after the visual rows of the full sequence were reduced. Truncation judges the reduced length."""
    model: Any = attachment.here.module
    tiles: list[Tiles] = []

    def encode(pixels: Tensor) -> Tensor:
        tiles.extend(attachment.encode(pixels, arguments.tiles))
        return joined(tiles)

    config = changed(model.config, call.settings, {LIMIT: None})
    _, _, _, cache, embeds, labels = official(View(model, config=config, encode_images=encode), *arguments)
    real = layout.real.to(embeds.device)
    channels = {} if labels is None else {"labels": Channel(labels, IGNORE, Rule.BLANK)}
    full = Sequence(embeds, real, (real.cumsum(1) - 1).clamp_min(0), channels)
    limit = getattr(changed(model.config, call.settings), LIMIT, None)
    out = attachment.reduce(call, full, layout, tiles, prompt_fingerprints(arguments), limit)
    if getattr(config, "tokenizer_padding_side", "right") == "left":
        out = pad_left(out)
    positions: Tensor | None = out.positions
    if attachment.method.positions == "renumber":
        positions = _like((out.real.cumsum(1) - 1).clamp_min(0) * out.real, arguments.position_ids)
    mask = _like(out.real, arguments.attention_mask)
    return None, positions, mask, cache, out.embeds, out.channels["labels"].values if channels else None


def row_kinds(official: Official, model: Any, arguments: Arguments, config: Any) -> RowKinds:
    """What every assembled row will be, from the official function itself called on a stand-in of one channel, in which
    text is 0, a newline -1, and patches are numbered from 1 over all tiles.
    """
    tower = model.get_vision_tower()

    def number(images: Tensor) -> Tensor:
        shape = (images.shape[0], tower.num_patches, 1)
        return torch.arange(1, shape[0] * shape[1] + 1, dtype=torch.float64).view(shape)

    inner = SimpleNamespace(
        embed_tokens=lambda ids: torch.zeros(*ids.shape, 1, dtype=torch.float64), get_vision_tower=lambda: tower
    )
    stand_in = SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        model=SimpleNamespace(image_newline=torch.tensor([-1.0], dtype=torch.float64)),
        encode_images=number,
        get_model=lambda: inner,
        get_vision_tower=lambda: tower,
    )
    ids = arguments.input_ids.cpu()
    mask = torch.ones_like(ids) if arguments.attention_mask is None else arguments.attention_mask.cpu()
    targets = None if arguments.labels is None else arguments.labels.cpu()
    results = official(stand_in, ids, None, mask, None, targets, arguments.without_pixels, arguments.image_sizes)
    _, _, real, _, rows, labels = results
    answer = None if labels is None else labels != IGNORE
    return _kinds(rows[..., 0].long(), real.bool(), arguments.tiles, tower.num_patches, answer)


def _kinds(rows: Tensor, real: Tensor, tiles: list[int], patches: int, answer: Tensor | None) -> RowKinds:
    """Kinds from the numbers of the stand-in [R, S]; a newline belongs to the picture before it."""
    owner = torch.repeat_interleave(torch.arange(len(tiles)), torch.tensor(tiles))  # [T] picture of each tile
    first = torch.tensor([0, *tiles]).cumsum(0)  # tile 0 of each picture
    flat = (rows - 1).div(patches, rounding_mode="floor")
    picture = torch.where(rows > 0, owner[flat.clamp(0, len(owner) - 1)], -1)
    place = torch.arange(rows.shape[1]).expand_as(rows)
    before = torch.where(rows > 0, place, 0).cummax(1).values  # the last visual row so far
    picture = torch.where(rows == -1, picture.gather(1, before), picture)
    tile = torch.where(rows > 0, flat - first[picture.clamp_min(0)], -1)
    return RowKinds(real, picture, tile, torch.where(rows > 0, (rows - 1) % patches, -1), answer)


def joined(tiles: list[Tiles]) -> Tensor:
    """Projected tokens of all pictures, tile by tile: [T, N, D]."""
    return torch.cat([picture.projected for picture in tiles])


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
