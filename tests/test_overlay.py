"""The picture of what was kept: bright where kept, tinted where merged, dark where dropped, cropped as the original."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_llava
from PIL import Image
from prompts import ANYRES, batch, row, tiles

from llava_consensus import attach
from llava_consensus.hosts.sequence.patches import patches
from llava_consensus.report.overlay import overlay, tiled_overlay
from llava_consensus.report.sheet import contact_sheet

GRAY = 160


def middle(picture: Image.Image, row: int, column: int, grid: int, size: tuple[int, int]) -> np.ndarray:
    """Mean colour inside one patch of the padded square, in the cropped picture."""
    scale = picture.width / size[0]
    side = max(size)
    left = (column + 0.5) * side / grid - (side - size[0]) // 2
    top = (row + 0.5) * side / grid - (side - size[1]) // 2
    x, y, reach = round(left * scale), round(top * scale), 4
    return np.asarray(picture, dtype=float)[y - reach : y + reach, x - reach : x + reach].mean((0, 1))


@pytest.mark.parametrize("size", [(240, 240), (240, 120), (120, 240), (240, 90)])
def test_patches_look_like_what_happened_to_them(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (GRAY, GRAY, GRAY))
    grid = 8
    owner = np.full(64, -1)
    row = 4  # within the picture in every shape
    at = [row * grid + column for column in range(3, 6)]
    owner[at[0]], owner[at[1]], owner[at[1] - grid], owner[at[2]] = 0, 1, 1, -1
    picture = overlay(image, [at[0]], [at[1]], owner, grid)
    assert picture.width / picture.height == pytest.approx(size[0] / size[1], rel=0.02)
    assert np.allclose(middle(picture, row, 3, grid, size), GRAY, atol=2)
    assert middle(picture, row, 5, grid, size).mean() < 0.2 * GRAY
    merged = middle(picture, row - 1, 4, grid, size)
    assert np.ptp(merged) > 40 and merged.mean() < GRAY
    assert np.ptp(middle(picture, row, 4, grid, size)) > 100  # the anchor's dot


def test_two_anchors_have_two_colours() -> None:
    owner = np.repeat([0, 1], 32)
    picture = overlay(Image.new("RGB", (80, 80), "white"), [], [0, 63], owner, 8)
    upper, lower = (middle(picture, row, 4, 8, (80, 80)) for row in (2, 5))
    assert np.abs(upper - lower).max() > 60


def test_all_kept_is_the_picture_itself() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (768, 768, 3), dtype=np.uint8))
    assert np.array_equal(overlay(image, np.arange(576), [], np.arange(576), 24), image)


def test_tokens_merged_into_kept_patches_are_tinted_by_them() -> None:
    owner = np.zeros(16, dtype=int)
    picture = overlay(Image.new("RGB", (64, 64), "gray"), [5], [], owner, 4)
    assert np.ptp(middle(picture, 3, 3, 4, (64, 64))) > 40


def test_the_grid_must_fit() -> None:
    with pytest.raises(ValueError, match="grid is 3 x 3"):
        overlay(Image.new("RGB", (9, 9)), [0], [], np.zeros(8), 3)


@settings(max_examples=25, deadline=None)
@given(
    size=st.tuples(st.integers(1, 900), st.integers(1, 900)),
    grid=st.tuples(st.integers(1, 27), st.integers(1, 27)),
    seed=st.integers(0, 99),
)
def test_any_shape_works(size: tuple[int, int], grid: tuple[int, int], seed: int) -> None:
    random = np.random.default_rng(seed)
    count = grid[0] * grid[1]
    kept, anchors = np.split(random.permutation(count)[: max(1, count // 3)], [max(1, count // 4)])
    owner = random.integers(-1, kept.size + anchors.size, count)
    owner[kept], owner[anchors] = np.arange(kept.size), kept.size + np.arange(anchors.size)
    picture = overlay(Image.new("RGB", size), kept, anchors, owner, grid)
    assert picture.mode == "RGB" and min(picture.size) >= 1 and max(picture.size) <= 1200


def test_contact_sheet_lays_out_rows_and_wraps_captions() -> None:
    panels = [(f"panel {number}, with a caption that is long enough for two lines", Image.new("RGB", (40, 30), "red"))
              for number in range(3)]  # fmt: skip
    two, three = contact_sheet(panels, 2), contact_sheet(panels, 3)
    assert two.height > three.height and two.width < three.width
    assert contact_sheet(panels, 3, legend=False).height < three.height
    assert contact_sheet(panels[:1], 4).width < two.width
    with pytest.raises(ValueError, match="panels"):
        contact_sheet([], 2)


def test_a_tiled_picture_is_drawn_whole_and_in_tiles() -> None:
    """A wide picture in 1 x 2 tiles of 4 x 4 patches: one patch of each view kept, one anchor for patches of both."""
    owner = np.full(16 + 32, -1)
    kept, anchor = [5, 16 + 2 * 8 + 6], 16 + 1 * 8 + 1
    owner[kept], owner[[0, anchor]] = [0, 1], 2
    whole, grid = tiled_overlay(Image.new("RGB", (400, 200), (GRAY,) * 3), kept, [anchor], owner, 4, (1, 2))
    assert whole.size == grid.size and whole.width == 2 * whole.height

    def seen(picture: Image.Image, line: int, column: int, cells: tuple[int, int]) -> np.ndarray:
        x, y = (round((place + 0.5) * size) for place, size in
                ((column, picture.width / cells[1]), (line, picture.height / cells[0])))  # fmt: skip
        return np.asarray(picture, dtype=float)[y - 3 : y + 3, x - 3 : x + 3].mean((0, 1))

    assert np.allclose(seen(whole, 1, 1, (4, 4)), GRAY, atol=2) and np.allclose(seen(grid, 2, 6, (4, 8)), GRAY, atol=2)
    assert seen(whole, 3, 3, (4, 4)).mean() < 0.2 * GRAY and seen(grid, 3, 3, (4, 8)).mean() < 0.2 * GRAY
    dot, tint = seen(grid, 1, 1, (4, 8)), seen(whole, 0, 0, (4, 4))
    assert np.ptp(dot) > 100 and np.ptp(tint) > 40 and dot.argmax() == tint.argmax()
    with pytest.raises(ValueError, match="which are not 3 x 3"):
        tiled_overlay(Image.new("RGB", (9, 9)), [0], [], owner, 3, (1, 2))


@pytest.mark.parametrize("tile_budget", ["per_tile", "global"])
@torch.no_grad()
def test_patches_are_numbered_as_the_views_lie(tower_folder: Path, tile_budget: str) -> None:
    """Of a picture that unpadding cuts rows from: every kept place is a token of its view."""
    model = tiny_llava(tower_folder, **ANYRES, mm_patch_merge_type="spatial_unpad")
    ids, _ = batch(row(5))
    with attach(model, "consensusdrop", 20, order="raster", merged=5, tile_budget=tile_budget) as attached:
        model(ids, images=[tiles(5)], image_sizes=[(100, 60)])
    (outcome,) = attached.outcomes
    found = patches(outcome, 4, 2)
    owner = np.array(found.owner)
    assert len(found.owner) == 16 + 64 and (owner[:16] >= 0).all()
    grid = owner[16:].reshape(8, 8)
    assert (grid[2:6] >= 0).all() and (grid[[0, 1, 6, 7]] == -1).all(), "the outer rows are padding"
    assert len(found.kept) + len(found.anchors) == 20 == len(set(owner[owner >= 0].tolist()))
    tile, token = (part.numpy() for part in outcome.origin)
    for place in found.kept:
        view, cell = divmod(place - 16, 64) if place >= 16 else (-1, place)
        line, column = divmod(cell, 8 if view == 0 else 4)
        number = 0 if view < 0 else 1 + line // 4 * 2 + column // 4
        assert ((tile == number) & (token == line % 4 * 4 + column % 4)).sum() == 1
