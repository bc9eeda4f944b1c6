"""Official LLaVA as its configuration describes it."""

import ast
import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llava_consensus.errors import OptionError
from llava_consensus.hosts.before_tower import check_masks, refusal
from llava_consensus.hosts.environment import check_llava_version
from llava_consensus.hosts.facts import TowerFacts
from llava_consensus.hosts.next_grid import STOCK, fixed_grid
from llava_consensus.hosts.official_prompt import vision_of
from llava_consensus.hosts.open_tower import OpenTower
from llava_consensus.hosts.units import shares_of
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.tokens import Need


class Official:
    """A `LlavaLlamaForCausalLM` or `LlavaMistralForCausalLM` as its configuration describes it.

    Args:
        module: the model.
        options: `layout` of the tiles of an image, see `hosts.LAYOUTS`.
    """

    offers = frozenset({Need.ATTENTION, Need.FEATURES, Need.CLASS_FEATURE, Need.PROJECTOR, Need.QUESTION})

    def __init__(self, module: Any, options: Mapping[str, str] = MappingProxyType({})) -> None:
        if type(module).__name__ == "LlavaMptForCausalLM":
            raise OptionError(
                "LLaVA's MPT class is broken upstream (it calls a five-argument form that is gone): "
                "use a Llama or Mistral checkpoint"
            )
        check_llava_version()
        self.module, self.options = module, options

    @property
    def config(self) -> Any:
        """The configuration, or a copy of it with the entries that make the layout."""
        return laid_out(self.module, self.options)

    @property
    def most_tiles(self) -> int:
        """The most tiles an image can have."""
        return most_tiles(self.module, self.config)

    @property
    def tower(self) -> TowerFacts:
        """Sizes of the vision side."""
        tower = self.module.get_vision_tower()
        blocks = range(len(vision_of(tower).encoder.layers))  # type: ignore[union-attr, arg-type]
        block = fed_block(tower.select_layer, len(blocks))
        return TowerFacts(patches_of(tower), side_of(tower), blocks, block, 1, 1, False, self.offers)


def open_tower(model: Any, stage: Any) -> OpenTower:
    """The tower that a method before the projector acts in.

    Raises:
        OptionError: for a method that cannot act there, or a budget that it cannot reach.
    """
    tower, method, name = model.get_vision_tower(), stage.method, type(stage.method).__name__
    kind = tower.vision_tower.config.model_type
    if why := refusal("llava", kind, method.place):
        raise OptionError(f"{name} {why}")
    check_masks(tower.vision_tower.config, method)
    blocks, size = len(vision_of(tower).encoder.layers), patches_of(tower)  # type: ignore[union-attr, arg-type]
    block = fed_block(tower.select_layer, blocks)
    found = OpenTower(tower.vision_tower, model.get_model().mm_projector, method, tower.select_layer, block)
    for tiles in (1, most_tiles(model, model.config)) if method.place is Place.TOWER else ():
        for share in shares_of([size] * tiles, stage.budget, method):
            if share.tokens < size:
                method.schedule(share.tokens, size, found.merging)
    return found


def fed_block(layer: Any, count: int) -> int:
    """The block whose output is `hidden_states[layer]`, which has one entry more than blocks."""
    if not isinstance(layer, int):
        raise OptionError(f"vision layer {layer!r}: features of several layers are not adapted, give one number")
    return layer + count if layer < 0 else layer - 1


def side_of(tower: Any) -> int:
    """Tokens in a row of a tile."""
    return round(patches_of(tower) ** 0.5)


def patches_of(tower: Any) -> int:
    """Tokens of a tile. The configuration of InternViT may say the first size that it was trained for."""
    if hasattr(vision_of(tower), "post_layernorm"):
        return int(tower.num_patches)
    return int(tower.image_processor.crop_size["height"] // tower.config.patch_size) ** 2


def laid_out(model: Any, options: Mapping[str, str], settings: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The configuration, or a copy of it with the entries that make the layout, and with these settings."""
    changes = dict(settings)
    if options.get("layout", STOCK) != STOCK:
        grid = fixed_grid(model.get_vision_tower().config.image_size)
        changes |= {"image_grid_pinpoints": grid, "mm_patch_merge_type": "spatial"}
    return changed(model.config, changes) if changes else model.config


def changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of a configuration with changes; the original is never written to."""
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
    points, size = ast.literal_eval(points) if isinstance(points, str) else points, tower.config.image_size
    return 1 + max((width // size) * (height // size) for width, height in points)
