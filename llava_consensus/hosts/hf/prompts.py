"""Prompts and pixels by a model's own processor.

A processor puts a text of its own where the placeholder of a picture stands: more placeholders, in some models with
tags of tiles, line breaks or times of frames between them. It makes that text once, together with the pixels, and every
prompt about the picture then holds it.
"""

from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from PIL.Image import new as new_image
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Clip


class Processed(NamedTuple):
    """What a processor makes of one picture or clip."""

    modality: str  # image | video
    text: str  # in place of its placeholder
    ids: Tensor  # [1, n] of that text alone
    inputs: dict[str, Any]  # pixels, and what the model needs to know of them


class Prompts:
    """The prompts of a model's chat template.

    Args:
        processor: of the model.
    """

    def __init__(self, processor: Any) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer

    def placeholder(self, modality: str) -> str:
        """What the chat template puts where a picture or clip stands."""
        token: str = getattr(self.processor, f"{modality}_token")
        return token

    def process(self, picture: Image | Clip, image_options: dict[str, Any] | None = None) -> Processed:
        """One picture or clip alone; `image_options` are for the image processor."""
        modality = "video" if isinstance(picture, Clip) else "image"
        arguments = _of_clip(picture) if isinstance(picture, Clip) else {"images": [picture], **(image_options or {})}
        options = {"return_tensors": "pt", "return_text_replacement_offsets": True}
        inputs = dict(self.processor(text=[self.placeholder(modality)], **arguments, **options))
        ((replaced,),) = inputs.pop("text_replacement_offsets")
        return Processed(modality, replaced["replacement"], inputs.pop("input_ids"), inputs)

    def text(self, question: str, modalities: list[str]) -> str:
        """The prompt of a question about pictures and clips, with one placeholder for each.

        Raises:
            OptionError: for a model without a chat template.
        """
        content = [*({"type": modality} for modality in modalities), {"type": "text", "text": question}]
        try:
            prompt: str = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        except ValueError as error:
            raise OptionError(
                f"the model has no chat template that takes {', '.join(modalities) or 'text'} ({error}): take a "
                "checkpoint that was trained to answer questions, with its chat_template.jinja"
            ) from error
        return prompt

    def ids(self, text: str, pictures: list[tuple[str, str]]) -> Tensor:
        """Ids [L] of a prompt in which each placeholder is replaced.

        Args:
            text: of the chat template.
            pictures: modality and text of each, in order.
        """
        parts = {
            f"{modality}s_replacements": [part for kind, part in pictures if kind == modality]
            for modality in ("image", "video")
        }
        texts, _ = self.processor.get_text_with_replacements([text], **parts)
        ids: Tensor = self.tokenizer(texts[0], return_tensors="pt", **self._special(text)).input_ids[0]
        return ids

    def check(self, model: str) -> None:
        """Tries a picture of one colour.

        Raises:
            OptionError: where the processor makes another prompt of it.
        """
        image, text = new_image("RGB", (64, 48)), self.text("What?", ["image"])
        expected = self.processor(images=[image], text=[text], return_tensors="pt", **self._special(text))
        picture = self.process(image)
        if not torch.equal(self.ids(text, [(picture.modality, picture.text)]), expected.input_ids[0]):
            raise OptionError(
                f"the processor of {model} puts a prompt together in a way the harness is not adapted to. "
                "attach(model, ...) works in your own generate call"
            )

    def _special(self, text: str) -> dict[str, bool]:
        """Whether the tokenizer adds a mark of the beginning, which some templates have in them."""
        mark = self.tokenizer.bos_token
        return {"add_special_tokens": mark is None or not text.startswith(mark)}


def _of_clip(clip: Clip) -> dict[str, Any]:
    """The arguments of a processor for a clip whose frames are chosen already."""
    from transformers.video_utils import VideoMetadata

    width, height = clip.frames[0].size
    metadata = VideoMetadata(
        total_num_frames=clip.length,
        fps=clip.rate,
        width=width,
        height=height,
        duration=None if clip.rate is None else clip.length / clip.rate,
        frames_indices=list(clip.places),
    )
    return {"videos": [list(clip.frames)], "video_metadata": [metadata], "do_sample_frames": False}
