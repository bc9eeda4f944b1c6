"""Rankings and sets of tokens as index tensors, the same on every device. Torch only."""

import torch
from torch import Tensor


def rank(saliency: Tensor) -> Tensor:
    """Indices by (saliency descending, index ascending): [..., N] -> [..., N]. Stable, so ties never depend on the
    device.
    """
    return torch.sort(saliency, dim=-1, descending=True, stable=True).indices


def indices(mask: Tensor, count: int) -> Tensor:
    """The first `count` true places of each row, ascending, where each row has so many: [B, N] -> [B, count]."""
    return torch.sort(mask.to(torch.uint8), dim=-1, descending=True, stable=True).indices[..., :count]


def divide(saliency: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens and the others, both in ascending index order: [B, N] -> [B, count], [B, N - count]."""
    best, others = rank(saliency).split((count, saliency.shape[1] - count), dim=1)
    return best.sort(dim=1).values, others.sort(dim=1).values


def membership(index: Tensor, size: int) -> Tensor:
    """Which of `size` places an index [B, K] names: bool [B, size]."""
    return torch.zeros(index.shape[0], size, dtype=torch.bool, device=index.device).scatter_(1, index, True)
