"""Map from visual tokens to the patches they are made of, found by backward passes and not by a formula.

The rows that the language model receives are differentiated, with a random cotangent v, by the attention output of one
block of the tower: once with v, then once for each octal digit of the row's number with v (digit + 1) / 8. Where a
position's gradients are proportional, the factors spell the one row that it feeds. This finds merge orders, windows,
pixel shuffles, pooling, class tokens, padding and rows that no patch feeds (newlines). One pass with a factor of
row / count would do in float64 and is silently wrong in bfloat16.

The result depends only on shapes, so it is cached by them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llava_consensus.hosts.images import STRUCTURAL, Integers
from llava_consensus.hosts.kernels import KernelCall

DIGIT = 8
# Of gradients that are called proportional, and of those that are called zero.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
LOOSE, NOTHING = 0.1, 1e-10
MOST_ROWS = 2048  # each of which is differentiated by itself, if positions feed several


class Mixed(Exception):
    """Rows have no patches of their own, as all positions of the block feed them."""


def fed_rows(rows: Tensor, outputs: list[Tensor]) -> list[Tensor] | None:
    """The row that every position feeds, -1 for none: [B, n] for each output [B, n, ...]; or whether it feeds each row,
    [B, n, N], if positions feed several (a convolution). None if none feeds any.

    Args:
        rows: [N, D] that the language model receives, a function of the outputs.
        outputs: of the kernel calls of one block, leaves of the autograd graph.
    Raises:
        Mixed: positions feed more than half of all rows.
    """
    count, device = len(rows), rows.device
    if not rows.requires_grad:
        return None
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(rows.shape, generator=generator, dtype=torch.float32).to(device, rows.dtype)
    number = torch.arange(count, device=device)
    digits = math.ceil(math.log(max(count, 2), DIGIT))
    factors = [torch.ones_like(number, dtype=torch.float32)]
    factors += [(number // DIGIT**place % DIGIT + 1) / DIGIT for place in range(digits)]
    passes = [
        torch.autograd.grad(
            rows, outputs, cotangent * factor[:, None].to(rows.dtype), retain_graph=True, allow_unused=True
        )
        for factor in factors
    ]
    found, mixed, feeding = [], 0, 0
    tolerance = TOLERANCE.get(rows.dtype, LOOSE)
    whole = [gradient for gradient in passes[0] if gradient is not None]
    if not whole:
        return None
    least = NOTHING * max(float(one.double().flatten(2).square().sum(-1).max()) for one in whole)
    for output, first, *others in zip(outputs, *passes, strict=True):
        if first is None:
            found.append(torch.full(output.shape[:2], -1))
            continue
        first = first.flatten(2).double()
        size = first.square().sum(-1)
        fed, row = size > least, torch.zeros_like(size, dtype=torch.long)
        wrong = torch.zeros_like(fed)
        for place, other in enumerate(others):
            other = other.flatten(2).double()
            factor = (first * other).sum(-1) / size.clamp_min(1e-300)
            wrong |= (other - factor[..., None] * first).norm(dim=-1) > tolerance * other.norm(dim=-1)
            row += ((factor * DIGIT).round().long() - 1) * DIGIT**place
        mixed, feeding = mixed + int((wrong & fed).sum()), feeding + int(fed.sum())
        found.append(torch.where(fed, row, -1).cpu())
    if mixed:
        why = f"{mixed} of {feeding} positions feed several rows"
        return _fed_sets(rows, outputs, cotangent, why)
    return found if feeding else None


def _fed_sets(rows: Tensor, outputs: list[Tensor], cotangent: Tensor, why: str) -> list[Tensor]:
    """Whether every position feeds each row: [B, n, N] for each output [B, n, ...]."""
    count = len(rows)
    found = [torch.zeros(*output.shape[:2], count, dtype=torch.bool) for output in outputs]
    for row in (0, count // 2, *range(count)):  # of the first two it is known soon if they are fed by everything
        products = (rows[row] * cotangent[row]).sum()
        gradients = torch.autograd.grad(products, outputs, retain_graph=True, allow_unused=True)
        sizes = [None if one is None else one.double().flatten(2).square().sum(-1) for one in gradients]
        least = NOTHING * max((float(size.max()) for size in sizes if size is not None), default=0.0)
        for own, size in zip(found, sizes, strict=True):
            if size is not None:
                own[..., row] = (size > least).cpu()
        most = max(float(own[..., row].float().mean(1).max()) for own in found)  # the share of an entry
        if count > MOST_ROWS or most > 0.5:
            raise Mixed(why)
    return found


class Tile(NamedTuple):
    """Positions of the block that attend to each other and feed rows of one image."""

    call: int  # of the block's kernel calls
    entry: int  # of that call's batch
    position: Tensor  # [n] in the entry
    row: Tensor  # [n] of the image, -1 for none; of several, the first
    feeds: Tensor | None  # [n, rows of the image] if positions feed several


class Mapped(NamedTuple):
    """The rows of one image with the patches they come from, on the CPU."""

    tile: Integers  # [n] of each row
    token: Integers  # [n] of that tile
    tiles: int
    patches: list[Tile]
    members: Tensor | None  # [N, m] patches of a tile that make each of its tokens; None: one each, in order
    side: int  # tokens in a row of a tile, 0 if they form no grid
    size: int  # N, tokens of a tile
    pooling: Tensor | None = None  # [T, N, n] share of each patch in each token, if `members` cannot say it

    def heads(self, calls: list[KernelCall]) -> dict[str, Tensor]:
        """Queries and keys [T, H, n, d] of the tiles in the kernel calls of a block."""
        queries, keys = [], []
        for tile in self.patches:
            call, position = calls[tile.call], tile.position.to(calls[tile.call].query.device)
            queries.append(call.query[tile.entry][:, position])
            key = call.key[tile.entry][:, position]
            keys.append(key.repeat_interleave(len(queries[-1]) // len(key), 0))
        return {"query": torch.stack(queries), "key": torch.stack(keys)}

    def shares(self, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """The share [T, N, n] of each position in each token, given those of a resampler [B, N, S] if there is one;
        nothing if `members` say it.
        """
        if self.pooling is not None or not weights:
            return {} if self.pooling is None else {"pooling": self.pooling}
        own = [weights[0][tile.entry][:, tile.position.to(weights[0].device)] for tile in self.patches]
        return {"pooling": torch.stack(own)}

    def states(self, calls: list[KernelCall], outputs: list[Tensor]) -> Tensor:
        """Rows [T, n, D_v] of the outputs of a block that made these kernel calls."""
        flat = torch.cat([output.reshape(-1, output.shape[-1]) for output in outputs])
        lengths = [call.query.shape[0] * call.query.shape[2] for call in calls]
        starts = [sum(lengths[: tile.call]) + tile.entry * calls[tile.call].query.shape[2] for tile in self.patches]
        rows = torch.stack([tile.position + start for tile, start in zip(self.patches, starts, strict=True)])
        return flat[rows.to(flat.device)]


def patch_map(
    calls: list[KernelCall], fed: list[Tensor], sizes: list[int], sides: list[int]
) -> tuple[list[Mapped], int]:
    """Maps the rows of images of these `sizes` in rows to tiles and patches, given the kernel calls of the block and
    the row each position feeds; and how many class tokens are in front of the patches of a tile.

    Raises:
        Mixed: the tiles of an image differ in size.
    """
    first, tiles = 0, list[list[Tile]]()
    for size in sizes:
        tiles.append(_tiles(calls, fed, first, size))
        first += size
    everything = [tile for own in tiles for tile in own]
    classes = int(all(int(tile.row[0]) < 0 and bool((tile.row[1:] >= 0).any()) for tile in everything))
    classes &= any(bool((tile.row[1:] >= 0).all()) for tile in everything)
    return [_image(own, size, side, classes) for own, size, side in zip(tiles, sizes, sides, strict=True)], classes


def resampled(call: KernelCall, queries: int, sizes: list[int]) -> list[Mapped]:
    """Maps rows that are the queries of a resampler to tiles, one for each entry of the call: its query looks at all
    positions of that, and how much at each differs between images.
    """
    found, first = [], 0
    for size in sizes:
        row = np.arange(size)
        seen = [visible(call, first + entry, 0).nonzero()[:, 0] for entry in range(size // queries)]
        tiles = [Tile(0, first + number, own, torch.full_like(own, -1), None) for number, own in enumerate(seen)]
        found.append(Mapped(row // queries, row % queries, len(tiles), tiles, None, 0, queries))
        first += len(tiles)
    return found


def _tiles(calls: list[KernelCall], fed: list[Tensor], first: int, size: int) -> list[Tile]:
    """The tiles of an image whose rows begin at `first`, in the order of their rows."""
    found = []
    for number, (call, rows) in enumerate(zip(calls, fed, strict=True)):
        sets = rows[..., first : first + size] if rows.ndim > 2 else None
        if sets is not None:
            rows = torch.where(sets.any(-1), sets.byte().argmax(-1) + first, -1)
        own = (rows >= first) & (rows < first + size)
        for entry in own.any(1).nonzero()[:, 0].tolist():
            left = own[entry].clone()
            while bool(left.any()):  # windows or images that follow each other in one entry
                seen = visible(call, entry, int(left.nonzero()[0]))
                here = seen & (own[entry] | (rows[entry] < 0))
                position = here.nonzero()[:, 0]
                row = torch.where(own[entry][position], rows[entry][position] - first, -1)
                found.append(Tile(number, entry, position, row, None if sets is None else sets[entry][position]))
                if not bool((left & here).any()):
                    raise Mixed("a position of the block does not see itself")
                left &= ~here
    return sorted(found, key=lambda tile: int(tile.row[tile.row >= 0].min()))


def visible(call: KernelCall, entry: int, position: int) -> Tensor:
    """The positions that one position of an entry attends to: [n] bool, on the CPU."""
    count = call.key.shape[2]
    mask, lengths = call.mask, call.options.get("cu_seq_lens_q")
    if isinstance(mask, Tensor) and mask.ndim == 4:
        row = mask[min(entry, len(mask) - 1), 0, min(position, mask.shape[2] - 1)].cpu()
        return row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask[entry].bool().cpu()
    if lengths is not None:
        ends = lengths[1:].cpu().long()
        segment = torch.bucketize(torch.arange(count), ends, right=True)
        return segment == segment[position]
    return torch.ones(count, dtype=torch.bool)


def _image(tiles: list[Tile], size: int, side: int, classes: int) -> Mapped:
    if not tiles:
        raise Mixed("an image has rows that no position feeds alone")
    if len({len(tile.position) for tile in tiles}) > 1:
        raise Mixed("the tiles of an image differ in size")
    tile_of, token_of = torch.zeros(size, dtype=torch.long), torch.full((size,), STRUCTURAL)
    members: list[Tensor | None] = []
    for number, tile in enumerate(tiles):
        fed = (tile.row >= 0).nonzero()[:, 0]
        row, token, count = tile.row[fed].unique(return_inverse=True, return_counts=True)
        tile_of[row] = number
        if tile.feeds is None and int(count.max()) == 1 and bool((tile.row[fed].diff() > 0).all()):
            token_of[tile.row[fed]] = fed - classes
            members.append(None)
        elif tile.feeds is None and int(count.min()) == int(count.max()):
            token_of[row] = torch.arange(len(row))
            members.append(fed[token.sort(stable=True).indices].view(len(row), -1) - classes)
    pooling, own = None, members[0] if members else None
    kinds = {None if one is None else tuple(one.flatten().tolist()) for one in members}
    if len(kinds) != 1 or len(members) < len(tiles):
        tile_of, token_of, pooling = _pooled(tiles, size, classes)
        own, tokens = None, pooling.shape[1]
    else:
        tokens = len(tiles[0].position) - classes if own is None else len(own)
    square = math.isqrt(tokens)
    side = side or (square if square**2 == tokens else 0)
    return Mapped(tile_of.numpy(), token_of.numpy(), len(tiles), tiles, own, side, tokens, pooling)


def _pooled(tiles: list[Tile], size: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tile and token of each row, and the share [T, N, n] of each position in each token, if tokens are made of
    differing positions: the mean of those that feed it. A token that several tiles feed is of the first (Molmo 2).
    """
    tile_of, token_of = torch.zeros(size, dtype=torch.long), torch.full((size,), STRUCTURAL)
    shares = []
    for number, tile in enumerate(tiles):
        feeds = torch.nn.functional.one_hot(tile.row + 1, size + 1)[:, 1:] if tile.feeds is None else tile.feeds
        row = (feeds.any(0) & (token_of == STRUCTURAL)).nonzero()[:, 0]
        tile_of[row], token_of[row] = number, torch.arange(len(row))
        share = feeds[classes:, row].T.float()
        shares.append(share / share.sum(1, keepdim=True).clamp_min(1))
    return tile_of, token_of, torch.nn.utils.rnn.pad_sequence(shares, batch_first=True)


def sides_of(inputs: dict[str, Any], sizes: list[int]) -> list[int]:
    """Tokens in a row of each image by the height and width that the processor gives of it, 0 if it gives none.

    Whatever has a row of whole numbers for each image ends in height and width, in patches or in pixels; or it has the
    column and row of each patch (Gemma 4).
    """
    for value in inputs.values():
        if not isinstance(value, Tensor) or value.is_floating_point() or value.ndim < 2 or len(value) != len(sizes):
            continue
        if value.ndim == 3 and value.shape[2] == 2:
            shapes = (value.amax(1) + 1).flip(1).tolist()
        elif value.ndim == 2 and value.shape[1] >= 2:
            shapes = value[:, -2:].tolist()
        else:
            continue
        found = [_width(height, width, size) for (height, width), size in zip(shapes, sizes, strict=True)]
        if all(found):
            return found
    return [0] * len(sizes)


def _width(height: int, width: int, size: int) -> int:
    """Tokens per row of the grid of an image of this height and width that makes `size` tokens; 0 if no grid fits."""
    step = round(math.sqrt(height * width / size))
    if not step or height % step or width % step or (height // step) * (width // step) != size:
        return 0
    return int(width // step)
