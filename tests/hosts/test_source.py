"""Inputs of a method for prompts that share an encoded picture."""

from unittest import mock

import pytest
import torch
import transformers

from llava_consensus import attach
from llava_consensus.hosts import source

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="models of transformers need version 5.19 or later"
)


@pytest.mark.parametrize("name", ["anchorprune", "mmtok"])
@torch.no_grad()
def test_each_question_about_one_encoding_is_read(name: str) -> None:
    """The evaluation encodes a picture once for its questions: what they choose is what they choose alone."""
    import hf_models

    case = hf_models.CASES["llava"]
    model, picture = case.build(), case.picture(0)
    asked = [1, 5, picture, 6, 40, 8], [1, 5, picture, 9, 77, 12]
    with attach(model, name, tokens=case.tokens) as attached:
        alone = []
        for words in asked:
            model(**hf_models.prompts(words))
            alone.append(attached.outcomes[0].reductions[0][1].kept)
        with mock.patch.object(source, "same_pictures", lambda tiles: (0,) * len(tiles)):  # as if encoded once
            model(**hf_models.prompts(*asked))
        kept = [reduction.kept[index] for one in attached.outcomes for index, reduction in one.reductions]
    assert torch.equal(torch.stack(kept), torch.cat(alone)) and not torch.equal(*alone)
