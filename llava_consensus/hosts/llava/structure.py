"""What official LLaVA makes of a prompt, row by row: its own function is run on numbers in place of
embeddings.

The numbers go through every branch of the official function and come out where the embeddings would have, so that they
say which row of the sequence is which text id, newline, patch or padding. Nothing of LLaVA is copied.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.layout import RowKinds

IGNORE = -100  # label of rows without a target
NEWLINE = -1  # the number of a newline; patches are numbered up from 1, and padding is 0
FIRST_ID = -1000  # the number of the first id; the others go down from it
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
    def pixels(self) -> Tensor:
        """All tiles of all pictures: [T, 3, h, w]."""
        if isinstance(self.images, list):
            return torch.cat([image[None] if image.ndim == 3 else image for image in self.images])
        pixels: Tensor = self.images.flatten(0, 1) if self.images.ndim == 5 else self.images
        return pixels

    @property
    def without_pixels(self) -> Any:
        """Pictures of no pixels that take the same branches of the official function."""
        if isinstance(self.images, list):
            return [torch.empty(*image.shape[:-2], 0, 0) for image in self.images]
        return torch.empty(*self.images.shape[:-2], 0, 0)


class Structure(NamedTuple):
    """What every row of the assembled sequences is, and where it comes from."""

    kinds: RowKinds
    source: Tensor  # [R, S] row of the pool: the ids of all prompts, the patches of all tiles, padding, newline

    def embeddings(self, model: Any, ids: Tensor, projected: Tensor) -> Tensor:
        """The assembled sequences [R, S, D] of ids [R, L] and projected tiles [T, N, D], in tensors of their device."""
        words = model.get_model().embed_tokens(ids.clamp_min(0)).flatten(0, 1)  # a placeholder's row is never taken
        patches = projected.to(words.device).flatten(0, 1)
        newline = getattr(model.model, "image_newline", None)
        ends = [patches.new_zeros(1, patches.shape[1])] + ([] if newline is None else [newline.to(words.device)[None]])
        return torch.cat((words, patches, *ends))[self.source]

    def labels(self, labels: Tensor, patches: int) -> Tensor:
        """Labels [R, S] of the assembled sequences from those of the ids [R, L]; rows of pictures have none."""
        return torch.cat((labels.flatten(), labels.new_full((patches + 2,), IGNORE)))[self.source]


def read_structure(official: Official, model: Any, arguments: Arguments, config: Any, patches: int) -> Structure:
    """The structure of prompts about tiles of so many `patches`, by the official function."""
    from llava.constants import IMAGE_TOKEN_INDEX

    tower = model.get_vision_tower()

    def number(images: Tensor) -> Tensor:
        shape = (images.shape[0], patches, 1)
        return torch.arange(1, shape[0] * shape[1] + 1, dtype=torch.float64).view(shape)

    inner = SimpleNamespace(embed_tokens=lambda ids: ids[..., None].double(), get_vision_tower=lambda: tower)
    stand_in = SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        model=SimpleNamespace(image_newline=torch.tensor([NEWLINE], dtype=torch.float64)),
        encode_images=number,
        get_model=lambda: inner,
        get_vision_tower=lambda: tower,
    )
    ids = arguments.input_ids.cpu()
    numbers = torch.arange(FIRST_ID, FIRST_ID - ids.numel(), -1).view(ids.shape).where(ids != IMAGE_TOKEN_INDEX, ids)
    mask = torch.ones_like(ids) if arguments.attention_mask is None else arguments.attention_mask.cpu()
    targets = None if arguments.labels is None else arguments.labels.cpu()
    results = official(stand_in, numbers, None, mask, None, targets, arguments.without_pixels, arguments.image_sizes)
    _, _, real, _, rows, labels = results
    rows = rows[..., 0].long()
    answer = None if labels is None else labels != IGNORE
    source = torch.where(rows <= FIRST_ID, FIRST_ID - rows, ids.numel() + rows - 1)
    ends = ids.numel() + sum(arguments.tiles) * patches
    source = torch.where(rows == 0, ends, torch.where(rows == NEWLINE, ends + 1, source))
    kinds = _kinds(rows, real.bool(), arguments.tiles, patches, answer)
    return Structure(kinds, source.to(arguments.input_ids.device))


def _kinds(rows: Tensor, real: Tensor, tiles: list[int], patches: int, answer: Tensor | None) -> RowKinds:
    """Kinds from the numbers of the stand-in [R, S]; a newline belongs to the picture before it."""
    owner = torch.repeat_interleave(torch.arange(len(tiles)), torch.tensor(tiles))  # [T] picture of each tile
    first = torch.tensor([0, *tiles]).cumsum(0)  # tile 0 of each picture
    flat = (rows - 1).div(patches, rounding_mode="floor")
    picture = torch.where(rows > 0, owner[flat.clamp(0, len(owner) - 1)], -1)
    place = torch.arange(rows.shape[1]).expand_as(rows)
    before = torch.where(rows > 0, place, 0).cummax(1).values  # the last visual row so far
    picture = torch.where(rows == NEWLINE, picture.gather(1, before), picture)
    tile = torch.where(rows > 0, flat - first[picture.clamp_min(0)], -1)
    return RowKinds(real, picture, tile, torch.where(rows > 0, (rows - 1) % patches, -1), answer)
