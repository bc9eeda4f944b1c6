"""The seam inside a vision tower, for methods that merge or shrink before the language model sees anything.

`encode` runs a model's own `encode_images` while the tower works on fewer tokens, so tower and projector cost only
those; then every patch gets a copy of the token it was merged into, and `slot` says which. So the official code, which
lays patches out on a grid (anyres, unpadding), finds the number of rows it expects, and the method's `reduce` picks one
row for each token afterwards. What is changed is `forward` of single module instances, and only while the tower runs.

`merged_blocks` (seam "vision") knows the parts of a CLIP block and no merging; `picture_seam.py` (seam "picture") has
the other one.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.tower import taps as capture
from llava_consensus.hosts.tower.small_picture import shrunk_picture
from llava_consensus.reduction.merging import Bag, fresh
from llava_consensus.reduction.method import Method

RETURNS_TENSOR = int(transformers.__version__.split(".")[0]) >= 5  # a block's result; a tuple before
PARTS = ("layer_norm1", "self_attn", "layer_norm2", "mlp")


class BlockMethod(Protocol):
    """What a method of the seam "vision" offers beside `Method`."""

    def schedule(self, tokens: int, patches: int, blocks: int) -> list[int]:
        """Patches to merge away in each block, `patches - tokens` in all; OptionError where that cannot be."""
        ...

    def bias(self, bag: Bag) -> Tensor | None:
        """Added to the logits of each key before the softmax: [U, t], or none."""
        ...

    def fold(self, bag: Bag, key: Tensor, count: int) -> Bag:
        """The bag with `count` tokens fewer, given the block's keys [U, H, t, d]; token 0 is the class token."""
        ...


def acts_inside(method: Method) -> bool:
    """Whether a method works before the projector."""
    return method.seam in SEAMS


def check(tower: Any, method: Method, tokens: list[int]) -> None:
    """Raises OptionError where this tower cannot be worked on, or a tile cannot be brought to one of these budgets."""
    if method.seam != "vision" or not tower.is_loaded:
        return
    blocks = _blocks(tower)
    missing = [part for part in PARTS if not hasattr(blocks[0], part)]
    if missing:
        raise OptionError(
            f"a vision block of this tower has no {missing[0]}: methods inside the tower are adapted to CLIP"
        )
    kernel = getattr(tower.config, "_attn_implementation", "eager")
    if getattr(method, "proportional", False) and kernel not in ("eager", "sdpa"):
        raise OptionError(
            f"attention {kernel!r} of the vision tower takes no additive mask: load it with sdpa, or proportional=false"
        )
    for count in tokens:
        if count < tower.num_patches:
            method.schedule(count, tower.num_patches, len(blocks))  # type: ignore[attr-defined]


def encode(model: Any, images: Tensor, method: Method, tokens: list[int]) -> tuple[Tensor, Tensor | None]:
    """Tiles [T, 3, h, w] through tower and projector, the method acting inside on its way.

    Args:
        tokens: budget of each tile; tiles of one budget go together, those with room for all patches as without method.
    Returns:
        projected [T, N, D], and which merged token each patch is in [T, N]; None where the method acts elsewhere.
    """
    if not acts_inside(method) or not tokens:
        return model.encode_images(images), None
    tower = model.get_vision_tower()
    order, projected, slots = [], [], []
    for count in sorted(set(tokens)):
        own = [place for place, value in enumerate(tokens) if value == count]
        every = len(own) == len(tokens)
        part, slot = _encode(model, images if every else images[own], method, min(count, tower.num_patches))
        order += own
        projected.append(part)
        slots.append(slot)
    if len(projected) == 1:
        return projected[0], slots[0]
    back = torch.tensor(order, device=projected[0].device).argsort()
    return torch.cat(projected)[back], torch.cat(slots)[back]


def _encode(model: Any, images: Tensor, method: Method, count: int) -> tuple[Tensor, Tensor]:
    """The same for tiles of one budget."""
    tower = model.get_vision_tower()
    if count >= tower.num_patches:
        projected = model.encode_images(images)
        return projected, torch.arange(count, device=projected.device).expand(projected.shape[:2])
    with SEAMS[method.seam](tower, method, count) as slot_of:
        merged = model.encode_images(images)  # [T, count, D]
        slot = slot_of(merged)
    return merged.gather(1, slot[..., None].expand(-1, -1, merged.shape[-1])), slot


SlotOf = Callable[[Tensor], Tensor]  # what the tower gave [T, t, D] -> the token each patch is in [T, N]


@contextmanager
def merged_blocks(tower: Any, method: Any, tokens: int) -> Iterator[SlotOf]:
    """While the body runs the tower once, its blocks up to the feature block merge their tokens by the method."""
    blocks = _blocks(tower)
    counts = method.schedule(tokens, tower.num_patches, len(blocks))
    run = _Run(method)
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.enter_context(shadowed(block, run.forward_of(block, counts[index], first=index == 0)))
        yield lambda merged: run.taken().place[:, 1:].to(merged.device) - 1  # the class token is token 0 throughout


@contextmanager
def picture(tower: Any, method: Any, tokens: int) -> Iterator[SlotOf]:
    """While the body runs the tower, it sees pictures shrunk to the method's rows x columns of patches."""
    rows, columns = method.picture(tokens)
    embeddings = getattr(tower.vision_tower, "vision_model", tower.vision_tower).embeddings
    side = tower.num_patches_per_side
    with shadowed(embeddings, shrunk_picture(embeddings, rows, columns)):
        yield lambda merged: _spread(side, rows, columns, merged.device).expand(len(merged), -1)


SEAMS = {"vision": merged_blocks, "picture": picture}


class _Run:
    """One pass of tiles through the blocks: the bag of tokens as it gets smaller."""

    def __init__(self, method: BlockMethod) -> None:
        self.method = method
        self.bag: Bag | None = None

    def taken(self) -> Bag:
        """The bag after the last block."""
        if self.bag is None:
            raise RuntimeError("the vision tower did not run its blocks")
        return self.bag

    def forward_of(self, block: Any, count: int, first: bool) -> Callable[..., Any]:
        """A block's forward with the merge between attention and MLP, for both signatures transformers has had."""

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if first and self.bag is not None:
                raise RuntimeError("the vision tower ran twice: multi-scale (S2) towers are not adapted")
            bag = fresh(hidden) if first else self.taken()._replace(values=hidden)
            attended, key = _attend(block, hidden, None if first else self.method.bias(bag))
            bag = bag._replace(values=hidden + attended)
            bag = self.method.fold(bag, key, count) if count else bag
            self.bag = bag
            out = bag.values + block.mlp(block.layer_norm2(bag.values))
            return out if RETURNS_TENSOR else (out,)

        return forward


def _attend(block: Any, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output of a block's own attention under an additive mask, and its keys [U, H, t, d]."""
    attention, found = block.self_attn, []
    handle = attention.k_proj.register_forward_hook(lambda module, inputs, output: found.append(output.detach()))
    length = hidden.shape[1]
    mask = None if bias is None else bias.to(hidden.dtype)[:, None, None].expand(-1, 1, length, -1)
    try:
        out = attention(block.layer_norm1(hidden), attention_mask=mask)
    finally:
        handle.remove()
    return out[0], capture.split_heads(found[0], attention.num_heads)


@contextmanager
def shadowed(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module.forward` replaced on this instance while the body runs, whatever stood there before."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _blocks(tower: Any) -> list[Any]:
    """The blocks up to the one whose output feeds the projector."""
    blocks = capture.vision_blocks(tower.vision_tower)
    return list(blocks)[: capture.feature_block(blocks, tower.select_layer, None) + 1]


def _spread(side: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """The cell of a grid of rows x columns that each patch of side x side lies in: [N]."""
    place = torch.arange(side, device=device)
    return ((place * rows // side)[:, None] * columns + place * columns // side).flatten()
