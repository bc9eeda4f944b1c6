"""Methods that act before the projector: inside the blocks of a vision tower, or on the picture it is shown.

Tower and projector work on fewer tokens, so they cost only those; then every patch gets a copy of the token it was
merged into, and `slot` says which. So a host that lays patches out on a grid finds the number of rows it expects, and
the method's `reduce` picks one row for each token afterwards. `forward` of the blocks (or of the embeddings) is
shadowed once, when the method is attached, and does what it always did unless a call is at work. Where a model's own
encoder reads pictures of any size it is given a smaller one, and nothing is shadowed (`Shrunk`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Tap, Tiles, Tower
from llava_consensus.hosts.call import Call, Shadow, current_call
from llava_consensus.hosts.reduce import cells_of
from llava_consensus.hosts.towers import BlockParts
from llava_consensus.reduction.merging import Bag, fresh
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.saliency import rotate

ELSEWHERE = (
    "acts before the projector and is adapted to CLIP towers, whose patches are the tokens of the language model"
)
CELLS_ELSEWHERE = "leaves out cells of the picture, which is done in the towers of Qwen3-VL and Qwen3.5 alone"
INSIDE = "inside"  # what the tower is made to do, in the state of a call


class OpenTower(Tower, Protocol):
    """A tower whose blocks or embeddings a method can act inside."""

    kernel: str
    embeddings: Any
    resizes_by: int | None

    def parts(self, block: int) -> BlockParts: ...
    def key_tap(self, block: int) -> Tap: ...
    def angles(self, hidden: Tensor, place: Tensor) -> tuple[Tensor, Tensor] | None: ...
    def result(self, states: Tensor) -> Any: ...


@dataclass
class Merging:
    """The state of a pass of tiles through blocks that merge."""

    tower: OpenTower  # the one that runs
    counts: list[int]  # patches to merge away in each block
    bag: Bag | None = None  # the tokens so far
    key: Tensor | None = None  # [T, H, t, d] of the block under way


class Shrinking(NamedTuple):
    """The grid of patches that tiles are shrunk to."""

    rows: int
    columns: int


class TokenGrid(NamedTuple):
    """The tokens of a picture of its own size."""

    tiles: int
    rows: int  # of each tile
    columns: int


class Shrunk(NamedTuple):
    """Pictures of their own sizes whose tiles are made smaller, each one for itself."""

    grids: list[TokenGrid]
    small: list[list[tuple[int, int]]]  # of each picture, rows and columns of tokens of each smaller tile

    def read(self, pixels: Tensor, size: int, read: Callable[[Tensor], Tensor]) -> Tensor:
        """The tokens of all smaller tiles in order: [n', D].

        Args:
            pixels: of the full tiles, all of one size [T, 3, h, w].
            size: pixels in a row of a token.
            read: gives the tokens of tiles of any one size: [t, 3, h, w] -> [t, n, D].
        """
        small, whole = [cells for own in self.small for cells in own], self.grids[0][1:]
        found: dict[int, Tensor] = {}
        for cells in dict.fromkeys(small):
            places = [place for place, one in enumerate(small) if one == cells]
            part = torch.stack([pixels[place] for place in places])
            if cells != whole:
                part = shrink(part, cells[0] * size, cells[1] * size).to(pixels.dtype)
            found.update(zip(places, read(part), strict=True))
        return torch.cat([found[place] for place in range(len(small))])

    def tiles(self, tokens: Tensor) -> tuple[list[Tiles], Tensor]:
        """The tiles of each picture, given the tokens of all smaller ones [n', D], and what gives each token of the
        full pictures a copy of the one in whose cell it lies: [n].
        """
        slots = [
            torch.stack([cells_of(grid[1:], small) for small in own])
            for grid, own in zip(self.grids, self.small, strict=True)
        ]
        first, taken = 0, []
        for slot, own in zip(slots, self.small, strict=True):
            for tile, (rows, columns) in zip(slot, own, strict=True):
                taken.append(tile + first)
                first += rows * columns
        index = torch.cat(taken).to(tokens.device)
        split = tokens.detach()[index].split([slot.numel() for slot in slots])
        return [
            Tiles(own.unflatten(0, slot.shape), {"slot": slot.to(tokens.device)}, grid.columns)
            for own, slot, grid in zip(split, slots, self.grids, strict=True)
        ], index


def shrunk(attachment: Any, grids: list[TokenGrid]) -> Shrunk:
    """The smaller grids of the tiles of these pictures by their budgets; a tile with room for all its tokens keeps its
    own.
    """
    method, sharing, small = attachment.method, attachment.sharing, []
    for grid in grids:
        size = grid.rows * grid.columns
        counts = sharing.of_tiles(grid.tiles, size)
        small.append([method.picture(count, *grid[1:]) if count < size else grid[1:] for count in counts])
    return Shrunk(grids, small)


def check_inside(tower: Any, method: Any, tokens: list[int]) -> None:
    """Raises OptionError where this tower cannot be worked on, or a tile cannot be brought to one of these budgets."""
    elsewhere = CELLS_ELSEWHERE if method.place is Place.CELLS else ELSEWHERE
    if why := getattr(tower, "inside", {}).get(method.place, elsewhere):
        raise OptionError(f"{type(method).__name__} {why}. Take a method that acts after the tower")
    if method.place is not Place.TOWER:
        return
    if method.masks and tower.kernel not in ("eager", "sdpa"):
        raise OptionError(
            f"attention {tower.kernel!r} of the vision tower takes no additive mask: load it with sdpa, or "
            "proportional=false"
        )
    for count in [] if getattr(tower, "varies", False) else tokens:  # there each picture has a schedule of its own
        if count < tower.tokens:
            method.schedule(count, tower.tokens, tower.feature_block + 1)


def install_inside(attachment: Any, tower: Any) -> tuple[list[Shadow], list[Any]]:
    """Shadows and hooks of what a method inside the tower replaces and reads; none for other methods."""
    shadows, handles = [], []
    for number, one in enumerate(towers_of(tower)):
        embeddings = getattr(one, "embeddings", None)
        if attachment.method.place is Place.PICTURE and embeddings is not None:  # else its host makes pictures smaller
            shadows.append(Shadow(embeddings, "forward", partial(_embed, attachment, number, embeddings.forward)))
        if attachment.method.place is not Place.TOWER:
            continue
        for index, block in enumerate(one.blocks[: one.feature_block + 1]):
            merging, tap = partial(_merge_inside, attachment, index, block.forward), one.key_tap(index)
            shadows.append(Shadow(block, "forward", merging))
            handles.append(tap.module.register_forward_hook(partial(_keep_key, attachment, tap)))
    return shadows, handles


def towers_of(tower: Any) -> tuple[Any, ...]:
    """The towers of a vision side, which may be several."""
    return getattr(tower, "towers", (tower,))


def run_inside(method: Method, call: Call, tower: Any, pixels: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Tiles through tower and projector, the method acting inside on their way.

    Args:
        tokens: budget of each tile; tiles of one budget go together, those with room for all patches as without method.
    Returns:
        projected [T, N, D], class tokens in front where the tower projects them too, and which merged token each patch
        is in [T, N].
    """
    order, projected, slots = [], [], []
    for count in sorted(set(tokens)):
        places = [place for place, budget in enumerate(tokens) if budget == count]
        part = pixels if len(places) == len(tokens) else torch.stack([pixels[place] for place in places])
        part_projected, slot = _encode(method, call, tower, part, count)
        order += places
        projected.append(part_projected)
        slots.append(slot)
    if len(projected) == 1:
        return projected[0], slots[0]
    back = torch.tensor(order, device=projected[0].device).argsort()
    return torch.cat(projected)[back], torch.cat(slots)[back]


def _encode(method: Any, call: Call, tower: Any, pixels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Result of `run_inside`, for tiles that all have the budget `count`."""
    if count >= tower.tokens:
        projected = tower.encode(pixels)
        return projected, torch.arange(tower.tokens, device=projected.device).expand(len(projected), -1)
    small = method.place is Place.PICTURE
    counts = None if small else method.schedule(count, tower.tokens, tower.feature_block + 1)
    state = Shrinking(*method.picture(count)) if counts is None else Merging(tower, counts)
    call.state[INSIDE] = state
    try:
        merged = tower.encode(pixels)  # [T, count, D], class tokens in front where they are projected too
    finally:
        call.state.pop(INSIDE, None)
    if isinstance(state, Shrinking):
        slot = cells_of((tower.side, tower.side), state).to(merged.device).expand(len(merged), -1)
    elif state.bag is None:
        raise RuntimeError("the vision tower did not run its blocks")
    else:
        slot = state.bag.place[:, tower.classes :].to(merged.device) - tower.classes  # which is token 0 throughout
    front = merged.shape[1] - (math.prod(state) if isinstance(state, Shrinking) else count)
    index = slot[..., None].expand(-1, -1, merged.shape[-1])
    spread = merged[:, front:].gather(1, index)
    return torch.cat((merged[:, :front], spread), dim=1) if front else spread, slot


def _embed(
    attachment: Any, number: int, plain: Callable[..., Any], pixel_values: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Forward of a tower's embeddings: of a smaller picture while a call is at work."""
    small = _state(attachment)
    if not isinstance(small, Shrinking):
        return plain(pixel_values, *args, **kwargs)
    tower = towers_of(attachment.here.tower)[number]
    if (patch := tower.resizes_by) is not None:
        return plain(shrink(pixel_values, small.rows * patch, small.columns * patch), *args, **kwargs)
    return shrunk_picture(tower.embeddings, pixel_values, small.rows, small.columns)


def _merge_inside(
    attachment: Any, index: int, plain: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Forward of block `index`: with the merge between attention and MLP while a call is at work."""
    merging = _state(attachment)
    if not isinstance(merging, Merging):
        return plain(hidden, *args, **kwargs)
    if index == 0 and merging.bag is not None:
        raise RuntimeError("the vision tower ran twice: multi-scale (S2) towers are not adapted")
    tower, bag = merging.tower, fresh(hidden) if merging.bag is None else merging.bag._replace(values=hidden)
    parts, method = tower.parts(index), attachment.method
    # as in `reduce`: autocast would choose pairs in half precision, where sizes above 256 are rounded too
    exact = torch.autocast(hidden.device.type, enabled=False)
    with exact:
        bias = method.bias(bag) if index else None
    mask = None if bias is None else bias.to(hidden.dtype)[:, None, None].expand(-1, 1, hidden.shape[1], -1)
    angles = tower.angles(hidden, bag.place)
    turned = {} if angles is None else {"position_embeddings": angles}
    attended = parts.attention(parts.before_attention(hidden), attention_mask=mask, **turned)[0]
    bag = bag._replace(values=hidden + attended)
    if merging.counts[index]:
        key: Any = merging.key
        key = key if angles is None else rotate(key, *angles)  # as attention compares them
        with exact:
            bag = method.fold(bag, key, merging.counts[index], bool(tower.classes))
    merging.bag, merging.key = bag, None
    return tower.result(bag.values + parts.mlp(parts.before_mlp(bag.values)))


def _keep_key(attachment: Any, tap: Tap, module: Any, inputs: Any, output: Any) -> None:
    """Forward hook of a block's key projection."""
    merging = _state(attachment)
    if isinstance(merging, Merging):
        merging.key = tap.read(output)["key"].detach()


def _state(attachment: Any) -> "Merging | Shrinking | None":
    """State of the tower's hooks in the current call; None outside of a call."""
    call = current_call(attachment)
    return None if call is None else call.state.get(INSIDE)


def shrunk_picture(embeddings: Any, pixels: Tensor, rows: int, columns: int) -> Tensor:
    """Embeddings of pictures shrunk to a grid of patches, by the modules of a CLIP or SigLIP tower: [T, 3, h, w] ->
    [T, C + rows x columns, D_v].
    """
    patch = embeddings.patch_size
    small = shrink(pixels, rows * patch, columns * patch).to(embeddings.patch_embedding.weight.dtype)
    patches = embeddings.patch_embedding(small).flatten(2).transpose(1, 2)
    front = getattr(embeddings, "class_embedding", None)
    if front is not None:
        patches = torch.cat((front.expand(len(patches), 1, -1), patches), dim=1)
    return patches + positions(embeddings.position_embedding.weight, rows, columns, int(front is not None))


def shrink(pixels: Tensor, height: int, width: int) -> Tensor:
    """Pictures [T, 3, h, w] resized, in float32."""
    return interpolate(pixels.float(), size=(height, width), mode="bicubic", antialias=True, align_corners=False)


def positions(weight: Tensor, rows: int, columns: int, classes: int = 1) -> Tensor:
    """Position embeddings [C + side^2, D_v] interpolated to another grid: [C + rows x columns, D_v]."""
    side = math.isqrt(len(weight) - classes)
    grid = weight[classes:].float().unflatten(0, (side, side)).permute(2, 0, 1)[None]
    small = interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)[0]
    return torch.cat((weight[:classes], small.flatten(1).T.to(weight.dtype)))
