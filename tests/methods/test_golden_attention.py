"""PruMerge(+), VisionZip and VisPruner against arrays of their authors' own code (tests/golden/README.md), on images
that go through the same tiny tower: kept tokens are equal in their order, and output tokens to 1e-5.
"""

from functools import cache
from typing import Any

import pytest
import torch
from golden_cases import arrays as golden
from golden_cases import seen
from models import collected
from transformers import CLIPVisionConfig, CLIPVisionModel

from llava_consensus.methods import make
from llava_consensus.methods.vispruner import ROUND, in_halves, list_table, thin_once
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.tokens import Reduction, VisualTokens

TOLERANCE = 1e-5
SHAPE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=24, num_attention_heads=4, patch_size=14)


@cache
def tower_of(side: int) -> Any:
    tower = CLIPVisionModel(CLIPVisionConfig(**SHAPE, image_size=14 * side)).eval()
    own = {key.removeprefix("vision_model."): key for key in tower.state_dict()}
    weights = {own[key.removeprefix("vision_model.")]: value.float() for key, value in golden("clip_tower").items()}
    (embedding,) = (key for key in weights if key.endswith("position_embedding.weight"))
    weights[embedding] = weights[embedding][: side**2 + 1]
    missing = tower.load_state_dict(weights, strict=False).missing_keys
    assert all("position_ids" in key for key in missing)
    return tower


@torch.no_grad()
def tokens_of(pictures: torch.Tensor, method: Any) -> VisualTokens:
    """What a host collects of images [U, side, side, 3] in which a patch is one pixel."""
    pixels = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
    pixels = pixels.repeat_interleave(14, 2).repeat_interleave(14, 3)
    return collected(tower_of(pictures.shape[1]), method, pixels)


def same(name: str, case: str, result: Reduction) -> None:
    assert (result.tokens - golden(name)[f"{case}/tokens"]).abs().max() <= TOLERANCE


def pictures_of(case: str, arrays: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    kind, number = case.split("-")
    if kind == "odd":
        return arrays["odd"], int(number)
    tiles = 2 if kind == "tiles" else 1
    return arrays["tiles"][:tiles], int(number) // tiles


BUDGETS = ("fixed-192", "fixed-128", "fixed-64", "fixed-32", "fixed-63", "tiles-128", "odd-41")


@pytest.mark.parametrize("case", BUDGETS)
def test_prumerge_equals_the_official_fixed_path(case: str) -> None:
    """The official non-adaptive path at ratio (T - 1) / N, tile by tile: it pools nothing then."""
    arrays, method = golden("prumerge"), make("prumerge")
    pictures, tokens = pictures_of(case, arrays)
    result = method.reduce(tokens_of(pictures, method), Budget(tokens))
    assert result.source[:, :-1].tolist() == arrays[f"{case}/index"].tolist()
    same("prumerge", case, result)


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize(("name", "kind"), [("prumerge", "adaptive"), ("prumerge_plus", "plus")])
def test_prumerge_equals_the_official_adaptive_path(name: str, kind: str, number: int) -> None:
    arrays, method, case = golden("prumerge"), make(name, budget="adaptive"), f"{kind}-{number}"
    result = method.reduce(tokens_of(arrays["adaptive"][number : number + 1], method), Budget(64))
    assert result.source[:, :-1].tolist() == arrays[f"{case}/index"].tolist()
    same("prumerge", case, result)


@pytest.mark.parametrize("case", [*BUDGETS, "class-only"])
def test_visionzip_equals_the_official_code(case: str) -> None:
    arrays, method = golden("visionzip"), make("visionzip")
    pictures, tokens = (arrays["tiles"][:1], 6) if case == "class-only" else pictures_of(case, arrays)
    budget = Budget(tokens, 5) if case == "class-only" else Budget(tokens)
    given = tokens_of(pictures, method)
    result = method.reduce(given, budget)
    size, official = given.projected.shape[1], arrays[f"{case}/index"].long()  # class token is 0
    assert official[:, 0].tolist() == [0] * len(official)
    assert result.kept.tolist() == (official[:, 1:] - 1).sort(dim=1).values.tolist()
    assert result.anchors.tolist() == arrays[f"{case}/targets"].tolist()
    owner = torch.full((len(official), size), -1).scatter(1, result.kept, 1)
    joined = result.owner[owner < 0].view(len(official), -1) - 1 - result.kept.shape[1]
    assert joined.tolist() == arrays[f"{case}/group"].tolist()
    same("visionzip", case, result)


@pytest.mark.parametrize("case", ["fixed-128", "fixed-64", "fixed-33", "tiles-128", "odd-42"])
def test_vispruner_equals_the_official_code_where_margins_are_wide(case: str) -> None:
    """Inputs on which the official loop gives the same in float32 and float64; other odd T crash officially."""
    arrays = golden("vispruner")
    features = arrays[f"{case}/features"]
    given = seen(features, arrays[f"{case}/saliency"])
    result = make("vispruner").reduce(given, Budget(int(case.split("-")[1]) // len(features)))
    assert result.kept.tolist() == arrays[f"{case}/index"].tolist()
    same("vispruner", case, result)


def test_vispruner_round_by_round_on_the_towers_own_features() -> None:
    """The official loop traced, each round replayed from its official list. Ours differs where two survivors are less
    than 2e-6 apart: ties are broken by place, and the official order of near ties hangs on the last bit.
    """
    arrays, method = golden("vispruner"), make("vispruner")
    given = tokens_of(arrays["replay/picture"], method)
    assert (given.features - arrays["replay/features"]).abs().max() <= TOLERANCE
    saliency = method.reduce(given, Budget(64)).vision
    order = saliency[0].sort(descending=True, stable=True).indices
    assert order[:32].tolist() == arrays["replay/important"][0].tolist()
    direction = torch.nn.functional.normalize(arrays["replay/features"], dim=-1)
    similarity = direction @ direction.transpose(1, 2)
    table, entries = list_table(similarity)
    lists = arrays["replay/lists"].long().split(arrays["replay/lengths"].tolist())
    scores = arrays["replay/scores"].split([(len(one) + 1) // 2 for one in lists[:-1]])
    assert len(lists) == 65 and len(lists[-1]) == 32
    exact = 0
    for before, after, official in zip(lists[:-1], lists[1:], scores, strict=True):
        own = similarity[0][before[::2]][:, before[1::2]].amax(1)
        assert (own - official).abs().max() <= TOLERANCE
        halves = in_halves(entries, before[None])
        left = halves[1].flatten()[thin_once(table, halves)[0, min(ROUND, len(before) - 32) :]]
        assert len(left) == len(before) - ROUND and left[-len(before[1::2]) :].tolist() == before[1::2].tolist()
        at = {place: own[slot].item() for slot, place in enumerate(before[::2].tolist())}
        near = [abs(at[a] - at[b]) for a, b in zip(left.tolist(), after.tolist(), strict=True) if a != b]
        assert max(near, default=0.0) < 2e-6
        exact += not near
    assert exact >= 60
