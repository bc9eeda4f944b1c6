"""Diversity-aware selection: keep tokens that are salient and unlike those kept already (beyond the paper).

Plain top-K keeps many patches of one salient thing. Published methods therefore weigh saliency with the distance to
what is kept (CDPruner by a determinantal point process, `methods/cdpruner.py`); here it is one running minimum, K steps
over [B, N], as in farthest point sampling.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def diverse(saliency: Tensor, features: Tensor, count: int, quality: float) -> Tensor:
    """K tokens, each the best of saliency^quality x distance to the nearest kept token, the most salient one first.

    Args:
        saliency: [B, N], not negative.
        features: [B, N, D_v] by which tokens are alike; the distance is 1 - cosine.
        count: K, at most N.
        quality: exponent of the saliency; 0 is farthest point sampling, large is plain top-K.
    Returns:
        [B, K] ascending. Ties go to the lower index.
    """
    points = normalize(features.float(), dim=-1)
    weight = saliency.clamp_min(torch.finfo(torch.float32).tiny).log() * quality  # [B, N]
    distance = points.new_full(saliency.shape, 2.0)
    chosen = torch.empty(len(points), count, dtype=torch.long, device=points.device)
    for step in range(count):
        gain = weight + distance.clamp_min(1e-6).log() if step else saliency
        index = gain.masked_fill(distance < 0, -torch.inf).argmax(1)  # [B]
        chosen[:, step] = index
        kept = points.gather(1, index[:, None, None].expand(-1, 1, points.shape[2]))
        distance = torch.minimum(distance, 1 - (points * kept).sum(-1).clamp_max(1.0))
        distance = distance.scatter(1, index[:, None], -1.0)  # a kept token is never kept again
    return chosen.sort(dim=1).values
