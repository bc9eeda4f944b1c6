"""Options of ConsensusDrop that the paper does not have: fusers, selection, debiasing, merge."""

import pytest
import torch
from units import WATCH, of_batch, unit

from llava_consensus.methods.consensusdrop import ConsensusDrop
from llava_consensus.reduction import egtm, fusers
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.diversity import diverse


def test_rank_and_product_fusers_by_hand() -> None:
    vision, cross = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.1, 0.8, 0.1]])
    points = torch.tensor([[0.5 * 3 + 0.5 * 2, 0.5 * 2 + 0.5 * 3, 1.0]])  # ties of the cross side to the lower index
    assert torch.allclose(fusers.by_rank(vision, cross, 0.5), points / points.sum())
    root = (vision * cross).sqrt()
    assert torch.allclose(fusers.product(vision, cross, 0.5), root / root.sum())
    for fuse in (fusers.by_rank, fusers.product):
        assert torch.equal(fusers.top(fuse(vision, cross, 1.0), 2), fusers.top(vision, 2))
        assert torch.equal(fusers.top(fuse(vision, cross, 0.0), 2), fusers.top(cross, 2))


def test_diverse_selection_by_hand() -> None:
    angle = torch.tensor([0.0, 5.0, 90.0, 180.0]).deg2rad()
    features = torch.stack((angle.cos(), angle.sin()), dim=-1)[None]
    saliency = torch.tensor([[0.5, 0.4, 0.06, 0.04]])
    assert diverse(saliency, features, 2, 1.0).tolist() == [[0, 3]]  # 0.04 x 2 beats 0.06 x 1 and 0.4 x 0.004
    assert diverse(saliency, features, 2, 100.0).tolist() == [[0, 1]]
    assert diverse(saliency, features, 4, 1.0).tolist() == [[0, 1, 2, 3]]
    same = torch.ones(1, 5, 2)
    assert diverse(torch.full((1, 5), 0.2), same, 3, 1.0).tolist() == [[0, 1, 2]]


def test_debiased_scap_is_flat_where_all_tokens_are_alike() -> None:
    tokens = unit()
    assert tokens.probe is not None and tokens.columns is not None
    places, key = tokens.columns[0], tokens.probe.key.clone()
    key[:, :, places] = key[:, :, places[:1]]
    angle = torch.arange(key.shape[2])[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).repeat(2)
    cos, sin = (wave.expand(2, -1, -1) for wave in (angle.cos(), angle.sin()))
    alike = tokens.probe._replace(key=key, cos=cos, sin=sin)
    method = ConsensusDrop(debias=True)
    cross = method.saliencies(tokens._replace(probe=alike), WATCH).cross
    assert torch.allclose(cross, cross[:, :1].expand_as(cross), atol=1e-4)
    biased = ConsensusDrop().saliencies(tokens._replace(probe=alike), WATCH).cross
    assert (biased.amax() / biased.amin()) > 1.01


def test_weighted_merge_by_hand() -> None:
    projected = torch.tensor([[[1.0], [3.0], [10.0]]])
    group = torch.tensor([[0, 0, 1]])
    assert egtm.merge(projected, group, 2, torch.tensor([[0.3, 0.1, 0.6]])).flatten().tolist() == pytest.approx(
        [1.5, 10]
    )


@pytest.mark.parametrize(
    "options",
    [{"fuser": "rank"}, {"fuser": "product"}, {"select": "diverse"}, {"debias": True}, {"anchors": "salient"}],
)
def test_options_beyond_the_paper_keep_the_contract(options: dict) -> None:
    tokens, method = unit(seed=3), ConsensusDrop(weights="saliency", **options)
    result = method.reduce(tokens, Budget(12))
    assert result.tokens.shape[1] == 12 and torch.isfinite(result.tokens).all()
    for index in range(len(tokens.projected)):
        alone = method.reduce(of_batch(tokens, index), Budget(12))
        assert torch.equal(alone.kept[0], result.kept[index]) and torch.equal(alone.owner[0], result.owner[index])
