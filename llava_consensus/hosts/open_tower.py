"""Vision towers that work on fewer patches: blocks that merge them (ToMe), and embeddings of a smaller image.

`forward` of the tower and of its blocks is shadowed on the instance as long as a method is attached, and behaves as
before unless this thread is in `OpenTower.running`. The tower passes its tokens in one row, so that the projector
works on these only; a hook behind the projector then gives every patch a copy of the token it was merged into, so that
the model lays its features out as always.
"""

import copy
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers.modeling_outputs import BaseModelOutputWithPooling

from llava_consensus.reduction.merging import Bag, fresh
from llava_consensus.reduction.method import Place

OLD = int(transformers.__version__.split(".")[0]) < 5  # official LLaVA's own pin, whose blocks return tuples


@dataclass
class Merging:
    """Tiles on their way through blocks that merge."""

    counts: list[int]  # patches to merge away in each block
    bag: Bag | None = None  # the tokens so far
    key: Tensor | None = None  # [T, H, t, d] of the block under way


class Shrinking(NamedTuple):
    """The grid of patches that tiles are shrunk to."""

    rows: int
    columns: int


@dataclass
class EncoderRun:
    """Tiles of one call of the model's encoder."""

    shares: list[int]  # tokens left of each tile
    grid: tuple[int, int]  # rows and columns of patches of a tile
    front: bool  # whether class tokens are projected too
    lengths: list[int] = field(default_factory=list)  # rows that the projector is given of each tile
    slot: Tensor | None = None  # [T, N] token that each patch was merged into
    projected: Tensor | None = None  # [T, C + N, D]


class OpenTower:
    """A tower of CLIP, SigLIP or DINOv2, and the steps of a method inside.

    Args:
        module: the vision model.
        projector: behind it.
        method: that acts inside the tower, or on the image.
        layer: of the hidden states that are projected.
        feature_block: the block that they are the output of.
    """

    def __init__(self, module: Any, projector: nn.Module, method: Any, layer: int, feature_block: int) -> None:
        self.module, self.projector, self.method, self.layer = module, projector, method, layer
        inner, kind = getattr(module, "vision_model", module), module.config.model_type
        self.blocks: Any = list(getattr(inner.encoder, "layers", None) or inner.encoder.layer)
        self.merging = feature_block + 1  # blocks that merge; later ones are not read
        self.classes = int(kind in ("clip_vision_model", "dinov2"))
        self.embeddings = inner.embeddings
        self.own_sizes = kind == "dinov2"  # whether its embeddings take images of any size
        self.local = threading.local()
        self.shadows: list[tuple[Any, Any]] = []
        self.handles: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "OpenTower":
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            twin.__dict__[name] = threading.local() if name == "local" else copy.deepcopy(value, memo)
        return twin

    def install(self) -> None:
        self._shadow(self.module, self._tower)
        self.handles.append(self.projector.register_forward_hook(self._spread))
        if self.method.place is Place.IMAGE:
            self._shadow(self.embeddings, self._embed)
            return
        for index, block in enumerate(self.blocks):
            self._shadow(block, partial(self._merge, index))
            attention = block.self_attn
            self.handles.append(attention.k_proj.register_forward_hook(partial(self._keep_key, attention)))

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()
        while self.shadows:
            target, before = self.shadows.pop()
            del target.forward
            if before is not None:
                target.forward = before

    def _shadow(self, target: Any, forward: Callable[..., Any]) -> None:
        before = vars(target).get("forward")
        self.shadows.append((target, before))
        # the shadow of a module is copied to its replicas on other devices: the hook says which of them is called
        self.handles.append(target.register_forward_pre_hook(self._note))
        target.forward = partial(self._shadowed, target, before, forward)

    def _shadowed(self, target: nn.Module, before: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        called: Any = getattr(self.local, "called", None)
        module = called if type(called) is type(target) else target
        return forward(module, before or partial(type(module).forward, module), *args, **options)

    def _note(self, module: nn.Module, args: Any) -> None:
        self.local.called = module

    @contextmanager
    def running(self, run: EncoderRun) -> Iterator[None]:
        """The method acts on the tiles that the tower is given in the body."""
        self.local.run = run
        try:
            yield
        finally:
            self.local.run = self.local.state = None

    def _tower(self, module: nn.Module, plain: Callable[..., Any], pixels: Tensor, *args: Any, **options: Any) -> Any:
        """Forward of the tower: tiles with equal budgets together, and the tokens of all in one row [1, n, D_v]."""
        run: EncoderRun | None = getattr(self.local, "run", None)
        if run is None:
            return plain(pixels, *args, **options)
        if run.slot is not None:
            raise RuntimeError("the vision tower ran twice: multi-scale (S2) towers are not adapted")
        options |= {"output_hidden_states": True, "return_dict": True}
        size = math.prod(run.grid)
        rows: list[Any] = [None] * len(run.shares)
        slots: list[Any] = [None] * len(run.shares)
        depth = 0
        for count in sorted(set(run.shares)):
            places = [place for place, share in enumerate(run.shares) if share == count]
            part = pixels if len(places) == len(rows) else torch.stack([pixels[place] for place in places])
            self.local.state = state = self._state(count, run.grid)
            hidden = plain(part, *args, **options).hidden_states
            states, depth = hidden[self.layer], len(hidden)  # [t, C + n, D_v]
            slot = self._slot(state, size, run.grid, states)
            for number, place in enumerate(places):
                rows[place], slots[place] = states[number], slot[number]
        self.local.state, run.slot = None, torch.stack(slots)
        if not run.front and self.classes:
            rows = [rows[0][:1], *(row[self.classes :] for row in rows)]  # the model cuts the first row off
            run.lengths = [len(row) for row in rows[1:]]
        else:
            run.lengths = [len(row) for row in rows]
        states = torch.cat(rows)[None]
        return BaseModelOutputWithPooling(last_hidden_state=states, hidden_states=(states,) * depth)

    def _state(self, count: int, grid: tuple[int, int]) -> Merging | Shrinking | None:
        size = math.prod(grid)
        if count >= size:
            return None
        if self.method.place is Place.IMAGE:
            return Shrinking(*self.method.image_size(count))
        return Merging(self.method.schedule(count, size, self.merging))

    def _slot(self, state: Any, size: int, grid: tuple[int, int], states: Tensor) -> Tensor:
        """Which token each patch is in, [T, N]."""
        if isinstance(state, Shrinking):
            return cells_of(grid, state).to(states.device).expand(len(states), -1)
        if state is None:
            return torch.arange(size, device=states.device).expand(len(states), -1)
        place: Tensor = state.bag.place
        return place[:, self.classes :].to(states.device) - self.classes  # a class token is token 0 throughout

    def _spread(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Hook behind the projector: a copy for each patch, [1, n, D] -> [T, C + N, D]."""
        run: EncoderRun | None = getattr(self.local, "run", None)
        if run is None or run.slot is None:
            return None
        front = self.classes if run.front else 0
        starts = torch.tensor([sum(run.lengths[:number]) for number in range(len(run.lengths))], device=output.device)
        index = starts[:, None] + run.slot.to(output.device)
        if front:
            index = torch.cat((starts[:, None], index + front), 1)
        run.projected = output[0][index]
        return run.projected

    def _embed(self, module: Any, plain: Callable[..., Any], pixels: Tensor, *args: Any, **options: Any) -> Any:
        small = getattr(self.local, "state", None)
        if not isinstance(small, Shrinking):
            return plain(pixels, *args, **options)
        if self.own_sizes:
            patch = self.module.config.patch_size
            return plain(shrink(pixels, small.rows * patch, small.columns * patch), *args, **options)
        return shrunk_embeddings(module, pixels, small.rows, small.columns)

    def _merge(
        self, index: int, block: Any, plain: Callable[..., Any], hidden: Tensor, *args: Any, **options: Any
    ) -> Any:
        """Forward of a block, with the merge between attention and MLP."""
        merging = getattr(self.local, "state", None)
        if not isinstance(merging, Merging):
            return plain(hidden, *args, **options)
        if index >= self.merging:
            return (hidden,) if OLD else hidden
        bag, method = fresh(hidden) if merging.bag is None else merging.bag._replace(values=hidden), self.method
        # autocast would choose pairs in half precision, where sizes above 256 are rounded too
        exact = torch.autocast(hidden.device.type, enabled=False)
        with exact:
            bias = method.bias(bag) if index else None
        mask = None if bias is None else bias.to(hidden.dtype)[:, None, None].expand(-1, 1, hidden.shape[1], -1)
        attended = block.self_attn(block.layer_norm1(hidden), attention_mask=mask)[0]
        bag = bag._replace(values=hidden + attended)
        if merging.counts[index]:
            with exact:
                bag = method.fold(bag, merging.key, merging.counts[index], bool(self.classes))
        merging.bag, merging.key = bag, None
        states = bag.values + block.mlp(block.layer_norm2(bag.values))
        return (states,) if OLD else states

    def _keep_key(self, attention: Any, module: nn.Module, args: Any, output: Tensor) -> None:
        """Hook of a block's key projection, [T, t, H d]."""
        merging = getattr(self.local, "state", None)
        if isinstance(merging, Merging):
            merging.key = output.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2).detach()


def cells_of(whole: tuple[int, int], small: tuple[int, int]) -> Tensor:
    """The cell of a smaller grid, of rows x columns, that each token of the whole one lies in: [N]."""
    row, column = (torch.arange(size) * less // size for size, less in zip(whole, small, strict=True))
    return (row[:, None] * small[1] + column).flatten()


def shrink(pixels: Tensor, height: int, width: int) -> Tensor:
    """Images [T, 3, h, w] resized, in float32."""
    return interpolate(pixels.float(), size=(height, width), mode="bicubic", antialias=True, align_corners=False)


def shrunk_embeddings(embeddings: Any, pixels: Tensor, rows: int, columns: int) -> Tensor:
    """CLIP's or SigLIP's embeddings of images shrunk to a grid: [T, 3, h, w] -> [T, C + rows x columns, D_v]."""
    patch = embeddings.patch_size
    small = shrink(pixels, rows * patch, columns * patch).to(embeddings.patch_embedding.weight.dtype)
    patches = embeddings.patch_embedding(small).flatten(2).transpose(1, 2)
    front = getattr(embeddings, "class_embedding", None)
    if front is not None:
        patches = torch.cat((front.expand(len(patches), 1, -1), patches), dim=1)
    return patches + positions(embeddings.position_embedding.weight, rows, columns, int(front is not None))


def positions(weight: Tensor, rows: int, columns: int, classes: int) -> Tensor:
    """Position embeddings [C + side^2, D_v] interpolated to another grid: [C + rows x columns, D_v]."""
    side = math.isqrt(len(weight) - classes)
    grid = weight[classes:].float().unflatten(0, (side, side)).permute(2, 0, 1)[None]
    small = interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)[0]
    return torch.cat((weight[:classes], small.flatten(1).T.to(weight.dtype)))
