"""Official LLaVA (the `llava` package, wheel and git HEAD) as an attachment sees it.

The parts a method may read or act on: vision tower and projector, language model, and the two functions by which the
model is entered (`prepare.py`).
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Tiles
from llava_consensus.hosts.decoders import LlamaDecoder
from llava_consensus.hosts.layouts import STOCK, fixed_grid
from llava_consensus.hosts.llava.checks import check_layout
from llava_consensus.hosts.llava.prepare import PREPARE, changed, generate, prepare
from llava_consensus.hosts.llava.shape import most_tiles
from llava_consensus.hosts.llava.structure import Arguments, Official, Structure, read_structure
from llava_consensus.hosts.towers import ClipBlocks, hidden_state_block
from llava_consensus.reduction.method import Method, Place

if TYPE_CHECKING:
    from llava_consensus.hosts.clip_text import ClipText


class Projected:
    """What is behind the blocks of any LLaVA tower: the model's own `encode_images` and projector."""

    _model: Any

    def encode(self, pixels: Tensor) -> Tensor:
        """Tiles [T, 3, h, w] through tower and projector: [T, N, D]."""
        projected: Tensor = self._model.encode_images(pixels)
        return projected

    def project(self, features: Tensor) -> Tensor:
        """The projector: [..., D_v] -> [..., D]."""
        projected: Tensor = self._model.get_model().mm_projector(features)
        return projected


class LlavaTower(Projected, ClipBlocks):
    """The CLIP tower of a LLaVA model, with the projector behind it."""

    def __init__(self, model: Any) -> None:
        tower = model.get_vision_tower()
        blocks = len(getattr(tower.vision_tower, "vision_model", tower.vision_tower).encoder.layers)
        super().__init__(tower.vision_tower, hidden_state_block(tower.select_layer, blocks))
        self._model = model
        self.tokens: int = tower.num_patches
        self.side: int = tower.num_patches_per_side


class LlavaModel:
    """A view of a `LlavaLlamaForCausalLM` or `LlavaMistralForCausalLM`, see `attachment.Model`.

    Args:
        module: the model.
        layout: of the tiles of a picture, see `hosts.layouts`.
    """

    def __init__(self, module: Any, layout: str = STOCK) -> None:
        self.module: Any = module
        self.layout = layout

    def of(self, module: Any) -> "LlavaModel":
        """The same view of a replica."""
        return type(self)(module, self.layout)

    @property
    def config(self) -> Any:
        """The configuration, or a copy of it with the entries that make the layout."""
        if self.layout == STOCK:
            return self.module.config
        grid = fixed_grid(self.module.get_vision_tower().config.image_size)
        return changed(self.module.config, {"image_grid_pinpoints": grid, "mm_patch_merge_type": "spatial"})

    @property
    def tower(self) -> LlavaTower | None:
        """The vision side; None where a model has none."""
        return None if self.module.get_vision_tower() is None else LlavaTower(self.module)

    @property
    def decoder(self) -> LlamaDecoder:
        """The language side."""
        return LlamaDecoder(self.module.get_model())

    @property
    def most_tiles(self) -> int:
        """The most tiles a picture can have."""
        tower = self.module.get_vision_tower()
        return 1 if tower is None else most_tiles(self.config, tower.config.image_size)

    def clip_text(self) -> "ClipText":
        """The text side of the CLIP model that the vision tower is of."""
        from llava_consensus.hosts.clip_text import load_clip_text

        return load_clip_text(self.module.get_vision_tower().vision_tower_name, self.module.device)

    def structure(self, attachment: Attachment, official: Official, arguments: Arguments, config: Any) -> Structure:
        """What every row of the sequences that the official function assembles will be."""
        return read_structure(official, self.module, arguments, config, self.module.get_vision_tower().num_patches)

    def seen(self, tiles: list[Tiles]) -> list[Tiles]:
        """What the tower gave, as methods see it."""
        return tiles

    def entrances(self, attachment: Attachment) -> dict[str, Callable[..., Any]]:
        """The official function, and `generate`, which makes a call of its own."""
        entrance = partial(generate, attachment)
        return {PREPARE: partial(prepare, attachment), "generate": wraps(type(self.module).generate)(entrance)}

    def check(self, method: Method) -> None:
        """Raises OptionError for what cannot be attached, with the remedy."""
        model = self.module
        if type(model).__name__ == "LlavaMptForCausalLM":
            raise OptionError(
                "LLaVA's MPT class is broken upstream (it calls a five-argument form that is gone): "
                "use a Llama or Mistral checkpoint"
            )
        check_layout(self.layout, getattr(model.config, "image_aspect_ratio", None))
        tower = model.get_vision_tower()
        if tower is not None and not tower.is_loaded:
            raise OptionError("the vision tower has no weights yet: call model.get_vision_tower().load_model() first")
        if tower is not None and getattr(tower, "select_feature", "patch") != "patch":
            raise OptionError(
                f"mm_vision_select_feature={tower.select_feature!r} must be 'patch': "
                "a class token among the patches is no candidate"
            )
        keeps = method.positions != "renumber" and method.place is not Place.DECODER
        if keeps and int(transformers.__version__.split(".")[0]) < 5:
            raise OptionError(
                f"positions={method.positions} needs transformers >= 5: "
                f"generate() of {transformers.__version__} does not advance given positions"
            )
