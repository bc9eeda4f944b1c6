"""What takes the place of Video-LLaVA's `prepare_inputs_labels_for_multimodal` while a method is attached: official
LLaVA's way (`llava/prepare.py`) for a list of pictures and clips.

Within this file and the adapter a picture is [1, 3, h, w] and a clip [frames, 1, 3, h, w]: tiles first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.llava.prepare import PREPARE, View, prepared
from llava_consensus.hosts.llava.structure import Arguments


def prepare(
    attachment: Attachment,
    input_ids: Tensor,
    position_ids: Any,
    attention_mask: Any,
    past_key_values: Any,
    labels: Any,
    images: Any,
) -> tuple[Any, ...]:
    """Takes the place of the function that assembles prompts: same six arguments, same six results.

    Raises:
        OptionError: for padded prompts, which that function's callers cannot mask while they answer, and for pictures
            and clips in one call.
    """
    official = partial(_later, getattr(type(attachment.here.module), PREPARE), images)
    arguments = Arguments(input_ids, position_ids, attention_mask, past_key_values, labels, images)
    if images is None or input_ids.shape[1] == 1:
        return prepared(attachment, official, arguments)
    if attention_mask is not None and labels is None and not attention_mask.all():
        raise OptionError("attention_mask: Video-LLaVA's own code answers no padded batch. Ask prompt by prompt")
    if len({image.ndim for image in images}) > 1:
        raise OptionError(
            "images: pictures and clips in one call, which have towers of their own. Ask about them apart"
        )
    return prepared(attachment, official, arguments._replace(images=[tiles_first(image) for image in images]))


def tiles_first(image: Tensor) -> Tensor:
    """A picture [3, h, w] or a clip [3, frames, h, w] with its tiles in front."""
    return image[None] if image.ndim == 3 else image.transpose(0, 1)[:, None]


def shows_clips(images: list[Tensor]) -> bool:
    """Whether these are clips, tiles first."""
    return images[0].ndim == 5


def _later(older: Callable[..., Any], images: Any, model: Any, *arguments: Any) -> tuple[Any, ...]:
    """The function in the form of official LLaVA's, in which one `encode_images` encodes all tiles; it is given the
    pictures and clips as they are.
    """
    encode = vars(model).get("encode_images")
    seeing = model if encode is None else _encoding(model, encode)
    results: tuple[Any, ...] = older(seeing, *arguments[:5], images)
    return results


def _encoding(model: Any, encode: Callable[[Tensor], Tensor]) -> View:
    """The model with `encode` in place of both its towers."""

    def encode_videos(videos: Tensor) -> Tensor:
        frames = videos.transpose(1, 2)  # [B, frames, 3, h, w]
        return encode(frames.flatten(0, 1)[:, None]).unflatten(0, frames.shape[:2])

    towers = dict.fromkeys(("get_image_tower", "get_video_tower"), lambda: True)
    return View(model, encode_images=encode, encode_videos=encode_videos, **towers)
