"""Vision towers that several families of transformers have."""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Tap
from llava_consensus.hosts.derived.tap import KernelCall, attention_modules, modules_of
from llava_consensus.hosts.towers import ClipBlocks, attention_blocks, feature_taps, hidden_state_block, states_of
from llava_consensus.reduction.method import Method, Place
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
        return self._inner.multi_modal_projector(features)


class TapTower:
    """A tower whose patches a projector puts together, read where its blocks hand queries and keys to their attention
    kernel.

    Args:
        vision: the vision model.
        tokens: of a tile; the most there can be where that depends on the picture.
        members: [N, m] the patches each token is made of; None where pictures of any size follow each other in a row,
            and each has its own.
        merged: patches of a token there.
        classes: class tokens in front of the patches.
        layer: of the hidden states that feed the projector.
        inside: where methods can act before the projector.
    """

    side = 0

    def __init__(
        self, vision: Any, tokens: int, members: Tensor | None = None, merged: int = 1, classes: int = 0,
        layer: int = -1, inside: Mapping[Place, str] = MERGER,
    ) -> None:  # fmt: skip
        lists = [one for one in modules_of(vision) if isinstance(one, nn.ModuleList)]
        found = [(block, next(attention_modules(block), None)) for one in lists for block in one]
        self.blocks: Sequence[Any] = [block for block, attention in found if attention is not None]
        self._attention = [attention for _, attention in found if attention is not None]
        self.feature_block = hidden_state_block(layer, len(self.blocks))
        self.tokens, self.members, self.classes = tokens, members, classes
        self.inside: Mapping[Place, str] = dict(inside)  # which can be copied with a model
        self.varies, self.merged = members is None, merged
        self.reorders = hasattr(vision, "window_size")  # rows are in the order of the windows inside
        if members is not None:
            self.side = math.isqrt(tokens)
        self.offers = PATCHES | ({Need.CLASS_FEATURE} if classes else frozenset())
        # blocks that see a whole picture; others of Qwen2.5-VL look at windows
        self.full: Sequence[int] = getattr(vision, "fullatt_block_indexes", range(len(self.blocks)))

    def encode(self, pixels: Tensor) -> Tensor:
        """Never asked for: the model's own encoder runs, and is read meanwhile."""
        raise NotImplementedError

    def project(self, features: Tensor) -> Tensor:
        """Not offered: the projector takes several patches at a time."""
        raise NotImplementedError

    def attention(self, block: int) -> Any:
        """The attention module of a block."""
        return self._attention[block]

    def scale(self, block: int) -> float:
        """Scale of the attention logits of a block."""
        attention = self.attention(block)
        return attention.scaling if hasattr(attention, "scaling") else attention.scale

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Taps of the output of a block: a row for each patch."""
        block = self.blocks[features]
        if not self.varies:
            return feature_taps(block, needs, self.classes)
        rows = Tap(block, lambda output: {"features": states_of(output).flatten(0, -2)})
        return [rows] if Need.FEATURES in needs else []

    def attending(self, method: Method) -> dict[str, Any]:
        """Attention modules whose kernel calls a method reads, by what stands in front of the names of their parts.

        Raises:
            OptionError: for a block that looks at windows.
        """
        blocks = attention_blocks(self, method)
        for block in blocks.values():
            if block not in self.full:
                raise OptionError(
                    f"vision_layer={block}: this block attends within windows, so its patches cannot be compared. "
                    f"Take one of {', '.join(map(str, self.full))}"
                )
        return {front: self.attention(block) for front, block in blocks.items()}

    def heads(self, calls: list[KernelCall]) -> tuple[Tensor, Tensor]:
        """Queries and keys of the kernel calls of a module: of tiles [T, H, n, d], or of all patches in a row
        [rows, H, d].
        """
        parts = ([call.query for call in calls], [call.key for call in calls])
        query, key = (torch.cat(part, 2) if len(part) > 1 else part[0] for part in parts)
        return (query[0].transpose(0, 1), key[0].transpose(0, 1)) if self.varies else (query, key)


def cells(height: int, width: int, stride: int) -> Tensor:
    """The patches of each square of a grid of patches: [N, stride * stride], without what does not fill a square."""
    corner = torch.arange(height // stride)[:, None] * stride * width + torch.arange(width // stride) * stride
    inside = torch.arange(stride)[:, None] * width + torch.arange(stride)
    return corner.flatten()[:, None] + inside.flatten()
