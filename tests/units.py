"""Made-up inputs of methods, shared by the tests: units of visual tokens, and views between decoder layers."""

import math
from functools import partial
from typing import Any

import torch

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import Cut, DecoderView
from llava_consensus.reduction.merging import fresh
from llava_consensus.reduction.method import Place, Shape
from llava_consensus.reduction.tokens import (
    ClipSides,
    Stopwatch,
    TextProbe,
    VisionAttention,
    VisualTokens,
    WholeImages,
    Words,
)

WATCH = Stopwatch(torch.device("cpu"))


def unit(
    size: int = 24, batch: int = 2, seed: int = 0, text: int = 5, dtype: torch.dtype = torch.float32, width: int = 6
) -> VisualTokens:
    """Random tokens of `batch` units, one tile each, with everything a method can ask for."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    length = 3 + size + text
    places = torch.arange(length - text, length).expand(batch, -1)
    probe = TextProbe(
        query=noise(batch, 4, text, 8),
        key=noise(batch, 2, length, 8),
        cos=torch.ones(batch, length, 8),
        sin=torch.zeros(batch, length, 8),
        scale=8**-0.5,
        rows=places,
        row_mask=torch.ones(batch, text, dtype=torch.bool),
        key_mask=torch.ones(batch, length, dtype=torch.bool),
    )
    return VisualTokens(
        projected=noise(batch, size, width),
        tile=torch.arange(batch)[:, None].expand(-1, size),
        patch=torch.arange(size).expand(batch, -1),
        attention=VisionAttention(noise(batch, 4, size + 1, 8), noise(batch, 4, size + 1, 8), 8**-0.5, 1),
        features=noise(batch, size, 10),
        class_feature=noise(batch, 10),
        project=lambda values: values[..., :width] * 2,
        probe=probe,
        image=torch.arange(batch),
        prompt=torch.arange(batch),
        columns=torch.arange(3, 3 + size).expand(batch, -1),
        fingerprint=torch.arange(batch) * 77 + 5,
        side=6,
        clip=ClipSides(noise(batch, size, 7), noise(batch, 2, 7), torch.ones(batch, 2, dtype=torch.bool)),
        whole=WholeImages(torch.arange(batch), torch.ones(batch, size, dtype=torch.bool)),
        slot=(torch.arange(size) * 9 // size).expand(batch, -1),  # as if a tower had merged them to nine
        earlier=VisionAttention(noise(batch, 4, size + 1, 8), noise(batch, 4, size + 1, 8), 8**-0.5, 1),
        words=Words(noise(batch, text, width), torch.ones(batch, text, dtype=torch.bool)),
    )


def of_batch(tokens: VisualTokens, index: int) -> VisualTokens:
    """One unit of a batch of single tiles, alone."""

    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[index : index + 1]
        return type(value)(*map(part, value)) if isinstance(value, tuple) else value

    found: VisualTokens = part(tokens)
    return found._replace(tile=torch.zeros_like(found.tile), prompt=torch.zeros(1, dtype=torch.long))


def without_question(tokens: VisualTokens) -> VisualTokens:
    """The same units for prompts that end in their image: a probe of zero rows."""
    probe = tokens.probe
    assert probe is not None
    return tokens._replace(
        probe=probe._replace(query=probe.query[:, :, :0], rows=probe.rows[:, :0], row_mask=probe.row_mask[:, :0])
    )


def at_angles(*degrees: float) -> torch.Tensor:
    """Points on the unit circle: [1, n, 2]."""
    angles = torch.tensor(degrees) * math.pi / 180
    return torch.stack((angles.cos(), angles.sin()), -1)[None]


def rectangle(height: int, width: int, side: int, corner: int = 0) -> VisualTokens:
    """Projected tokens of a rectangle of patches of a tile, each its own number."""
    places = (torch.arange(height)[:, None] * side + torch.arange(width)).flatten()[None] + corner
    projected = torch.arange(height * width, dtype=torch.float32)[None, :, None]
    return VisualTokens(projected, torch.zeros_like(places), places, side=side)


def seen(saliency: list[float], angles: list[float] | None, values: list[float]) -> VisualTokens:
    """One unit whose class attention, key angles in degrees and one-channel features are as given: of two heads, whose
    keys agree in the angle and cancel in the coordinate that carries the attention.
    """
    angle = torch.zeros(len(values)) if angles is None else torch.tensor(angles) * math.pi / 180
    level = torch.tensor(saliency).log()
    sides = [torch.stack((angle.cos(), angle.sin(), sign * level), -1) for sign in (1, -1)]
    key = torch.nn.functional.pad(torch.stack(sides), (0, 0, 1, 0))[None]  # [1, 2, 1 + N, 3]
    key[0, :, 0, 2] = torch.tensor([-1e4, 1e4])  # the class token does not look at itself
    query = torch.zeros_like(key)
    query[:, :, 0, 2] = torch.tensor([1.0, -1.0])
    own = torch.tensor(values)[None, :, None]
    return VisualTokens(
        projected=own,
        tile=torch.zeros(1, len(values), dtype=torch.long),
        patch=torch.arange(len(values))[None],
        attention=VisionAttention(query, key, 1.0, 1),
        features=own,
        class_feature=torch.zeros(1, 1),
        project=lambda x: x,
    )


def view_of(attention: list[float], kept: int, before: int = 2, after: int = 3, **changes: Any) -> DecoderView:
    """One image in a sequence of one head whose last row attends to the visual tokens as given."""
    size = before + len(attention) + after
    rest = (1 - sum(attention)) / (before + after)
    row = torch.full((size,), rest)
    row[before : before + len(attention)] = torch.tensor(attention)
    key = torch.stack((row.log(), torch.zeros(size)), dim=-1)[None, None]
    flat, none = torch.ones(1, size, 2), torch.zeros(1, size, 2)
    rows = torch.tensor([[size - 1]])
    probe = TextProbe(torch.tensor([[[[1.0, 0.0]]]]), key, flat, none, 1.0, rows, rows >= 0, torch.ones(1, size) > 0)
    hidden = torch.arange(len(attention)).float()[None, :, None].expand(1, -1, 4) * 10
    columns = torch.arange(before, before + len(attention))[None]
    asked = torch.zeros(1, 1, 4)
    view = DecoderView(kept, Cut(2, kept), hidden, asked, columns, probe, hidden, asked, lambda states: states)
    return view._replace(**changes)


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without numbers: reading one from it, which on a device would mean to wait, is an error."""
    return torch.empty(*shape, device="meta", dtype=dtype)


places, masks = partial(blank, dtype=torch.long), partial(blank, dtype=torch.bool)


def blank_probe(shape: Shape, rows: int, visual: int) -> TextProbe:
    """The probe of `rows` text rows of one prompt with so many visual tokens."""
    size, width = visual + shape.text, shape.head_width
    query, key = blank(1, shape.heads, rows, width), blank(1, shape.kv_heads, size, width)
    around = blank(1, size, width)
    return TextProbe(query, key, around, around, 1.0, places(1, rows), masks(1, rows), masks(1, size))


def blank_unit(shape: Shape) -> VisualTokens:
    """One unit of a model of this shape, with everything a method can ask for and no number in it."""
    size, width = shape.patches, shape.vision_width
    head = blank(1, shape.vision_heads, size + shape.classes, width // shape.vision_heads)
    layers = [torch.nn.Linear(width, shape.width), torch.nn.GELU(), torch.nn.Linear(shape.width, shape.width)]
    return VisualTokens(
        projected=blank(1, size, shape.width),
        tile=places(1, size),
        patch=places(1, size),
        side=int(size**0.5),
        slot=places(1, size),
        image=places(1),
        prompt=places(1),
        columns=places(1, size),
        attention=VisionAttention(head, head, 1.0, shape.classes),
        earlier=VisionAttention(head, head, 1.0, shape.classes),
        features=blank(1, size, width),
        class_feature=blank(1, width),
        project=torch.nn.Sequential(*layers).to("meta"),
        clip=ClipSides(blank(1, size, shape.joint), blank(1, 1, shape.joint), masks(1, 1)),
        probe=blank_probe(shape, shape.known("question"), size),
        fingerprint=places(1),
        whole=WholeImages(places(1), masks(1, size)),
        words=Words(blank(1, shape.known("question"), shape.width), masks(1, shape.known("question"))),
    )


def work(method: Any, shape: Shape, tokens: int) -> None:
    """All a method does for one image by itself, wherever it acts, on tensors without numbers."""
    if method.place is Place.DECODER:
        tower, visual, rows = blank_unit(shape), shape.patches, 1 if method.asks == "last" else shape.text
        asked = blank(1, rows, shape.width)
        for cut in method.cuts(Budget(tokens), shape.patches, shape.layers):
            left, probe = blank(1, visual, shape.width), blank_probe(shape, rows, visual)
            own = left, asked, places(1, visual), probe, tower.projected, asked
            method.select(DecoderView(tokens, cut, *own, lambda states: states, tower), WATCH)
            visual = cut.left
    elif method.place is Place.TOWER:
        bag = fresh(blank(1, shape.patches + 1, shape.vision_width))
        for count in method.schedule(tokens, shape.patches, shape.feature_blocks):
            key = blank(1, shape.vision_heads, bag.values.shape[1], shape.vision_width // shape.vision_heads)
            method.bias(bag)
            bag = method.fold(bag, key, count, protected=True)
    if method.place not in (Place.DECODER, Place.CELLS) and method.reduces:  # cells are counted, which waits
        method.reduce(blank_unit(shape), Budget(tokens))
