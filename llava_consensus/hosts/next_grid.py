"""Layout of the tiles of an image in LLaVA-NeXT: a base view and a grid of tiles (host option `layout`)."""

from collections.abc import Iterable, Mapping
from typing import Any

from llava_consensus.errors import OptionError

# How LLaVA-NeXT lays out the tiles of an image, a base view and then a grid of tiles. `stock` follows the checkpoint:
# the grid that fits the image best, rows and columns of padding cut away, a newline after each row. `2880` is
# the layout behind the numbers of the paper, VisPruner and CDPruner: always 2 x 2 tiles, nothing cut away, no
# newlines, so that every image has 5 x 576 tokens and 640 of them are 128 of each tile.
STOCK, FIXED = LAYOUTS = ("stock", "2880")
# as in llava-torch 1.2.2.post1, which takes any other ratio for `square`, and any spatial merge for `spatial`
RATIOS = ("square", "pad", "anyres")
MERGES = ("flat", "spatial", "spatial_unpad")
ACROSS = 2  # tiles in a row of the fixed grid


def fixed_grid(image_size: int) -> list[list[int]]:
    """The only entry of `image_grid_pinpoints` for the fixed grid of tiles of `image_size` pixels."""
    return [[ACROSS * image_size, ACROSS * image_size]]


def check_tiles(counts: Iterable[int]) -> None:
    """Raises OptionError unless every image has the number of tiles of the fixed grid, with the base view."""
    wanted = 1 + ACROSS**2
    for count in counts:
        if count != wanted:
            raise OptionError(
                f"layout={FIXED}: every image must be {wanted} tiles, and one is {count}: cut it with "
                f"image_grid_pinpoints of one entry, {ACROSS} by {ACROSS} tiles in pixels"
            )


def check_images(config: Mapping[str, Any]) -> None:
    """Raise OptionError for a layout of images in a checkpoint's config.json that official LLaVA does not follow."""
    ratio = config.get("image_aspect_ratio") or "square"
    entries = {"image_aspect_ratio": (ratio, RATIOS)}
    if ratio == "anyres":  # one square has nothing to merge
        entries["mm_patch_merge_type"] = (config.get("mm_patch_merge_type") or "flat", MERGES)
    for name, (value, known) in entries.items():
        if value not in known:
            raise OptionError(
                f"{name}={value!r}: official LLaVA knows {'|'.join(known)}, and silently takes another for one of "
                "these. Take a checkpoint in transformers' format, or write the one you want in config.json"
            )


def check_layout(layout: str, image_aspect_ratio: str | None) -> None:
    if layout != STOCK and image_aspect_ratio != "anyres":
        raise OptionError(
            f"layout={layout} lays out the tiles of an image, and this model cuts none (image_aspect_ratio="
            f"{image_aspect_ratio!r}): take a checkpoint of LLaVA 1.6, or layout={STOCK}"
        )
