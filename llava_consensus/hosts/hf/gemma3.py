"""`Gemma3ForConditionalGeneration`: a SigLIP tower, squares of patches averaged to 256 tokens, and pictures whose
tokens attend in both directions.

The model makes its mask of the token types, which are shortened with the rows: what is left of a picture still is one
block. Masks for sequences that are cut between decoder layers are not adapted. SCAP reads layer 0 without its sliding
window, which is wider than most prompts.
"""

from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import CutDecoder, Offer
from llava_consensus.hosts.decoders import LlamaDecoder
from llava_consensus.hosts.hf.internvl import Shuffled
from llava_consensus.hosts.hf.model import PATCHES, ShuffledTower, squares
from llava_consensus.reduction.method import Method, Place


class GemmaDecoder(LlamaDecoder):
    """Layers of two kinds, with a rotation each; layer 0's is the one that is asked for."""

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] of layer 0."""
        cos, sin = self.module.rotary_emb(hidden, positions, self.layers[0].self_attn.layer_type)
        return cos, sin


class Gemma3(Shuffled):
    """Every run of placeholders is a picture, or a crop of one."""

    offer = Offer(PATCHES, inside=ShuffledTower.inside)
    tensors = frozenset({"image"})

    @property
    def tower(self) -> ShuffledTower:
        """The blocks, and the squares of patches that the projector averages."""
        config, module = self.module.config, self.inner.vision_tower
        side = config.vision_config.image_size // config.vision_config.patch_size
        members = squares(side, side // round(config.mm_tokens_per_image**0.5))
        blocks = list(getattr(module, "vision_model", module).encoder.layers)
        return ShuffledTower(blocks, members, 0, "self_attn", ("q_proj", "k_proj"))

    def patches(self, pixels: Tensor) -> Tensor:
        """With positions interpolated."""
        states: Tensor = self.inner.vision_tower(pixels, interpolate_pos_encoding=True).last_hidden_state
        return states

    def joined(self, squares: Tensor) -> Tensor:
        """The parts of the projector, whose own forward takes whole tiles alone."""
        projector = self.inner.multi_modal_projector
        normed: Tensor = projector.mm_soft_emb_norm(squares.mean(1))
        return (normed @ projector.mm_input_projection_weight).type_as(squares)

    def row_inputs(self, ids: Tensor, real: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Which rows are tokens of pictures: they attend in both directions."""
        return {"token_type_ids": (ids == self.placeholder("image")).long()}

    @property
    def decoder(self) -> CutDecoder:
        """The language side."""
        return GemmaDecoder(self.inner.language_model)

    def check(self, method: Method) -> None:
        """Raises OptionError for methods that would need masks of their own."""
        super().check(method)
        if method.place is Place.DECODER:
            raise OptionError(
                f"{type(method).__name__} cuts between decoder layers, and the pictures of Gemma 3 attend in both "
                "directions there, which is not adapted: take a method that acts after the tower"
            )
