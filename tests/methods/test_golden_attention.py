"""PruMerge(+), VisionZip and VisPruner against arrays their authors' own code gave (tests/golden/README.md).

The images go through the same tiny tower by our hooks, on whichever stack runs the test; kept tokens must be equal in
their order and output tokens to 1e-5. `pytest tests/methods/test_golden_attention.py -s` prints the largest deviation
of each.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import seen
from models import collected
from transformers import CLIPVisionConfig, CLIPVisionModel

from llava_consensus.methods import make
from llava_consensus.methods.vispruner import ROUND, in_halves, list_table, thin_once
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.tokens import Reduction, VisualTokens

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-5
SHAPE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=24, num_attention_heads=4, patch_size=14)


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


@cache
def tower_of(side: int) -> Any:
    tower = CLIPVisionModel(CLIPVisionConfig(**SHAPE, image_size=14 * side)).eval()
    own = {key.removeprefix("vision_model."): key for key in tower.state_dict()}
    weights = {
        own[key.removeprefix("vision_model.")]: torch.from_numpy(value).float()
        for key, value in golden("clip_tower").items()
    }
    (embedding,) = (key for key in weights if key.endswith("position_embedding.weight"))
    weights[embedding] = weights[embedding][: side**2 + 1]
    missing = tower.load_state_dict(weights, strict=False).missing_keys
    assert all("position_ids" in key for key in missing)
    return tower


@torch.no_grad()
def tokens_of(pictures: np.ndarray, method: Any) -> VisualTokens:
    """What a host collects of images [U, side, side, 3] in which a patch is one pixel."""
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    pixels = pixels.repeat_interleave(14, 2).repeat_interleave(14, 3)
    return collected(tower_of(pictures.shape[1]), method, pixels)


def same(name: str, case: str, result: Reduction) -> None:
    """Prints the largest deviation of the output tokens and demands that it is small."""
    deviation = np.abs(result.tokens.numpy() - golden(name)[f"{case}/tokens"]).max()
    shape = "x".join(str(size) for size in result.tokens.shape[:2])
    print(f"{name:10} {case:12} {shape:>8} tokens, same indices, largest deviation {deviation:.1e}")
    assert deviation <= TOLERANCE


def pictures_of(case: str, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, int]:
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
    size, official = given.projected.shape[1], torch.from_numpy(arrays[f"{case}/index"]).long()  # class token is 0
    assert official[:, 0].tolist() == [0] * len(official)
    assert result.kept.tolist() == (official[:, 1:] - 1).sort(dim=1).values.tolist()
    assert result.anchors.tolist() == arrays[f"{case}/targets"].tolist()
    owner = torch.full((len(official), size), -1).scatter(1, result.kept, 1)
    joined = result.owner[owner < 0].view(len(official), -1) - 1 - result.kept.shape[1]
    assert joined.tolist() == arrays[f"{case}/group"].tolist()
    same("visionzip", case, result)


VISPRUNER = ("fixed-128", "fixed-64", "fixed-33", "tiles-128", "odd-42")


@pytest.mark.parametrize("case", VISPRUNER)
def test_vispruner_equals_the_official_code_where_margins_are_wide(case: str) -> None:
    """Inputs on which the official loop gives the same in float32 and float64; other odd T crash officially."""
    arrays = golden("vispruner")
    features, saliency = (torch.from_numpy(arrays[f"{case}/{name}"]) for name in ("features", "saliency"))
    result = make("vispruner").reduce(seen(features, saliency), Budget(int(case.split("-")[1]) // len(features)))
    assert result.kept.tolist() == arrays[f"{case}/index"].tolist()
    same("vispruner", case, result)


def test_vispruner_round_by_round_on_the_towers_own_features() -> None:
    """The official loop traced, each round replayed from its official list. Ours differs where two survivors are less
    than 2e-6 apart: ties are broken by place, and the official order of near ties hangs on the last bit.
    """
    arrays, method = golden("vispruner"), make("vispruner")
    given = tokens_of(arrays["replay/picture"], method)
    deviation = np.abs(given.features.numpy() - arrays["replay/features"]).max()
    assert deviation <= TOLERANCE
    saliency = method.reduce(given, Budget(64)).vision
    order = saliency[0].sort(descending=True, stable=True).indices
    assert order[:32].tolist() == arrays["replay/important"][0].tolist()
    direction = torch.nn.functional.normalize(torch.from_numpy(arrays["replay/features"]), dim=-1)
    similarity = direction @ direction.transpose(1, 2)
    table, entries = list_table(similarity)
    lists = np.split(arrays["replay/lists"].astype(np.int64), np.cumsum(arrays["replay/lengths"])[:-1])
    scores = np.split(arrays["replay/scores"], np.cumsum(np.array([(len(one) + 1) // 2 for one in lists[:-1]]))[:-1])
    assert len(lists) == 65 and len(lists[-1]) == 32
    worst, exact = 0.0, 0
    for before, after, official in zip(lists[:-1], lists[1:], scores, strict=True):
        own = similarity[0][before[::2]][:, before[1::2]].amax(1)
        worst = max(worst, float(np.abs(own.numpy() - official).max()))
        halves = in_halves(entries, torch.from_numpy(before)[None])
        left = halves[1].flatten()[thin_once(table, halves)[0, min(ROUND, len(before) - 32) :]].numpy()
        assert len(left) == len(before) - ROUND and left[-len(before[1::2]) :].tolist() == before[1::2].tolist()
        at = {place: own[slot].item() for slot, place in enumerate(before[::2].tolist())}
        near = [abs(at[a] - at[b]) for a, b in zip(left, after, strict=True) if a != b]
        assert max(near, default=0.0) < 2e-6
        exact += not near
    print(f"vispruner  replay: {exact} of {len(scores)} rounds identical, similarities deviate {worst:.1e} at most")
    assert worst <= TOLERANCE and exact >= 60
