"""What a loss is trained through: tokens, never the choice of them, but for a scorer by its soft mask; and what the
answers may not steer.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_llava
from prompts import batch, row, tiles
from torch import nn

from llava_consensus import attach
from llava_consensus.methods import METHODS, make
from llava_consensus.methods.scorer import Scorer
from llava_consensus.reduction.method import Place
from llava_consensus.training.scorer import ScorerWeights, SoftTop, store
from llava_consensus.training.trainer import inner, trained

BETWEEN = [name for name in METHODS if make(name).place is Place.DECODER]


def labelled(ids: torch.Tensor, last: int = 2) -> torch.Tensor:
    labels = torch.full_like(ids, -100)
    labels[:, -last:] = ids[:, -last:]
    return labels


@pytest.mark.parametrize("name", BETWEEN)
def test_a_loss_after_cuts_between_layers_reaches_the_projector(tower_folder: Path, name: str) -> None:
    model = tiny_llava(tower_folder).train()
    ids, mask = batch(row(5, 6), row(5, after=9))
    with attach(model, name, tokens=6) as attached:
        loss = model(ids, attention_mask=mask, labels=labelled(ids), images=tiles(2), use_cache=False).loss
        assert attached.outcomes[0].after == 6 or attached.outcomes[0].entering[-1] < 16
    loss.backward()
    gradients = [parameter.grad for parameter in model.get_model().mm_projector.parameters()]
    assert all(one is not None and bool(torch.isfinite(one).all()) and bool(one.any()) for one in gradients)


def test_answers_do_not_steer_the_probe(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder)
    ids, _ = batch(row(5, after=9))
    other = ids.clone()
    other[:, -2:] = torch.tensor([401, 402])
    chosen = []
    with attach(model, "consensusdrop", tokens=6, alpha=0.0) as attached:
        for rows, labels in ((ids, labelled(ids)), (other, labelled(other)), (ids, None), (other, None)):
            model(rows, labels=labels, images=tiles(1), use_cache=False)
            chosen.append(attached.outcomes[0].reductions[0][1].fused)
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[2], chosen[3]), "as text they would have steered it, else nothing is tested"


def test_the_probe_reads_layers_whose_weights_come_when_they_are_called(tower_folder: Path) -> None:
    """As under ZeRO stage 3: a module has its parameters while its forward runs, and no numbers in them otherwise."""
    model = tiny_llava(tower_folder)
    ids, mask = batch(row(5, 6))
    with attach(model, "consensusdrop", tokens=6):
        expected = model(ids, attention_mask=mask, labels=labelled(ids), images=tiles(1), use_cache=False).loss
    modules = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    for module in modules:
        _cut(module)
    assert len(modules) > 20 and not bool(model.model.layers[0].self_attn.q_proj.weight.numel())
    with attach(model, "consensusdrop", tokens=6):
        loss = model(ids, attention_mask=mask, labels=labelled(ids), images=tiles(1), use_cache=False).loss
    assert torch.equal(loss, expected)


def _cut(module: nn.Module) -> None:
    """Takes a module's parameters away but while it is called."""
    whole = {parameter: parameter.data for parameter in module.parameters(recurse=False)}

    def show(there: bool) -> None:
        for parameter, data in whole.items():
            parameter.data = data if there else data.new_empty(0)

    module.register_forward_pre_hook(lambda *_: show(True))
    module.register_forward_hook(lambda *_: show(False))
    show(False)


def test_the_model_is_found_in_what_wraps_it(llava_model: Any) -> None:
    assert inner(llava_model) is llava_model
    assert inner(nn.DataParallel(llava_model)) is llava_model


def test_shared_parameters_are_stored_once(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder, tie_word_embeddings=True)
    model.tie_weights()
    names = trained(model)
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert not any("vision_tower" in name for name in names)


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
