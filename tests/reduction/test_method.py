"""ConsensusDrop by hand and by its invariants, and what every method after the vision tower promises."""

from dataclasses import fields

import pytest
import torch
from golden_cases import seen
from hypothesis import given, settings
from hypothesis import strategies as st
from units import at_angles, of_batch, unit, view_of, without_question

from llava_consensus.errors import NonFiniteError, OptionError
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction import merging, saliency, selection
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.selection import rank
from llava_consensus.reduction.tokens import Need, VisionAttention, VisualTokens

S_V = torch.tensor([[0.10, 0.40, 0.05, 0.20, 0.05, 0.20]])
S_C = torch.tensor([[0.30, 0.05, 0.25, 0.10, 0.25, 0.05]])
AFTER_TOWER = [name for name, one in METHODS.items() if one.place is Place.TOKENS and one.reduces]
VARIED: list[tuple[str, dict]] = [*((name, {}) for name in AFTER_TOWER), ("consensusdrop", {"select": "diverse"})]


def test_worked_example_fusion_and_selection() -> None:
    fused = selection.convex(selection.temperature(S_V), selection.temperature(S_C), 0.7)
    assert torch.allclose(fused, torch.tensor([[0.160, 0.295, 0.110, 0.170, 0.110, 0.155]]))
    assert selection.top(fused, 2).tolist() == [[1, 3]]
    assert selection.temperature(torch.zeros(1, 4)).tolist() == [[0.25] * 4]


def test_worked_example_recovery() -> None:
    assert selection.recover(S_V, S_C, 4, 0.5).tolist() == [[0, 1, 2, 3]]
    assert selection.recover(S_V, S_C, 3, 0.4).tolist() == [[0, 1, 3]]
    assert selection.agreement(S_V, S_C, 4).tolist() == [0.5]
    assert selection.correction_factor(S_V, S_C, 4, 0.5).tolist() == [1.0]


def test_worked_example_merge() -> None:
    features = at_angles(0, 10, 170, 80)  # the tokens 0, 2, 4, 5
    anchors, group = merging.group(features, features, 2)
    assert anchors.tolist() == [[0, 2]]  # tokens 0 and 4
    assert group.tolist() == [[0, 0, 1, 0]]
    rows = features[0, torch.tensor([[0, 1, 2, 3, 1], [3, 2, 1, 0, 0], [1, 0, 3, 2, 2]])]
    alone = [merging.group(row[None], row[None], 3)[0][0].tolist() for row in rows]
    assert merging.group(rows, rows, 3)[0].tolist() == alone
    projected = torch.tensor([[[0.0], [2.0], [4.0], [5.0]]])
    assert torch.allclose(merging.group_means(projected, group, 2), torch.tensor([[[7 / 3], [4.0]]]))


def test_worked_example_whole_method() -> None:
    """With attention that gives the worked example's saliencies; a tenth of the text's is on text."""
    view = view_of([0.9 * one for one in S_C[0].tolist()], 3)
    features = torch.randn(1, 6, 2, generator=torch.Generator().manual_seed(0))
    tokens = seen(torch.arange(6.0)[None, :, None], S_V)._replace(features=features, prompt=torch.tensor([0]))
    tokens = tokens._replace(probe=view.probe, columns=view.columns)
    result = make("consensusdrop", scap_rope=False).reduce(tokens, Budget(3, 1))
    assert torch.allclose(result.vision, S_V) and torch.allclose(result.cross, S_C, atol=1e-5)
    assert result.kept.tolist() == [[1, 3]] and result.anchors.tolist() == [[0]]
    assert result.owner.tolist() == [[2, 0, 2, 1, 2, 2]]
    assert result.tokens[..., 0].tolist() == [[1.0, 3.0, 11 / 4]]


def test_temperatures_and_cross_saliency_by_hand() -> None:
    s_v = torch.tensor([[0.36, 0.09, 0.18, 0.09, 0.09, 0.09]])
    rows = torch.tensor([[[0.02, 0.02, 0.02, 0.10, 0.02, 0.02], [0.03, 0.03, 0.03, 0.15, 0.03, 0.03]]])
    s_c = saliency.cross_saliency(rows, torch.ones(1, 2, dtype=torch.bool), torch.arange(6)[None])
    assert torch.allclose(s_c, torch.tensor([[0.1, 0.1, 0.1, 0.5, 0.1, 0.1]]), atol=1e-4)
    fused = selection.convex(selection.temperature(s_v), selection.temperature(s_c), 0.7)
    assert torch.allclose(fused, torch.tensor([[0.31, 0.10, 0.17, 0.22, 0.10, 0.10]]), atol=1e-4)
    sharp, flat = selection.temperature(s_v, 0.5)[0].tolist(), selection.temperature(s_v, 2.0)[0].tolist()
    assert sharp == pytest.approx([0.6667, 0.0417, 0.1667, 0.0417, 0.0417, 0.0417], abs=1e-4)
    assert flat == pytest.approx([0.2698, 0.1349, 0.1907, 0.1349, 0.1349, 0.1349], abs=1e-4)


def test_budget_table() -> None:
    for tokens, merged in ((192, 30), (128, 20), (64, 10), (32, 5), (640, 100), (160, 25), (227, 35), (123, 19)):
        assert Budget(tokens).split(10_000) == (tokens - merged, merged)


@settings(max_examples=60)
@given(data=st.data())
def test_invariants_of_a_reduction(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 40), label="N")
    tokens = data.draw(st.integers(1, size - 1), label="T")
    merged = data.draw(st.none() | st.integers(0, tokens), label="M")
    options = {
        "alpha": data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        "vision_score": data.draw(st.sampled_from(["class", "tokens"])),
        "aggregate": data.draw(st.sampled_from(["all", "last", "max"])),
        "fuser": data.draw(st.sampled_from(["convex", "recovery"])),
        "student": data.draw(st.sampled_from(["vision", "cross"])),
        "rate": data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "fps_start": data.draw(st.sampled_from(["first", "salient", "mean"])),
        "order": data.draw(st.sampled_from(["top_then_merged", "raster"])),
        "tau_vision": data.draw(st.sampled_from([0.1, 1.0, 3.0])),
    }
    if options["fuser"] == "recovery" and options["fps_start"] == "salient":
        options["fps_start"] = "first"  # recovery has no fused saliency to start from
    given_tokens = unit(size, seed=data.draw(st.integers(0, 50)))
    result = make("consensusdrop", **options).reduce(given_tokens, Budget(tokens, merged))
    count, folded = Budget(tokens, merged).split(size)
    assert result.tokens.shape == (2, tokens, 6) and result.kept.shape[1] == count and result.anchors.shape[1] == folded
    assert (result.fused is None) == (options["fuser"] == "recovery")  # which ranks by each side in turn
    assert result.fused is None or torch.allclose(result.fused.sum(1), torch.ones(2), atol=1e-5)
    for row in range(2):
        kept, anchors, owner = result.kept[row].tolist(), result.anchors[row].tolist(), result.owner[row].tolist()
        assert kept == sorted(set(kept)) and anchors == sorted(set(anchors)) and not set(kept) & set(anchors)
        assert sorted(set(owner) - {-1}) == list(range(tokens))  # every slot stands for something
        assert owner.count(-1) == (0 if folded else size - count)  # kept and groups partition the N
        for slot in range(tokens):  # every output token is the mean of what it owns
            members = [index for index, own in enumerate(owner) if own == slot]
            assert torch.allclose(result.tokens[row, slot], given_tokens.projected[row, members].mean(0), atol=1e-5)
            assert result.source[row, slot] in members


def test_alpha_one_ignores_the_question_and_alpha_zero_the_picture() -> None:
    tokens = unit()
    other_text = tokens._replace(probe=unit(seed=9).probe)
    other_sight = tokens._replace(attention=tokens.attention._replace(query=unit(seed=9).attention.query))
    vision, cross = make("consensusdrop", alpha=1.0), make("consensusdrop", alpha=0.0)
    budget = Budget(8, 0)
    assert torch.equal(vision.reduce(tokens, budget).kept, vision.reduce(other_text, budget).kept)
    assert torch.equal(cross.reduce(tokens, budget).kept, cross.reduce(other_sight, budget).kept)
    assert not torch.equal(vision.reduce(tokens, budget).kept, cross.reduce(tokens, budget).kept)


@pytest.mark.parametrize(("name", "options"), VARIED)
def test_batch_equals_singles(name: str, options: dict) -> None:
    tokens, method = unit(batch=3), make(name, **options)
    together = method.reduce(tokens, Budget(9))
    for index in range(3):
        alone = method.reduce(of_batch(tokens, index), Budget(9))
        assert torch.equal(together.kept[index], alone.kept[0]) and torch.equal(together.owner[index], alone.owner[0])
        assert torch.allclose(together.tokens[index], alone.tokens[0], atol=1e-6)
    assert method.reduce(unit(dtype=torch.bfloat16), Budget(9)).tokens.dtype == torch.bfloat16


def test_ties_go_to_the_lower_index() -> None:
    assert rank(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])).tolist() == [[1, 2, 4, 0, 3]]
    assert selection.top(torch.zeros(1, 8), 3).tolist() == [[0, 1, 2]]
    same = torch.ones(1, 5, 2)
    assert merging.group(same, same, 2)[0].tolist() == [[0, 1]]
    assert merging.nearest(same, torch.tensor([[1, 3]])).tolist() == [[0, 0, 0, 1, 0]]


def test_merging_identical_tokens_gives_that_token() -> None:
    tokens = unit()._replace(projected=torch.full((2, 24, 6), 0.3))
    assert torch.allclose(make("consensusdrop").reduce(tokens, Budget(8, 4)).tokens, torch.tensor(0.3))


@pytest.mark.parametrize("rows", [150, 3])
def test_received_saliency_equals_the_definition(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saliency, "TOWER_CHUNK", rows * 4 * 151)
    attention = unit(size=150, batch=1).attention
    weights = torch.softmax(attention.query @ attention.key.transpose(-1, -2) * attention.scale, -1).mean(1)[:, 1:, 1:]
    others = weights.sum(1) - weights.diagonal(dim1=1, dim2=2)
    assert torch.allclose(saliency.received_saliency(attention), others / 149, atol=1e-6)
    without_class = attention._replace(query=attention.query[:, :, 1:], key=attention.key[:, :, 1:], classes=0)
    assert torch.equal(saliency.class_saliency(without_class), saliency.received_saliency(without_class))


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"fuser": "recovery"}, {"fuser": "recovery", "student": "cross"}])
def test_a_prompt_without_text_is_ranked_by_vision_alone(options: dict) -> None:
    tokens, budget = without_question(unit()), Budget(8, 3)
    result = make("consensusdrop", **options).reduce(tokens, budget)
    vision = make("consensusdrop", alpha=1.0).reduce(unit(), budget)
    assert torch.equal(result.kept, vision.kept) and torch.equal(result.tokens, vision.tokens)
    assert result.cross is None and torch.equal(result.vision, vision.vision)


@pytest.mark.parametrize("option", [{"select": "diverse"}, {"fps_start": "salient"}])
def test_recovery_has_no_fused_saliency_and_refuses_what_needs_one(option: dict) -> None:
    assert make("consensusdrop", fuser="recovery").reduce(unit(), Budget(8)).fused is None
    with pytest.raises(OptionError, match=rf"{next(iter(option))}=.*fuser='recovery' has not: take fuser='convex'"):
        make("consensusdrop", fuser="recovery", **option)
    assert make("consensusdrop", **option).reduce(unit(), Budget(8)).fused is not None


def test_nan_is_an_error_that_names_the_stage() -> None:
    tokens, nan = unit(), float("nan")
    for stage, bad in {
        "vision saliency": {"attention": tokens.attention._replace(key=tokens.attention.key * nan)},
        "SCAP": {"probe": tokens.probe._replace(key=tokens.probe.key * nan)},
        "features of the vision tower": {"features": tokens.features * float("inf")},
    }.items():
        with pytest.raises(NonFiniteError, match=stage):
            make("consensusdrop").reduce(tokens._replace(**bad), Budget(8))


@pytest.mark.parametrize(("name", "options"), VARIED)
def test_gradients_reach_the_projected_tokens_or_the_projector_only(name: str, options: dict) -> None:
    """Every input asks for gradients; the choice of tokens passes none on, and what is projected anew gives the
    projector some but not the tower. Weights of merged tokens are numbers: a gradient in one channel stays in it.
    """
    tokens, projector = unit(), torch.nn.Linear(10, 6)
    attention, probe, clip = tokens.attention, tokens.probe, tokens.clip
    assert attention is not None and probe is not None and clip is not None
    of_tower = [attention.query, attention.key, tokens.features, tokens.class_feature, clip.patches]
    of_question = [probe.query, probe.key, clip.text]
    for value in (tokens.projected, *of_tower, *of_question):
        value.requires_grad_()
    make(name, **options).reduce(tokens._replace(project=projector), Budget(8, 3)).tokens[..., 3].sum().backward()
    assert all(value.grad is None for value in (*of_tower, *of_question))
    anew, reached = Need.PROJECTOR in METHODS[name].needs, []
    others = [channel for channel in range(6) if channel != 3]
    for value, of_channels in ((tokens.projected, -1), (projector.weight, 0)):
        if value.grad is not None:
            assert torch.isfinite(value.grad).all() and (value.grad != 0).any()
            assert not value.grad.index_select(of_channels, torch.tensor(others)).any()
            reached.append(value)
    assert any(value is projector.weight for value in reached) == anew
    assert any(value is tokens.projected for value in reached) != name.startswith("prumerge")  # it projects all anew


def test_rows_of_tiles_come_to_the_tokens_made_of_them() -> None:
    """Two tiles of four rows, two tokens each: of rows 0 and 3, and of 1 and 2."""
    tile, patch = torch.tensor([[0, 0, 1], [1, 0, 1]]), torch.tensor([[0, 1, 1], [0, 0, 1]])
    tokens = VisualTokens(torch.zeros(2, 3, 1), tile, patch, members=torch.tensor([[0, 3], [1, 2]]))
    rows = torch.tensor([[1.0, 2, 3, 5], [10, 20, 30, 50]])
    assert tokens.by_token(rows).tolist() == [[3.0, 2.5], [30.0, 25.0]]
    assert tokens.of_tiles(rows).tolist() == [[3.0, 2.5, 25.0], [30.0, 3.0, 25.0]]
    assert tokens.of_tiles(rows[..., None].bfloat16()).shape == (2, 3, 1)
    made = torch.tensor([[7.0, 8.0], [9.0, 6.0]])  # has a row for each token already
    assert tokens.of_tiles(made).tolist() == [[7.0, 8.0, 6.0], [9.0, 7.0, 6.0]]
    assert tokens._replace(members=None).of_tiles(rows).tolist() == [[1.0, 2.0, 20.0], [10.0, 1.0, 20.0]]


@pytest.mark.parametrize("name", AFTER_TOWER)
def test_a_merger_that_makes_one_token_of_four_patches(name: str) -> None:
    """Hosts whose tokens are made of 2 x 2 rows of the tower: four equal rows count as the one they are copies of."""
    tokens, method = unit(), make(name)
    attention, earlier, clip = tokens.attention, tokens.earlier, tokens.clip
    assert attention is not None and earlier is not None and clip is not None
    for one in (attention, earlier):
        one.key[:, :, 0] = -1e4 * one.query[:, :, 0]  # a class token that looks at patches alone
        if name in ("hiprune", "hydart", "flashvid"):  # which count its row as one of all: here it looks at all alike
            one.query[:, :, 0] = 0

    def four(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(4, 1)

    def of_patches(one: VisionAttention) -> VisionAttention:
        repeats = torch.tensor([1] + [4] * 24)
        return one._replace(query=one.query.repeat_interleave(repeats, 2), key=one.key.repeat_interleave(repeats, 2))

    fine = tokens._replace(
        **{"members": torch.arange(4 * 24).view(24, 4), "features": four(tokens.features)},
        **{"attention": of_patches(attention), "earlier": of_patches(earlier)},
        clip=clip._replace(patches=four(clip.patches)),
    )
    expected, found = method.reduce(tokens, Budget(9)), method.reduce(fine, Budget(9))
    assert torch.equal(found.kept, expected.kept) and torch.equal(found.anchors, expected.anchors)
    assert torch.equal(found.owner, expected.owner)
    assert found.tokens.shape == expected.tokens.shape and torch.isfinite(found.tokens).all()


def test_what_a_host_did_not_collect_is_named() -> None:
    for name in [name for name in AFTER_TOWER if METHODS[name].needs]:
        bare = VisualTokens(*unit()[:3], side=6)
        with pytest.raises(LookupError, match="was not collected: the method must name it in `needs`"):
            make(name).reduce(bare, Budget(8))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": 1.5}, r"alpha=1.5 must be a number in \[0, 1\]"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"tau_vision": 0}, "tau_vision=0 must be a number above 0"),
        ({"rate": -0.1}, "rate=-0.1"),
        ({"order": "sideways"}, "top_then_merged, raster"),
        ({"fuser": "both"}, "convex, recovery"),
        ({"alhpa": 1.0}, "Did you mean 'alpha'"),
        ({"vision_layer": "two"}, "vision_layer='two'"),
    ],
)
def test_bad_options_name_argument_value_and_bound(options: dict, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        make("consensusdrop", **options)


def test_options_follow_from_where_a_method_acts_and_what_it_reads() -> None:
    for name in METHODS:
        method = METHODS[name]
        options = {field.name for field in fields(method)} - {"newlines"}
        of_tower = {Need.ATTENTION, Need.EARLIER, Need.FEATURES, Need.CLASS_FEATURE}
        placed = {"positions"} if method.place is Place.DECODER else {"positions", "order"}
        assert {"positions", "order"} & options == (placed if method.reduces else set())
        assert ("vision_layer" in options) == bool(method.needs & of_tower)
        assert ("early_layer" in options) == (Need.EARLIER in method.needs)
        assert ("answer_rows" in options) == (method.place is Place.DECODER or Need.PROBE in method.needs)
        assert method.place is Place.TOKENS or "tile_budget" not in options


def test_a_method_reads_the_prompt_if_its_choice_changes_with_the_question() -> None:
    tokens, other = unit(size=60), unit(size=60, seed=1)
    assert tokens.clip is not None and other.clip is not None and tokens.fingerprint is not None
    asked = tokens.clip._replace(text=other.clip.text)
    more = {"words": other.words, "fingerprint": tokens.fingerprint + 1}
    differently = tokens._replace(probe=other.probe, clip=asked, **more)
    for name in METHODS:
        method = make(name)
        if name not in AFTER_TOWER:
            assert method.reads_prompt == (method.place is Place.DECODER and method.attention != "none"), name
            continue
        one, two = (method.reduce(given, Budget(20)) for given in (tokens, differently))
        assert method.reads_prompt != torch.equal(one.kept, two.kept), name


def test_tiles_pool_to_their_share() -> None:
    tile = torch.tensor([[4, 4, 4, 5]])
    pooled = saliency.pool_tiles(torch.tensor([[1.0, 1.0, 2.0, 7.0]]), tile, 2)
    assert torch.allclose(pooled, torch.tensor([[0.1875, 0.1875, 0.375, 0.25]]))


def test_aggregates_by_hand() -> None:
    mask, columns = torch.tensor([[True, True, False]]), torch.arange(3)[None]  # the last row is padding
    rows = torch.tensor([[[0.1, 0.1, 0.2], [0.4, 0.1, 0.0], [9.0, 9.0, 9.0]]]) * mask[..., None]
    expected = {"all": [1.05 / 2, 0.45 / 2, 0.25], "last": [0.8, 0.2, 0.0], "max": [4 / 7, 1 / 7, 2 / 7]}
    assert expected.keys() == set(saliency.AGGREGATES)
    for aggregate, wanted in expected.items():
        found = saliency.cross_saliency(rows, mask, columns, aggregate)
        assert found[0].tolist() == pytest.approx(wanted, abs=1e-4), aggregate
        alone = saliency.cross_saliency(rows[:, :2], None, columns, aggregate)  # without padding
        assert alone[0].tolist() == pytest.approx(wanted, abs=1e-4), aggregate
