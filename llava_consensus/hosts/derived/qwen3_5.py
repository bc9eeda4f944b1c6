"""Qwen3.5: derived as any family without a file, and a tower that can see some cells of a picture, as Qwen3-VL's."""

from typing import Any

from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.derived.model import DerivedModel, DerivedTower
from llava_consensus.hosts.derived.record import Fields, Record
from llava_consensus.hosts.hf.cells import ADAPTED, through_tower
from llava_consensus.hosts.hf.rows import Features, PictureRows
from llava_consensus.hosts.hf.towers import PATCHES
from llava_consensus.reduction.method import Place


class Qwen35(DerivedModel):
    """Adapter for Qwen3.5."""

    offer = Offer(PATCHES, inside=ADAPTED)

    def _tower_of(self, record: Record) -> DerivedTower:
        tower = super()._tower_of(record)
        tower.inside = ADAPTED
        return tower

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """Encodes as every derived family does; for methods that leave cells out those that stay."""
        if attachment.method.place is not Place.CELLS:
            return super().encode(attachment, modality, inputs, pictures)
        seen = through_tower(self.inner.visual, attachment, modality, inputs)
        kept = Fields(seen.output, len(seen.output.pooler_output))
        counts = [len(one.token) for one in pictures]
        parts = [list(part[seen.stand_in].split(counts)) for part in kept.flat()]
        fields = Fields(kept.with_parts(parts, split=True), len(seen.stand_in))
        tokens, *planes = fields.flat()
        return Features(seen.tiles(tokens), tokens, tuple(planes), fields)
