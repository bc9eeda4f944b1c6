"""Qwen3.5: derived as any family without a file, and a tower that can see some cells of a picture, as Qwen3-VL's."""

from typing import Any

from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.derived.model import DerivedModel
from llava_consensus.hosts.derived.record import Fields
from llava_consensus.hosts.hf.cells import ADAPTED, through_tower
from llava_consensus.hosts.hf.rows import Features, PictureRows
from llava_consensus.hosts.hf.towers import PATCHES
from llava_consensus.reduction.method import Place


class Qwen35(DerivedModel):
    """Adapter for Qwen3.5."""

    offer = Offer(PATCHES, inside=ADAPTED)

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """Encodes as every derived family does; for methods that leave cells out those that stay."""
        if attachment.method.place is not Place.CELLS:
            return super().encode(attachment, modality, inputs, pictures)
        seen = through_tower(self.inner.visual, attachment, modality, inputs)
        kept = Fields(seen.output, len(seen.output.pooler_output))
        fields = kept.taken(seen.stand_in, [len(one.token) for one in pictures])
        tokens, *planes = fields.flat()
        return Features(seen.tiles(tokens), tokens, tuple(planes), fields)
