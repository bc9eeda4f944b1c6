"""The picture of what was kept: bright where kept, tinted where merged, dark where dropped, cropped as the original."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from llava_consensus.report.overlay import contact_sheet, overlay

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
