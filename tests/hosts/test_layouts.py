"""The paper's layout of tiled images, a fixed grid of 2 x 2 tiles without unpadding and newlines, on both hosts."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hf_models
import numpy as np
import pytest
import torch
import transformers
from hf_models import IMAGE, noise, prompts
from models import IMAGE as PIXELS
from models import PATCHES, tiny_llava
from prompts import ANYRES, batch, row, tiles

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models.convert import convert
from llava_consensus.hosts.images import Image
from llava_consensus.hosts.official import PREPARE
from llava_consensus.hosts.rows import ROW, _tails, member_means
from llava_consensus.hosts.units import units_of
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.tokens import AFTER, AHEAD, BEHIND, Reduction
from llava_consensus.training.official import check as check_training
from llava_consensus.training.plan import TrainingPlan

FIXED = {"layout": "2880"}
NEEDS_HF = pytest.mark.skipif(
    tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 19),
    reason="models of transformers need version 5.19 or later",
)
SIZES = [(100, 40), (30, 110)]  # of which the checkpoint's own layout would cut rows or columns away


@pytest.mark.parametrize(("method", "tokens"), [("full", 1), ("consensusdrop", 20), ("visionzip", 40), ("fastv", 9)])
@torch.no_grad()
def test_official_pictures_are_laid_out_as_an_edited_configuration_would(
    tower_folder: Path, method: str, tokens: int
) -> None:
    stock = tiny_llava(tower_folder, **ANYRES, mm_patch_merge_type="spatial_unpad", tokenizer_padding_side="left")
    edited = copy.deepcopy(stock)
    edited.config.mm_patch_merge_type, edited.config.image_grid_pinpoints = "spatial", [[2 * PIXELS, 2 * PIXELS]]
    before = stock.config.to_json_string()
    ids, mask = batch(row(5), row(6, 7), left=True)
    given = dict(attention_mask=mask, images=[tiles(5), tiles(5, 1)], image_sizes=SIZES)
    said = []
    for model, options in ((stock, FIXED), (edited, {})):
        with attach(model, method, tokens, host_options=options) as attached:
            logits = model(ids, **given).logits
            answer = model.generate(ids, **given, max_new_tokens=4, do_sample=False)
            said.append((logits, answer, [outcome[:4] for outcome in attached.outcomes]))
    assert torch.equal(said[0][0], said[1][0]) and torch.equal(said[0][1], said[1][1])
    after = 5 * PATCHES if method == "full" else tokens
    assert said[0][2] == said[1][2] == [(number, 5 * PATCHES, after, 0) for number in range(2)]
    assert stock.config.to_json_string() == before and PREPARE not in vars(stock)


@NEEDS_HF
@pytest.mark.parametrize(("method", "tokens"), [("full", 1), ("consensusdrop", 20), ("fastv", 9)])
@torch.no_grad()
def test_pictures_of_transformers_are_laid_out_by_hand(method: str, tokens: int) -> None:
    model = hf_models.CASES["llava_next"].build()
    pixels = noise(2, 5, 3, PIXELS, PIXELS, seed=3)
    pictures = [
        hf_models.Picture([IMAGE] * 5 * PATCHES, {"pixel_values": one[None], "image_sizes": torch.tensor([size[::-1]])})
        for one, size in zip(pixels, SIZES, strict=True)
    ]
    inputs = prompts([1, 5, pictures[0], 6, 7, 8], [1, pictures[1], 9, 10])
    with attach(model, method, tokens, host_options=FIXED) as attached:
        encoded = {name: inputs[name] for name in ("pixel_values", "image_sizes")}
        features = model.model.get_image_features(**encoded, return_dict=True).pooler_output
        answer = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        after = 5 * PATCHES if method == "full" else tokens
        assert [outcome[:4] for outcome in attached.outcomes] == [(n, 5 * PATCHES, after, 0) for n in range(2)]
    assert answer.shape[1] == inputs["input_ids"].shape[1] + 4
    if method == "full":
        projected = model.model.multi_modal_projector(
            model.model.vision_tower(pixels.flatten(0, 1), output_hidden_states=True).hidden_states[-2][:, 1:]
        ).view(2, 5, PATCHES, -1)
        for picture, found in zip(projected, features, strict=True):
            grid = picture[1:].view(2, 2, 4, 4, -1).transpose(1, 2).reshape(4 * PATCHES, -1)
            assert torch.allclose(torch.cat((picture[0], grid)), found, atol=1e-5)


@torch.no_grad()
def test_other_numbers_of_tiles_are_refused(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder, **ANYRES, mm_patch_merge_type="spatial_unpad")
    ids, _ = batch(row(5))
    with attach(model, tokens=20, host_options=FIXED), pytest.raises(OptionError, match="5 tiles, and one is 3"):
        model(ids, images=[tiles(3)], image_sizes=[(110, 30)])


def test_models_without_tiles_are_refused_before_weights(tower_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cuts none .*'pad'.*: take a checkpoint of LLaVA 1"):
        attach(tiny_llava(tower_folder), tokens=20, host_options=FIXED)
    sizes = {"architectures": ["LlavaLlamaForCausalLM"], "image_aspect_ratio": "pad"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(OptionError, match="this model cuts none"):
        models.check(str(tmp_path), host_options=FIXED)
    with pytest.raises(OptionError, match=r"knows layout=stock\|2880"):
        models.check(str(tmp_path), host_options={"layout": "2881"})
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"image_aspect_ratio": "anyres"}))
    assert models.check(str(tmp_path), host_options=FIXED)["host_options"] == FIXED


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"image_aspect_ratio": "anyres_max_9"}, r"image_aspect_ratio='anyres_max_9': .* knows square\|pad\|anyres, "),
        (
            ANYRES | {"mm_patch_merge_type": "spatial_maxpool2x2"},
            r"mm_patch_merge_type='spatial_maxpool2x2': .*\|spatial_unpad, ",
        ),
    ],
)
def test_pictures_that_official_llava_lays_out_otherwise_are_refused_before_weights(
    tower_folder: Path, tmp_path: Path, given: dict[str, Any], reason: str
) -> None:
    """By check, load, conversion, training and attach; a merge that nothing reads is let through."""
    folder = tmp_path / "llava-tiny"
    folder.mkdir()
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 1, "mm_vision_tower": str(tower_folder)}
    made = {"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava_llama", **sizes}
    (folder / "config.json").write_text(json.dumps(made | given))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    plan = TrainingPlan(str(folder), tmp_path, tmp_path, tmp_path / "llava-out", None, ())
    refused: list[Callable[[], object]] = [
        lambda: models.check(str(folder)),
        lambda: models.load(str(folder), models.Loading("cpu")),
        lambda: convert(folder, tmp_path / "out"),
        lambda: check_training(plan, folder),
        lambda: attach(tiny_llava(tower_folder, **given), tokens=4),
    ]
    for call in refused:
        with pytest.raises(OptionError, match=reason):
            call()
    (folder / "config.json").write_text(json.dumps(made | given | {"image_aspect_ratio": "pad"}))
    assert models.check(str(folder))


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
