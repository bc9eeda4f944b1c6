"""Tensors of a vision tower, read by hooks on its modules: of official LLaVA, on whose pin attention asks for
no kernel, and of models that carry their own code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from llava_consensus.hosts.kernels import in_this_thread
from llava_consensus.hosts.tower import EARLIER, Tiles, check_blocks, early_block, too_far
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Need


class EncodedImage(NamedTuple):
    """An image after tower and projector, for any number of prompts about it."""

    projected: Tensor  # [T, N, D]
    tiles: Tiles
    pixels: Tensor | None  # [T, 3, h, w], for methods that draw lots by them
    left: Any = None  # `before_tower.ImageLeft`, if a method before the projector has left fewer tokens

    @property
    def side(self) -> int:
        return self.tiles.side


class Tap(NamedTuple):
    """A module, and a function from its output to tensors by the names of `Tiles.parts`."""

    module: nn.Module
    read: Callable[[Any], dict[str, Tensor]]


class Reader:
    """The blocks of a tower that a method reads. Towers are a `LlavaTower` or the view of a remote model (`blocks`,
    `side`, `classes`, `states`, `attention`, `pooling`).

    Args:
        count: of blocks.
        fed: the block that feeds the projector.
    Raises:
        OptionError: for a block that the tower does not have.
    """

    def __init__(self, method: Method, count: int, fed: int) -> None:
        check_blocks(method, count)
        self.method = method
        self.features = fed if method.vision_layer is None else method.vision_layer % count
        self.attention, self.short = self.features + method.blocks_ahead, ""
        self.early = early_block(method, count) if Need.EARLIER in method.needs else None
        if self.attention >= count:
            self.short = too_far(count, method)  # why the attention that it reads is not there
            self.attention = self.features

    @property
    def last(self) -> int:
        return max(self.features, self.attention, self.early or 0)

    def scales(self, tower: Any) -> tuple[float, float]:
        """Scales of the products of queries and keys in the block that is read, and in the earlier one."""
        early = self.attention if self.early is None else self.early
        return tower.attention(self.attention)[1], tower.attention(early)[1]

    @contextmanager
    def reading(self, tower: Any) -> Iterator[dict[str, Tensor]]:
        """Parts of the images that this thread encodes in the body."""
        parts: dict[str, Tensor] = {}
        block = tower.blocks[self.features]
        taps = [("", Tap(block, tower.states)), *(("", tap) for tap in tower.pooling())]
        taps += [("", tap) for tap in tower.attention(self.attention)[0]]
        taps += [(EARLIER, tap) for tap in tower.attention(self.early)[0]] if self.early is not None else []

        def note(read: Callable[[Any], dict[str, Tensor]], front: str, module: nn.Module, _: Any, output: Any) -> None:
            for name, value in read(output).items():
                if front + name in parts:
                    raise RuntimeError(
                        "the vision tower ran twice for one set of images: multi-scale (S2) towers are not adapted"
                    )
                parts[front + name] = value.detach()

        notes = [(tap.module, in_this_thread(partial(note, tap.read, front))) for front, tap in taps]
        handles = [module.register_forward_hook(hook) for module, hook in notes]
        try:
            yield parts
        finally:
            for handle in handles:
                handle.remove()


def encoded_images(
    reader: Reader | None, view: Any, encode: Callable[[Tensor], Tensor], pixels: Tensor, tiles: list[int]
) -> list[EncodedImage]:
    """Tiles [T, 3, h, w] through tower and projector, and the tensors that are read of each image.

    Args:
        reader: None if the method reads no tower.
        view: of the tower, see `Reader`.
        encode: tower and projector.
        tiles: how many each image has.
    """
    scales = (1.0, 1.0) if reader is None else reader.scales(view)
    with nullcontext(dict[str, Tensor]()) if reader is None else reader.reading(view) as parts:
        projected = encode(pixels)
    found, first = [], 0
    for count, own, views in zip(tiles, projected.split(tiles), pixels.split(tiles), strict=True):
        read = {name: value[first : first + count] for name, value in parts.items()}
        image = Tiles(count, own.shape[1], view.side, read, None, view.classes, *scales)
        found.append(EncodedImage(own, image, views))
        first += count
    return found


def packed_tap(module: nn.Module, heads: int) -> Tap:
    """The tap of a projection to queries, keys and values together, [T, n, 3 H d]."""

    def read(output: Tensor) -> dict[str, Tensor]:
        query, key, _ = (split_heads(part, heads) for part in output.chunk(3, -1))
        return {"query": query, "key": key}

    return Tap(module, read)


def split_heads(states: Tensor, heads: int = -1, width: int = -1) -> Tensor:
    """[T, n, H d] -> [T, H, n, d], by the number of heads H or by their width d."""
    return states.unflatten(-1, (heads, width)).transpose(1, 2)
