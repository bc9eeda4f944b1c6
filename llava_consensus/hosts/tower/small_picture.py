"""A CLIP tower of fixed size made to look at a smaller picture.

The pixels prepared for the tower are resized to rows x columns patches (bicubic, antialiased; resizing is linear, so it
commutes with normalisation), and the position embeddings are interpolated to the same grid, bicubically, as
transformers does for `interpolate_pos_encoding=True`. Everything behind the embeddings takes any number of tokens.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def shrunk_picture(embeddings: Any, pixels: Tensor, rows: int, columns: int) -> Tensor:
    """Embeddings of pictures shrunk to a grid of patches, by the modules of a CLIP tower: [T, 3, h, w] ->
    [T, 1 + rows x columns, D_v].
    """
    patch = embeddings.patch_size
    small = shrink(pixels, rows * patch, columns * patch).to(embeddings.patch_embedding.weight.dtype)
    patches = embeddings.patch_embedding(small).flatten(2).transpose(1, 2)
    front = embeddings.class_embedding.expand(len(patches), 1, -1)
    return torch.cat((front, patches), dim=1) + positions(embeddings.position_embedding.weight, rows, columns)


def shrink(pixels: Tensor, height: int, width: int) -> Tensor:
    """Pictures [T, 3, h, w] resized, in float32."""
    return interpolate(pixels.float(), size=(height, width), mode="bicubic", antialias=True, align_corners=False)


def positions(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Position embeddings [1 + side^2, D_v] interpolated to another grid: [1 + rows x columns, D_v]."""
    side = math.isqrt(len(weight) - 1)
    grid = weight[1:].float().unflatten(0, (side, side)).permute(2, 0, 1)[None]
    small = interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)[0]
    return torch.cat((weight[:1], small.flatten(1).T.to(weight.dtype)))
