"""PruMerge(+), VisionZip and VisPruner where their authors' arrays (test_golden_attention.py) say nothing: options,
edges, and the contract on both kinds of host layout.
"""

from pathlib import Path
from typing import Any

import golden_cases
import pytest
import torch
from models import IMAGE, as_units, tiny_llava
from prompts import ANYRES, row, tiles
from units import seen, unit

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.methods import make, vispruner
from llava_consensus.methods.vispruner import thin
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.tokens import VisionAttention, VisualTokens

NAMES = ("prumerge", "prumerge_plus", "visionzip", "vispruner")


def test_visionzip_without_a_class_token_and_with_plain_means() -> None:
    saliency = [0.05, 0.30, 0.05, 0.05, 0.25, 0.05, 0.05, 0.05]
    angles = [0.0, 45.0, 8.0, 80.0, 45.0, 20.0, 70.0, 90.0]  # of patches 1..8; those of 2 and 5 do not matter
    tokens = seen(saliency, angles, [1.0, 2, 3, 4, 5, 6, 7, 8])
    mean = make("visionzip", contextual="mean").reduce(tokens, Budget(5, 2)).tokens[0, :, 0]
    assert torch.allclose(mean, torch.tensor([0.0, 2, 5, 2, 25 / 4]))
    without = make("visionzip", class_token=False).reduce(tokens, Budget(4, 2))
    assert without.kept.tolist() == [[1, 4]] and without.tokens.shape == (1, 4, 1)


def test_prumerge_after_the_projector() -> None:
    """Four tokens of two patches each: their shares of the attention sum to one, and they are summed as they are."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, 2, 8, 4, generator=generator) for _ in range(2))
    members, values = torch.arange(8).view(4, 2), torch.tensor([[[1.0], [10], [100], [1000]]])
    place = torch.arange(4)[None]
    tokens = VisualTokens(values, 0 * place, place, members=members, attention=VisionAttention(query, key, 0.5, 0))
    result = make("prumerge", neighbours=0).reduce(tokens, Budget(3))
    rows, keys = (states.transpose(1, 2).flatten(2) for states in (query, key))
    shares = torch.softmax(rows @ keys.transpose(1, 2) * 8**-0.5, -1).mean(1)[0].view(4, 2).sum(1)
    assert result.vision is not None and torch.allclose(result.vision[0], shares)
    assert result.kept[0].tolist() == shares.topk(2).indices.sort().values.tolist()
    pruned = shares.scatter(0, result.kept[0], 0) @ values[0, :, 0]
    expected = {place: float(values[0, place, 0]) for place in result.kept[0].tolist()}
    expected[int(result.anchors[0, 0])] = float(pruned)
    assert result.source[0].tolist() == sorted(expected)
    assert result.tokens[0, :, 0].tolist() == pytest.approx([expected[place] for place in sorted(expected)])


@pytest.mark.parametrize("name", NAMES)
def test_order_of_ties_is_by_index_on_twins(name: str) -> None:
    """Two equal patches: the first one is never kept after the second."""
    given = unit(24, batch=1)
    given.features[:, 7], given.attention.key[:, :, 8] = given.features[:, 3], given.attention.key[:, :, 4]
    kept = make(name, **({"ratio": 1.0} if name == "vispruner" else {})).reduce(given, Budget(9)).kept[0].tolist()
    assert 3 in kept or 7 not in kept


def test_adaptive_prumerge_without_outliers_with_nothing_to_prune_and_of_one_unit() -> None:
    """Ours differs: without outliers the official "+" divides by zero, where ours spaces as for one of them; where
    nothing is pruned it appends the projection of a row of zeros.
    """
    given = golden_cases.seen(torch.ones(1, 60, 1), torch.full((1, 60), 1 / 60))
    plain = make("prumerge", budget="adaptive").reduce(given, Budget(12))
    assert plain.tokens.shape[1] == 1 and torch.allclose(plain.tokens, torch.ones(1))  # sum of a_j x_j, as officially
    assert make("prumerge_plus", budget="adaptive").reduce(given, Budget(12)).kept.tolist() == [[0, 20, 40]]
    saliency = torch.linspace(1.0, 1.1, 60)
    saliency[-12:] = 9.0 + torch.arange(12)  # spacing 1, and the last patch, which no sample reaches, is an outlier
    given = golden_cases.seen(torch.ones(1, 60, 1), saliency[None] / saliency.sum())
    result = make("prumerge_plus", budget="adaptive").reduce(given, Budget(12))
    assert result.tokens.shape[1] == 60 and result.anchors.shape == (1, 0) and (result.owner >= 0).all()
    with pytest.raises(ValueError, match="one by one"):
        make("prumerge", budget="adaptive").reduce(unit(batch=2), Budget(5))


def test_prumerge_plus_fixed_walks_spreads_or_takes_a_ratio() -> None:
    """At the ratio a quarter of 16 tokens by attention, and every fourth from the second on; one that is both is taken
    once, and the next by attention in its place.
    """
    saliency = torch.linspace(1.0, 1.1, 576)[None].clone()
    saliency[0, [100, 30]] = torch.tensor([9.0, 8.0])
    walk = make("prumerge_plus").select(saliency, 63)[0].tolist()
    assert walk == [100, 30, *[place for place in range(0, 576, 9) if place not in (100, 30)][:61]]
    even = make("prumerge_plus", spread="even").select(saliency, 63)[0].tolist()
    assert even[:2] == [100, 30] and even[2:] == [place * 576 // 61 for place in range(61)]
    many = saliency.clone()
    many[0, :100] = 20.0 + torch.arange(100)
    assert make("prumerge_plus").select(many, 63)[0].tolist() == list(range(99, 36, -1))  # more outliers than T
    saliency = torch.tensor([[0.01 * place for place in range(16)]])
    kept = make("prumerge_plus", spread="ratio").select(saliency, 8)[0].tolist()
    assert kept == [15, 14, 13, 12, 2, 6, 10, 11]
    random = torch.rand(1, 576, generator=torch.Generator().manual_seed(0))
    assert sorted(make("prumerge_plus", spread="ratio").select(random, 144)[0].tolist()[72:])[0] <= 4


def test_visionzip_with_as_many_targets_as_tokens_leaves_them_as_they_are() -> None:
    given = unit(24, batch=1)
    result = make("visionzip").reduce(given, Budget(24, 23))
    assert result.kept.shape[1] == 0 and result.anchors.shape[1] == 23
    full = make("visionzip", class_token=False).reduce(given, Budget(24, 24))
    assert torch.allclose(full.tokens, given.features[..., :6] * 2) and full.owner.tolist() == [list(range(24))]


@pytest.mark.parametrize(("size", "count"), [(150, 9), (151, 8), (13, 1)])
@pytest.mark.parametrize(("long", "nearest"), [(1024, 32), (8, 4), (8, 1)])
def test_vispruner_thins_out_as_if_everything_were_compared_again_and_again(
    monkeypatch: pytest.MonkeyPatch, long: int, nearest: int, size: int, count: int
) -> None:
    """Also if only the nearest of each token are looked up, however few they are."""
    monkeypatch.setattr(vispruner, "LONG", long)
    monkeypatch.setattr(vispruner, "NEAREST", nearest)
    generator = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(2, size, 8, generator=generator), dim=-1)
    points[:, ::4] = points[:, :1]  # many ties
    similarity = points @ points.transpose(1, 2)
    for index, one in enumerate(similarity):
        left = list(range(size))
        while len(left) > count:
            even, odd = left[::2], left[1::2]
            order = one[even][:, odd].amax(1).sort(descending=True, stable=True).indices.tolist()
            left = [even[place] for place in order[min(8, len(left) - count) :]] + odd
        assert thin(similarity, count)[index].tolist() == left


def of_llava(model: Any, name: str, images: torch.Tensor) -> VisualTokens:
    with attach(model, name, tokens=1) as attached:
        (found,) = attached.entrance.encode(images, [len(images)])
        project = model.get_model().mm_projector
        return as_units(found.projected, found.tiles.parts, found.tiles.scale, attached.method, project)


@torch.no_grad()
def test_taps_are_those_of_the_blocks_they_name(llava_model: Any, tower_folder: Path) -> None:
    from transformers import CLIPVisionModel

    images = tiles(2)
    tower = CLIPVisionModel.from_pretrained(tower_folder)
    states = tower(images, output_hidden_states=True).hidden_states[-2]
    blocks = getattr(tower, "vision_model", tower).encoder.layers
    given = of_llava(llava_model, "prumerge", images)
    key = blocks[3].self_attn.k_proj(blocks[3].layer_norm1(states))  # the last block, which reads the features
    assert torch.allclose(given.attention.key.transpose(1, 2).flatten(2), key, atol=1e-4)
    assert torch.allclose(given.features, states[:, 1:], atol=1e-4) and given.class_feature is None
    assert torch.allclose(given.project(given.features), given.projected, atol=1e-4)
    given = of_llava(llava_model, "visionzip", images)
    assert torch.allclose(given.class_feature, states[:, 0], atol=1e-4)
    assert not torch.allclose(given.attention.key.transpose(1, 2).flatten(2), key, atol=1e-4)  # its own block's
    assert of_llava(llava_model, "vispruner", images).class_feature is None


def test_a_tower_that_ends_with_the_features_is_refused(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder, mm_vision_select_layer=-1)
    with pytest.raises(OptionError, match="vision_layer=2"):
        attach(model, "prumerge", tokens=5)
    attach(model, "visionzip", tokens=5).detach()


def rows_of(model: Any, name: str, tokens: int, images: Any, **options: Any) -> tuple[torch.Tensor, Any]:
    """Visual rows and newlines of one prompt between its text, and the outcome of its picture."""
    sizes = options.pop("sizes", None)
    ids = torch.tensor([row(5, 6)])
    with attach(model, name, tokens=tokens, **options) as attached:
        embeds = model.prepare_inputs_labels_for_multimodal(ids, None, None, None, None, images, sizes)[4]
    return embeds[0, 3:-4], attached.outcomes[0]


@pytest.mark.parametrize("name", ["prumerge", "prumerge_plus", "visionzip"])
@torch.no_grad()
def test_official_order_of_one_picture_is_that_of_the_reduction(tower_folder: Path, name: str) -> None:
    rows, outcome = rows_of(tiny_llava(tower_folder), name, 7, tiles(1))
    assert torch.equal(rows, outcome.reductions[0][1].tokens[0])
    other, outcome = rows_of(tiny_llava(tower_folder), name, 7, tiles(1), order="raster")
    if name == "visionzip":
        assert torch.equal(other[0], rows[0])  # the class token stays ahead
    assert outcome.reductions[0][1].source[0, 1:].tolist() == sorted(outcome.reductions[0][1].source[0, 1:].tolist())


@torch.no_grad()
def test_order_of_tiles(tower_folder: Path) -> None:
    """VisionZip's as the official code has it: base tile whole, the tiles' patches in one raster, their class tokens,
    their contextual ones; in a flat layout tile by tile, as PruMerge's always.
    """
    model = tiny_llava(tower_folder, **ANYRES, mm_patch_merge_type="spatial")
    rows, outcome = rows_of(model, "visionzip", 35, [tiles(5)], merged=10, sizes=[(100, 100)])
    parts = [reduction.tokens[0] for _, reduction in outcome.reductions]
    assert [len(part) for part in parts] == [7] * 5 and torch.equal(rows[:7], parts[0])
    assert torch.equal(rows[23:27], torch.stack([part[0] for part in parts[1:]]))
    assert torch.equal(rows[27:], torch.cat([part[5:] for part in parts[1:]]))
    side, places = 4, []
    for number, (_, reduction) in enumerate(outcome.reductions[1:]):
        for slot, patch in enumerate(reduction.source[0, 1:5].tolist()):
            at = (number // 2 * side + patch // side) * 2 * side + number % 2 * side + patch % side
            places.append((at, parts[number + 1][1 + slot]))
    assert torch.equal(rows[7:23], torch.stack([token for _, token in sorted(places, key=lambda one: one[0])]))
    flat = rows_of(tiny_llava(tower_folder), "visionzip", 20, tiles(3).view(1, 3, 3, IMAGE, IMAGE))
    for rows, outcome in (flat, rows_of(model, "prumerge", 35, [tiles(5)], sizes=[(100, 100)])):
        assert torch.equal(rows, torch.cat([reduction.tokens[0] for _, reduction in outcome.reductions]))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_anyres_with_newlines(tower_folder: Path, name: str) -> None:
    model = tiny_llava(tower_folder, **ANYRES, mm_patch_merge_type="spatial_unpad")
    for tile_budget in ("per_tile", "global"):
        rows, outcome = rows_of(model, name, 20, [tiles(5)], sizes=[(100, 60)], tile_budget=tile_budget)
        assert outcome.after == 20 and outcome.structural == 4 and len(rows) == 24
    if name.startswith("prumerge"):
        rows, outcome = rows_of(model, name, 20, [tiles(5)], sizes=[(100, 60)], budget="adaptive")
        assert len(rows) == outcome.after + 4
