"""Methods of 2025 and 2026 after the tower against arrays their authors' own code gave (tests/golden/README.md): the
same tokens, in the same order where that code has one.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import arrays as golden
from golden_cases import seen
from safetensors.torch import save_file
from torch.nn.functional import one_hot

from llava_consensus.errors import OptionError
from llava_consensus.methods import make
from llava_consensus.methods.anchorprune import AnchorPrune
from llava_consensus.methods.flashvid import FlashVID
from llava_consensus.methods.scope import cover
from llava_consensus.methods.scorer import PARTS
from llava_consensus.methods.vidcom2 import likeness, shares, still
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.saliency import class_saliency
from llava_consensus.reduction.tokens import ClipSides, Need, Reduction, VisionAttention, VisualTokens, Words


def cases(name: str, array: str) -> list[str]:
    return [key.removeprefix(f"{array}_") for key in golden(name) if key.startswith(f"{array}_")]


def without_class(tokens: torch.Tensor, arrays: dict[str, torch.Tensor], case: str) -> VisualTokens:
    """The same for a tower without a class token, as that of Qwen2.5-VL, with queries and keys of one or two blocks."""
    blocks = [
        VisionAttention(arrays[f"qwen-{front}query_{case}"].float(), arrays[f"qwen-{front}key_{case}"].float(), 1.0, 0)
        for front in ("", "early_")
        if f"qwen-{front}query_{case}" in arrays
    ]
    return seen(tokens)._replace(attention=blocks[0], earlier=blocks[-1])


def asked(patches: torch.Tensor, text: torch.Tensor) -> ClipSides:
    """Patches [U, n, P], and one question of segments or words [M, P] about all of their tiles."""
    shape = len(patches), *text.shape
    return ClipSides(patches.float(), text.float().expand(shape), torch.ones(shape[:2], dtype=torch.bool))


def words_of(text: torch.Tensor) -> Words:
    return Words(text.float()[None], torch.ones(1, len(text), dtype=torch.bool))


def video_of(case: str, arrays: dict[str, torch.Tensor]) -> VisualTokens:
    """A video whose frames lie one after the other."""
    frames, size, _ = map(int, case.split("_"))
    frame, patch = torch.arange(frames).repeat_interleave(size), torch.arange(size).repeat(frames)
    projected = arrays[f"tokens_{case}"].float()[None]
    return VisualTokens(projected, frame[None], patch[None], tiles_per_unit=frames)


def kept_of(case: str) -> int:
    return int(case.split("_")[1])


def options_of(case: str, *names: str) -> dict[str, float]:
    """Those options of a method that a case names after its sizes."""
    return dict(zip(names, map(float, case.split("_")[2:]), strict=False))


def equal(given: VisualTokens, arrays: dict[str, torch.Tensor], case: str, name: str, **options: Any) -> Reduction:
    """What a method makes of tokens, if it keeps those that its authors' code keeps."""
    kept = arrays[f"kept_{case}"].long()
    result = make(name, **options).reduce(given, Budget(kept.shape[-1]))
    assert torch.equal(result.kept, kept.view_as(result.kept))
    return result


@pytest.mark.parametrize("case", cases("scope", "picks"))
def test_scope_equals_the_official_code(case: str) -> None:
    arrays = golden("scope")
    given, picks = seen(arrays[f"features_{case}"], arrays[f"attention_{case}"]), arrays[f"picks_{case}"].long()
    direction = directions(given.projected)
    weight = class_saliency(given.needed(Need.ATTENTION))
    assert torch.equal(cover(direction @ direction.transpose(1, 2), weight, picks.shape[1]), picks)
    result = make("scope").reduce(given, Budget(picks.shape[1]))
    assert torch.equal(result.kept, picks.sort(dim=1).values)


@pytest.mark.parametrize("case", cases("holov", "picks"))
def test_holov_equals_the_official_code(case: str) -> None:
    """`full` has a crop that is kept whole, which then stands in its own order."""
    arrays = golden("holov")
    given, picks = seen(arrays[f"tokens_{case}"], arrays[f"attention_{case}"]), arrays[f"picks_{case}"].long()
    result = make("holov").reduce(given, Budget(kept_of(case)))
    assert torch.equal(result.source, picks) and torch.equal(result.tokens[0], given.projected[0, picks[0]])
    raster = make("holov", order="raster").reduce(given, Budget(kept_of(case)))
    assert torch.equal(raster.source, picks.sort(dim=1).values)
    assert case != "576_64_full" or bool(torch.isin(torch.arange(72, 108), picks).all())


@pytest.mark.parametrize("case", cases("hiprune", "kept"))
def test_hiprune_equals_the_official_code(case: str) -> None:
    """From queries and keys of its two blocks, with alpha where the case names it."""
    arrays = golden("hiprune")
    early, last = (
        VisionAttention(*(arrays[f"{front}{name}_{case}"].float() for name in ("query", "key")), 1.0, 1)
        for front in ("early_", "")
    )
    given = seen(torch.zeros(len(arrays[f"kept_{case}"]), 576, 1))
    equal(given._replace(attention=last, earlier=early, side=24), arrays, case, "hiprune", **options_of(case, "alpha"))


@pytest.mark.parametrize("case", [*cases("vscan", "kept"), *cases("vscan", "qwen-kept")])
def test_vscan_equals_the_official_code(case: str) -> None:
    """Its scans, and the merged tokens; for Qwen2.5-VL of rows x columns_T."""
    arrays = golden("vscan")
    front, side = ("qwen-", int(case.partition("x")[2].partition("_")[0])) if "x" in case else ("", 24)
    features, kept = arrays[f"{front}features_{case}"], arrays[f"{front}kept_{case}"].long()
    if front:
        given = without_class(features, arrays, case)
    else:
        early = seen(features, arrays[f"early_{case}"]).attention
        given = seen(features, arrays[f"attention_{case}"])._replace(earlier=early)
    result = make("vscan").reduce(given._replace(side=side), Budget(kept.shape[1]))
    assert torch.equal(result.source, kept)
    assert torch.allclose(result.tokens, arrays[f"{front}means_{case}"], atol=1e-5)


@pytest.mark.parametrize("case", cases("holov", "qwen-picks"))
def test_holov_equals_the_official_code_for_qwen(case: str) -> None:
    arrays = golden("holov")
    given = without_class(arrays[f"qwen-tokens_{case}"], arrays, case)
    assert torch.equal(make("holov").reduce(given, Budget(kept_of(case))).source, arrays[f"qwen-picks_{case}"].long())


SAME = [(name, case) for name in ("idpruner", "otprune", "mfpruner", "hydart", "mmtok") for case in cases(name, "kept")]


@pytest.mark.parametrize(("name", "case"), SAME)
def test_keeps_what_the_official_code_keeps(name: str, case: str) -> None:
    """N_T or rows x columns_T, and options where the case names them. IDPruner's is its greedy loop, given attention
    where it has a trained scorer.
    """
    arrays = golden(name)
    tokens = arrays[f"tokens_{case}"]
    given, options = seen(tokens if tokens.ndim == 3 else tokens[None], arrays.get(f"attention_{case}")), {}
    if name == "mfpruner":
        given = given._replace(clip=asked(arrays[f"patches_{case}"], arrays[f"text_{case}"]))
    if name == "hydart":
        early, options = arrays[f"early_{case}"][None], options_of(case, "alpha", "near", "picked")
        side = int(case.partition("x")[2].partition("_")[0])
        given = given._replace(earlier=seen(given.projected, early).attention, side=side)
    if name == "mmtok":
        options = options_of(case, "word_temperature", "token_temperature", "alpha")
        features = arrays[f"features_{case}"].float()[None]
        given = given._replace(features=features, words=words_of(arrays[f"words_{case}"]))
    equal(given, arrays, case, name, **options)


@pytest.mark.parametrize("case", cases("restore", "kept"))
def test_restore_equals_the_official_code(case: str) -> None:
    """Its DivPrune and its merging: what the language model gets, in this order and with these positions."""
    arrays = golden("restore")
    result = make("restore", selector="divprune").reduce(seen(arrays[f"tokens_{case}"]), Budget(kept_of(case)))
    assert torch.equal(result.kept, arrays[f"kept_{case}"].long())
    assert torch.equal(result.source, arrays[f"places_{case}"].long())
    assert torch.allclose(result.tokens, arrays[f"ordered_{case}"], atol=1e-5)


@pytest.mark.parametrize("case", cases("flashvid", "kept"))
def test_flashvid_equals_the_official_code(case: str) -> None:
    """Tokens and places in the order of the video; of two at one place, of which theirs has either first, both."""
    arrays = golden("flashvid")
    video, saliency, rule = (arrays[f"{name}_{case}"] for name in ("video", "attention", "rule"))
    tokens, alpha, likeness, cut, segments, relevance = rule.tolist()
    method = FlashVID(alpha=alpha, likeness=likeness, cut=cut, segments=int(segments), relevance=bool(relevance))
    each = math.ceil(round(tokens / len(video), 9))
    kept, merged, anchors, group = method.compressed(video, saliency, each)
    ours = torch.cat((torch.cat((kept, anchors))[:, None], torch.cat((video.flatten(0, 1)[kept], merged))), dim=1)
    theirs = torch.cat((arrays[f"kept_{case}"][:, None], arrays[f"tokens_{case}"]), dim=1)
    ours, theirs = (torch.tensor(sorted(one.tolist())) for one in (ours, theirs))
    assert torch.equal(ours[:, 0], theirs[:, 0]) and (ours - theirs).abs().max() <= 2e-6
    assert group.shape == (video.shape[0] * video.shape[1],) and group.unique().tolist() == list(range(len(merged)))


@pytest.mark.parametrize("case", cases("vidcom2", "kept"))
def test_vidcom2_equals_the_official_code(case: str) -> None:
    """Videos whose rounded shares come to T."""
    arrays = golden("vidcom2")
    given, tokens = video_of(case, arrays), int(case.rpartition("_")[2])
    frames, frame = given.tiles_per_unit, given.tile
    video, local = likeness(still(given.projected), frame, one_hot(frame).float())
    assert torch.allclose(torch.cat((video, local)), arrays[f"scores_{case}"], atol=1e-5)
    share = shares(video.view(1, frames, -1).mean(2), 0.01) * tokens / frame.shape[1]
    assert torch.allclose(share[0], arrays[f"scales_{case}"], atol=1e-4)
    equal(given, arrays, case, "vidcom2")


@pytest.mark.parametrize("case", cases("evs", "kept"))
def test_evs_equals_the_official_code(case: str) -> None:
    """The last case has a budget of one frame, which is the first one."""
    equal(video_of(case, golden("evs")), golden("evs"), case, "evs")


@pytest.mark.parametrize("case", cases("anchorprune", "kept"))
def test_anchorprune_equals_the_official_code(case: str) -> None:
    """The anchor in the order of relevance and what stays, of every tile."""
    arrays = golden("anchorprune")
    features = arrays[f"features_{case}"].float()
    sides = asked(features @ arrays[f"projection_{case}"].float().T, arrays[f"text_{case}"])
    given = seen(features, arrays[f"attention_{case}"])._replace(clip=sides)
    result = equal(given, arrays, case, "anchorprune")
    ranked, anchored = AnchorPrune().anchor(result.cross, directions(sides.patches), result.kept.shape[1])
    assert torch.equal(ranked.masked_fill(~anchored, -1), arrays[f"anchor_{case}"].long())


@pytest.mark.parametrize("case", cases("anchorprune", "qwen-kept"))
def test_anchorprune_equals_the_official_code_for_qwen(case: str) -> None:
    """Tokens of four patches, the words of the question in the language model's space."""
    arrays = golden("anchorprune")
    projected, level = arrays[f"qwen-tokens_{case}"].float()[None], arrays[f"qwen-received_{case}"].log()
    key = level[None, None, :, None]
    given = seen(projected)._replace(
        attention=VisionAttention(torch.ones_like(key), key, 1.0, 0),
        members=torch.arange(len(level)).view(-1, 4),
        clip=asked(projected, arrays[f"qwen-words_{case}"])._replace(words=True),
    )
    kept = arrays[f"qwen-kept_{case}"].long()
    assert torch.equal(AnchorPrune().reduce(given, Budget(len(kept))).kept[0], kept)


@pytest.mark.parametrize("case", cases("eadp", "order"))
def test_eadp_equals_the_official_code(case: str) -> None:
    """Rows x columns_T, alpha and beta where the case names them: weights, and the tokens in the order of choice."""
    arrays = golden("eadp")
    order, side = arrays[f"order_{case}"], int(case.partition("x")[2].partition("_")[0])
    given = seen(arrays[f"tokens_{case}"][None])._replace(side=side, words=words_of(arrays[f"words_{case}"]))
    chosen = make("eadp", **options_of(case, "alpha", "beta")).choose(given, len(order))
    assert torch.equal(chosen.kept[0], order.long())
    assert torch.allclose(chosen.cross[0], arrays[f"weight_{case}"], atol=1e-5)


@pytest.mark.parametrize("case", cases("scorer", "scores"))
def test_scorer_equals_the_official_code(case: str, tmp_path: Path) -> None:
    """VisionSelector's and IDPruner's choice by the weights of a folder, with the prefixes that are published; the last
    one has a norm that is not read.
    """
    prefixes = {"576_64": "", "391_98": "module.visual.importance_scorer."}
    arrays, prefix = golden("scorer"), prefixes.get(case, "_orig_mod.")
    weights = {prefix + name: arrays[f"{name}_{case}"].float() for name in PARTS}
    if "importance" in prefix:
        weights |= {"model.embed_tokens.weight": torch.zeros(2, 2)}
    elif prefix:
        weights |= {prefix + "norm.weight": torch.ones(weights[prefix + PARTS[0]].shape[1])}
    save_file(weights, tmp_path / "model.safetensors")
    given, scores = seen(arrays[f"tokens_{case}"][None]), arrays[f"scores_{case}"]
    for name, balance in (("visionselector", 1.0), ("idpruner", 0.5)):
        method, kept = make("scorer", weights=str(tmp_path), balance=balance), arrays[f"{name}_{case}"].long()
        result = method.reduce(given, Budget(len(kept)))
        assert torch.equal(result.kept[0], kept)
        assert torch.allclose(result.fused[0], scores, atol=1e-4)


@pytest.mark.parametrize("change, message", [
    ({"k_proj.bias": None}, "without k_proj.bias"),
    ({"v_proj.weight": (4, 6)}, "with v_proj.weight"),
    ({"q_proj.weight": (6, 4)}, "Weights are"),
])  # fmt: skip
def test_a_scorer_whose_names_or_shapes_are_others_is_refused(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None], message: str
) -> None:
    shapes = {name: (4, 6) if name.endswith("weight") else (4,) for name in PARTS} | change
    save_file({name: torch.zeros(shape) for name, shape in shapes.items() if shape}, tmp_path / "scorer.safetensors")
    with pytest.raises(OptionError, match=message):
        make("scorer", weights=str(tmp_path / "scorer.safetensors"))
