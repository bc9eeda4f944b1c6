"""Takes from a vision tower what a method reads, with hooks that change nothing. The tower keeps its attention kernel;
no attention map is ever asked for.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts import call as calls
from llava_consensus.hosts.base import Tap, Tower


def chosen_block(tower: Tower, option: int | None) -> int:
    """The block that is read: the one whose output feeds the projector, or the one the option names.

    Raises:
        OptionError: for an index the tower does not have.
    """
    if option is None:
        return tower.feature_block
    count = len(tower.blocks)
    if not -count <= option < count:
        raise OptionError(f"vision_layer={option} must be in {-count}..{count - 1}: the tower has {count} blocks")
    return option % count


def attending_block(tower: Tower, features: int, ahead: int) -> int:
    """The block whose attention is read: `ahead` blocks behind the one that gives the features.

    Raises:
        OptionError: for a tower that ends before it.
    """
    count = len(tower.blocks)
    if features + ahead >= count:
        raise OptionError(
            f"this method reads the attention of the block after the features' own, which is the last of {count}: "
            f"give vision_layer={count - 1 - ahead}, or use a model with mm_vision_select_layer=-2"
        )
    return features + ahead


def install_taps(attachment: Any, tower: Tower) -> list[Any]:
    """Hooks for what the attachment's method reads of the tower; they collect while a call wants it."""
    method = attachment.method
    features = chosen_block(tower, method.vision_layer)
    taps = tower.taps(method.needs, features, attending_block(tower, features, method.blocks_ahead))
    return [tap.module.register_forward_hook(partial(_collect, attachment, tap)) for tap in taps]


def _collect(attachment: Any, tap: Tap, module: nn.Module, inputs: Any, output: Any) -> None:
    call = calls.current(attachment)
    if call is None or call.parts is None:
        return
    parts = tap.read(output)
    if parts.keys() & call.parts.keys():
        raise RuntimeError(
            "the vision tower ran twice for one set of pictures: multi-scale (S2) towers are not adapted"
        )
    call.parts |= {name: value.detach() for name, value in parts.items()}


def split_heads(states: Tensor, heads: int) -> Tensor:
    """[T, n, H d] -> [T, H, n, d]."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def fingerprint(values: Tensor) -> Tensor:
    """A number for each row of a tensor [T, ...], from its bits: int64 [T], the same in every batch and on every
    device.
    """
    if values.is_floating_point():
        values = values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    flat = values.flatten(1).long()
    weight = torch.arange(flat.shape[1], device=flat.device) * 0x9E3779B97F4A7C1 | 1
    return (flat * weight).sum(1)  # int64 arithmetic wraps
