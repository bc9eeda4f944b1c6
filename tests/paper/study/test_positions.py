"""Positions closed up from a layer on: the study's method beside those that act after the tower."""

import math
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


def decay(distance: int, theta: list[float]) -> float:
    """D of RESTORE, as it is written."""
    return sum(math.cos(distance * frequency) for frequency in theta) / len(theta)


@needs_5
@torch.no_grad()
def test_calibrated_attention_is_restores_formula(llava_model: Any, prompt: SimpleNamespace) -> None:
    """Against the language model on the same rows with a mask that is made here number by number, token by token."""
    model, layers = llava_model, llava_model.model.layers
    read: list[torch.Tensor] = []
    with Attachment(view_of(model), ClosedFrom(calibrate=True), Budget(TOKENS)) as attached:
        mask = torch.ones_like(prompt.ids)
        tap = layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: read.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        given = model.generate(
            prompt.ids, images=prompt.images, attention_mask=mask, max_new_tokens=5, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tap.remove()
        (outcome,) = attached.outcomes
    rows, kept = read[0], outcome.reductions[0][1].source[0].tolist()
    before, width = outcome.before, rows.shape[1]
    start = prompt.ids[0].tolist().index(-200)
    places = [*range(start), *(start + one for one in kept)]
    places += range(start + before, start + before + width - len(places))
    theta = model.model.rotary_emb.inv_freq.tolist()
    visual = range(start, start + TOKENS)

    def added(layer: int, query: int, key: int, prefill: bool) -> float:
        if key > query:
            return torch.finfo(rows.dtype).min
        size = before / TOKENS if layer == 0 and key in visual else 1.0
        return math.log(size) + (math.log(2 - decay(places[query] - places[key], theta)) if prefill else 0.0)

    def reader(layer: int) -> Any:
        def change(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            count = len(places)
            table = [[added(layer, row, column, row < width) for column in range(count)] for row in range(count)]
            return args, {**kwargs, "attention_mask": torch.tensor(table)[None, None]}

        return change

    hooks = [layer.register_forward_pre_hook(reader(number), with_kwargs=True) for number, layer in enumerate(layers)]
    for step, token in enumerate(given.sequences[0].tolist()):
        found = model.lm_head(model.model(inputs_embeds=rows, position_ids=torch.tensor([places]), use_cache=False)[0])
        assert torch.allclose(found[0, -1], given.logits[step][0], atol=1e-4)
        rows = torch.cat((rows, model.model.embed_tokens(torch.tensor([[token]]))), dim=1)
        places.append(places[-1] + 1)
    for hook in hooks:
        hook.remove()
    with Attachment(view_of(model), ClosedFrom(), Budget(TOKENS)):
        assert not torch.allclose(logits(model, prompt), given.logits[0][0], atol=1e-3), "it is another policy"


@torch.no_grad()
def test_older_versions_refuse_to_drop_before_the_first_layer(
    llava_model: Any, prompt: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llava_consensus.hosts.cut_forward.OLD", True)
    refused = pytest.raises(OptionError, match="needs transformers >= 5")
    with Attachment(view_of(llava_model), ClosedFrom(), Budget(TOKENS)), refused:
        logits(llava_model, prompt)
