"""Options of ConsensusDrop that the paper does not have: diverse selection, and those that were dropped."""

import torch
from units import of_batch, unit

from llava_consensus.methods.consensusdrop import ConsensusDrop
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.selection import diverse


def test_diverse_selection_by_hand() -> None:
    angle = torch.tensor([0.0, 5.0, 90.0, 180.0]).deg2rad()
    features = torch.stack((angle.cos(), angle.sin()), dim=-1)[None]
    saliency = torch.tensor([[0.5, 0.4, 0.06, 0.04]])
    assert diverse(saliency, features, 2, 1.0).tolist() == [[0, 3]]  # 0.04 x 2 beats 0.06 x 1 and 0.4 x 0.004
    assert diverse(saliency, features, 2, 100.0).tolist() == [[0, 1]]
    assert diverse(saliency, features, 4, 1.0).tolist() == [[0, 1, 2, 3]]
    same = torch.ones(1, 5, 2)
    assert diverse(torch.full((1, 5), 0.2), same, 3, 1.0).tolist() == [[0, 1, 2]]


def test_diverse_selection_keeps_the_contract() -> None:
    tokens, method = unit(seed=3), ConsensusDrop(select="diverse")
    result = method.reduce(tokens, Budget(12))
    assert result.tokens.shape[1] == 12 and torch.isfinite(result.tokens).all()
    for index in range(len(tokens.projected)):
        alone = method.reduce(of_batch(tokens, index), Budget(12))
        assert torch.equal(alone.kept[0], result.kept[index]) and torch.equal(alone.owner[0], result.owner[index])
