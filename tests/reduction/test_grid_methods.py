"""Methods that look at nothing: the uniform grid, pooling and smaller pictures."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import IMAGE
from prompts import tiles
from units import rectangle

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.methods import make
from llava_consensus.methods.resize import smaller
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import SHAPES
from llava_consensus.reduction.grid import divide
from llava_consensus.reduction.tokens import VisualTokens


def test_sixty_four_cells_of_llava_are_three_by_three() -> None:
    tokens = rectangle(24, 24, 24)
    kept = make("uniform_grid").reduce(tokens, Budget(64)).kept[0]
    assert kept.tolist() == [24 * y + x for y in range(1, 24, 3) for x in range(1, 24, 3)]
    pooled = make("pool").reduce(tokens, Budget(64))
    own = torch.nn.functional.avg_pool2d(tokens.projected.view(1, 1, 24, 24), 3).flatten()
    assert torch.allclose(pooled.tokens.flatten(), own) and torch.equal(pooled.anchors[0], kept)
    assert pooled.owner.unique().tolist() == list(range(64))


@settings(max_examples=80)
@given(height=st.integers(1, 24), width=st.integers(1, 24), data=st.data())
def test_cells_divide_any_rectangle_into_any_number(height: int, width: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, height * width))
    tokens = rectangle(height, width, 24, corner=24 * (24 - height) + 24 - width)
    cells = divide(tokens, count)
    centre, group = cells.centre[0], cells.group[0]
    assert centre.tolist() == sorted(set(centre.tolist())) and group.unique().tolist() == list(range(count))
    assert torch.equal(group[centre], torch.arange(count))  # a centre lies in its own cell
    many = make("pool").reduce(tokens, Budget(count))
    assert many.tokens.shape[1] == count
    alone = divide(VisualTokens(*(torch.cat((v, v)) for v in tokens[:3]), side=24), count)
    assert torch.equal(alone.centre[1], centre) and torch.equal(alone.group[1], group)


def test_without_a_grid_the_tokens_are_one_row() -> None:
    tokens = rectangle(1, 10, 10)._replace(side=0)
    assert make("uniform_grid").reduce(tokens, Budget(5)).kept.tolist() == [[0, 2, 4, 6, 8]]


@pytest.mark.parametrize(
    ("tokens", "grid"), [(192, (13, 14)), (128, (11, 11)), (64, (8, 8)), (32, (5, 6)), (1, (1, 1))]
)
def test_small_pictures_never_have_more_than_the_budget(tokens: int, grid: tuple[int, int]) -> None:
    assert smaller(tokens) == grid
    count = grid[0] * grid[1]
    assert make("resize").entering(Budget(tokens), 576, 3) == [count] * 3
    assert make("resize").vision_tokens(Budget(tokens), SHAPES["llava-1.5-7b"]) == [count] * 24
    assert make("resize").entering(Budget(600), 576, 2) == [576] * 2


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), data=st.data())
def test_a_smaller_grid_has_the_form_of_the_larger_one(rows: int, columns: int, data: st.DataObject) -> None:
    """At most the budget, within the grid, and each side at most one from the exact one."""
    tokens = data.draw(st.integers(1, max(1, rows * columns - 1)))
    height, width = smaller(tokens, rows, columns)
    assert 1 <= height <= rows and 1 <= width <= columns and height * width <= tokens < (height + 1) * (width + 1)
    exact = (tokens * rows / columns) ** 0.5, (tokens * columns / rows) ** 0.5
    if min(exact) >= 1:
        assert abs(height - exact[0]) <= 1 and abs(width - exact[1]) <= 1
    else:
        assert height * width == tokens
    some = {(2, 19, 10): (2, 1), (40, 10, 30): (4, 10), (40, 30, 10): (10, 4), (10, 3, 5): (2, 5), (17, 10, 30): (2, 8)}
    assert {one: smaller(*one) for one in some} == some


@pytest.mark.parametrize("name", ["uniform_grid", "pool", "resize", "tome"])
def test_methods_that_rank_nothing_across_tiles_have_no_such_option(name: str) -> None:
    with pytest.raises(OptionError, match=f"unknown option of method '{name}' 'tile_budget'"):
        make(name, tile_budget="global")
    assert make(name).tile_budget == "per_tile"


@pytest.mark.parametrize("tokens", [4, 6, 9, 12])
@torch.no_grad()
def test_downsample_equals_transformers_own_interpolation(llava_model: Any, tokens: int) -> None:
    images, tower = tiles(2), llava_model.get_vision_tower()
    rows, columns = smaller(tokens)
    with attach(llava_model, "resize", tokens=tokens) as attached:
        tiles_of = attached.entrance.encode(images, [1, 1])
    projected, slot = torch.cat([one.projected for one in tiles_of]), torch.cat([one.left.slot for one in tiles_of])
    size = (14 * rows, 14 * columns)
    small = torch.nn.functional.interpolate(images, size=size, mode="bicubic", antialias=True)
    out = tower.vision_tower(small, interpolate_pos_encoding=True, output_hidden_states=True)
    expected = llava_model.get_model().mm_projector(out.hidden_states[-2][:, 1:])  # [2, rows x columns, D]
    side = IMAGE // 14
    for y in range(side):
        for x in range(side):
            cell = (y * rows // side) * columns + x * columns // side
            assert torch.allclose(projected[:, y * side + x], expected[:, cell], atol=1e-5)
            assert (slot[:, y * side + x] == cell).all()
