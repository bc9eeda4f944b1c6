"""Inputs of a method for prompts that share an encoded image, and for prompts of several pictures."""

import pytest
import torch
import transformers

from llava_consensus import attach
from llava_consensus.hosts.inputs import Inputs
from llava_consensus.reduction.saliency import EPSILON

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="models of transformers need version 5.19 or later"
)


@pytest.mark.parametrize("aggregate", ["all", "last", "max"])
@torch.no_grad()
def test_words_ask_about_the_pictures_before_them(aggregate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are taken once for each prompt, so that many images cost what one of their length does; each
    image is asked about by the eager first layer's rows behind it.
    """
    import hf_models

    case = hf_models.CASES["llava"]
    model, (first, second, third) = case.build(), map(case.picture, range(3))
    words = [1, first, 5, 6, second, 7, 9, third, 8], [3, 4, first, 5]
    inputs, made = hf_models.prompts(*words), []
    probe = Inputs.probe_of
    monkeypatch.setattr(Inputs, "probe_of", lambda *given: made.append(probe(*given)) or made[0])
    with attach(model, "consensusdrop", tokens=case.tokens, alpha=0.0, aggregate=aggregate) as attached:
        model(**inputs)
        found = [one.reductions[0][1].cross[0] for one in attached.outcomes]
    assert (*made[0].query.shape[:3:2], len(made[0].key)) == (2, 5, 2)  # sequences, words behind images, sequences
    model.set_attn_implementation("eager")
    attention = model(**inputs, output_attentions=True).attentions[0].mean(1)  # [R, S, S]
    picture = inputs["input_ids"] == hf_models.IMAGE
    starts = picture & ~picture.roll(1, 1)
    for cross, (row, start) in zip(found, starts.nonzero().tolist(), strict=True):
        end = start + len(first.ids)
        rows = attention[row, end:][~picture[row, end:]][:, start:end]
        rows = {"all": rows, "last": rows[-1:], "max": rows.amax(0, keepdim=True)}[aggregate]
        assert torch.allclose(cross, (rows / (rows.sum(-1, keepdim=True) + EPSILON)).mean(0), atol=1e-6)
