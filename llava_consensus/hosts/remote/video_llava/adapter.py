"""The official Video-LLaVA as an attachment sees it: official LLaVA with two towers, whose clips have the class token
of every frame in the prompt. What becomes of these is the host's option `class_tokens`: `keep` leaves them, beside the
budget, `drop` takes them out where a clip is reduced, and with `candidates` they are tokens like patches.

Attribute paths were checked against PKU-YuanGroup/Video-LLaVA at 984e65b, `videollava/model`: `llava_arch.py`,
`language_model/llava_llama.py`, and in `multimodal_encoder/languagebind` `__init__.py` and `video/modeling_video.py`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Tiles
from llava_consensus.hosts.hf.rows import DROPPED, STRUCTURAL, without_dropped
from llava_consensus.hosts.llava.adapter import Projected
from llava_consensus.hosts.llava.prepare import View
from llava_consensus.hosts.llava.structure import Arguments, Official, Structure, read_structure
from llava_consensus.hosts.remote.older_llava import OlderLlava
from llava_consensus.hosts.remote.video_llava.prepare import prepare, shows_clips
from llava_consensus.hosts.tower.clip import ClipBlocks, hidden_state_block
from llava_consensus.hosts.tower.clip_text import ClipText
from llava_consensus.hosts.tower.two import TwoTowers
from llava_consensus.reduction.method import Method


class BindTower(Projected, ClipBlocks):
    """A tower of LanguageBind, with the projector behind it. Frames see each other in its attention over time; what
    methods read is the attention within a frame.

    Args:
        model: the whole model.
        holder: what the model calls its tower.
        module: the vision model in it.
    """

    def __init__(self, model: Any, holder: Any, module: Any) -> None:
        super().__init__(module, hidden_state_block(holder.select_layer, len(module.encoder.layers)))
        self._model = model
        self.tokens: int = holder.num_patches
        self.side = math.isqrt(self.tokens)

    def encode(self, pixels: Tensor) -> Tensor:
        """Pictures [T, 3, h, w] or the frames of clips [T, 1, 3, h, w] through tower and projector: [T, N, D]."""
        if pixels.ndim == 4:
            return super().encode(pixels)
        frames = self._model.get_video_tower().config.num_frames
        clips = pixels[:, 0].unflatten(0, (-1, frames)).transpose(1, 2)  # [B, 3, frames, h, w]
        encoded: Tensor = self._model.encode_videos(clips)
        return encoded.flatten(0, 1)


class VideoLlava(OlderLlava):
    """A view of the `LlavaLlamaForCausalLM` of `videollava`.

    Args:
        module: the model.
        class_tokens: what becomes of the class tokens of frames.
    """

    called = "Video-LLaVA"

    def __init__(self, module: Any, class_tokens: str = "keep") -> None:
        super().__init__(module)
        self.class_tokens = class_tokens

    def of(self, module: Any) -> "VideoLlava":
        """The same view of a replica."""
        return VideoLlava(module, self.class_tokens)

    @property
    def tower(self) -> Any:
        """Both towers."""
        model = self.module
        video, image = model.get_video_tower(), model.get_image_tower()
        clips, pictures = BindTower(model, video, video.video_tower), BindTower(model, image, image.image_tower)
        return TwoTowers(clips, pictures, self.class_tokens == "candidates")

    def structure(self, attachment: Attachment, official: Official, arguments: Arguments, config: Any) -> Structure:
        """What every row will be: a picture has its patches, a frame its class token in front of them."""
        clips = shows_clips(arguments.images)
        stand_in = View(self.module, get_vision_tower=self.module.get_video_tower)
        structure = read_structure(official, stand_in, arguments, config, self.tower.tokens + clips)
        if not clips:
            return structure
        kinds = structure.kinds._replace(videos=frozenset(range(len(arguments.images))))
        if self.class_tokens == "candidates":
            return structure._replace(kinds=kinds)
        of_class = DROPPED if self.class_tokens == "drop" else STRUCTURAL
        is_class, is_patch = kinds.token == 0, kinds.token > 0
        token = torch.where(is_patch, kinds.token - 1, kinds.token.masked_fill(is_class, of_class))
        kinds = kinds._replace(token=token, tile=kinds.tile.masked_fill(~is_patch, -1))
        kinds = without_dropped(kinds) if attachment.layout(kinds).reduced() else kinds
        return structure._replace(kinds=kinds)

    def seen(self, tiles: list[Tiles]) -> list[Tiles]:
        """What a tower gave; where the class tokens of frames are tokens, these form no grid."""
        if self.class_tokens != "candidates":
            return tiles
        patches = self.tower.tokens
        return [
            one if one.projected.shape[1] == patches else one._replace(side=0, class_is_token=True) for one in tiles
        ]

    def clip_text(self) -> ClipText:
        """LanguageBind's text tower is no side of a CLIP model in transformers."""
        raise OptionError(
            "this method compares patches with the question by CLIP's text tower, which LanguageBind's towers come "
            "without here: take another method (llava-consensus list)"
        )

    def prepare(self, attachment: Attachment, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Takes the place of the function that assembles prompts."""
        return prepare(attachment, *args, **kwargs)

    def check(self, method: Method) -> None:
        """Raises OptionError for what cannot be attached, with the remedy."""
        video, image = self.module.get_video_tower(), self.module.get_image_tower()
        if video is None or image is None:
            raise OptionError("Video-LLaVA is adapted with both its towers, and this model has one of them alone")
        if not (video.is_loaded and image.is_loaded):
            raise OptionError("a vision tower has no weights yet: call its load_model() first")
        if image.select_feature != "patch":
            raise OptionError(
                f"mm_vision_select_feature={image.select_feature!r} must be 'patch': "
                "the class token of a picture is no candidate"
            )
        self.check_method(method)
