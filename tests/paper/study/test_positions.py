"""Positions closed up from a layer on: the study's method beside those that act after the tower."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from models import tiny_llava
from PIL import Image
from prompts import batch, row, tiles

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models import Prompt
from llava_consensus.hosts import view_of
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.paper.study.methods import ClosedFrom
from llava_consensus.reduction.budget import Budget

TOKENS = 6
ROOT = Path(__file__).parents[3]
QUESTION = Prompt("Is there a dog?")
needs_5 = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="transformers 4 does not advance given positions"
)


@pytest.fixture(scope="module")
def mini() -> Any:
    return models.load(str(ROOT / "checkpoints/llava-mini"))


@pytest.fixture(scope="module")
def scene() -> Image.Image:
    return Image.open(sorted((ROOT / "playground/mini/eval/gqa/data/images").glob("*.jpg"))[0]).convert("RGB")


def logits(model: Any, prompt: SimpleNamespace) -> torch.Tensor:
    mask = torch.ones_like(prompt.ids)
    found: torch.Tensor = model(prompt.ids, images=prompt.images, attention_mask=mask, use_cache=False).logits[0, -1]
    return found


@needs_5
@torch.no_grad()
@pytest.mark.parametrize("closed_from, positions", [(0, "renumber"), (None, "keep")])
def test_from_the_first_layer_on_it_is_the_policy_of_a_method_after_the_tower(
    llava_model: Any, prompt: SimpleNamespace, closed_from: int | None, positions: str
) -> None:
    with Attachment(view_of(llava_model), ClosedFrom(closed_from=closed_from), Budget(TOKENS)):
        inside = logits(llava_model, prompt)
    with attach(llava_model, tokens=TOKENS, alpha=1.0, merged=0, positions=positions):
        after = logits(llava_model, prompt)
    assert torch.allclose(inside, after, atol=1e-4)


@needs_5
@torch.no_grad()
def test_a_later_layer_lies_between_the_two(llava_model: Any, prompt: SimpleNamespace) -> None:
    found = {}
    for layer in (None, 0, 1):
        with Attachment(view_of(llava_model), ClosedFrom(closed_from=layer), Budget(TOKENS)):
            found[layer] = logits(llava_model, prompt)
    assert not torch.allclose(found[1], found[None], atol=1e-4) and not torch.allclose(found[1], found[0], atol=1e-4)


@needs_5
@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"closed_from": 0}, {"closed_from": 1}, {"calibrate": True}])
def test_batches_of_different_prompts_answer_as_single_ones(tower_folder: Path, options: dict[str, Any]) -> None:
    """The cache of the first layer is shorter than the prompt, and still every step finds its columns."""
    model = tiny_llava(tower_folder, tokenizer_padding_side="left")
    rows = [row(5, 6), row(5, after=9), row(7, 8, 9, after=2)]
    images = tiles(3)
    ids, mask = batch(*rows, left=True)
    with Attachment(view_of(model), ClosedFrom(**options), Budget(TOKENS)):
        together = model.generate(ids, images=images, attention_mask=mask, max_new_tokens=6, do_sample=False)
        for index, one in enumerate(rows):
            alone = model.generate(
                torch.tensor([one]), images=images[index : index + 1], max_new_tokens=6, do_sample=False
            )
            assert together[index].tolist() == alone[0].tolist()


def test_a_layer_the_model_does_not_have_is_refused(llava_model: Any, prompt: SimpleNamespace) -> None:
    nine = pytest.raises(OptionError, match=r"closed_from=9 must be in 0\.\.")
    with nine, Attachment(view_of(llava_model), ClosedFrom(closed_from=9), Budget(TOKENS)):
        logits(llava_model, prompt)
    with pytest.raises(OptionError, match="closed_from"):
        ClosedFrom(closed_from=1.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="for positions that are kept"):
        ClosedFrom(closed_from=1, calibrate=True)


@torch.no_grad()
def test_older_versions_refuse_to_drop_before_the_first_layer(
    llava_model: Any, prompt: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llava_consensus.hosts.cut_forward.OLD", True)
    refused = pytest.raises(OptionError, match="needs transformers >= 5")
    with Attachment(view_of(llava_model), ClosedFrom(), Budget(TOKENS)), refused:
        logits(llava_model, prompt)
