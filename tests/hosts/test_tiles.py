"""Images of several tiles on both hosts: what a budget comes to (`tools/tile_budgets.py` shows the whole table), the
paper's fixed grid of 2 x 2 tiles without unpadding and newlines, and newlines that are dropped with the reduction.
"""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hf_models
import numpy as np
import pytest
import torch
import transformers
from hf_models import noise, prompts
from models import IMAGE, PATCHES, tiny_llava
from prompts import ANYRES, batch, row, tiles

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.evaluation import models
from llava_consensus.hosts.images import Image
from llava_consensus.hosts.official import PREPARE
from llava_consensus.hosts.rows import ROW, _tails, member_means
from llava_consensus.hosts.units import units_of
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.tokens import AFTER, AHEAD, BEHIND, Reduction

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
NEEDS_HF = pytest.mark.skipif(VERSION < (5, 19), reason="models of transformers need version 5.19 or later")
SPATIAL, UNPAD = (ANYRES | {"mm_patch_merge_type": name} for name in ("spatial", "spatial_unpad"))
FIXED = {"layout": "2880"}


# ---- `tokens=T` is T for images of any size and any tiles


def test_budgets_of_official_tiles(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder, **SPATIAL)
    ids, mask = batch(row(5), row(6, 7))
    arguments = dict(images=[tiles(5), tiles(3, 1)], image_sizes=[(100, 100), (110, 50)], attention_mask=mask)
    for tokens, tile_budget, after in (
        (20, "per_tile", [20, 20]),
        (20, "global", [20, 20]),
        (20, "most_tiles", [20, 12]),  # of three tiles, where an image can have five
        (4, "per_tile", [4, 4]),  # fewer tokens than tiles: ranked over all of them
    ):
        with attach(model, tokens=tokens, tile_budget=tile_budget) as attached:
            model(ids, **arguments)
            assert [one[:4] for one in attached.outcomes] == [(0, 80, after[0], 0), (1, 48, after[1], 0)]
    with attach(model, "uniform_grid", tokens=4), pytest.raises(OptionError, match="each of 5 tiles"):
        model(ids, **arguments)


# ---- the paper's layout

SHAPES = [(100, 40), (30, 110)]  # of which the checkpoint's own layout would cut rows or columns away


@pytest.mark.parametrize(("method", "tokens"), [("full", 1), ("consensusdrop", 20), ("visionzip", 40), ("fastv", 9)])
def test_official_pictures_are_laid_out_as_an_edited_configuration_would(
    tower_folder: Path, method: str, tokens: int
) -> None:
    stock = tiny_llava(tower_folder, **UNPAD, tokenizer_padding_side="left")
    edited = copy.deepcopy(stock)
    edited.config.mm_patch_merge_type, edited.config.image_grid_pinpoints = "spatial", [[2 * IMAGE, 2 * IMAGE]]
    before = stock.config.to_json_string()
    ids, mask = batch(row(5), row(6, 7), left=True)
    given = dict(attention_mask=mask, images=[tiles(5), tiles(5, 1)], image_sizes=SHAPES)
    said = []
    for model, options in ((stock, FIXED), (edited, {})):
        with attach(model, method, tokens, host_options=options) as attached:
            answer = model.generate(ids, **given, max_new_tokens=4, do_sample=False)
            said.append((answer, model(ids, **given).logits))
            after = 5 * PATCHES if method == "full" else tokens
            assert [one[:4] for one in attached.outcomes] == [(number, 5 * PATCHES, after, 0) for number in range(2)]
    assert all(map(torch.equal, *said))
    assert stock.config.to_json_string() == before and PREPARE not in vars(stock)


@NEEDS_HF
@pytest.mark.parametrize(("method", "tokens"), [("full", 1), ("consensusdrop", 20), ("fastv", 9)])
def test_pictures_of_transformers_are_laid_out_by_hand(method: str, tokens: int) -> None:
    model = hf_models.CASES["llava_next"].build()
    pixels = noise(2, 5, 3, IMAGE, IMAGE, seed=3)
    one, other = (
        hf_models.Picture([hf_models.IMAGE] * 5 * PATCHES, {"pixel_values": own[None], "image_sizes": size})
        for own, size in zip(pixels, torch.tensor(SHAPES).flip(1)[:, None], strict=True)
    )
    inputs = prompts([1, 5, one, 6, 7, 8], [1, other, 9, 10])
    encoded = {name: inputs[name] for name in ("pixel_values", "image_sizes")}
    with attach(model, method, tokens, host_options=FIXED) as attached:
        features = model.model.get_image_features(**encoded, return_dict=True).pooler_output
        answer = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        after = 5 * PATCHES if method == "full" else tokens
        assert [one[:4] for one in attached.outcomes] == [(number, 5 * PATCHES, after, 0) for number in range(2)]
    assert answer.shape[1] == inputs["input_ids"].shape[1] + 4
    if method == "full":
        states = model.model.vision_tower(pixels.flatten(0, 1), output_hidden_states=True).hidden_states[-2][:, 1:]
        for picture, found in zip(model.model.multi_modal_projector(states).split(5), features, strict=True):
            grid = picture[1:].view(2, 2, 4, 4, -1).transpose(1, 2).reshape(4 * PATCHES, -1)
            assert torch.allclose(torch.cat((picture[0], grid)), found, atol=1e-5)


def test_other_tiles_and_models_without_any_are_refused(tower_folder: Path, tmp_path: Path) -> None:
    model = tiny_llava(tower_folder, **UNPAD)
    with attach(model, tokens=20, host_options=FIXED), pytest.raises(OptionError, match="5 tiles, and one is 3"):
        model(torch.tensor([row(5)]), images=[tiles(3)], image_sizes=[(110, 30)])
    with pytest.raises(OptionError, match=r"cuts none .*'pad'.*: take a checkpoint of LLaVA 1"):
        attach(tiny_llava(tower_folder), tokens=20, host_options=FIXED)
    sizes = {"architectures": ["LlavaLlamaForCausalLM"], "image_aspect_ratio": "pad"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(OptionError, match="this model cuts none"):
        models.check(str(tmp_path), host_options=FIXED)
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"image_aspect_ratio": "anyres"}))
    assert models.check(str(tmp_path), host_options=FIXED)["host_options"] == FIXED


# ---- newlines


@pytest.mark.parametrize(
    ("order", "side", "tile_budget"), [("top_then_merged", "right", "per_tile"), ("raster", "left", "global")]
)
def test_dropped_newlines_are_all_that_is_missing(tower_folder: Path, order: str, side: str, tile_budget: str) -> None:
    """Of a tiled image, of two of them with another grid, and of none, in one padded batch with labels. Positions that
    are kept have gaps there.
    """
    model = tiny_llava(tower_folder, **UNPAD, tokenizer_padding_side=side)
    ids, mask = batch(row(5, 6), row(5, images=2, after=6), [1, 5, 6, 7], left=side == "left")
    images = [tiles(5), tiles(3, 1), tiles(3, 2), tiles(5, 3)]
    sizes = [(100, 70), (110, 30), (50, 110), (100, 100)]
    given = dict(attention_mask=mask, labels=torch.where(ids % 10 > 2, ids, -100), images=images, image_sizes=sizes)
    keeps = [("consensusdrop", {"tile_budget": tile_budget}, None)]
    if VERSION >= (5, 0) and order == "raster":  # transformers 4 takes no positions
        keeps.append(("random", {"positions": "keep"}, torch.zeros(3, 1)))
    for method, options, positions in keeps:
        found, counts = [], []
        for newlines, structural in (("keep", [6, 2, 8]), ("drop", [0, 0, 0])):
            with attach(model, method, 30, order=order, newlines=newlines, **options) as attached:
                results = model.prepare_inputs_labels_for_multimodal(ids, positions, past_key_values=None, **given)
            _, places, real, _, embeds, labels = results
            parts = [embeds, labels, *([] if places is None else [places])]
            found.append([tuple(part[index][shown] for part in parts) for index, shown in enumerate(real.bool())])
            counts.append([one[:3] for one in attached.outcomes])
            assert [one.structural for one in attached.outcomes] == structural
        assert counts[0] == counts[1]
        for kept, dropped in zip(*found, strict=True):
            stays = (kept[0] != model.model.image_newline).any(1)
            assert all(torch.equal(part[stays], fewer) for part, fewer in zip(kept, dropped, strict=True))


@NEEDS_HF
@pytest.mark.parametrize("name", ["llava_next", "llava_next_video", "llava_onevision", "llava_onevision video"])
def test_models_of_transformers_drop_them_too(name: str) -> None:
    """Those of images: those of videos stay."""
    case = hf_models.CASES[name]
    model, (a, b, c) = case.build(), (case.picture(number) for number in range(3))
    rows: list[list[Any]] = [[1, 5, a, 6, 7, 8], [1, b, 9, c, 11, 12], [1, 21, 22, 23]]
    longest = len(rows[1]) - 2
    for newlines in ("keep", "drop"):
        options = {"tile_budget": case.tile_budget, "newlines": newlines}
        with attach(model, "consensusdrop", case.tokens, **options) as attached:
            width = hf_models.rows_read(model, prompts(*rows))
            own = [one for one in attached.outcomes if one.row == 1]
            assert width == longest + sum(one.after + one.structural for one in own)
            stay = newlines == "keep" or " video" in name
            assert all((one.structural > 0) == stay and one.after < one.before for one in own)
            said = model.generate(**prompts(*rows), max_new_tokens=3, do_sample=False)[:, -3:]
            singles = [model.generate(**prompts(row), max_new_tokens=3, do_sample=False)[:, -3:] for row in rows]
            assert torch.equal(said, torch.cat(singles))


# ---- where merged tokens and tokens of no place are put


def zones(image: Image, **options: Any) -> list[list[int]]:
    method = make("divprune", **options)
    units = units_of([image], [Budget(6)], method)
    slots = torch.zeros(len(units), 1, dtype=torch.long)
    reduction = Reduction(slots[..., None], slots, slots, slots, slots, zone=slots)
    group: Any = SimpleNamespace(units=SimpleNamespace(units=units), reduction=reduction)
    return _tails(group, [image], method)[..., 0].tolist()


def test_what_is_in_one_piece_has_a_place_of_its_own_and_what_is_mixed_has_none() -> None:
    """A base tile in one piece, then two tiles side by side: rows of two tokens each, with a newline after each row."""
    tile = np.array([0, 0, 0, 0, 1, 1, 2, 2, 0, 1, 1, 2, 2, 0])
    token = np.array([0, 1, 2, 3, 0, 1, 0, 1, -1, 2, 3, 2, 3, -1])
    image, end = Image(0, np.arange(1, 15), tile, token, 3, False, 0), 14
    base, left, right = zones(image)
    assert 0 < base[AHEAD] < 1 * ROW and 4 * ROW < base[AFTER] < 5 * ROW and base[BEHIND] > end * ROW
    for mixed in (left, right):
        assert all(end * ROW < mixed[zone] < (end + 1) * ROW for zone in (AHEAD, AFTER, BEHIND))
        assert mixed[AHEAD] < mixed[AFTER] == mixed[BEHIND]
    assert left[AHEAD] < right[AHEAD] and left[BEHIND] < right[BEHIND]
    (ranked,) = zones(image, tile_budget="global")
    assert ranked[AHEAD] < 1 * ROW and ranked[AFTER] > 13 * ROW


def test_means_of_merged_tokens() -> None:
    """Whole numbers are rounded; a kept token is itself, and a slot of no patch is zero."""
    none, owner = torch.empty(0), torch.tensor([[1, 1, 0, -1, 1, 3, 3]])
    reduction = Reduction(none, none, none, torch.tensor([[2, 0, -1, 5]]), owner)
    places = torch.tensor([[0, 4, 7, 8, 4, 10, 11]])
    assert member_means(places, reduction).tolist() == [[7, 3, 0, 10]]  # of 7, of 0, 4 and 4, of none, of 10 and 11
    both = torch.stack((places, places + 1), -1)
    assert member_means(both, reduction)[..., 1].tolist() == [[8, 4, 0, 12]]
    assert torch.allclose(member_means(places.float(), reduction), torch.tensor([[7, 8 / 3, 0, 10.5]]))
