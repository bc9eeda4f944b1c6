"""Vision towers that several families of transformers have."""

from collections.abc import Sequence
from operator import attrgetter
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
ACTED_INSIDE = ("clip_vision_model", "siglip_vision_model")
READ = {"dinov2": "encoder.layer", "dinov2_with_registers": "encoder.layer", "vit": "layers"}  # where the blocks are
UNREAD = MappingProxyType(
    {Place.PICTURE: "acts before the vision tower, which is done for CLIP, SigLIP and DINOv2 towers alone",
     Place.TOWER: "acts inside the vision tower, which is done in CLIP and SigLIP towers alone"}
)  # fmt: skip
MERGER = MappingProxyType(  # where methods can act before a projector that takes several patches at a time
    {
        Place.PICTURE: "",
        Place.TOWER: "merges patches inside the tower, and what is left forms no grid, of which this model makes one "
        "token of each square of patches",
    }
)


class LlavaTower(ClipBlocks):
    """A vision transformer under a LLaVA-type model, with its projector: one token for each patch.

    CLIP and SigLIP are read and methods act inside them; DINOv2 and ViT are read, and DINOv2 takes smaller pictures.
    Any other tower serves methods that read tokens alone.

    Args:
        inner: the model without its head.
        module: the vision tower.
    Raises:
        OptionError: for features of several layers, or a class token among the patches.
    """

    projects_class = False

    def __init__(self, inner: Any, module: Any) -> None:
        config = inner.config
        vision, layer = config.vision_config, config.vision_feature_layer
        kind, strategy = vision.model_type, config.vision_feature_select_strategy
        if not isinstance(layer, int):
            raise OptionError(f"vision_feature_layer={layer}: features of several layers are not adapted")
        self.layer, self._inner, self.drops = layer, inner, strategy == "default"
        registers = getattr(vision, "num_register_tokens", 0)  # LLaVA's model takes them for patches
        self.side: int = 0 if registers else vision.image_size // vision.patch_size
        self.tokens: int = (vision.image_size // vision.patch_size) ** 2 + registers
        if kind in ACTED_INSIDE:
            blocks = getattr(module, "vision_model", module).encoder.layers
            super().__init__(module, hidden_state_block(layer, len(blocks)))
            self.classes = 1 if kind == "clip_vision_model" else 0
            self.offers = self.offers if self.classes else PATCHES | {Need.PROJECTOR}
        else:
            self.module, self.inside = module, dict(UNREAD)  # which can be copied with a model
            if kind in READ:
                self.blocks = list(attrgetter(READ[kind])(module))
                self.feature_block = hidden_state_block(layer, len(self.blocks))
                if kind == "dinov2":
                    self.embeddings, self.resizes_by = module.embeddings, vision.patch_size
                    self.inside = {**UNREAD, Place.PICTURE: ""}
            else:
                self.blocks, self.feature_block, self.offers = [module], 0, frozenset()
        if kind in (*ACTED_INSIDE, *READ) and self.drops != bool(self.classes):
            raise OptionError(
                f"vision_feature_select_strategy={strategy!r} does not fit a {kind}: "
                "a class token among the patches is no candidate"
            )

    def attention(self, block: int) -> tuple[Any, int, float]:
        """The attention module of a block, with `q_proj` and `k_proj`; its heads, and the scale of its products."""
        if self.module.config.model_type in ACTED_INSIDE:
            return super().attention(block)
        module: Any = self.blocks[block]
        return module.attention, module.attention.num_attention_heads, module.attention.scaling

    def encode(self, pixels: Tensor) -> Tensor:
        """Tiles [T, 3, h, w] through tower and projector: [T, N, D], with class tokens where the model keeps them."""
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
        """Scale of the attention logits of a block."""
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
