"""What FastV, SparseVLM, PyramidDrop and DART do on paper: worked examples, the published counts, their
schedules in deep and shallow models, and options that are refused.
"""

from statistics import mean
from typing import Any

import pytest
import torch
from units import WATCH, at_angles, view_of

from llava_consensus.errors import OptionError
from llava_consensus.methods import make, sparsevlm
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import scaled


def counts(name: str, tokens: int, available: int = 576, layers: int = 32, **options: Any) -> list[int]:
    return make(name, **options).entering(Budget(tokens), available, layers)


@pytest.mark.parametrize(
    "tokens, available, equal, needed", [(192, 576, 216, 166), (64, 576, 96, 30), (455, 2048, 555, 349)]
)
def test_fastv_counts(tokens: int, available: int, equal: int, needed: int) -> None:
    assert counts("fastv", tokens, available) == [available] * 2 + [tokens] * 30
    assert round(mean(counts("fastv", tokens, available))) == equal
    by_mean = counts("fastv", tokens, available, count="eq")
    assert by_mean[2:] == [needed] * 30 and abs(mean(by_mean) - tokens) <= 0.5 * 30 / 32
    assert counts("fastv", 74, 576, layers=20, layer=2, count="eq") == [576] * 2 + [18] * 18  # of exactly 18.2


def test_fastv_says_which_means_cannot_be() -> None:
    for tokens, available in ((32, 576), (160, 2880), (114, 2048)):
        with pytest.raises(OptionError, match="count=kept"):
            counts("fastv", tokens, available, count="eq")
    for tokens in (33, 36, 37, 40):  # the least the message names is the least there is
        try:
            counts("fastv", tokens, 576, count="eq")
        except OptionError as error:
            least = int(str(error).split("at least ")[1].split(",")[0])
            assert tokens < least == round(mean(counts("fastv", least, 576, count="eq")))


def test_raters_are_the_rows_above_uniform() -> None:
    share = torch.tensor([0.2, 0.5, 0.3])
    visual, text = torch.ones(1, 4, 1), share.log()[None, :, None]
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert sparsevlm.raters(visual, text, mask).tolist() == [[False, True, False]]
    padded = torch.cat((text, torch.full((1, 2, 1), 9.0)), dim=1)
    wider = torch.tensor([[True, True, True, False, False]])
    assert sparsevlm.raters(visual, padded, wider).tolist() == [[False, True, False, False, False]]
    assert sparsevlm.raters(visual, text * 0, mask).tolist() == [[True] * 3]  # nobody is above: all of them


def test_other_budgets_are_solved() -> None:
    for tokens, kept in {192: 180, 128: 114, 64: 48, 32: 15}.items():
        assert sparsevlm.solve(tokens, 576) == kept
    assert [cut[1:] for cut in make("sparsevlm").plan(32, 576, 32)] == [(15, 17)]
    for available in (256, 576, 1225, 2048, 2880):
        for tokens in (1, 2, 17, 18, 33, 101, available - 1):
            assert set(counts("sparsevlm", tokens, available)[3:]) == {tokens} or tokens in sparsevlm.KEPT["1.5"]


def test_equal_densities_rank_by_index_so_that_twins_give_one_centre() -> None:
    """Sixteen states in two clusters: the closest pair has equal densities, and only one of them may be a centre."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 16, 8, generator=generator) * 3
    states[0, 5] = states[0, 11] + 0.01
    group, centres = sparsevlm.cluster(states, 2)
    assert len({5, 11} & set(centres[0].tolist())) <= 1 and group[0, 5] == group[0, 11]
    assert group.unique().tolist() == [0, 1] and group[0, centres[0]].tolist() == [0, 1]
    same, middle = sparsevlm.cluster(torch.ones(1, 6, 4), 1)
    assert same.tolist() == [[0] * 6] and middle.tolist() == [[0]]


def test_version_one_has_scales_for_three_budgets() -> None:
    method = make("sparsevlm", version=1.0)  # as the command line reads it
    assert [method.rank_rule(tokens) for tokens in (192, 128, 64)] == [(13.5, 0.0), (9.0, 6.0), (0.8, 0.0)]
    with pytest.raises(OptionError, match="Give scale"):
        method.plan(32, 576, 32)
    assert make("sparsevlm", version="1.0", scale=2.0).rank_rule(32) == (2.0, 0.0)


def test_schedules_of_pyramiddrop() -> None:
    assert counts("pyramiddrop", 72) == [576] * 8 + [288] * 8 + [144] * 8 + [72] * 8
    assert mean(counts("pyramiddrop", 72)) == 270
    by_mean = counts("pyramiddrop", 192, count="eq")
    assert by_mean[8::8] == [145, 36, 9] and mean(by_mean) == 191.5
    assert counts("pyramiddrop", 270, count="eq")[8::8] == [288, 144, 72]
    for tokens in (128, 64, 32):
        with pytest.raises(OptionError, match="more than 144, or count=kept"):
            counts("pyramiddrop", tokens, count="eq")
    # at least one token is left
    few = {(1, 2): [1, 1, 1], (1, 8): [4, 2, 1], (2, 3): [2, 2, 2], (2, 16): [8, 4, 2]}
    assert {one: [cut.kept for cut in make("pyramiddrop").plan(*one, 32)] for one in few} == few
    few = {(1, 2): [1, 1, 1], (2, 4): [2, 1, 1]}  # the last cut of the first would leave 0.3 of a token
    assert {one: [cut.kept for cut in make("pyramiddrop", count="eq").plan(*one, 32)] for one in few} == few


def test_lists_of_pyramiddrop_are_taken_as_they_are() -> None:
    """The authors' own default, another one by hand, and cuts whose counts follow from T."""
    assert counts("pyramiddrop", 9, ratios="0.5 0.25 0.125") == counts("pyramiddrop", 72)
    by_hand = make("pyramiddrop", layers="2 5", ratios="0.4 0.1").entering(Budget(9), 101, 6)
    assert by_hand == [101, 101, 40, 40, 40, 10]
    assert make("pyramiddrop", layers=3).entering(Budget(9), 101, 6) == [101] * 3 + [9] * 3
    assert make("pyramiddrop", layers="2 4").entering(Budget(9), 100, 6) == [100] * 2 + [30] * 2 + [9] * 2
    for options, message in (
        ({"layers": "8 4"}, "must ascend"),
        ({"layers": "8 x"}, "whole numbers with spaces"),
        ({"layers": 1.5}, "whole numbers with spaces"),
        ({"ratios": "0.5 0.25"}, "2 for 3 cuts"),
        ({"ratios": "0.1 0.5 0.5"}, "do not grow"),
        ({"ratios": "1.5 0.5 0"}, r"in \(0, 1\]"),
    ):
        with pytest.raises(OptionError, match=message):
            make("pyramiddrop", **options)
    with pytest.raises(OptionError, match=r"must be in 1\.\.5: the model has 6"):
        make("pyramiddrop", layers="2 6").entering(Budget(9), 100, 6)


def test_dart_keeps_pivots_and_what_is_least_like_them() -> None:
    assert make("dart").rounds(128) == [16] * 7 + [12] and make("dart").rounds(64) == [8] * 7 + [4]
    assert make("dart").rounds(32) == [4] * 7 + [0] and make("dart").rounds(127) == [15] * 7 + [18]
    assert make("dart").rounds(3) == [0] * 8 and sum(make("dart", exact=False).rounds(132)) == 128
    assert make("dart", exact=False).rounds(132) == [16] * 8
    assert counts("dart", 128, exact=False)[-1] == 132 and counts("dart", 128)[-1] == 128
    hidden = at_angles(0, 1, 2, 3, 80, 81, 150, 151, 200, 20)
    view = view_of([0.08] * 10, 6, hidden=hidden, asked=hidden[:, :1])
    key = torch.zeros(1, 1, 15, 2)
    key[0, 0, 2:12, 0] = torch.tensor([9.0, 8, 7, 6, 1, 1, 1, 1, 1, 1])  # the first four are the pivots
    chosen = make("dart").select(view._replace(probe=view.probe._replace(key=key)), WATCH)
    assert chosen.kept.tolist() == [[0, 1, 2, 3, 7, 8]]  # the last text pivot, at 0 degrees, adds 200 and 151


def test_layers_scale_with_shallow_models_only() -> None:
    assert scaled((8, 16, 24), 32) == scaled((8, 16, 24), 40) == (8, 16, 24)
    assert scaled((8, 16, 24), 4) == (1, 2, 3) and scaled((3, 7, 16), 4) == (1, 2, 3) and scaled((2,), 4) == (1,)
    assert scaled((3, 7, 16, 20), 24) == (2, 5, 12, 15) and scaled((8, 16, 24), 2) == (1, 1, 1)
    assert counts("pyramiddrop", 72, layers=3) == [576, 288, 72]  # two cuts fall together: the later one counts


@pytest.mark.parametrize("name", ["fastv", "sparsevlm", "pyramiddrop", "dart"])
def test_every_budget_from_one_to_all_has_a_schedule(name: str) -> None:
    for layers in (2, 3, 4, 8, 32, 40):
        for tokens in (1, 2, 3, 7, 31, 64, 128, 575):
            found = counts(name, tokens, layers=layers)
            assert len(found) == layers and found == sorted(found, reverse=True) and found[0] == 576 and found[-1] >= 1
        assert counts(name, 576, layers=layers) == counts(name, 999, layers=layers) == [576] * layers


def test_options_are_refused_with_their_bound() -> None:
    wrong = [("fastv", "count", "mean"), ("fastv", "layer", 1.5), ("pyramiddrop", "count", "all")]
    wrong += [("dart", "exact", "maybe"), ("sparsevlm", "version", "3.0"), ("sparsevlm", "scale", -1.0)]
    for name, option, value in wrong:
        with pytest.raises(OptionError, match=option):
            make(name, **{option: value})
    for name in ("fastv", "dart"):
        with pytest.raises(OptionError, match=r"layer=32 must be in 1\.\.31"):
            counts(name, 64, layer=32)
