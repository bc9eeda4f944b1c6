"""What tiny models are shown in the tests: noise for images, rows of ids, a layout for every official branch."""

from typing import Any

import torch
from hf_models import padded
from models import IMAGE

PINS = [[IMAGE, 2 * IMAGE], [2 * IMAGE, IMAGE], [2 * IMAGE, 2 * IMAGE]]
ANYRES = {"image_aspect_ratio": "anyres", "image_grid_pinpoints": PINS}
UNPAD = ANYRES | {"mm_patch_merge_type": "spatial_unpad"}


def tiles(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(seed))


def row(*text: int, images: int = 1, after: int = 4) -> list[int]:
    """BOS, some text, then every image followed by some text."""
    ids = [1, *text]
    for number in range(images):
        ids += [-200, *range(20 + 10 * number, 20 + 10 * number + after)]
    return ids


def batch(*rows: list[int], left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    found = padded(list(rows), left=left)
    return found["input_ids"], found["attention_mask"]


TILED = dict(rows=[row(5), row(6, 7)], images=[tiles(5), tiles(3, 1)], ranges=[range(5), range(5, 8)])
LONG = dict(config={"tokenizer_model_max_length": 14})
CASES: dict[str, dict[str, Any]] = {
    "one image": dict(rows=[row(5, 6)], images=tiles(1), ranges=[range(1)]),
    "no mask": dict(rows=[row(5, 6)], images=tiles(1), ranges=[range(1)], mask=False),
    "right padding": dict(rows=[row(5, 6), row(5, after=9)], images=tiles(2), ranges=[range(1), range(1, 2)]),
    "left padding": dict(rows=[row(5, 6), row(5, after=9)], images=tiles(2), ranges=[range(1), range(1, 2)], left=True),
    "two images in a prompt": dict(rows=[row(5, images=2)], images=tiles(2), ranges=[range(1), range(1, 2)]),
    "list of images": dict(rows=[row(5, images=2)], images=list(tiles(2)), ranges=[range(1), range(1, 2)]),
    "a row without image": dict(rows=[row(5), [1, 5, 6, 7], row(6)], images=tiles(3), ranges=[range(1), range(2, 3)]),
    "adjacent pictures": dict(rows=[[1, 5, -200, -200, 9, 8]], images=tiles(2), ranges=[range(1), range(1, 2)]),
    "five dimensions, flat": dict(
        rows=[row(5), row(6, 7)], images=tiles(6).view(2, 3, 3, IMAGE, IMAGE), ranges=[range(3), range(3, 6)]
    ),
    "spatial": dict(TILED, sizes=[(100, 100), (110, 50)], config=ANYRES | {"mm_patch_merge_type": "spatial"}),
    "spatial_unpad": dict(TILED, sizes=[(100, 70), (110, 30)], config=UNPAD, left=True),
    "spatial_unpad, single tile": dict(
        rows=[row(5)], images=[tiles(1)], sizes=[(50, 50)], config=UNPAD, ranges=[range(1)]
    ),
    "truncated": dict(LONG, rows=[row(5, after=30)], images=tiles(1), ranges=[range(1)]),
    "truncated, left padding": dict(
        LONG, rows=[row(5, after=30), row(6)], images=tiles(2), ranges=[range(1), range(1, 2)], left=True
    ),
}
