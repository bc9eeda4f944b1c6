"""Official LLaVA 1.5 and 1.6 (the `llava` package, wheel and git HEAD), with Llama and Mistral language models.

While a method is attached, `prepare` takes the place of the model's `prepare_inputs_labels_for_multimodal`. What that
function makes of a prompt is known row by row (`read_structure`): it is run on numbers in place of embeddings. They go
through all of its branches and come out where the embeddings would have, so that they say which row of the sequence is
which text id, newline, patch or padding. Nothing of LLaVA is copied. Embeddings are gathered accordingly, the visual
ones are reduced, and what the function returns is made of the rest. Where nothing is reduced, the official function
assembles the sequence itself.
"""

import ast
import copy
from collections.abc import Callable, Mapping
from functools import cached_property, partial, wraps
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import IGNORE, Offer, Overlay, Tiles
from llava_consensus.hosts.caches import (
    begin_cache,
    cache_given,
    cache_of,
    cached_rows,
    check_counted,
    going_on,
    remember,
    shortened,
)
from llava_consensus.hosts.call import COUNTING, MORE, UNDER_WAY, Call, named, recounting, uncompiled
from llava_consensus.hosts.decoders import LlamaDecoder
from llava_consensus.hosts.environment import check_llava_version
from llava_consensus.hosts.next_grid import STOCK, check_layout, check_pictures, check_tiles, fixed_grid
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.sequence import Assembled, Channel, Layout, RowKinds, Rule, fingerprints, pad_left
from llava_consensus.hosts.towers import OLD, ClipBlocks, hidden_state_block, load_clip_text
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need, Stopwatch

PREPARE = "prepare_inputs_labels_for_multimodal"
LIMIT = "tokenizer_model_max_length"  # entry of the configuration: rows a sequence is cut to
NEWLINE = -1  # the number of a newline; patches are numbered up from 1, and padding is 0
PROMPT = "prompt"  # in the state of a call: metadata of the reduced prompts that the next forward reads
ASSISTED = (
    "assistant_model: official LLaVA reads its prompts as embeddings, which no second model is given to guess from: "
    "leave it out, or take prompt_lookup_num_tokens, or LLaVA of transformers (llava-consensus model convert)"
)
FIRST_ID = -1000  # the number of the first id; the others go down from it
Official = Callable[..., tuple[Any, ...]]


class Projected:
    """Projection part of any LLaVA tower: the model's own `encode_images` and projector."""

    _model: Any

    def encode(self, pixels: Tensor) -> Tensor:
        """Tiles [T, 3, h, w] through tower and projector: [T, N, D]."""
        return self._model.encode_images(pixels)

    def project(self, features: Tensor) -> Tensor:
        """The projector: [..., D_v] -> [..., D]."""
        return self._model.get_model().mm_projector(features)


class OfficialTower(Projected, ClipBlocks):
    """The CLIP tower of a LLaVA model, with its projector."""

    def __init__(self, model: Any) -> None:
        tower = model.get_vision_tower()
        blocks = len(getattr(tower.vision_tower, "vision_model", tower.vision_tower).encoder.layers)
        super().__init__(tower.vision_tower, hidden_state_block(tower.select_layer, blocks))
        self._model = model
        self.tokens: int = tower.num_patches
        self.side: int = tower.num_patches_per_side


class LlavaModel:
    """A view of a `LlavaLlamaForCausalLM` or `LlavaMistralForCausalLM`, see `base.Model`.

    Args:
        module: the model.
        options: of the host: `layout` of the tiles of a picture, see `hosts.LAYOUTS`.
    """

    offer = Offer(ClipBlocks.offers | {Need.QUESTION}, inside=ClipBlocks.inside)
    reads_inside = True

    def __init__(self, module: Any, options: Mapping[str, str] = MappingProxyType({})) -> None:
        self.module: Any = module
        self.options = options
        self.layout = options.get("layout", STOCK)

    def of(self, module: Any) -> "LlavaModel":
        """A copy of this view for a replica."""
        return type(self)(module, self.options)

    @property
    def config(self) -> Any:
        """The configuration, or a copy of it with the entries that make the layout."""
        if self.layout == STOCK:
            return self.module.config
        grid = fixed_grid(self.module.get_vision_tower().config.image_size)
        return changed(self.module.config, {"image_grid_pinpoints": grid, "mm_patch_merge_type": "spatial"})

    @cached_property
    def tower(self) -> Any:
        """The vision side; None where a model has none."""
        return None if self.module.get_vision_tower() is None else OfficialTower(self.module)

    @cached_property
    def decoder(self) -> LlamaDecoder:
        """The language side."""
        return LlamaDecoder(self.module.get_model())

    @property
    def most_tiles(self) -> int:
        """The most tiles a picture can have: the base view and the largest grid; 1 without anyres."""
        tower, config = self.module.get_vision_tower(), self.config
        points = getattr(config, "image_grid_pinpoints", None)
        if tower is None or getattr(config, "image_aspect_ratio", None) != "anyres" or not points:
            return 1
        points, size = ast.literal_eval(points) if isinstance(points, str) else points, tower.config.image_size
        return 1 + max((width // size) * (height // size) for width, height in points)

    def clip_text(self) -> Any:
        """The text side of the CLIP model that the vision tower is of."""
        return load_clip_text(self.module.get_vision_tower().vision_tower_name, self.module.device)

    def entrances(self, attachment: Attachment) -> dict[str, Callable[..., Any]]:
        """The official function; `generate`, which makes a call of its own; the function that settles its lengths; and
        `forward`, which continues from caches of reduced prompts.
        """
        model_class = type(self.module)
        counting = {COUNTING: partial(recounting, attachment, None)} if hasattr(model_class, COUNTING) else {}
        return {
            PREPARE: partial(prepare, attachment),
            "generate": wraps(model_class.generate)(partial(generate, attachment)),
            "forward": wraps(model_class.forward)(partial(forward, attachment, vars(self.module).get("forward"))),
            **counting,
        }

    def check(self, method: Method) -> None:
        """Raises OptionError for what cannot be attached, with the remedy."""
        model = self.module
        if type(model).__name__ == "LlavaMptForCausalLM":
            raise OptionError(
                "LLaVA's MPT class is broken upstream (it calls a five-argument form that is gone): "
                "use a Llama or Mistral checkpoint"
            )
        check_llava_version()
        check_pictures(vars(model.config))
        check_layout(self.layout, getattr(model.config, "image_aspect_ratio", None))
        tower = model.get_vision_tower()
        if tower is not None:
            self.check_tower(tower)
        keeps = method.positions != "renumber" and method.place is not Place.DECODER
        if keeps and OLD:
            raise OptionError(
                f"positions={method.positions} needs transformers >= 5: "
                f"generate() of {transformers.__version__} does not advance given positions"
            )

    def check_tower(self, tower: Any) -> None:
        """Raises OptionError for a vision tower that has no weights yet, or hands on its class token."""
        if not tower.is_loaded:
            raise OptionError("the vision tower has no weights yet: call model.get_vision_tower().load_model() first")
        if getattr(tower, "select_feature", "patch") != "patch":
            raise OptionError(
                f"mm_vision_select_feature={tower.select_feature!r} must be 'patch': "
                "a class token among the patches is no candidate"
            )


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
        return [self.images.shape[1] if self.images.ndim == 5 else 1] * self.images.shape[0]

    @property
    def pixels(self) -> Tensor:
        """All tiles of all pictures: [T, 3, h, w]."""
        if isinstance(self.images, list):
            return torch.cat([image[None] if image.ndim == 3 else image for image in self.images])
        return self.images.flatten(0, 1) if self.images.ndim == 5 else self.images

    @property
    def without_pixels(self) -> Any:
        """Pictures of no pixels that take the same branches of the official function."""
        if isinstance(self.images, list):
            return [torch.empty(*image.shape[:-2], 0, 0) for image in self.images]
        return torch.empty(*self.images.shape[:-2], 0, 0)


def generate(attachment: Attachment, *args: Any, **kwargs: Any) -> Any:
    """`generate` as the class has it, as one call. OptionError for an `assistant_model`, which it cannot use."""
    if kwargs.get("assistant_model") is not None:
        raise OptionError(ASSISTED)
    model, call = attachment.model.module, attachment.entered()
    if call is None:
        return type(model).generate(model, *args, **kwargs)
    if not call.scoped:
        with attachment.call():
            return generate(attachment, *args, **kwargs)
    state = call.state
    check_counted(cache_given(kwargs))
    state[UNDER_WAY] = True
    try:
        return type(model).generate(model, *args, **kwargs)
    finally:
        del state[UNDER_WAY]
        state.pop(MORE, None)


def forward(attachment: Attachment, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """`forward` as it was, from the cache of a reduced prompt at the rows that follow it."""
    model = attachment.here.module
    inputs = named(type(model).forward, args, kwargs)
    run = plain or partial(type(model).forward, model)
    call = attachment.entered()
    if call is None:
        return run(**inputs)
    cache = cache_given(inputs)
    state, cached = call.state, cached_rows(cache)
    if attachment.cuts is not None:
        attachment.cuts.given(call, inputs)
    if cached:
        return run(**going_on(inputs, cached, UNDER_WAY in state))
    begin_cache(cache, None)  # of a prompt before, where the cache was emptied
    output = run(**inputs)
    prompt = attachment.current(fresh=False).state.pop(PROMPT, None)
    if prompt is not None:  # else a method between layers may have noted its cuts there
        remember(cache_of(output), prompt)
    return output


def prepare(attachment: Attachment, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Replaces the official function on this instance: same arguments, same six results."""
    return prepared(attachment, getattr(type(attachment.model.module), PREPARE), Arguments(*args, **kwargs))


@uncompiled
def prepared(attachment: Attachment, official: Official, arguments: Arguments) -> tuple[Any, ...]:
    """The results of the official function, with the pictures reduced."""
    view = cast("LlavaModel", attachment.here)
    model = view.module
    step = arguments.input_ids.shape[1] == 1
    call = attachment.entered(fresh=not step)
    tower = None if step or arguments.images is None else view.tower
    if call is None or tower is None:
        return official(model, *arguments)
    watch = Stopwatch(arguments.input_ids.device)
    cuts = attachment.method.place is Place.DECODER
    if view.layout != STOCK:
        check_tiles(arguments.tiles)
    config = changed(view.config, call.given.settings)
    with watch.time("layout"):
        uncut = config if cuts else changed(config, {LIMIT: None})
        structure = read_structure(official, model, arguments, uncut, tower.tokens)
        layout = attachment.layout(structure.kinds)
    if attachment.reduces(layout) and not cuts:
        return _reduced(attachment, call, arguments, structure, layout, config, watch)
    replaced: dict[str, Any] = {"config": config}
    tiles: list[Tiles] = []

    def encode(pixels: Tensor) -> Tensor:
        tiles.extend(attachment.encode(pixels, arguments.tiles))
        return _joined(tiles)

    if cuts or call.given.encoded is not None or attachment.method.acts_inside:
        replaced["encode_images"] = encode
    result = official(Overlay(model, **replaced), *arguments)
    attachment.arm(call, layout, result[4], tiles, limit=None if cuts else getattr(config, LIMIT, None))
    return result


def _reduced(
    attachment: Attachment,
    call: Call,
    arguments: Arguments,
    structure: "Structure",
    layout: Layout,
    config: Any,
    watch: Stopwatch,
) -> tuple[Any, ...]:
    """The six results after the visual rows of the full sequence were reduced. Truncation judges the reduced length."""
    tiles = attachment.encode(arguments.pixels, arguments.tiles)
    projected = _joined(tiles)
    embeds = structure.embeddings(attachment.here.module, arguments.input_ids, projected)
    device, channels = embeds.device, {}
    if arguments.labels is not None:
        targets = structure.labels(arguments.labels, projected.shape[0] * projected.shape[1])
        channels["labels"] = Channel(targets, IGNORE, Rule.BLANK)
    full = Assembled(embeds, layout.real.to(device), layout.positions.to(device), channels)
    prompts = None
    if Need.FINGERPRINT in attachment.needs:
        ids, mask = arguments.input_ids, arguments.attention_mask
        prompts = fingerprints(ids, torch.ones_like(ids) if mask is None else mask)
    out = attachment.reduce(call, full, layout, tiles, prompts, getattr(config, LIMIT, None), watch)
    if getattr(config, "tokenizer_padding_side", "right") == "left":
        out = pad_left(out)
    attachment.follow(call, out, out.embeds)
    keeps = attachment.positions != "renumber"
    call.state[PROMPT] = shortened(full, out, keeps)
    call.state[MORE] = out.real.shape[1] - min(full.real.shape[1], getattr(config, LIMIT, None) or full.real.shape[1])
    positions: Tensor | None = out.positions
    if not keeps:
        given = arguments.position_ids
        positions = None if given is None else _like((out.real.cumsum(1) - 1).clamp_min(0) * out.real, given)
    # without a mask, gaps between positions would be taken for the ends of packed sequences
    mask = out.real if keeps and arguments.attention_mask is None else _like(out.real, arguments.attention_mask)
    labels = out.channels["labels"].values if channels else None
    return None, positions, mask, arguments.past_key_values, out.embeds, labels


class Structure(NamedTuple):
    """Kind and source of every row of the assembled sequences."""

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
    """Reads the structure of prompts about tiles of `patches` tokens by running the official function."""
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
    token = torch.where(rows > 0, (rows - 1) % patches, -1)
    return RowKinds(real, picture, tile, token, answer, tiles=tuple(tiles))


def changed(config: Any, *changes: Mapping[str, Any]) -> Any:
    """A copy of a configuration with changes; the original is never written to."""
    altered = copy.copy(config)
    for name, value in (item for part in changes for item in part.items()):
        setattr(altered, name, value)
    return altered


def _joined(tiles: list[Tiles]) -> Tensor:
    """Projected tokens of all pictures, tile by tile: [T, N, D]."""
    return tiles[0].projected if len(tiles) == 1 else torch.cat([picture.projected for picture in tiles])


def _like(values: Tensor, argument: Tensor | None) -> Tensor | None:
    """None where the caller gave None, else the values in the caller's dtype: what the official function does."""
    return None if argument is None else values.to(argument.dtype)
