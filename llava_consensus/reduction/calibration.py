"""RESTORE's calibration of attention (Cho et al., arXiv 2606.01711), which restores the attention an image loses by
kept positions and fewer tokens.

Rotated queries and keys that are far from each other have smaller products, and an image of which fewer tokens are
left has less of the softmax than it had. So the logit of query m and key n gets log s_n + log(2 - D(m - n)) more: s_n
is how many tokens a key represents, and D(x) the mean of cos(x t) over the frequencies t of the rotation, which is 1 at
distance 0 and falls with it. The authors add the second term while a prompt is read, the first also in decoding. Maths
only. Torch only.
"""

import torch
from torch import Tensor

MOST = 2.0  # the constant from which D is taken, so that at distance 0 nothing is added


def far_logits(cos: Tensor, sin: Tensor) -> Tensor:
    """log(2 - D) of every pair of rows, float32.

    Args:
        cos, sin: of the rotation at each row's position, [R, W, d], each frequency as often as any other.
    Returns:
        [R, W, W], at least 0.
    """
    turned = torch.cat((cos, sin), dim=2).float()
    near = turned @ turned.transpose(1, 2)
    near = near / near.diagonal(dim1=1, dim2=2)[..., None]  # d, unless a model stretches its rotation
    return (MOST - near).clamp_min(1.0).log()


def seen_logits(mask: Tensor, sizes: Tensor, far: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Additive mask of a layer's attention with the calibration in it.

    Args:
        mask: [R, 1, q, W], true if a column is seen.
        sizes: [R, W] how many tokens each column represents.
        far: [R, q, W] of `far_logits`, or None.
        dtype: of the states.
    Returns:
        [R, 1, q, W], the least number of the dtype if a column is not seen.
    """
    added = sizes.float().log()[:, None, None]
    added = added if far is None else added + far[:, None]
    return added.to(dtype).expand(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
