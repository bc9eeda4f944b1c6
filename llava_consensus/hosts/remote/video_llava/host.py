"""The official Video-LLaVA as the harness uses it: pictures and clips in, answers out, prompt by prompt."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor

from llava_consensus.hosts.base import Clip, Encoded, Prompt
from llava_consensus.hosts.llava.prepare import View
from llava_consensus.hosts.llava.shape import read_shape
from llava_consensus.hosts.remote.older_llava import OlderLlavaHost
from llava_consensus.hosts.remote.video_llava.adapter import VideoLlava
from llava_consensus.hosts.remote.video_llava.prepare import tiles_first
from llava_consensus.reduction.shape import Shape

FLIP = "Flip"  # in the name of the step of the package's preprocessing that mirrors half of the clips at random


class VideoLlavaHost(OlderLlavaHost):
    """A Video-LLaVA with its tokenizer.

    Args:
        model, tokenizer: as the package's loader returns them.
        processors: of pictures (`image`) and of clips (`video`), as it returns them.
        options: of the host, all of them.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        processors: Mapping[str, Any] = MappingProxyType({}),
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(model, tokenizer, processors.get("image"), options)
        self.processors = processors
        self.view = VideoLlava(model, options.get("class_tokens", "keep"))

    def shape(self, text: int = 0) -> Shape:
        """Sizes of the model, with a prompt of one picture and `text` other rows."""
        holder = self.model.get_image_tower()
        tower = View(holder, vision_tower=holder.image_tower, vision_tower_name=holder.image_tower_name)
        return read_shape(View(self.model, get_vision_tower=lambda: tower), text)

    @torch.inference_mode()
    def encode(self, pictures: list[Image.Image | Clip]) -> list[Encoded]:  # type: ignore[override]
        """Pictures and clips through preprocessing, their tower and the projector, one by one."""
        encoded = []
        with self.attachment() as attachment, attachment.call():
            for picture in pictures:
                pixels = tiles_first(self._pixels(picture))
                (tiles,) = self.view.seen(attachment.encode(pixels, [len(pixels)]))
                clip = isinstance(picture, Clip)
                first = picture.frames[0] if isinstance(picture, Clip) else picture
                encoded.append(Encoded(tiles, clip, first.size, attachment.method, attachment.budget))
        return encoded

    def own_inputs(self, prompt: Prompt, image: Image.Image, folder: Path) -> dict[str, Any]:
        """What the model's own `generate` is given for one prompt about a picture."""
        ids = self.prompt_ids(prompt)[None].to(self.model.device)
        return {"inputs": ids, "attention_mask": torch.ones_like(ids), "images": [self._pixels(image)]}

    def question_ids(self, prompt: Prompt, pictures: list[Any]) -> Tensor:
        """Token ids [L] of a prompt with a placeholder for each picture and each frame."""
        return self.prompt_ids(prompt, sum(len(picture.tiles.projected) for picture in pictures))

    def _pixels(self, picture: Image.Image | Clip) -> Tensor:
        """[3, h, w] of a picture, [3, frames, h, w] of a clip, by the package's own preprocessing."""
        from llava.mm_utils import process_images

        if isinstance(picture, Clip):
            pixels = self._film(picture)
        else:
            pixels = process_images([picture], self.image_processor, self.model.config)[0]
        return pixels.to(self.model.device, self.model.dtype)

    def _film(self, clip: Clip) -> Tensor:
        """A clip [3, frames, h, w] by the package's own steps but for its random flip."""
        frames: Any = torch.from_numpy(numpy.stack([numpy.asarray(frame) for frame in clip.frames]))
        frames = frames.permute(3, 0, 1, 2)
        for step in self.processors["video"].transform.transforms:
            if FLIP not in type(step).__name__:
                frames = step(frames)
        film: Tensor = frames
        return film

    def blank(self, encoded: list[Encoded]) -> list[Tensor]:
        """Pictures and clips without pixels, of the shape the model's own function looks at."""
        device, dtype = self.model.device, self.model.dtype
        shapes = [(3, len(one.tiles.projected), 0, 0) if one.tiled else (3, 0, 0) for one in encoded]
        return [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]


def wrap(model: Any, options: Mapping[str, str]) -> VideoLlavaHost:
    """The host of a model that is loaded already, with all options of the host."""
    return VideoLlavaHost(model, options=options)
