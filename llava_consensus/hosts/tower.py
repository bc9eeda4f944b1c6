"""Records the tensors of the vision tower that methods read, in any family, while the model encodes its images.

`get_image_features` and `get_video_features` run as they are, in `generate` and in `forward`. The tensors recorded
meanwhile travels on their output to the entrance of the language model. The blocks of the tower are recorded at their
attention kernels. Which patches make which token is found once for each shape of images: the features are
differentiated by the attention output of the block (`patch_map.fed_rows`), where the graph begins. Modules are looked
up by name in every call, so that weights and adapters that come later are the ones that are read.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import STRUCTURAL, Image
from llava_consensus.hosts.kernels import Block, KernelCall, Recorder
from llava_consensus.hosts.patch_map import Mapped, Mixed, fed_rows, patch_map, resampled, sides_of
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Need

TRIED = 4  # last blocks of a tower, one of which feeds the projector
READ = frozenset({Need.ATTENTION, Need.EARLIER, Need.FEATURES, Need.CLASS_FEATURE})
EARLIER = "earlier "  # in front of the names of parts that an earlier block gave
RECORD = "_reduction_record"  # attribute of an encoder's output


class Encoded(NamedTuple):
    """Images of one modality that were encoded, and the tensors recorded meanwhile."""

    inputs: dict[str, Any]
    key: Any  # shapes
    count: int | None  # type: ignore[assignment]  # rows of features; None if they come in another form
    calls: dict[Block, list[KernelCall]]
    states: dict[Block, list[Tensor]]  # outputs of blocks
    prompt: dict[str, int]  # rows of the prompt that they were first used in
    left: Any = None  # tokens that a method before the projector has left (`before_tower.Left`)
    pooling: Sequence[Tensor] = ()  # weights [B, N, n] of the queries of a resampler


class Fed(NamedTuple):
    """Which row of features each position of a block feeds, for images of certain shapes."""

    block: Block | None  # the one that feeds the projector; None if none can be read
    rows: list[Tensor] | None  # of each kernel call [B, n], -1 for none; None if positions feed several rows
    calls: list[KernelCall]  # without numbers
    queries: int = 0  # of a resampler, each of which is a row of features; 0 if there is none


class Tiles(NamedTuple):
    """One image as the tower saw it."""

    count: int  # type: ignore[assignment]  # T
    size: int  # N, tokens of a tile
    side: int  # tokens in a row of a tile, 0 if they form no grid
    parts: dict[str, Tensor]  # query, key [T, H, C + n, d], features [T, n, D_v], class_feature [T, D_v], ...
    members: Tensor | None = None  # [N, m] patches of each token; None: one each, in order
    classes: int = 0  # C, class tokens in front of the patches
    scale: float = 1.0  # of the products of queries and keys
    early_scale: float = 1.0  # the same in the earlier block
    places: int = 0  # last channels of queries and keys, see `kernels.placed`


class Learnt(NamedTuple):
    """Facts about a tower, by shapes of images."""

    fed: dict[Any, Fed]
    maps: dict[Any, tuple[list[Mapped | None], int]]  # and the class tokens
    mixed: dict[Any, str]  # why there is no map


def check_blocks(method: Method, count: int) -> None:
    """Raises OptionError for a block that a tower of `count` blocks does not have."""
    for name in ("vision_layer", "early_layer"):
        option = getattr(method, name)
        if option is not None and not -count <= option < count:
            raise OptionError(f"{name}={option} must be in {-count}..{count - 1}: the tower has {count} blocks")


def early_block(method: Method, count: int, among: Sequence[int] | None = None) -> int:
    """The earlier block, of `count`, whose attention a method reads: as the user says, or the nearest of `among`."""
    if method.early_layer is not None:
        return method.early_layer % count
    place = round(method.early * count) - 1
    return min(among or range(count), key=lambda block: (abs(block - place), -block))


def too_far(count: int, method: Method) -> str:
    """Why a method cannot read the attention of a block behind the last one."""
    return (
        f"this method reads the attention of the block after the features' own, which is the last of {count}: give "
        f"vision_layer={count - 1 - method.blocks_ahead}, or use a model with mm_vision_select_layer=-2"
    )


class Tower:
    """The vision side of a model.

    Args:
        base: the module with `get_image_features`.
        decoder: the language model in it.
        method: the method that reads the tower.
        learnt: of this model.
    """

    def __init__(self, base: nn.Module, decoder: nn.Module, method: Method, learnt: Learnt) -> None:
        self.method, self.learnt = method, learnt
        self.reads = bool(method.needs & READ)
        self.lists: dict[str, int] = {}  # lengths by name
        self.resamplers: list[str] = []  # names of modules in which queries look at all positions
        if self.reads:
            self._look(base, decoder)
        vision = getattr(base.config, "vision_config", None)
        whole = ("fullatt_block_indexes", "global_attn_indexes")  # blocks whose attention looks at everything
        self.whole = next((getattr(vision, name) for name in whole if getattr(vision, name, None)), None)
        self.busy = threading.local()
        if self.reads and (method.vision_layer, method.early_layer) != (None, None):
            check_blocks(method, max(self.lists.values(), default=0))
            layer = method.vision_layer
            if self.whole and layer is not None and layer % max(self.lists.values()) not in self.whole:
                raise OptionError(
                    f"vision_layer={layer}: this block attends within windows, so its patches cannot be compared. Take "
                    f"one of {', '.join(map(str, self.whole))}"
                )

    def _look(self, base: nn.Module, decoder: nn.Module | None) -> None:
        self.lists = dict(block_lists(base, decoder))
        inner = tuple(f"{name}." for name in self.lists)
        named = (name for name, module in base.named_modules() if isinstance(module, nn.MultiheadAttention))
        self.resamplers = [name for name in named if not name.startswith(inner)]

    def features_block(self, fed: Block) -> Block:
        """The block whose output is read, given the one that feeds the projector."""
        name, index = fed
        layer = self.method.vision_layer
        return name, index if layer is None else layer % self.lists[name]

    def early_block(self, name: str) -> Block:
        return name, early_block(self.method, self.lists[name], self.whole)

    def named(self, inputs: dict[str, Any], config: Any) -> list[Block]:
        """The blocks whose output the configuration, or the call, names for the projector; none if it names several
        layers. A model with two towers has one for each.
        """
        layer = inputs.get("vision_feature_layer")
        layer = getattr(config, "vision_feature_layer", None) if layer is None else layer
        if not isinstance(layer, int) or not self.lists:
            return []
        count = max(self.lists.values())
        index = layer + count if layer < 0 else layer - 1
        return [(name, index) for name, own in self.lists.items() if own == count]

    def unread(self, base: Any, decoder: nn.Module) -> list[str]:
        """Names of the blocks after the last one that the projector, by the configuration, or the method reads."""
        if not self.lists:
            self._look(base, decoder)
        self.layer, found = getattr(base.config, "vision_feature_layer", None), list[str]()
        for name, index in self.named({}, base.config):
            read = [(name, index), *(self.wanted((name, index)) if self.reads else ())]
            found += [f"{name}.{later}" for later in range(max(of for _, of in read) + 1, self.lists[name])]
        return found

    def reads_as_named(self, inputs: dict[str, Any], config: Any) -> bool:
        """Whether a call reads the layer for which `unread` found the blocks."""
        given = inputs.get("vision_feature_layer")
        return (getattr(config, "vision_feature_layer", None) if given is None else given) == self.layer

    def wanted(self, fed: Block | None) -> set[Block]:
        """Blocks to record: those that are read, or all that may be if the one that feeds the projector is unknown."""
        ahead = range(self.method.blocks_ahead + 1)
        if fed is None:
            found = {
                (name, index) for name, count in self.lists.items() for index in range(max(0, count - TRIED), count)
            }
            found |= {self.features_block((name, 0)) for name in self.lists if self.method.vision_layer is not None}
        else:
            found = {self.features_block(fed)}
        found |= {(name, index + more) for name, index in set(found) for more in ahead}
        if Need.EARLIER in self.method.needs:
            found |= {self.early_block(name) for name in ([fed[0]] if fed else self.lists)}
        return {(name, index) for name, index in found if index < self.lists[name]}

    def encode(self, plain: Callable[..., Any], base: nn.Module, maps: bool, learns: bool, **inputs: Any) -> Any:
        """Runs an encoder of the model, `get_image_features` or that of videos, and records.

        Args:
            maps: whether a map of patches is needed even if nothing is read.
            learns: whether the map depends on the shapes of images; if not, only the block must be found.
        """
        if getattr(self.busy, "on", False):  # encoders of videos that call the one of images
            return plain(**inputs)
        self.busy.on = True
        try:
            return self._encode(plain, base, maps, learns, inputs)
        finally:
            self.busy.on = False

    def _encode(
        self, plain: Callable[..., Any], base: nn.Module, maps: bool, learns: bool, inputs: dict[str, Any]
    ) -> Any:
        layer = repr(getattr(base.config, "vision_feature_layer", None))
        # without maps, calls with the same arguments apart from tensors are equal
        plainly = {name: None if isinstance(value, Tensor) else value for name, value in inputs.items()}
        key = layer, shape_key(inputs if learns else plainly)
        fed = self.learnt.fed.get(key)
        record = Encoded(inputs, key, 0, {}, {}, {}, None, [])
        known = [] if learns or fed is not None or not self.reads else self.named(inputs, base.config)
        if known:  # no gradient is needed to find it
            output = self._recorded(plain, base, inputs, record, known, False)
            ran = next((block for block in known if any(name == block[0] for name, _ in record.calls)), known[0])
            self.learnt.fed[key] = Fed(ran, None, [])
            return self._noted(output, record, flat_features(output, self.reads))
        learning = fed is None and (self.reads or maps)
        if learning and not self.lists:
            self._look(base, None)
        if fed is not None and self.reads:
            output = self._recorded(plain, base, inputs, record, [fed.block] if fed.block else [], False)
        else:
            output = self._learning(plain, base, inputs, record) if learning else plain(**inputs)
        rows = flat_features(output, self.reads)
        own = *key, 0 if rows is None else len(rows)
        if learns and fed is not None and fed.calls and own not in self.learnt.fed:
            # as many tiles, of which others are padding (SmolVLM)
            self.learnt.fed.pop(key, None)  # which another thread may have done
            return self._encode(plain, base, maps, learns, inputs)
        record = record._replace(key=own)
        if fed is not None:
            self.learnt.fed.setdefault(own, fed)
        if learning and rows is not None and bool(rows.isfinite().all()):
            self.learnt.fed[key] = self.learnt.fed[own] = self._fed(own, output, record)
            if not torch.is_grad_enabled():
                for name in list(output):
                    output[name] = detached(output[name])
            for calls in record.calls.values():
                calls[:] = [call._replace(output=None) for call in calls]
        return self._noted(output, record, rows)

    def _learning(self, plain: Callable[..., Any], base: nn.Module, inputs: dict[str, Any], record: Encoded) -> Any:
        if torch.is_grad_enabled():
            with open_checkpoints(base):
                return self._recorded(plain, base, inputs, record, None, True)
        copied = {n: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for n, v in inputs.items()}
        with torch.inference_mode(False), torch.no_grad(), open_checkpoints(base):
            return self._recorded(plain, base, copied, record, None, True)

    def _noted(self, output: Any, record: Encoded, rows: Tensor | None) -> Any:
        object.__setattr__(output, RECORD, [record._replace(count=None if rows is None else len(rows))])
        return output

    def _recorded(
        self, plain: Callable[..., Any], base: nn.Module, inputs: dict[str, Any], record: Encoded,
        fed: list[Block] | None, cut: bool,
    ) -> Any:  # fmt: skip
        """Runs an encoder while blocks are recorded.

        Args:
            fed: those that may feed the projector; None if they are not known.
            cut: whether the autograd graph begins at the attention output of the blocks, if it has not begun before.
        """
        wanted = {block for one in ([None] if fed is None else fed) for block in self.wanted(one)}
        blocks = {block: list(base.get_submodule(block[0]).children())[block[1]] for block in wanted}
        resamplers = [base.get_submodule(name) for name in self.resamplers]
        recorder = Recorder(blocks, resamplers, record, cut, fed is None)
        with recorder.recording(apart=fed is not None):
            output = plain(**inputs)
        if fed is None and not record.calls and (recorder.written or recorder.fused):
            record.states.clear()
            with recorder.recording(apart=True):
                output = plain(**inputs)
        return output

    def _fed(self, key: Any, output: Any, record: Encoded) -> Fed:
        with torch.inference_mode(False), torch.enable_grad():
            rows = flat_features(output)
        assert rows is not None
        for block, own in sorted(record.calls.items(), key=lambda item: -item[0][1]):
            light = [
                call._replace(
                    query=call.query.to("meta"), key=call.key.to("meta"), value=call.key.to("meta"), output=None
                )
                for call in own
            ]
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    found = fed_rows(rows, [call.output for call in own if call.output is not None])
            except Mixed as error:
                queries = [one.shape[1] for one in record.pooling if one.shape[:2].numel() == len(rows)]
                if len(own) == len(queries) == 1:
                    return Fed(block, None, light, queries[0])
                self.learnt.mixed[key] = str(error)
                return Fed(block, None, light)
            if found is not None:
                return Fed(block, found, light)
        return Fed(None, None, [])

    def map(self, record: Encoded, images: list[Image]) -> tuple[list[Mapped | None], int]:
        """The patches of each image of a record, and how many class tokens are in front of them."""
        sizes, tokens = [len(image.places) for image in images], [int(image.token.max()) + 1 for image in images]
        key, fed = (record.key, tuple(sizes)), self.learnt.fed.get(record.key)
        if fed is None:  # nothing was recorded, and nothing is to be read
            return [None] * len(images), 0
        if key not in self.learnt.maps:
            self.learnt.maps[key] = [None] * len(images), 0
            if fed.queries:
                self.learnt.maps[key] = list(resampled(fed.calls[0], fed.queries, sizes)), 0
            if fed.rows is not None:
                # a class token in the prompt is no candidate
                candidate = torch.from_numpy(np.concatenate([image.token for image in images]) != STRUCTURAL)
                rows = [
                    row & candidate if row.ndim > 2 else torch.where((row >= 0) & candidate[row.clamp_min(0)], row, -1)
                    for row in (r.cpu() for r in fed.rows)
                ]
                try:
                    found, classes = patch_map(fed.calls, rows, sizes, sides_of(record.inputs, tokens))
                    self.learnt.maps[key] = list(found), classes
                except Mixed as error:
                    self.learnt.mixed[record.key] = str(error)
        return self.learnt.maps[key]

    def tiles(
        self, record: Encoded, images: list[Image], straight: bool, square: bool = True
    ) -> tuple[list[Tiles], str]:
        """The tensors recorded of each image, and why the attention that the method reads is absent ("" if present).

        Args:
            straight: whether each token is one patch, in order, so that no map is needed.
            square: whether tiles whose sides are not known are squares.
        """
        fed = self.learnt.fed.get(record.key)
        maps: list[Mapped | None] = [None] * len(images)
        classes = 0
        if not straight:
            maps, classes = self.map(record, images)
        if fed is None or fed.block is None or not self.reads:
            sizes = [int(image.token.max()) + 1 for image in images]
            sides = sides_of(record.inputs, sizes)
            if square:
                sides = [side or _side(size) for side, size in zip(sides, sizes, strict=True)]
            return [
                Tiles(image.tiles, size, side, {})
                if mapped is None
                else Tiles(mapped.tiles, mapped.size, mapped.side, {}, mapped.members)
                for image, mapped, size, side in zip(images, maps, sizes, sides, strict=True)
            ], ""
        block, ahead = self.features_block(fed.block), self.method.blocks_ahead
        pairs = list(zip(images, maps, strict=True))
        found = [self._read(record, *pair, classes, block, ahead) for pair in pairs]
        if not ahead or all("key" in tiles.parts and tiles.classes for tiles in found):
            return found, self.learnt.mixed.get(record.key, "") if None in maps else ""
        found = [self._read(record, *pair, classes, block, 0) for pair in pairs]
        return found, too_far(self.lists[block[0]], self.method)

    def _read(
        self, record: Encoded, image: Image, mapped: Mapped | None, classes: int, block: Block, ahead: int
    ) -> Tiles:
        """Tensors of an image from the output of a block and the kernel calls of the one `ahead` of it. Without a map,
        tiles are as they were encoded, and of tokens that are resized (OneVision) each is read at the patch in its
        middle, if possible.
        """
        name, index = block
        calls, states = record.calls.get((name, index + ahead), []), record.states.get(block, [])
        early = record.calls.get(self.early_block(name), []) if Need.EARLIER in self.method.needs else []
        scale, early_scale = (own[0].scale if own else 1.0 for own in (calls, early))
        parts: dict[str, Tensor] = {}
        if mapped is None:
            size, own = int(image.token.max()) + 1, slice(image.first, image.first + image.tiles)
            if len(calls) == len(states) == 1:
                call, classes = calls[0], calls[0].query.shape[2] - size
                if classes in (0, 1) and len(call.query) >= own.stop:
                    times = call.query.shape[1] // call.key.shape[1]
                    key = call.key[own].unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)
                    parts = {"query": call.query[own], "key": key, "features": states[0][own, classes:]}
                    if classes:
                        parts["class_feature"] = states[0][own, 0]
                    if early:
                        parts |= {EARLIER + "query": early[0].query[own], EARLIER + "key": early[0].key[own]}
            return Tiles(image.tiles, size, _side(size), parts, None, max(classes, 0), scale, early_scale)
        if calls and states and mapped.patches:
            queries = self.learnt.fed[record.key].queries
            parts = mapped.heads(calls) | mapped.shares([one for one in record.pooling if one.shape[1] == queries])
            found = mapped.states(calls, states)
            parts["features"] = found[:, classes:]
            if classes:
                parts["class_feature"] = found[:, 0]
            if early:
                parts |= {EARLIER + name: value for name, value in mapped.heads(early).items()}
        places = max((call.places for call in calls), default=0)
        return Tiles(mapped.tiles, mapped.size, mapped.side, parts, mapped.members, classes, scale, early_scale, places)


def _side(size: int) -> int:
    side = int(size**0.5)
    return side if side**2 == size else 0


def block_lists(module: nn.Module, decoder: nn.Module | None, name: str = "") -> list[tuple[str, int]]:
    """Names and lengths of the lists of blocks in a module, without those in the decoder."""
    found = []
    for child_name, child in module.named_children():
        if child is decoder:
            continue
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ModuleList):
            found.append((path, len(child)))
        found += block_lists(child, decoder, path)
    return found


def flat_features(output: Any, deep: bool = True) -> Tensor | None:
    """Features as the language model gets them, [rows, D]; with `deep`, those of its first layer if it gets them by
    layers (Granite Vision 4).
    """
    value = output.get("pooler_output", output.get("last_hidden_state"))
    if value is None and deep and output.get("deepstack_features"):
        _, value = output["deepstack_features"][0]
    if isinstance(value, (list, tuple)) and value:
        return torch.cat([item.reshape(-1, item.shape[-1]) for item in value])
    return value.reshape(-1, value.shape[-1]) if isinstance(value, Tensor) else None


def detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(map(detached, value)) if type(value) in (list, tuple) else value


def _open_checkpoint(block: Callable[..., Any], *args: Any) -> Any:
    """A gradient checkpoint that is not reentrant. A graph may begin inside a block whose input has none."""
    graph = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    return checkpoint(block, *args, use_reentrant=False) if graph else block(*args)


@contextmanager
def open_checkpoints(module: nn.Module) -> Iterator[None]:
    """In the body the graph of gradient checkpoints can be differentiated, which it cannot if they are reentrant."""
    name = "_gradient_checkpointing_func"
    before = {
        part: vars(part)[name] for part in module.modules() if vars(part).get(name) not in (None, _open_checkpoint)
    }
    try:
        for part in before:
            setattr(part, name, _open_checkpoint)
        yield
    finally:
        for part, own in before.items():
            setattr(part, name, own)


@functools.cache
def argument_names(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def shape_key(inputs: dict[str, Any]) -> Any:
    """Equal for calls whose images have equal shapes: of pixels, and the numbers of grids and sizes."""
    return tuple(
        (name, tuple(value.shape), () if value.is_floating_point() else tuple(value.flatten().tolist()))
        if isinstance(value, Tensor)
        else (name, repr(value))
        for name, value in sorted(inputs.items())
    )


def records_of(output: Any) -> list[Encoded]:
    return list(getattr(output, RECORD))
