"""Vision towers that several families of transformers have."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Tap
from llava_consensus.hosts.towers import ClipBlocks, hidden_state_block, split_heads
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.tokens import Need

PATCHES = frozenset({Need.ATTENTION, Need.FEATURES})  # what every tower offers
MERGER = MappingProxyType(  # where methods can act before a projector that takes several patches at a time
    {
        Place.PICTURE: "",
        Place.TOWER: "merges patches inside the tower, and what is left forms no grid, of which this model makes one "
        "token of each square of patches",
    }
)


class LlavaTower(ClipBlocks):
    """CLIP or SigLIP under a LLaVA-type model, with its projector: one token for each patch.

    Args:
        inner: the model without its head.
        module: the vision tower.
    Raises:
        OptionError: for a tower of another kind, or features of several layers.
    """

    projects_class = False

    def __init__(self, inner: Any, module: Any) -> None:
        config = inner.config
        kind, layer = config.vision_config.model_type, config.vision_feature_layer
        if kind not in ("clip_vision_model", "siglip_vision_model"):
            raise OptionError(f"vision tower {kind!r}: adapted are CLIP and SigLIP towers, whose pictures are square")
        if not isinstance(layer, int):
            raise OptionError(f"vision_feature_layer={layer}: features of several layers are not adapted")
        encoder = getattr(module, "vision_model", module).encoder
        super().__init__(module, hidden_state_block(layer, len(encoder.layers)))
        self.classes = 1 if kind == "clip_vision_model" else 0
        self.offers = self.offers if self.classes else PATCHES | {Need.PROJECTOR}
        self.drops = config.vision_feature_select_strategy == "default"
        if self.drops != bool(self.classes):
            raise OptionError(
                f"vision_feature_select_strategy={config.vision_feature_select_strategy!r} does not fit a {kind}: "
                "a class token among the patches is no candidate"
            )
        self.layer, self._inner = layer, inner
        self.side: int = config.vision_config.image_size // config.vision_config.patch_size
        self.tokens: int = self.side**2

    def encode(self, pixels: Tensor) -> Tensor:
        """Tiles [T, 3, h, w] through tower and projector: [T, N, D], with class tokens where these are told to stay."""
        states = self.module(pixels, output_hidden_states=True, return_dict=True).hidden_states[self.layer]
        return self.project(states if self.projects_class else states[:, self.classes :])

    def project(self, features: Tensor) -> Tensor:
        """The projector: [..., D_v] -> [..., D]."""
        projected: Tensor = self._inner.multi_modal_projector(features)
        return projected


class ShuffledTower:
    """A tower of plain blocks whose patches a shuffle puts together into tokens.

    Args:
        blocks: of the tower.
        members: [N, m] the patches each token is made of.
        classes: class tokens in front of the patches.
        query, key: names of the modules in a block's attention that give queries and keys [T, n, H d].
    """

    inside = MERGER

    def __init__(
        self,
        blocks: Sequence[Any],
        members: Tensor,
        classes: int,
        attention: str,
        names: tuple[str, str],
    ) -> None:
        self.blocks, self.members, self.classes = blocks, members, classes
        self._attention, self._names = attention, names
        self.feature_block = len(blocks) - 1
        self.tokens = len(members)
        self.side = round(self.tokens**0.5)
        self.offers = PATCHES | ({Need.CLASS_FEATURE} if classes else frozenset())

    def encode(self, pixels: Tensor) -> Tensor:
        """Never asked for: the model's own encoder runs, and hooks collect."""
        raise NotImplementedError

    def project(self, features: Tensor) -> Tensor:
        """Not offered: the projector takes several patches at a time."""
        raise NotImplementedError

    def scale(self, block: int) -> float:
        """What the products of queries and keys of a block are multiplied with."""
        scale: float = getattr(self.blocks[block], self._attention).scale
        return scale

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Queries and keys of one block, and the output of another."""
        attending = getattr(self.blocks[attention], self._attention)
        taps, heads = [], attending.num_heads
        query, key = (getattr(attending, name) for name in self._names)
        if Need.ATTENTION in needs:
            taps.append(Tap(query, lambda output: {"query": split_heads(output, heads)}))
            taps.append(Tap(key, lambda output: {"key": split_heads(output, heads)}))
        if Need.FEATURES in needs:
            taps.append(Tap(self.blocks[features], lambda output: {"features": _first(output)[:, self.classes :]}))
        if Need.CLASS_FEATURE in needs:
            taps.append(Tap(self.blocks[features], lambda output: {"class_feature": _first(output)[:, 0]}))
        return taps


def squares(side: int, stride: int) -> Tensor:
    """The patches of each square of a square grid of patches, as `cells`."""
    return cells(side, side, stride)


def cells(height: int, width: int, stride: int) -> Tensor:
    """The patches of each square of a grid of patches: [N, stride * stride], without what does not fill a square."""
    corner = torch.arange(height // stride)[:, None] * stride * width + torch.arange(width // stride) * stride
    inside = torch.arange(stride)[:, None] * width + torch.arange(stride)
    return corner.flatten()[:, None] + inside.flatten()


def _first(output: Any) -> Tensor:
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states
