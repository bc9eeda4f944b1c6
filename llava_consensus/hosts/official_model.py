"""Official LLaVA as its configuration describes it, its tower, and the kind of each row of its prompts.

LLaVA's own function that assembles prompts is run once more, on numbers in place of embeddings. They go through all of
its branches and come out where the embeddings would have, so that they say which row is which word, patch or newline.
Nothing of LLaVA is copied.
"""

import ast
import copy
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.before_tower import Left, check_masks, refusal, tiles_left, whole_tiles
from llava_consensus.hosts.environment import OFFICIAL, STOCK
from llava_consensus.hosts.facts import TowerFacts
from llava_consensus.hosts.images import STRUCTURAL, Image, Integers, fixed_grid, grid_tiles
from llava_consensus.hosts.kernels import OLD
from llava_consensus.hosts.open_tower import OpenTower
from llava_consensus.hosts.outcomes import ImageOutcome
from llava_consensus.hosts.prompts import IGNORE, Prompt
from llava_consensus.hosts.rows import Rows, upload
from llava_consensus.hosts.taps import EncodedImage, Tap, split_heads
from llava_consensus.hosts.tower import RECORD
from llava_consensus.hosts.units import shares_of
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need

# as in llava-torch 1.2.2.post1, which takes any other ratio for `square`, and any spatial merge for `spatial`
RATIOS = ("square", "pad", "anyres")
MERGES = ("flat", "spatial", "spatial_unpad")
IMAGE_ID = -200  # IMAGE_TOKEN_INDEX of official LLaVA
NEWLINE = -1  # its number; patches are numbered up from 1, and padding is 0
FIRST_WORD = -2  # number of the word 0; the others go down from it
Function = Callable[..., tuple[Any, ...]]


def check_llava_version() -> None:
    """Raises OptionError for a version of transformers on which official LLaVA does not run: the metadata of this
    project can only state the requirements of transformers models. From 5.24 on generate() hands models a `cache`, and
    LLaVA's own code takes `past_key_values`.
    """
    installed = version("transformers")
    release = tuple(map(int, installed.split(".")[:2]))
    if release != (4, 37) and not (5, 19) <= release < (5, 24):
        raise OptionError(
            f"transformers {installed}: official LLaVA runs here on 4.37.2, its own pin, and on 5.19 to 5.23. "
            f"{OFFICIAL}, or convert the checkpoint to transformers' own LLaVA: llava-consensus model convert"
        )


class Official:
    """A `LlavaLlamaForCausalLM` or `LlavaMistralForCausalLM` as its configuration describes it.

    Args:
        module: the model.
        options: `layout` of the tiles of an image, see `hosts.LAYOUTS`.
    """

    entrance = "llava_consensus.hosts.official:OfficialEntrance"  # how rows leave the model
    offers = frozenset({Need.ATTENTION, Need.FEATURES, Need.CLASS_FEATURE, Need.PROJECTOR, Need.QUESTION})

    def __init__(self, module: Any, options: Mapping[str, str] = MappingProxyType({})) -> None:
        check_llava_version()
        self.module, self.options = module, options

    @staticmethod
    def check(method: Method, model: str = "") -> None:
        """Raises OptionError for a method that no model of this kind can have."""
        if method.acts_inside and (why := refusal("llava", "clip_vision_model", method.place)):
            raise OptionError(f"{type(method).__name__} {why}")
        if OLD and method.place is not Place.DECODER and method.positions != "renumber":
            raise OptionError(
                f"positions={method.positions} needs transformers >= 5: "
                f"generate() of {transformers.__version__} does not advance given positions"
            )

    @property
    def config(self) -> Any:
        """The configuration, or a copy of it with the entries that make the layout."""
        return laid_out(self.module, self.options)

    @property
    def most_tiles(self) -> int:
        return most_tiles(self.module, self.config)

    @property
    def tower(self) -> TowerFacts:
        tower = LlavaTower(self.module.get_vision_tower())
        return TowerFacts(tower.size, tower.side, range(len(tower.blocks)), tower.fed, 1, 1, False, self.offers)


def open_tower(model: Any, stage: Any) -> OpenTower:
    """The tower that a method before the projector acts in.

    Raises:
        OptionError: for a method that cannot act there, or a budget that it cannot reach.
    """
    tower, method = LlavaTower(model.get_vision_tower()), stage.method
    module = tower.own.vision_tower
    if why := refusal("llava", module.config.model_type, method.place):
        raise OptionError(f"{type(method).__name__} {why}")
    check_masks(module.config, method)
    found = OpenTower(module, model.get_model().mm_projector, method, tower.own.select_layer, tower.fed)
    for tiles in (1, most_tiles(model, model.config)) if method.place is Place.TOWER else ():
        for share in shares_of([tower.size] * tiles, stage.budget, method):
            if share.tokens < tower.size:
                method.schedule(share.tokens, tower.size, found.merging)
    return found


def laid_out(model: Any, options: Mapping[str, str], settings: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The configuration, or a copy of it with the entries that make the layout, and with these settings."""
    changes = dict(settings)
    if options.get("layout", STOCK) != STOCK:
        grid = fixed_grid(model.get_vision_tower().config.image_size)
        changes |= {"image_grid_pinpoints": grid, "mm_patch_merge_type": "spatial"}
    return changed(model.config, changes) if changes else model.config


def changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of a configuration, or a model, with changes; the original is never written to."""
    altered = copy.copy(config)
    for name, value in changes.items():
        setattr(altered, name, value)
    return altered


def most_tiles(model: Any, config: Any) -> int:
    """The most tiles an image can have: the base view and the largest grid; 1 without anyres."""
    tower = model.get_vision_tower()
    points = getattr(config, "image_grid_pinpoints", None)
    if tower is None or getattr(config, "image_aspect_ratio", None) != "anyres" or not points:
        return 1
    return grid_tiles(ast.literal_eval(points) if isinstance(points, str) else points, tower.config.image_size)


def check_images(config: Mapping[str, Any]) -> None:
    """Raise OptionError for a layout of images in a checkpoint's config.json that official LLaVA does not follow."""
    ratio = config.get("image_aspect_ratio") or "square"
    entries = {"image_aspect_ratio": (ratio, RATIOS)}
    if ratio == "anyres":  # one square has nothing to merge
        entries["mm_patch_merge_type"] = (config.get("mm_patch_merge_type") or "flat", MERGES)
    for name, (value, known) in entries.items():
        if value not in known:
            raise OptionError(
                f"{name}={value!r}: official LLaVA knows {'|'.join(known)}, and silently takes another for one of "
                "these. Take a checkpoint in transformers' format, or write the one you want in config.json"
            )


def check_layout(layout: str, image_aspect_ratio: str | None) -> None:
    if layout != STOCK and image_aspect_ratio != "anyres":
        raise OptionError(
            f"layout={layout} lays out the tiles of an image, and this model cuts none (image_aspect_ratio="
            f"{image_aspect_ratio!r}): take a checkpoint of LLaVA 1.6, or layout={STOCK}"
        )


# The vision tower


class LlavaTower:
    """LLaVA's tower around a vision model of CLIP or InternViT, as `Reader` reads it."""

    classes = 1

    def __init__(self, own: Any) -> None:
        self.own = own
        self.vision: Any = getattr(own.vision_tower, "vision_model", own.vision_tower)
        self.blocks: Any = self.vision.encoder.layers

    @property
    def size(self) -> int:
        """Tokens of a tile. The configuration of InternViT may say the first size that it was trained for."""
        if hasattr(self.vision, "post_layernorm"):
            return int(self.own.num_patches)
        return int(self.own.image_processor.crop_size["height"] // self.own.config.patch_size) ** 2

    @property
    def side(self) -> int:
        return round(self.size**0.5)

    @property
    def fed(self) -> int:
        """The block whose output is `hidden_states[select_layer]`, which has one entry more than blocks."""
        layer: int = self.own.select_layer
        return layer + len(self.blocks) if layer < 0 else layer - 1

    def states(self, output: Any) -> dict[str, Tensor]:
        value = output[0] if isinstance(output, tuple) else output
        return {"features": value[:, 1:], "class_feature": value[:, 0]}

    def pooling(self) -> list[Tap]:
        return []

    def attention(self, block: int) -> tuple[list[Tap], float]:
        """Taps of queries and keys of a block, and the scale of their products."""
        attention = getattr(self.blocks[block], "self_attn", None) or self.blocks[block].attn
        heads, scale = attention.num_heads, float(attention.scale)
        # InternViT norms over all heads together
        query, key = ("q_norm", "k_norm") if hasattr(attention, "qkv") else ("q_proj", "k_proj")
        return [
            Tap(getattr(attention, query), lambda output: {"query": split_heads(output, heads)}),
            Tap(getattr(attention, key), lambda output: {"key": split_heads(output, heads)}),
        ], scale


# Prompts


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
        return [1 if image.ndim == 3 else len(image) for image in self.images]

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
    """The images that `blank_images` represent; None for images with pixels."""
    parts = images if isinstance(images, list) else [images]
    if not parts or not hasattr(parts[0], RECORD):
        return None
    return [one for part in parts for one in getattr(part, RECORD)]


def read_structure(
    official: Function, tower: Any, given: Arguments, config: Any, patches: int
) -> tuple[Integers, NDArray[np.bool_], NDArray[np.bool_], list[Image], list[int]]:
    """Rows of the sequences that LLaVA's function assembles: their words, or IMAGE_ID, [R, S], False for padding
    [R, S], rows without a label [R, S], the images, and which of those that the user passed each one is.
    """

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
    return words, real, asks, *_images(rows, real, given.tiles, patches)


def _images(rows: Integers, real: NDArray[np.bool_], tiles: list[int], patches: int) -> tuple[list[Image], list[int]]:
    """Images from the numbers of rows [R, S]. A newline belongs to the image before it."""
    owner, first = np.repeat(np.arange(len(tiles)), tiles), np.cumsum([0, *tiles])
    flat = np.maximum(rows - 1, 0) // patches
    which = np.where(rows > 0, owner[flat], -1)
    before = np.maximum.accumulate(np.where(rows > 0, np.arange(rows.shape[1]), 0), axis=1)
    which = np.where((rows == NEWLINE) & real, np.take_along_axis(which, before, 1), which)
    images, origins = [], []
    for origin in np.unique(which[which >= 0]).tolist():
        row, places = (which == origin).nonzero()
        own = rows[row[0], places]
        tile = np.maximum(own - 1, 0) // patches - first[origin]
        newline = own == NEWLINE
        tile = np.where(newline, 0, tile)
        token = np.where(newline, STRUCTURAL, (own - 1) % patches)
        images.append(Image(int(row[0]), places, tile, token, tiles[origin], False, 0))
        origins.append(origin)
    return images, origins


# Their remaining rows


def aligned(rows: Rows, left: bool, limit: int | None) -> Rows:
    """Rows [R, W] that are padded on the left, as rows of themselves with padding on this side, cut to a limit."""
    lengths, width = rows.real.sum(1)[:, None], rows.real.shape[1]
    most = width if limit is None else min(width, limit)
    kept = np.minimum(lengths, most)
    place = np.arange(most)[None] - (most - kept if left else 0)
    real = (place >= 0) & (place < kept)
    index, shown = upload([np.where(real, width - lengths + place, 0), real], rows.index.device)
    return Rows(width, index, None, real, shown.bool(), rows.removed, True)


def counted(outcomes: list[ImageOutcome], prompt: Prompt, real: NDArray[np.bool_]) -> list[ImageOutcome]:
    """Outcomes of truncated prompts, of which these rows [R, S] are left."""
    return [
        outcome._replace(after=int(real[image.row, image.places[image.token >= 0]].sum()))
        for outcome, image in zip(outcomes, prompt.images, strict=True)
    ]


def with_encoded(prompt: Prompt, own: list[EncodedImage]) -> Prompt:
    """Prompts with the tensors read of each of their images."""
    pixels = [{} if one.pixels is None else {"pixel_values": one.pixels} for one in own]
    tiles, left = [one.tiles for one in own], [one.left for one in own]
    if None in left:
        return prompt._replace(tiles=tiles, encoded=pixels)
    smaller, _ = tiles_left(None, Left(left, None), prompt.images, True, True)  # type: ignore[arg-type]
    later = [read._replace(size=one.size, side=one.side) for read, one in zip(tiles, smaller, strict=True)]
    tiles = [whole_tiles(*of) for of in zip(prompt.images, left, strict=True)]
    return prompt._replace(tiles=tiles, encoded=pixels, left=left, later=later)


def for_beams(prompt: Prompt, beams: int) -> Prompt:
    rows = {name: getattr(prompt, name).repeat(beams, 0) for name in ("ids", "real", "asks")}
    parts = {name: getattr(prompt, name) * beams for name in ("tiles", "encoded", "text")}
    images = [one._replace(row=one.row * beams + beam) for beam in range(beams) for one in prompt.images]
    return prompt._replace(**rows, **parts, images=images, beams=beams)
