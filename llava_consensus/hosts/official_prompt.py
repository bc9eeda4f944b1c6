"""Prompts of official LLaVA: what each row of them is, and what is read of their images.

LLaVA's own function is run once more, on numbers in place of embeddings. They go through all of its branches and come
out where the embeddings would have, so that they say which row is which word, patch or newline. Nothing of LLaVA is
copied.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llava_consensus.hosts.arguments import IGNORE
from llava_consensus.hosts.images import STRUCTURAL, Image, Integers
from llava_consensus.hosts.inputs import EncodedImage
from llava_consensus.hosts.tower import EARLIER, RECORD, Block, Tower
from llava_consensus.reduction.tokens import Need

IMAGE_ID = -200  # IMAGE_TOKEN_INDEX of official LLaVA
NEWLINE = -1  # its number; patches are numbered up from 1, and padding is 0
FIRST_WORD = -2  # number of the word 0; the others go down from it
Official = Callable[..., tuple[Any, ...]]


class Arguments(NamedTuple):
    """The arguments of LLaVA's function, in its own order."""

    input_ids: Tensor
    position_ids: Tensor | None
    attention_mask: Tensor | None
    past_key_values: Any
    labels: Tensor | None
    images: Any
    image_sizes: Any = None

    @property
    def tiles(self) -> list[int]:
        """Number of tiles of each image."""
        if isinstance(self.images, list):
            return [1 if image.ndim == 3 else len(image) for image in self.images]
        return [self.images.shape[1] if self.images.ndim == 5 else 1] * len(self.images)

    @property
    def without_pixels(self) -> Any:
        """Images of no pixels that take the same branches of the function."""
        if isinstance(self.images, list):
            return [torch.empty(*image.shape[:-2], 0, 0) for image in self.images]
        return torch.empty(*self.images.shape[:-2], 0, 0)


def blank_images(encoded: list[EncodedImage], tiled: bool, dtype: torch.dtype) -> Any:
    """Images without pixels that are the `images` argument of prompts about images that are encoded.

    Args:
        tiled: whether any image is cut into tiles.
        dtype: of the model.
    """
    blank = [torch.empty(len(one.projected), 3, 0, 0, device=one.projected.device, dtype=dtype) for one in encoded]
    if not tiled:
        together = torch.cat(blank)
        setattr(together, RECORD, encoded)
        return together
    for image, one in zip(blank, encoded, strict=True):
        setattr(image, RECORD, [one])
    return blank


def encoded_in(images: Any) -> list[EncodedImage] | None:
    """What `blank_images` stand for; None for images with pixels."""
    parts = images if isinstance(images, list) else [images]
    if not parts or not hasattr(parts[0], RECORD):
        return None
    return [one for part in parts for one in getattr(part, RECORD)]


class Structure(NamedTuple):
    """Rows of the sequences that LLaVA's function assembles."""

    ids: Integers  # [R, S] word, or IMAGE_ID
    real: NDArray[np.bool_]  # [R, S] False for padding
    asks: NDArray[np.bool_]  # [R, S] rows that have no label
    images: list[Image]
    pictures: list[int]  # of each of these, which of the images that the user passed it is


def read_structure(official: Official, model: Any, given: Arguments, config: Any, patches: int) -> Structure:
    """Rows of prompts about tiles of so many patches."""
    tower = model.get_vision_tower()

    def number(images: Tensor) -> Tensor:
        count = len(images) * patches
        return torch.arange(1, count + 1, dtype=torch.float64).view(len(images), patches, 1)

    inner = SimpleNamespace(
        embed_tokens=lambda ids: FIRST_WORD - ids[..., None].double(), get_vision_tower=lambda: tower
    )
    stand_in = SimpleNamespace(
        config=config, device=torch.device("cpu"), encode_images=number, get_model=lambda: inner,
        get_vision_tower=lambda: tower, model=SimpleNamespace(image_newline=torch.tensor([NEWLINE]).double()),
    )  # fmt: skip
    ids = given.input_ids.cpu()
    mask = torch.ones_like(ids) if given.attention_mask is None else given.attention_mask.cpu()
    labels = None if given.labels is None else given.labels.cpu()
    _, _, real, _, numbers, targets = official(
        stand_in, ids, None, mask, None, labels, given.without_pixels, given.image_sizes
    )
    rows, real = numbers[..., 0].long().numpy(), real.bool().numpy()
    asks = real if targets is None else real & (targets.numpy() == IGNORE)
    words = np.where(rows <= FIRST_WORD, FIRST_WORD - rows, IMAGE_ID)
    return Structure(words, real, asks, *_images(rows, real, given.tiles, patches))


def _images(rows: Integers, real: NDArray[np.bool_], tiles: list[int], patches: int) -> tuple[list[Image], list[int]]:
    """Images from the numbers of rows [R, S]. A newline belongs to the image before it."""
    owner, first = np.repeat(np.arange(len(tiles)), tiles), np.cumsum([0, *tiles])
    flat = np.maximum(rows - 1, 0) // patches
    which = np.where(rows > 0, owner[flat], -1)
    before = np.maximum.accumulate(np.where(rows > 0, np.arange(rows.shape[1]), 0), axis=1)
    which = np.where((rows == NEWLINE) & real, np.take_along_axis(which, before, 1), which)
    images, pictures = [], []
    for picture in np.unique(which[which >= 0]).tolist():
        row, places = (which == picture).nonzero()
        own = rows[row[0], places]
        tile = np.maximum(own - 1, 0) // patches - first[picture]
        newline = own == NEWLINE
        tile = np.where(newline, 0, tile)
        token = np.where(newline, STRUCTURAL, (own - 1) % patches)
        images.append(Image(int(row[0]), places, tile, token, tiles[picture], False, 0))
        pictures.append(picture)
    return images, pictures


# The vision tower


def vision_of(tower: Any) -> nn.Module:
    """The vision model of LLaVA's tower, with `encoder.layers`."""
    vision: nn.Module = getattr(tower.vision_tower, "vision_model", tower.vision_tower)
    return vision


def split_heads(states: Tensor, heads: int) -> Tensor:
    """[T, n, H d] -> [T, H, n, d]."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def _taps(attention: Any) -> list[tuple[nn.Module, Callable[[Tensor], dict[str, Tensor]]]]:
    """Modules whose outputs are queries and keys of an attention module, by name."""
    heads = attention.num_heads
    if not hasattr(attention, "qkv"):
        return [
            (attention.q_proj, lambda output: {"query": split_heads(output, heads)}),
            (attention.k_proj, lambda output: {"key": split_heads(output, heads)}),
        ]
    if attention.qk_normalization:  # InternViT: normed over all heads together
        return [
            (attention.q_norm, lambda output: {"query": split_heads(output, heads)}),
            (attention.k_norm, lambda output: {"key": split_heads(output, heads)}),
        ]

    def packed(output: Tensor) -> dict[str, Tensor]:
        query, key, _ = (split_heads(part, heads) for part in output.chunk(3, -1))
        return {"query": query, "key": key}

    return [(attention.qkv, packed)]


class Reader:
    """What a method reads of the tower, by hooks on its blocks while images are encoded.

    Args:
        tower: of LLaVA.
        method: the one that reads the tower, or any.
        fed: the block that feeds the projector.
    """

    def __init__(self, tower: Tower, fed: Block) -> None:
        self.name, self.method = fed[0], tower.method
        self.features = tower.features_block(fed)[1]
        self.attention = self.features + tower.method.blocks_ahead
        self.early: int | None = None
        self.short, count = "", tower.lists[self.name]
        if Need.EARLIER in tower.method.needs:
            self.early = tower.early_block(self.name)[1]
        if self.attention >= count:
            self.short = (
                f"this method reads the attention of the block after the features' own, which is the last of {count}: "
                f"give vision_layer={count - 1 - tower.method.blocks_ahead}, or use a model with "
                "mm_vision_select_layer=-2"
            )
            self.attention = self.features

    @property
    def last(self) -> int:
        """The last block that is read."""
        return max(self.features, self.attention, self.early or 0)

    @contextmanager
    def reading(self, vision: Any) -> Iterator[dict[str, Tensor]]:
        """Parts of the images that this thread encodes in the body."""
        parts: dict[str, Tensor] = {}
        thread, handles = threading.get_ident(), []
        blocks: Any = vision.get_submodule(self.name)

        def note(read: Callable[[Any], dict[str, Tensor]], front: str, module: nn.Module, _: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                for name, value in read(output).items():
                    if front + name in parts:
                        raise RuntimeError(
                            "the vision tower ran twice for one set of images: multi-scale (S2) towers are not adapted"
                        )
                    parts[front + name] = value.detach()

        def states(output: Any) -> dict[str, Tensor]:
            value = output[0] if isinstance(output, tuple) else output
            return {"features": value[:, 1:], "class_feature": value[:, 0]}

        for index, front in ((self.attention, ""), (self.early, EARLIER)):
            for module, read in [] if index is None else _taps(attention_of(blocks[index])):
                handles.append(module.register_forward_hook(partial(note, read, front)))
        handles.append(blocks[self.features].register_forward_hook(partial(note, states, "")))
        try:
            yield parts
        finally:
            for handle in handles:
                handle.remove()

    def scales(self, vision: Any) -> tuple[float, float]:
        """Scales of the products of queries and keys in the block that is read, and in the earlier one."""
        blocks: Any = vision.get_submodule(self.name)
        scale = float(attention_of(blocks[self.attention]).scale)
        return scale, scale if self.early is None else float(attention_of(blocks[self.early]).scale)


def attention_of(block: Any) -> Any:
    """The attention module of a block of CLIP or InternViT."""
    return getattr(block, "self_attn", None) or block.attn
