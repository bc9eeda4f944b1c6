"""`VideoLlavaForConditionalGeneration`: pictures of one tile, and clips of eight frames, each with its class token in
the prompt. The host option `class_tokens` treats those of frames: `keep` leaves them, beside the budget, `drop` takes
them out where a clip is reduced, and with `candidates` they are tokens like patches.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.hf.llava import Llava
from llava_consensus.hosts.hf.rows import DROPPED, STRUCTURAL, Features, PictureRows, whole_tiles
from llava_consensus.hosts.hf.towers import LlavaTower
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.towers import TwoTowers
from llava_consensus.reduction.method import Method, Place


class VideoLlava(Llava):
    """Pictures and clips."""

    offer = Offer(LlavaTower.offers, inside=TwoTowers.inside)
    tensors = frozenset({"image", "video"})

    @cached_property
    def tower(self) -> Any:
        """Both towers, one of clips and one of pictures."""
        clips, pictures = (LlavaTower(self.inner, tower) for tower in (self.inner.video_tower, self.inner.image_tower))
        clips.projects_class = True
        return TwoTowers(clips, pictures, self.class_tokens == "candidates")

    @property
    def class_tokens(self) -> str:
        """Treatment of the class tokens of frames: `keep`, `drop` or `candidates`."""
        return self.options["class_tokens"]

    def check(self, method: Method) -> None:
        """Raises OptionError for methods that would need rows taken out before they see them."""
        super().check(method)
        if method.place is Place.DECODER and self.class_tokens == "drop":
            raise OptionError(
                f"class_tokens=drop: {type(method).__name__} cuts between decoder layers, which the class tokens of "
                "frames have entered by then. Take class_tokens=keep or class_tokens=candidates"
            )
        if method.acts_inside and self.class_tokens == "candidates":
            raise OptionError(
                f"class_tokens=candidates: {type(method).__name__} acts before the projector, on patches, and class "
                "tokens are none. Take class_tokens=keep or class_tokens=drop"
            )

    def encoder_inputs(self, inputs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Encoder inputs as of any model; `pixel_values_images` of pictures are added as `pixel_values`."""
        by_modality = super().encoder_inputs(inputs)
        if "pixel_values_images" in by_modality.get("image", {}):
            image_inputs = by_modality["image"]
            image_inputs.setdefault("pixel_values", image_inputs["pixel_values_images"])
        return by_modality

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """A picture has its patches, a frame its class token in front of them."""
        patches = self.tower.tokens
        if modality == "image":
            return super().pictures(modality, inputs, ids)
        count, frames = inputs["pixel_values_videos"].shape[:2]
        rows = whole_tiles(frames, patches + 1)
        if self.class_tokens == "candidates":
            return [rows] * count
        token = rows.token - 1
        of_class = DROPPED if self.class_tokens == "drop" else STRUCTURAL
        return [PictureRows(rows.tile, token.where(token >= 0, of_class), frames)] * count

    def pixels(self, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]) -> Tensor:
        """Pictures, or the frames of all clips."""
        return inputs["pixel_values"] if modality == "image" else inputs["pixel_values_videos"].flatten(0, 1)

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """The model's own encoder, which takes the tower of the modality."""
        inputs = {name: value for name, value in inputs.items() if name != "pixel_values_images"}
        if attachment.method.acts_inside:
            vision, counts = self.tower, [rows.tiles for rows in pictures]
            tower = vision.towers[modality == "image"]
            tiles = attachment.encode(self.pixels(modality, inputs, pictures), counts, tower)
            tokens = torch.cat([one.projected.flatten(0, 1) for one in tiles])
            return Features([one._replace(projected=one.projected[:, -vision.tokens :]) for one in tiles], tokens)
        features = super().encode(attachment, modality, inputs, pictures)
        if modality == "image" or self.class_tokens != "candidates":
            return features
        return features._replace(tiles=[clip._replace(side=0, class_is_token=True) for clip in features.tiles])
