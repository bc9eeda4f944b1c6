"""`Ovis2ForConditionalGeneration`: tiles under an AIMv2 tower without a class token, squares of patches that make one
token, and a table of visual words that a token is a mixture of. The rows around the tiles of a picture, which are words
of the prompt here and stay, have embeddings of that table too.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from llava_consensus.errors import OptionError
from llava_consensus.hosts.hf.internvl import Shuffled
from llava_consensus.hosts.hf.rows import spaced
from llava_consensus.hosts.tower_hooks import positions
from llava_consensus.reduction.method import Method, Place


class Ovis2(Shuffled):
    """Tiles with one row between them, the whole view first."""

    around = (1, 1)
    placed = staticmethod(spaced)
    tensors = frozenset({"image"})
    merge = "vision_config.hidden_stride"
    chunks = False  # in one without tokens of a picture, rows around tiles have the embeddings of words

    def check(self, method: Method) -> None:
        """Raises OptionError for smaller pictures where tokens are drawn of the table."""
        super().check(method)
        drawn = getattr(self.module.config.vision_config, "tokenize_function", "softmax")
        if method.place is Place.PICTURE and drawn != "softmax":
            raise OptionError(
                f"tokenize_function={drawn!r}: {type(method).__name__} is adapted to tokens that are mixtures of "
                "visual words (softmax). Take a method that acts after the tower"
            )

    def patches(self, pixels: Tensor) -> Tensor:
        """Runs the parts of the tower, whose own embeddings take whole tiles alone."""
        transformer = self.vision.transformer
        front, weight = transformer.embeddings, transformer.embeddings.position_embedding.weight
        rows, columns = (size // self.patch for size in pixels.shape[-2:])
        patches = front.rms_norm(front.patch_embedding(pixels.to(weight.dtype)).flatten(2).transpose(1, 2))
        places = weight if rows * columns == len(weight) else positions(weight, rows, columns, classes=0)
        states: Tensor = transformer.encoder(inputs_embeds=patches + places).last_hidden_state
        return transformer.rms_norm(states)

    def joined(self, squares: Tensor) -> Tensor:
        """The head of the tower, and the table."""
        tower, inner = self.vision, self.inner
        words = tower.head_norm(tower.head_linear(squares.flatten(1))).softmax(-1)
        return inner.visual_embeddings_table(pad(words, (0, tower.num_visual_indicator_tokens)))

    def words(self, ids: Tensor) -> Tensor:
        """Embeddings of the ids, with those of the rows around tiles."""
        embeds = super().words(ids)
        for indicator, row in zip(self.module.config.visual_indicator_token_ids, self._indicators(), strict=True):
            embeds = torch.where((ids == indicator)[..., None], row.to(embeds), embeds)
        return embeds

    def output(self, tokens: Any, planes: list[list[Tensor]], like: Any) -> Any:
        """Encoder output with the embeddings of the rows around tiles, which the model puts in itself."""
        from transformers.models.ovis2.modeling_ovis2 import BaseModelOutputWithVisualIndicatorFeatures

        return BaseModelOutputWithVisualIndicatorFeatures(
            pooler_output=tokens, visual_indicator_features=self._indicators()
        )

    def _indicators(self) -> Tensor:
        """The last rows of the table, in the order of their ids: [n, D]."""
        table: Tensor = self.inner.visual_embeddings_table.weight
        return table[-self.module.config.vision_config.num_visual_indicator_tokens :]
