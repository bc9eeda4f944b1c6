"""The image of what was kept: as it is where kept, pale and tinted where merged, nearly white where dropped."""

from pathlib import Path

import numpy as np
import pytest
import torch
from models import tiny_llava
from PIL import Image
from prompts import ANYRES, batch, row, tiles

from llava_consensus import attach
from llava_consensus.evaluation.report.overlay import contact_sheet, draw, fates, heat, overlay, selection, view
from llava_consensus.evaluation.report.patches import patches

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
    row = 4  # within the image in every shape
    at = [row * grid + column for column in range(3, 6)]
    owner[at[0]], owner[at[1]], owner[at[1] - grid], owner[at[2]] = 0, 1, 1, -1
    picture = overlay(image, [at[0]], [at[1]], owner, grid)
    assert picture.width / picture.height == pytest.approx(size[0] / size[1], rel=0.02)
    assert np.allclose(middle(picture, row, 3, grid, size), GRAY, atol=2)
    dropped = middle(picture, row, 5, grid, size)
    assert dropped.min() > 230 and np.ptp(dropped) < 3
    merged = middle(picture, row - 1, 4, grid, size)
    assert np.ptp(merged) > 20 and merged.mean() < dropped.mean() - 20
    assert np.ptp(middle(picture, row, 4, grid, size)) > np.ptp(merged)  # the anchor's dot


def test_a_heat_map_is_bright_where_a_saliency_is() -> None:
    pytest.importorskip("matplotlib")
    seen = view(Image.new("RGB", (64, 32), "gray"), (4, 4))
    drawn = heat(seen, [0.0] * 6 + [1.0] + [float("nan")] * 9)
    assert drawn.size == draw(seen).size
    assert middle(drawn, 1, 2, 4, (64, 32)).sum() > middle(drawn, 2, 2, 4, (64, 32)).sum() + 100
    assert heat(seen, [0.5] * 16).size == drawn.size


def test_contact_sheet_lays_out_rows_and_wraps_captions() -> None:
    panels = [("panel, with a caption that is long enough for two lines", Image.new("RGB", (40, 30), "red"))] * 3
    two, three = contact_sheet(panels, 2), contact_sheet(panels, 3)
    assert two.height > three.height and two.width < three.width
    assert contact_sheet(panels[:1], 4).width < two.width
    with pytest.raises(ValueError, match="panels"):
        contact_sheet([], 2)


def test_a_tiled_picture_is_drawn_whole_and_in_tiles() -> None:
    """A wide image in 1 x 2 tiles of 4 x 4 patches: one patch of each view kept, one anchor for patches of both."""
    owner = np.full(16 + 32, -1)
    kept, anchor = [5, 16 + 2 * 8 + 6], 16 + 1 * 8 + 1
    owner[kept], owner[[0, anchor]] = [0, 1], 2
    known, picture = fates(kept, [anchor], owner), Image.new("RGB", (400, 200), (GRAY,) * 3)
    whole = selection(view(picture.resize((200, 200)), (4, 4)), known)
    grid = selection(view(picture, (4, 8), 16), known)
    assert whole.width == whole.height and grid.width == 2 * grid.height

    def seen(picture: Image.Image, line: int, column: int, cells: tuple[int, int]) -> np.ndarray:
        x, y = round((column + 0.5) * picture.width / cells[1]), round((line + 0.5) * picture.height / cells[0])
        return np.asarray(picture, dtype=float)[y - 3 : y + 3, x - 3 : x + 3].mean((0, 1))

    assert np.allclose(seen(whole, 1, 1, (4, 4)), GRAY, atol=2) and np.allclose(seen(grid, 2, 6, (4, 8)), GRAY, atol=2)
    assert seen(whole, 3, 3, (4, 4)).min() > 230 and seen(grid, 3, 3, (4, 8)).min() > 230
    dot, tint = seen(grid, 1, 1, (4, 8)), seen(whole, 0, 0, (4, 4))
    assert np.ptp(dot) > np.ptp(tint) > 20 and dot.argmax() == tint.argmax()


@pytest.mark.parametrize("tile_budget", ["per_tile", "global"])
@torch.no_grad()
def test_patches_are_numbered_as_the_views_lie(tower_folder: Path, tile_budget: str) -> None:
    """Of an image that unpadding cuts rows from: every kept place is a token of its view."""
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
    assert set(owner[owner >= 0].tolist()) == set(range(len(tile), len(tile) + 20)), "slots follow those of full views"
    fused = np.array(found.fused)
    assert (np.isfinite(fused) == (owner >= 0)).all()
    if tile_budget == "global":
        assert set(np.argsort(-np.nan_to_num(fused, nan=-1))[:15].tolist()) == set(found.kept)
    for place in found.kept:
        view, cell = divmod(place - 16, 64) if place >= 16 else (-1, place)
        line, column = divmod(cell, 8 if view == 0 else 4)
        number = 0 if view < 0 else 1 + line // 4 * 2 + column // 4
        assert ((tile == number) & (token == line % 4 * 4 + column % 4)).sum() == 1
