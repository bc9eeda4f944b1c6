"""Training of a scorer: the soft mask and its gradient, and that what is stored ranks as what was trained."""

from pathlib import Path

import pytest
import torch
import transformers

if transformers.__version__.startswith("4."):
    pytest.skip("a scorer is trained on models of transformers, which need version 5", allow_module_level=True)

from llava_consensus.methods.scorer import Scorer
from llava_consensus.training.scorer import ScorerWeights, SoftTop, store


def test_a_soft_mask_sums_to_the_budget_and_has_its_gradient() -> None:
    scores = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert float(SoftTop.apply(scores, 4.0).sum().detach()) == pytest.approx(4)
    assert torch.autograd.gradcheck(lambda given: SoftTop.apply(given, 4.0), scores)


def test_what_is_stored_ranks_as_what_was_trained(tmp_path: Path) -> None:
    weights, tokens = ScorerWeights(6, 3, seed=1), torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    weights.q_proj.bias.data += 0.1
    store(weights, tmp_path / "scorer.safetensors")
    scores = Scorer(weights=str(tmp_path / "scorer.safetensors")).scores(tokens[None])
    assert torch.allclose(scores[0], weights(tokens), atol=1e-7)
