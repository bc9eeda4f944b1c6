"""Budgets that follow from an image's small print (`auto`), and the total of a conversation."""

import re
from typing import Any

import hf_models
import pytest
import torch
import transformers
from PIL import Image, ImageDraw

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Auto, Budget, Share, budget, conversation, of_prompts, wanted
from llava_consensus.reduction.detail import auto_share


def page(part: float) -> Image.Image:
    """A white image of which the upper part is covered with print."""
    picture = Image.new("RGB", (480, 480), "white")
    for y in range(8, int(480 * part), 12):
        ImageDraw.Draw(picture).text((0, y), "the quick brown fox jumps over the lazy dog " * 4, fill="black")
    return picture


def test_more_tokens_for_small_print_and_fewer_for_a_plain_picture() -> None:
    shares = [auto_share(page(part)).share for part in (0, 0.1, 0.2, 1)]
    assert shares == sorted(shares) and shares[0] == round(1 / 9, 4) and shares[-1] == 0.5
    assert 0.15 < shares[1] < shares[2] < 0.4
    block = Image.new("RGB", (480, 480), "white")
    ImageDraw.Draw(block).rectangle((100, 100, 300, 300), fill="black")  # edges that are no strokes
    assert auto_share(block).share == shares[0]
    for mode in ("L", "RGBA", "P", "CMYK"):
        assert auto_share(page(1).convert(mode)).share == 0.5
    assert auto_share(Image.new("RGB", (1, 1))).share == auto_share(Image.new("RGB", (3000, 2))).share == shares[0]
    with pytest.raises(OptionError, match="looks at images of PIL, and this is Tensor"):
        auto_share(torch.zeros(3, 4, 4))


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


def test_one_validator_for_numbers_shares_and_auto() -> None:
    assert (wanted("auto"), wanted(64, 3), wanted(0.5)) == (Auto(), Budget(64, 3), Share(0.5))
    for tokens, merged, reason in (("auto", 3, "merged=3 beside"), ("64", None, "or 'auto'"), (0, None, "at least 1")):
        with pytest.raises(OptionError, match=reason):
            wanted(tokens, merged)
    given: Any = "auto"
    with pytest.raises(OptionError, match="is for attach, serve and eval --url"):
        budget(given)


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="transformers 5.19 or later")
def test_attached_budgets_follow_from_what_is_said_around_the_call() -> None:
    model = hf_models.CASES["llava"].build()
    inputs = hf_models.prompts([1, 5, hf_models.square(0), 7, hf_models.square(1), 8, 9])
    with attach(model, "visionzip", tokens="auto") as attached:
        with pytest.raises(
            OptionError, match=r"say them around the call, `with attached.seeing\(\[...\]\):`, 2 of PIL"
        ):
            model.generate(**inputs, max_new_tokens=1)
        with attached.seeing([page(0), page(1)]):
            model.generate(**inputs, max_new_tokens=1)
        assert [one.after for one in attached.outcomes] == [Share(0.1111).of(16).tokens, 8]
    with attach(model, "visionzip", tokens=8, total=12) as attached:
        model.generate(**inputs, max_new_tokens=1)
        assert [one.after for one in attached.outcomes] == [4, 8]
    with pytest.raises(OptionError, match="total=True must be a whole number"):
        attach(model, "visionzip", total=True)
    with pytest.raises(OptionError, match="are for methods that act after the vision tower"):
        attach(model, "fastv", tokens="auto")
