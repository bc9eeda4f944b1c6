"""What the vision tower of a LLaVA model gives for pictures: projected tokens, and whatever a method needs on the way.

`take_taps` encodes tiles; `join_taps` and `slice_taps` put the tiles of several pictures into one batch and out of it;
`blank_images` stands for pictures that were encoded already.
"""

from typing import Any

import torch
from torch import Tensor

from llava_consensus.hosts.base import VisionTaps
from llava_consensus.hosts.tower import blocks as vision_seam
from llava_consensus.hosts.tower import taps as capture
from llava_consensus.reduction.method import Method


def take_taps(model: Any, images: Tensor, method: Method, tokens: list[int] | None = None) -> VisionTaps:
    """Encodes tiles [T, 3, h, w] with the model's own `encode_images` and takes what the method needs on the way; a
    method inside the tower must be told the budget of each tile.
    """
    tower = model.get_vision_tower()
    blocks = capture.vision_blocks(tower.vision_tower)
    index = capture.feature_block(blocks, tower.select_layer, method.vision_layer)
    attending: Any = capture.attending_block(blocks, index, method.attention_ahead)
    with capture.tapped(blocks[index], attending, method.needs) as found:
        projected, slot = vision_seam.encode(model, images, method, tokens or [])
    heads, scale = attending.self_attn.num_heads, attending.self_attn.scale
    query, key = (capture.split_heads(found[name], heads) if name in found else None for name in ("query", "key"))
    output = found.get("output")
    return VisionTaps(
        projected,
        output[:, 1:] if output is not None and "features" in method.needs else None,
        query,
        key,
        scale=scale,
        fingerprint=capture.fingerprint(images) if "fingerprint" in method.needs else None,
        class_feature=output[:, 0] if output is not None and "class_feature" in method.needs else None,
        project=model.get_model().mm_projector if "project" in method.needs else None,
        slot=slot,
    )


def join_taps(taps: list[VisionTaps]) -> VisionTaps:
    """Tiles of several pictures as one batch."""
    fields = [[getattr(one, name) for one in taps] for name in VisionTaps._fields]
    return VisionTaps._make(torch.cat(values) if isinstance(values[0], Tensor) else values[0] for values in fields)


def slice_taps(taps: VisionTaps, start: int, stop: int) -> VisionTaps:
    """The tiles start..stop-1."""
    return VisionTaps._make(value[start:stop] if isinstance(value, Tensor) else value for value in taps)


def blank_images(images: Any) -> tuple[list[int], Any]:
    """Tiles of each picture, and pictures of no pixels that take the same branches of the official function."""
    if isinstance(images, list):
        blank = [torch.empty(*image.shape[:-2], 0, 0) for image in images]
        return [1 if image.ndim == 3 else image.shape[0] for image in images], blank
    empty = torch.empty(*images.shape[:-2], 0, 0)
    return [images.shape[1]] * images.shape[0] if images.ndim == 5 else [1] * images.shape[0], empty
