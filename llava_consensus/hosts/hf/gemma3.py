"""`Gemma3ForConditionalGeneration`: a SigLIP tower, squares of patches averaged to 256 tokens, and pictures whose
tokens attend in both directions.

The model makes its mask of the token types, which are shortened with the rows: what is left of a picture still is one
block, after a cut between decoder layers too. What methods read of a layer's attention they read without its sliding
window, which is wider than most prompts.
"""

from types import MappingProxyType

from torch import Tensor

from llava_consensus.hosts.hf.internvl import Shuffled


class Gemma3(Shuffled):
    """Adapter for Gemma 3. Every run of placeholders is a picture, or a crop of one."""

    around = (1, 1)
    decoding = MappingProxyType({"sees_ahead": True})
    tensors = frozenset({"image"})
    most_tiles = 1

    @property
    def stride(self) -> int:
        """Patches in a row of the square that the projector averages."""
        config = self.module.config
        return int(config.vision_config.image_size // self.patch // round(config.mm_tokens_per_image**0.5))

    def joined(self, squares: Tensor) -> Tensor:
        """The parts of the projector, whose own forward takes whole tiles alone."""
        projector = self.inner.multi_modal_projector
        normed: Tensor = projector.mm_soft_emb_norm(squares.mean(1))
        return (normed @ projector.mm_input_projection_weight).type_as(squares)

    def row_inputs(self, ids: Tensor, real: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mask of the rows that are tokens of pictures: they attend in both directions."""
        return {"token_type_ids": (ids == self.placeholder("image")).long()}
