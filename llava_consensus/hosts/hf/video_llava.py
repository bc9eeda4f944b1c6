"""`VideoLlavaForConditionalGeneration`: pictures of one tile, and clips of eight frames, each with its class token in
the prompt. The class tokens of frames are structural: they stay, and are no part of the budget.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from llava_consensus.hosts.base import Tap
from llava_consensus.hosts.hf.llava import Llava
from llava_consensus.hosts.hf.model import Features
from llava_consensus.hosts.hf.rows import Rows, whole_tiles
from llava_consensus.hosts.hf.towers import LlavaTower
from llava_consensus.reduction.tokens import Need

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment


class TwoTowers:
    """A tower for pictures and a tower for videos, of one shape; methods inside a tower are not adapted to two."""

    members: Tensor | None = None

    def __init__(self, inner: Any) -> None:
        self._towers = [LlavaTower(inner, module) for module in (inner.video_tower, inner.image_tower)]
        tower = self._towers[0]
        self.tokens, self.side, self.classes, self.offers = tower.tokens, tower.side, tower.classes, tower.offers
        self.blocks, self.feature_block = tower.blocks, tower.feature_block
        self.scale, self.project, self.encode = tower.scale, tower.project, tower.encode

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Of both towers, one of which runs at a time."""
        return [tap for tower in self._towers for tap in tower.taps(needs, features, attention)]


class VideoLlava(Llava):
    """Pictures and clips."""

    tensors = frozenset({"image", "video"})

    @property
    def tower(self) -> Any:
        """Both towers."""
        return TwoTowers(self.inner)

    def encoder_inputs(self, inputs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """As of any model; pixels of pictures given as `pixel_values_images` are there as `pixel_values` too."""
        by_modality = super().encoder_inputs(inputs)
        if "pixel_values_images" in by_modality.get("image", {}):
            image_inputs = by_modality["image"]
            image_inputs.setdefault("pixel_values", image_inputs["pixel_values_images"])
        return by_modality

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[Rows]:
        """A picture has its patches, a frame its class token in front of them."""
        patches = self.tower.tokens
        if modality == "image":
            return super().pictures(modality, inputs, ids)
        count, frames = inputs["pixel_values_videos"].shape[:2]
        rows = whole_tiles(frames, patches + 1)
        return [Rows(rows.tile, rows.token - 1, frames)] * count

    def pixels(self, modality: str, inputs: dict[str, Any], pictures: list[Rows]) -> Tensor:
        """Pictures, or the frames of all clips."""
        pixels: Tensor = inputs["pixel_values"] if modality == "image" else inputs["pixel_values_videos"].flatten(0, 1)
        return pixels

    def encode(self, attachment: "Attachment", modality: str, inputs: dict[str, Any], pictures: list[Rows]) -> Features:
        """The model's own encoder, which takes the tower of the modality."""
        inputs = {name: value for name, value in inputs.items() if name != "pixel_values_images"}
        return super().encode(attachment, modality, inputs, pictures)
