"""Numbers worked out by hand, where random ones would let a wrong formula pass."""

from typing import Any

import pytest
import torch

from llava_consensus.errors import OptionError
from llava_consensus.methods.sparsevlm import SparseVLM
from llava_consensus.reduction import saliency
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.costs import SHAPES, paper_flops
from llava_consensus.reduction.saliency import cross_saliency, text_attention, text_saliency
from llava_consensus.reduction.selection import correction_factor
from llava_consensus.reduction.tokens import TextProbe


def test_the_last_row_is_the_last_real_one() -> None:
    rows = torch.tensor([[0.1, 0.9, 0.5, 0.2], [0.2, 0.1, 0.8, 0.3], [0.4, 0.3, 0.2, 0.6], [0.7, 0.2, 0.6, 0.1]])
    attention, columns = rows.expand(3, -1, -1), torch.tensor([[3, 1, 0]] * 3)
    mask = torch.tensor([[True] * 3 + [False], [True] + [False] * 3, [True] * 4])
    found = cross_saliency(attention, mask, columns, "last")
    alone = [cross_saliency(rows[None, [last]], None, columns[:1], "last")[0] for last in (2, 0, 3)]
    assert found.shape == (3, 3) and torch.equal(found, torch.stack(alone))
    assert found.argsort(1).tolist() == [[1, 2, 0], [2, 0, 1], [0, 1, 2]]
    assert torch.equal(cross_saliency(attention, None, columns, "last")[0], alone[2])


def test_a_probe_that_says_nothing_of_padding_may_have_some() -> None:
    query, key, flat = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), torch.zeros(1, 3, 4)
    real, all_keys = torch.tensor([[True, False]]), torch.ones(1, 3, dtype=torch.bool)
    probe = TextProbe(query, key, flat + 1, flat, 0.5, torch.tensor([[1, 2]]), real, all_keys)
    rows = text_attention(probe)[0]
    assert rows[0].sum() > 0.99 and rows[1].tolist() == [0.0] * 3
    capped = text_attention(probe._replace(key=key * torch.tensor([0.0, 1, 2])[:, None], cap=3.0))[0, 0, :2]
    assert torch.allclose(capped, torch.softmax(3 * torch.tensor([0.0, 2 / 3]).tanh(), 0))


@pytest.mark.parametrize("aggregate", saliency.AGGREGATES)
def test_a_long_question_is_read_in_chunks_of_rows(aggregate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, angle = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 30, 8), torch.randn(2, 30, 8)
    places, real = torch.arange(21, 30).expand(2, -1), torch.ones(2, 30, dtype=torch.bool)
    probe = TextProbe(query, key, angle, angle.sin(), 0.5, places, real[:, :9], real)
    prompt, columns = torch.tensor([0, 1, 1]), torch.tensor([[1, 2, 3], [4, 6, 8], [9, 12, 20]])
    asking = torch.arange(9) >= torch.tensor([[0], [2], [5]])
    whole = cross_saliency(text_attention(probe)[prompt], asking, columns, aggregate)
    softmax, sizes = torch.softmax, []
    monkeypatch.setattr(torch, "softmax", lambda one, dim: sizes.append(one.numel()) or softmax(one, dim=dim))
    monkeypatch.setattr(saliency, "PROBE_CHUNK", 2 * 4 * 30 * 2)  # two rows
    found = text_saliency(probe, prompt, columns, asking, aggregate)
    assert max(sizes) == saliency.PROBE_CHUNK and len(sizes) == 5
    assert torch.allclose(found, whole, atol=1e-6)


def test_how_far_down_the_teachers_ranking_recovery_must_look() -> None:
    teacher = torch.tensor([[5.0, 4, 3, 2, 1, 0]])
    student = torch.tensor([[9.0, 0, 8, 7, 1, 2]])  # keeps 0 and 2; 1 and 3 come, of the first 4
    assert correction_factor(student, teacher, 4, 0.5).tolist() == [0.0]
    assert correction_factor(student, teacher, 4, 0.25).item() == pytest.approx(2 / 3)  # 1, of the first 2
    assert all(correction_factor(student, teacher, 4, rate).tolist() == [1.0] for rate in (0.0, 1.0))


def test_flops_of_the_papers_efficiency_tables() -> None:
    """Its formula on small numbers: (S + 20) 2 P + 2 S^2 D in each layer, P = 4 D^2 + 3 D I and S = T + text."""
    shape = SHAPES["llava-1.5-7b"]._replace(width=8, inner=3, text=5)
    per_row = 4 * 64 + 3 * 8 * 3
    assert paper_flops(shape, [6, 2]) == 2 * (31 + 27) * per_row + 2 * 8 * (11**2 + 7**2)
    assert paper_flops(shape, [6], decoded=1) == 2 * 12 * per_row + 2 * 8 * 11**2


def test_a_budget_is_whole_numbers() -> None:
    wrong: list[tuple[Any, ...]] = [(True,), (1.5,), (None,), ("4",), (0,), (4, True), (4, 1.0), (4, 5), (4, -1)]
    for given in wrong:
        with pytest.raises(OptionError, match=r"tokens=|merged="):
            Budget(*given)
    assert [Share(0.1).of(available).tokens for available in (4, 15, 576)] == [1, 2, 58]
    assert Budget(4, 0).split(9) == (4, 0) and Budget(4, 4).split(9) == (0, 4) and Budget(1).merged is None


def test_version_one_of_sparsevlm_keeps_by_the_rank_of_the_attention() -> None:
    method = SparseVLM(version="1.0", scale=2.0, bias=1.0)
    attention = torch.zeros(1, 2, 4, 9)
    attention[0, :, 0, 0] = attention[0, :, 1, 5] = attention[0, :, 2, 7] = 1.0
    attention[0, :, 3, 8] = torch.tensor([2.0, -2.0])  # nothing, in the mean over heads
    raters = torch.tensor([[True, True, False, True]])
    assert method.count_by_rank(64, attention, raters) == 2 * 2 + 1
    assert method.count_by_rank(64, attention, torch.ones_like(raters)) == 2 * 3 + 1
    most = SparseVLM(version="1.0", scale=9.0, bias=0.0)
    assert most.count_by_rank(64, attention, raters) == 8, "one leaves at least"
    square = torch.eye(4)[None, None]
    assert method.count_by_rank(64, square, torch.ones(1, 4, dtype=torch.bool)) == 4
