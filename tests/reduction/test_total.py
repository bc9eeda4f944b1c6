"""The most visual tokens of a prompt with several images."""

import re

import hf_models
import pytest

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Budget, Share, conversation, of_prompts


def test_older_pictures_are_halved_until_a_conversation_fits() -> None:
    assert conversation([64] * 4, 256) == [64] * 4
    assert conversation([64] * 4, 200) == [32, 32, 64, 64]
    assert conversation([64] * 4, 150) == [16, 32, 32, 64]
    assert conversation([64] * 20, 300) == [8] * 9 + [16] * 10 + [64]
    assert conversation([3, 1, 64], 66) == [1, 1, 64]
    with pytest.raises(OptionError, match=re.escape("total=100 visual tokens are too few for 20 images")):
        conversation([64] * 20, 100)
    found = of_prompts([Share(0.5), Budget(64), Budget(64)], [100, 40, 576], [0, 1, 1], 80)
    assert found == (Share(0.5), Budget(10), Budget(64))


def test_a_prompt_has_at_most_its_total() -> None:
    model = hf_models.CASES["llava"].build()
    inputs = hf_models.prompts([1, 5, hf_models.square(0), 7, hf_models.square(1), 8, 9])
    with attach(model, "visionzip", tokens=8, total=12) as attached:
        model.generate(**inputs, max_new_tokens=1)
        assert [one.after for one in attached.outcomes] == [4, 8]
    with pytest.raises(OptionError, match="total=True must be a whole number"):
        attach(model, "visionzip", total=True)
    with pytest.raises(OptionError, match="is for methods that act after the vision tower"):
        attach(model, "fastv", tokens=8, total=12)
