"""Density-peak clustering of dropped tokens, as SparseVLM recycles them (Zhang et al., ICML 2025). Torch only."""

import torch
from torch import Tensor

from llava_consensus.reduction.ranking import rank


def cluster(states: Tensor, count: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Density-peak clusters: a centre is dense and far from anything denser. Equal densities rank by index.

    Args:
        states: [P, m, D].
        count: clusters, which is also how many nearest states, itself included, make a density.
        noise: [P, m] added to the densities, as the authors do; for comparison with them.
    Returns:
        Cluster of every state [P, m], and centres [P, count], best first.
    """
    states = states.float()
    distance = torch.cdist(states, states, compute_mode="donot_use_mm_for_euclid_dist") / states.shape[-1] ** 0.5
    nearest = distance.topk(count, dim=-1, largest=False).values
    density = torch.exp(-nearest.square().mean(-1)) + (0.0 if noise is None else noise)
    place = torch.arange(states.shape[1], device=states.device)
    equal = density[:, None] == density[..., None]
    denser = (density[:, None] > density[..., None]) | (equal & (place < place[:, None]))  # [P, m, of which]
    widest = distance.flatten(1).amax(1)[:, None, None]
    gap = torch.where(denser, distance, widest).amin(-1)
    centres = rank(gap * density)[:, :count]
    group = distance.gather(2, centres[:, None].expand(-1, states.shape[1], -1)).argmin(-1)
    cluster_index = torch.arange(count, device=states.device).expand_as(centres)
    return group.scatter(1, centres, cluster_index), centres


def average(states: Tensor, group: Tensor, count: int) -> Tensor:
    """Mean of every cluster: [P, m, D] -> [P, count, D]."""
    share = torch.nn.functional.one_hot(group, count).transpose(1, 2).to(states.dtype)
    return (share @ states) / share.sum(-1, keepdim=True)
