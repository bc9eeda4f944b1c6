"""The newlines of tiled images: kept outside the budget, or dropped with the reduction, on both hosts."""

from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import transformers
from hf_models import prompts
from models import tiny_llava
from prompts import ANYRES, batch, row, tiles
from torch import Tensor

from llava_consensus import attach

UNPAD = ANYRES | {"mm_patch_merge_type": "spatial_unpad"}
NEEDS_HF = pytest.mark.skipif(
    tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 19),
    reason="models of transformers need version 5.19 or later",
)


def arguments(left: bool) -> dict[str, Any]:
    """A tiled image, two of them with another grid, and none, in one padded batch with labels."""
    ids, mask = batch(row(5, 6), row(5, images=2, after=6), [1, 5, 6, 7], left=left)
    labels = torch.where(ids % 10 > 2, ids, -100)
    images = [tiles(5), tiles(3, 1), tiles(3, 2), tiles(5, 3)]
    sizes = [(100, 70), (110, 30), (50, 110), (100, 100)]
    return dict(input_ids=ids, attention_mask=mask, labels=labels, images=images, image_sizes=sizes)


def assembled(model: Any, given: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Embeddings and labels of every row without padding, as the official function returns them."""
    found = model.prepare_inputs_labels_for_multimodal(**{"position_ids": None, "past_key_values": None, **given})
    _, _, mask, _, embeds, labels = found
    return [(embeds[index][real.bool()], labels[index][real.bool()]) for index, real in enumerate(mask)]


@pytest.mark.parametrize(
    ("order", "left", "tile_budget"), [("top_then_merged", False, "per_tile"), ("raster", True, "global")]
)
@torch.no_grad()
def test_dropped_newlines_are_all_that_is_missing(tower_folder: Path, order: str, left: bool, tile_budget: str) -> None:
    model = tiny_llava(tower_folder, **UNPAD, tokenizer_padding_side="left" if left else "right")
    given, options = arguments(left), {"order": order, "tile_budget": tile_budget}
    with attach(model, tokens=20, **options) as attached:
        kept, before = assembled(model, given), attached.outcomes
    with attach(model, tokens=20, newlines="drop", **options) as attached:
        dropped, after = assembled(model, given), attached.outcomes
    newline = model.model.image_newline
    for (embeds, labels), (fewer, fewer_labels) in zip(kept, dropped, strict=True):
        stays = (embeds != newline).any(1)
        assert torch.equal(embeds[stays], fewer) and torch.equal(labels[stays], fewer_labels)
    assert [outcome.structural for outcome in before] == [6, 2, 8] and [one.structural for one in after] == [0] * 3
    assert [outcome[:3] for outcome in before] == [outcome[:3] for outcome in after]


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="transformers 4 takes no positions")
@torch.no_grad()
def test_positions_that_are_kept_have_gaps_where_newlines_were(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder, **UNPAD)
    given = arguments(False) | {"position_ids": torch.zeros(3, 1), "past_key_values": None}
    found = []
    for newlines in ("keep", "drop"):
        with attach(model, "random", 20, positions="keep", order="raster", newlines=newlines):
            _, positions, mask, _, embeds, _ = model.prepare_inputs_labels_for_multimodal(**given)
        found.append([(positions[index][real], embeds[index][real]) for index, real in enumerate(mask.bool())])
    for (positions, embeds), (fewer, _) in zip(*found, strict=True):
        assert torch.equal(positions[(embeds != model.model.image_newline).any(1)], fewer)


@NEEDS_HF
@pytest.mark.parametrize("name", ["llava_next", "llava_next_video", "llava_onevision"])
@torch.no_grad()
def test_models_of_transformers_drop_them_too(name: str) -> None:
    case = hf_models.CASES[name]
    model, (a, b, c, _) = case.build(), (case.picture(number) for number in range(4))
    rows: list[list[Any]] = [[1, 5, a, 6, 7, 8], [1, b, 9, c, 11, 12], [1, 21, 22, 23]]
    longest = len(rows[1]) - 2
    for newlines in ("keep", "drop"):
        options = {"tile_budget": case.tile_budget, "newlines": newlines}
        with attach(model, "consensusdrop", case.tokens, **options) as attached:
            width = hf_models.rows_read(model, prompts(*rows))
            own = [one for one in attached.outcomes if one.row == 1]
            assert width == longest + sum(one.after + one.structural for one in own)
            assert all((one.structural == 0) == (newlines == "drop") for one in own)
            said = model.generate(**prompts(*rows), max_new_tokens=3, do_sample=False)[:, -3:]
            singles = [model.generate(**prompts(row), max_new_tokens=3, do_sample=False)[:, -3:] for row in rows]
            assert torch.equal(said, torch.cat(singles))


@NEEDS_HF
@torch.no_grad()
def test_those_of_videos_stay() -> None:
    case, left = hf_models.CASES["llava_onevision video"], []
    model = case.build()
    for newlines in ("keep", "drop"):
        with attach(model, "consensusdrop", case.tokens, newlines=newlines) as attached:
            model(**prompts([1, 5, case.picture(0), 7]))
            (outcome,) = attached.outcomes
        assert outcome.after < outcome.before
        left.append(outcome.structural)
    assert left[0] == left[1] > 0
