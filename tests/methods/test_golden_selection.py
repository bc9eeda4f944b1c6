"""Methods of 2025 and 2026 after the tower against arrays their authors' own code gave (tests/golden/README.md): the
same tokens, in the same order where that code has one.
"""

import math
from pathlib import Path

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
from llava_consensus.reduction.tokens import ClipSides, Need, VisionAttention, VisualTokens, Words


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
    return ClipSides(patches, text.float().expand(shape), torch.ones(shape[:2], dtype=torch.bool))


def video_of(case: str, arrays: dict[str, torch.Tensor]) -> tuple[VisualTokens, int]:
    """A video whose frames lie one after the other, and T."""
    frames, size, tokens = (int(number) for number in case.split("_"))
    frame, patch = torch.arange(frames).repeat_interleave(size), torch.arange(size).repeat(frames)
    projected = arrays[f"tokens_{case}"].float()[None]
    return VisualTokens(projected, frame[None], patch[None], tiles_per_unit=frames), tokens


def kept_of(case: str) -> int:
    return int(case.split("_")[1])


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
    kept, (size, total, *alpha) = arrays[f"kept_{case}"].long(), case.split("_")
    given = seen(torch.zeros(len(kept), 576, 1))._replace(attention=last, earlier=early, side=24)
    method = make("hiprune", **({"alpha": float(alpha[0])} if alpha else {}))
    result = method.reduce(given, Budget(int(total) * 576 // int(size)))
    assert torch.equal(result.kept, kept)


@pytest.mark.parametrize("case", cases("vscan", "kept"))
def test_vscan_equals_the_official_code(case: str) -> None:
    """Its scans, and the merged tokens."""
    arrays = golden("vscan")
    kept, features = arrays[f"kept_{case}"].long(), arrays[f"features_{case}"]
    given = seen(features, arrays[f"attention_{case}"])._replace(side=24)
    given = given._replace(earlier=seen(features, arrays[f"early_{case}"]).attention)
    result = make("vscan").reduce(given, Budget(kept.shape[1]))
    assert torch.equal(result.source, kept)
    assert torch.allclose(result.tokens, arrays[f"means_{case}"], atol=1e-5)


@pytest.mark.parametrize("case", cases("vscan", "qwen-kept"))
def test_vscan_equals_the_official_code_for_qwen(case: str) -> None:
    """Rows x columns_T."""
    arrays, side = golden("vscan"), int(case.partition("x")[2].partition("_")[0])
    given = without_class(arrays[f"qwen-features_{case}"], arrays, case)._replace(side=side)
    kept = arrays[f"qwen-kept_{case}"].long()
    result = make("vscan").reduce(given, Budget(kept.shape[1]))
    assert torch.equal(result.source, kept)
    assert torch.allclose(result.tokens, arrays[f"qwen-means_{case}"], atol=1e-5)


@pytest.mark.parametrize("case", cases("holov", "qwen-picks"))
def test_holov_equals_the_official_code_for_qwen(case: str) -> None:
    arrays = golden("holov")
    given = without_class(arrays[f"qwen-tokens_{case}"], arrays, case)
    assert torch.equal(make("holov").reduce(given, Budget(kept_of(case))).source, arrays[f"qwen-picks_{case}"].long())


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in ("idpruner", "otprune") for case in cases(name, "kept")]
)
def test_idpruner_and_otprune_equal_the_official_selection(name: str, case: str) -> None:
    """IDPruner's is its greedy loop, given attention where it has a trained scorer."""
    arrays = golden(name)
    given = seen(arrays[f"tokens_{case}"], arrays.get(f"attention_{case}"))
    assert torch.equal(make(name).reduce(given, Budget(kept_of(case))).kept, arrays[f"kept_{case}"].long())


@pytest.mark.parametrize("case", cases("mfpruner", "kept"))
def test_mfpruner_equals_the_official_code(case: str) -> None:
    arrays = golden("mfpruner")
    text = arrays[f"text_{case}"].float()[None]
    sides = ClipSides(arrays[f"patches_{case}"].float(), text, torch.ones(1, text.shape[1], dtype=torch.bool))
    given = seen(arrays[f"tokens_{case}"], arrays[f"attention_{case}"])._replace(clip=sides)
    assert torch.equal(make("mfpruner").reduce(given, Budget(kept_of(case))).kept, arrays[f"kept_{case}"].long())


@pytest.mark.parametrize("case", cases("restore", "kept"))
def test_restore_equals_the_official_code(case: str) -> None:
    """Its DivPrune and its merging: what the language model gets, in this order and with these positions."""
    arrays = golden("restore")
    given = seen(arrays[f"tokens_{case}"])
    result = make("restore", selector="divprune").reduce(given, Budget(kept_of(case)))
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
    given, tokens = video_of(case, arrays)
    frames, frame = given.tiles_per_unit, given.tile
    video, local = likeness(still(given.projected), frame, one_hot(frame).float())
    assert torch.allclose(torch.cat((video, local)), arrays[f"scores_{case}"], atol=1e-5)
    share = shares(video.view(1, frames, -1).mean(2), 0.01) * tokens / frame.shape[1]
    assert torch.allclose(share[0], arrays[f"scales_{case}"], atol=1e-4)
    assert torch.equal(make("vidcom2").reduce(given, Budget(tokens)).kept, arrays[f"kept_{case}"].long())


@pytest.mark.parametrize("case", cases("evs", "kept"))
def test_evs_equals_the_official_code(case: str) -> None:
    """The last case has a budget of one frame, which is the first one."""
    arrays = golden("evs")
    given, tokens = video_of(case, arrays)
    assert torch.equal(make("evs").reduce(given, Budget(tokens)).kept, arrays[f"kept_{case}"].long())


@pytest.mark.parametrize("case", cases("anchorprune", "kept"))
def test_anchorprune_equals_the_official_code(case: str) -> None:
    """The anchor in the order of relevance and what stays, of every tile."""
    arrays = golden("anchorprune")
    features = arrays[f"features_{case}"].float()
    sides = asked(features @ arrays[f"projection_{case}"].float().T, arrays[f"text_{case}"])
    given = seen(features, arrays[f"attention_{case}"])._replace(clip=sides)
    kept, anchor = arrays[f"kept_{case}"].long(), arrays[f"anchor_{case}"].long()
    method = AnchorPrune()
    result = method.reduce(given, Budget(kept.shape[1]))
    assert torch.equal(result.kept, kept) and result.cross is not None
    ranked, anchored = method.anchor(result.cross, directions(sides.patches), kept.shape[1])
    assert torch.equal(ranked.masked_fill(~anchored, -1), anchor)


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


@pytest.mark.parametrize("case", cases("hydart", "kept"))
def test_hydart_equals_the_official_code(case: str) -> None:
    """Rows x columns_T, and alpha, near and picked where the case names them."""
    arrays, (grid, _, *options) = golden("hydart"), case.split("_")
    given = seen(arrays[f"tokens_{case}"][None])._replace(side=int(grid.partition("x")[2]))
    given = given._replace(earlier=seen(given.projected, arrays[f"early_{case}"][None]).attention)
    kept = arrays[f"kept_{case}"].long()
    method = make("hydart", **dict(zip(("alpha", "near", "picked"), map(float, options), strict=False)))
    assert torch.equal(method.reduce(given, Budget(len(kept))).kept[0], kept)


@pytest.mark.parametrize("case", cases("mmtok", "kept"))
def test_mmtok_equals_the_official_code(case: str) -> None:
    """N_T, and the temperatures and alpha where the case names them."""
    arrays, options = golden("mmtok"), case.split("_")[2:]
    given, text = seen(arrays[f"tokens_{case}"][None]), arrays[f"words_{case}"].float()[None]
    words = Words(text, torch.ones(text.shape[:2], dtype=torch.bool))
    given = given._replace(features=arrays[f"features_{case}"].float()[None], words=words)
    names = "word_temperature", "token_temperature", "alpha"
    kept = arrays[f"kept_{case}"].long()
    method = make("mmtok", **dict(zip(names, map(float, options), strict=False)))
    assert torch.equal(method.reduce(given, Budget(len(kept))).kept[0], kept)


@pytest.mark.parametrize("case", cases("eadp", "order"))
def test_eadp_equals_the_official_code(case: str) -> None:
    """Rows x columns_T, alpha and beta where the case names them: weights, and the tokens in the order of choice."""
    arrays, (grid, _, *options) = golden("eadp"), case.split("_")
    text = arrays[f"words_{case}"].float()[None]
    given = seen(arrays[f"tokens_{case}"][None])._replace(side=int(grid.partition("x")[2]))
    given = given._replace(words=Words(text, torch.ones(text.shape[:2], dtype=torch.bool)))
    method, order = (
        make("eadp", **dict(zip(("alpha", "beta"), map(float, options), strict=False))),
        arrays[f"order_{case}"],
    )
    chosen = method.choose(given, len(order))
    assert torch.equal(chosen.kept[0], order.long())
    assert torch.allclose(chosen.cross[0], arrays[f"weight_{case}"], atol=1e-5)


LAYOUTS = {"576_64": "", "391_98": "module.visual.importance_scorer."}


@pytest.mark.parametrize("case", cases("scorer", "scores"))
def test_scorer_equals_the_official_code(case: str, tmp_path: Path) -> None:
    """VisionSelector's and IDPruner's choice by the weights of a folder, with the prefixes that are published; the last
    one has a norm that is not read.
    """
    arrays, prefix = golden("scorer"), LAYOUTS.get(case, "_orig_mod.")
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
