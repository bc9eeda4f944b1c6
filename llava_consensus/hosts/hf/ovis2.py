"""`Ovis2ForConditionalGeneration`: tiles under an AIMv2 tower without a class token, squares of patches that make one
token, and a table of visual words that a token is a mixture of. The rows around the tiles of a picture, which are words
of the prompt here and stay, have embeddings of that table too.
"""

from typing import Any

import torch
from torch import Tensor

from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.hf.aya_vision import spaced
from llava_consensus.hosts.hf.internvl import InternVL
from llava_consensus.hosts.hf.model import PATCHES, ShuffledTower, squares
from llava_consensus.hosts.hf.seam import Rows


class Ovis2(InternVL):
    """Tiles with one row between them, the whole view first."""

    offer = Offer(PATCHES)
    chunks = False  # in one without tokens of a picture, rows around tiles have the embeddings of words

    @property
    def tower(self) -> ShuffledTower:
        """The blocks, and the squares of patches that the head takes together."""
        config = self.module.config.vision_config
        members = squares(config.image_size // config.patch_size, config.hidden_stride)
        blocks = list(self.inner.vision_tower.transformer.encoder.layers)
        return ShuffledTower(blocks, members, 0, "attention", ("q_proj", "k_proj"))

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[Rows]:
        """A picture is the tiles that have one row between them."""
        return self.matching(inputs, spaced(ids, self.placeholder(modality), self.tower.tokens))

    def words(self, ids: Tensor) -> Tensor:
        """With those of the rows around tiles."""
        embeds = super().words(ids)
        for indicator, row in zip(self.module.config.visual_indicator_token_ids, self._indicators(), strict=True):
            embeds = torch.where((ids == indicator)[..., None], row.to(embeds), embeds)
        return embeds

    def output(self, tokens: Any, planes: list[list[Tensor]]) -> Any:
        """With the embeddings of the rows around tiles, which the model puts in itself."""
        from transformers.models.ovis2.modeling_ovis2 import BaseModelOutputWithVisualIndicatorFeatures

        return BaseModelOutputWithVisualIndicatorFeatures(
            pooler_output=tokens, visual_indicator_features=self._indicators()
        )

    def _indicators(self) -> Tensor:
        """The last rows of the table, in the order of their ids: [n, D]."""
        table: Tensor = self.inner.visual_embeddings_table.weight
        return table[-self.module.config.vision_config.num_visual_indicator_tokens :]
