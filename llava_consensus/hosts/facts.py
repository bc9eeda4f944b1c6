"""Facts from the configuration of a transformers model: sizes of its vision side, and how it takes images. Nothing
here runs the model; harness and server compute the cost of a prompt from it before they read one.
"""

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.environment import REMEDY, STOCK
from llava_consensus.hosts.images import (
    ACROSS,
    MODALITIES,
    PIXELS,
    STRAIGHT,
    Image,
    Integers,
    base_of,
    clip_of,
    decoder_of,
    fixed_grid,
    grid_tiles,
    images_of,
    kind_of,
)
from llava_consensus.hosts.tower import argument_names, block_lists
from llava_consensus.reduction.tokens import Need

# Tiles of one size, a token for each square of patches: where the configuration says how many are in a row of a square.
SHUFFLED = {
    "internvl": lambda config: round(1 / config.downsample_ratio),
    "smolvlm": lambda config: config.scale_factor,
    "idefics3": lambda config: config.scale_factor,
    "gemma3": lambda config: (
        _first(config.vision_config.image_size)
        // _first(config.vision_config.patch_size)
        // round(config.mm_tokens_per_image**0.5)
    ),
    "aya_vision": lambda config: config.downsample_factor,
    "cohere2_vision": lambda config: config.downsample_factor,
    "ovis2": lambda config: config.vision_config.hidden_stride,
}
TILES = {"internvl": 13, "aya_vision": 13, "cohere2_vision": 13, "ovis2": 13, "smolvlm": 17, "idefics3": 17}


def check_version(transformers: str) -> None:
    """Raises OptionError for a version of transformers on whose own models methods were not seen to work."""
    if not (5, 19) <= tuple(map(int, transformers.split(".")[:2])) < (5, 25):
        raise OptionError(
            f"transformers {transformers}: methods on models of transformers run on 5.19 to 5.24. {REMEDY.format(5.25)}"
        )


class TowerFacts(NamedTuple):
    tokens: int  # of one tile; the most there can be if that depends on the image
    side: int  # tokens in a row of a tile, 0 if they form no grid
    blocks: range
    feature_block: int  # the one whose output feeds the projector
    classes: int  # class tokens in front of the patches
    merged: int  # patches of a token
    varies: bool  # whether the number of tokens depends on the size of the image
    offers: frozenset[Need]


class Facts:
    """A model of transformers as its configuration describes it.

    Args:
        module: the model.
        options: of its family (`HostEntry.options`).
    """

    entrance = "llava_consensus.hosts.entrance:Entrance"  # how rows leave the model

    def __init__(self, module: Any, options: Mapping[str, str]) -> None:
        check_version(transformers.__version__)
        self.module, self.options, self.config = module, options, module.config
        self.image_processor: Any = None  # if there is one, it knows how many tiles an image has
        self.kind: str = kind_of(module.config)

    @property
    def inner(self) -> Any:
        return base_of(self.module)

    @property
    def reach(self) -> int:
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", 0) or 0)

    @property
    def keeps_positions(self) -> bool:
        return hasattr(self.inner, "rope_deltas")

    @property
    def clip_name(self) -> str:
        return clip_of(self.config)

    @property
    def tower(self) -> TowerFacts:
        vision = self.config.vision_config
        lists = block_lists(self.inner, decoder_of(self.module))
        count = max((number for _, number in lists), default=1)
        layer = getattr(self.config, "vision_feature_layer", -1)
        layer = layer if isinstance(layer, int) else -1
        block = layer + count if layer < 0 else layer - 1
        classes, offers = 0, {Need.ATTENTION, Need.FEATURES}
        if self.kind in STRAIGHT:
            grid = vision.image_size // vision.patch_size
            registers = getattr(vision, "num_register_tokens", 0)  # LLaVA's model takes them for patches
            classes = int(vision.model_type not in ("siglip_vision_model",))
            tokens, side, merged, varies = grid**2 + registers, 0 if registers else grid, 1, False
            offers |= {Need.PROJECTOR}
        elif self.kind in SHUFFLED:
            grid = _first(vision.image_size) // _first(vision.patch_size)
            stride = SHUFFLED[self.kind](self.config)
            tokens, side, merged, varies = (grid // stride) ** 2, grid // stride, stride**2, False
            classes, block = int(self.kind == "internvl"), block if self.kind == "internvl" else count - 1
        elif self.kind in ("pixtral", "mistral3"):
            stride = getattr(self.config, "spatial_merge_size", 1)
            tokens = (vision.image_size // (vision.patch_size * stride)) ** 2
            side, merged, varies = 0, stride**2, True
        else:
            merge = getattr(vision, "spatial_merge_size", None)
            tokens, side, merged, varies = self.reach, 0, merge**2 if merge else 1, True
        if classes:
            offers |= {Need.CLASS_FEATURE}
        return TowerFacts(tokens, side, range(count), block, classes, merged, varies, frozenset(offers))

    @property
    def most_tiles(self) -> int:
        processor = self.image_processor
        if getattr(self.config, "image_grid_pinpoints", None):
            return grid_tiles(self.pinpoints, self.config.vision_config.image_size)
        if processor is not None and self.kind in ("smolvlm", "idefics3"):
            grid = -(-processor.size["longest_edge"] // processor.max_image_size["longest_edge"])
            return 1 + grid**2 if processor.do_image_splitting else 1
        if processor is not None and self.kind in TILES:
            return 1 + int(processor.max_patches)
        return TILES.get(self.kind, 1)

    # LLaVA-NeXT's grids

    @property
    def lays_out(self) -> bool:
        """Whether the grid of tiles is fixed, otherwise than the model and its processor have it."""
        return self.options.get("layout", STOCK) != STOCK

    @property
    def pinpoints(self) -> list[list[int]]:
        """Height and width in pixels of the grids an image may be cut to."""
        grids: list[list[int]] = self.config.image_grid_pinpoints
        return fixed_grid(self.config.vision_config.image_size) if self.lays_out else grids

    @property
    def preprocessing(self) -> dict[str, Any]:
        return {"image_grid_pinpoints": self.pinpoints} if self.lays_out else {}

    def on_grid(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], Integers]:
        """Arguments of the encoder and placeholders of one image that fills the fixed grid."""
        size = torch.tensor(self.pinpoints)
        ids = np.full((1, (1 + ACROSS**2) * self.tower.tokens), self.placeholder("image"))
        return {**arguments, "image_sizes": size}, ids

    @property
    def tiled_alone(self) -> bool:
        return self.kind == "llava_onevision"

    def grid_columns(self, size: tuple[int, int]) -> int:
        """Tiles in a row of the grid after the base view of an image of this width and height; 0 without a grid."""
        if not getattr(self.config, "image_grid_pinpoints", None):
            return 0
        family = import_module(type(self.inner).__module__)
        tile = self.config.vision_config.image_size
        return int(family.get_anyres_image_grid_shape(torch.tensor(size[::-1]), self.pinpoints, tile)[1])

    # Inputs

    def placeholder(self, modality: str) -> int:
        kind = "image" if self.kind.startswith("glm4v") or self.kind == "glm46v" else modality
        return int(getattr(self.config, f"{kind}_token_id"))

    def encoder_inputs(self, inputs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Arguments of the encoder of each modality that there are pixels of."""
        found = {}
        for modality in MODALITIES:
            encoder = getattr(type(self.inner), f"get_{modality}_features", None)
            if encoder is None:
                continue
            names = [name for name in argument_names(encoder)[1:] if name != "kwargs"]
            arguments = {name: inputs[name] for name in names if inputs.get(name) is not None}
            if any(name in arguments for name in PIXELS[modality]):
                found[modality] = arguments
        return found

    def images(self, modality: str, inputs: dict[str, Any], ids: Integers) -> list[Image]:
        """Rows of the images of prompts [R, S], given the arguments of their encoder."""
        count = int((ids == self.placeholder(modality)).sum())
        record = SimpleNamespace(inputs=inputs, count=count)
        return [
            image for _, _, own, _ in images_of(self.inner, self.config, {modality: [record]}, ids) for image in own
        ]

    def row_inputs(self, ids: Tensor, video: bool = False) -> dict[str, Tensor]:
        """Arguments of the model that say which rows [R, S] are of images."""
        taken = inspect.signature(type(self.module).forward).parameters
        visual = (ids == self.placeholder("image")).int()
        types = {"token_type_ids": visual.long()}
        clips = visual * 2 if video and self.placeholder("video") == self.placeholder("image") else visual
        if hasattr(self.config, "video_token_id") and self.placeholder("video") != self.placeholder("image"):
            clips = visual + 2 * (ids == self.placeholder("video")).int()
        types |= {"mm_token_type_ids": clips, "moe_mm_token_type_ids": clips}
        return {name: value for name, value in types.items() if name in taken}


def _first(size: int | list[int]) -> int:
    """Height in pixels of a size that is an int or (height, width)."""
    return size if isinstance(size, int) else size[0]


def text_side(checkpoint: str) -> str:
    """Folder of the CLIP model that `model convert` has put next to the weights; empty if there is none."""
    config = next(Path(checkpoint).glob("official/*/config.json"), None)
    return "" if config is None else str(config.parent)
