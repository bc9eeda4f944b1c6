"""Official LLaVA with a method attached, outside of a plain `generate`: loops of the user's own, with and without masks
and caches, kinds of caches, and lengths that count the prompt.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import PATCHES, tiny_llava
from prompts import batch, row, tiles
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import OptionError

CURRENT = int(transformers.__version__.split(".")[0]) >= 5
NEW, TOKENS = 5, 6
KEPT: list[tuple[str, dict[str, Any]]] = [("consensusdrop+", {}), ("consensusdrop", {"positions": "mean"})]
WAYS: list[tuple[str, dict[str, Any]]] = [("consensusdrop", {}), ("sparsevlm", {})]
WAYS += KEPT[1:] if CURRENT else []  # version 4 is refused kept positions
KINDS = {
    "one": ([row(5, 6)], 1),
    "batch": ([row(5, 6), row(5, images=2, after=9)], 3),
    "picture last": ([[1, 5, 6, 7, 8, -200]], 1),
}


@pytest.fixture(scope="module")
def model(tower_folder: Path) -> Any:
    return tiny_llava(tower_folder, num_hidden_layers=4, tokenizer_padding_side="left", eos_token_id=None)


def inputs(kind: str) -> dict[str, Any]:
    rows, pictures = KINDS[kind]
    ids, mask = batch(*rows, left=True)
    return {"inputs": ids, "images": tiles(pictures), "attention_mask": mask}


def generate(model: Any, given: dict[str, Any], **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(**given, return_dict_in_generate=True, output_scores=True, **options)


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4)


@torch.no_grad()
def loop(model: Any, given: dict[str, Any], words: Tensor, masked: bool) -> Tensor:
    """Logits of a loop of one's own that says these words [R, t], with masks of the rows that are read or with none."""
    ids, images, mask = given["inputs"], given["images"], given["attention_mask"]
    output = model(ids, images=images, attention_mask=mask if masked else None, use_cache=True)
    found = [output.logits[:, -1]]
    real = model.prepare_inputs_labels_for_multimodal(ids, None, mask, None, None, images)[2]
    for word in words[:, :-1].T[..., None]:
        real = torch.cat((real, torch.ones_like(word).to(real)), 1)
        more = {"attention_mask": real} if masked else {}
        output = model(word, past_key_values=output.past_key_values, use_cache=True, **more)
        found.append(output.logits[:, -1])
    return torch.stack(found, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "options"), WAYS)
def test_a_loop_of_ones_own_answers_like_generate(model: Any, method: str, options: dict[str, Any], kind: str) -> None:
    given = inputs(kind)
    with attach(model, method, TOKENS, **options):
        found = generate(model, given)
        expected, words = torch.stack(found.scores, 1), found.sequences[:, -NEW:]
        assert close(loop(model, given, words, True), expected)
        if kind != "batch":
            assert close(loop(model, given, words, False), expected)


@pytest.mark.skipif(not CURRENT, reason="version 4 counts the answer only")
@pytest.mark.parametrize("method", ["full", "consensusdrop", "consensusdrop+", "fastv"])
@torch.no_grad()
def test_lengths_count_the_full_prompt_wherever_they_are_set(model: Any, method: str) -> None:
    given = inputs("one")
    size = given["inputs"].shape[1] - 1 + PATCHES
    config = transformers.GenerationConfig(max_length=size + 4, pad_token_id=0)
    places: list[int] = []

    def note(layer: Any, args: Any, kwargs: Any) -> None:
        places.append(int(kwargs["position_ids"][0, -1]))

    with attach(model, method, TOKENS), model.model.layers[0].register_forward_pre_hook(note, with_kwargs=True):
        for options in ({"max_length": size + 4}, {"generation_config": config}):
            assert model.generate(**given, do_sample=False, **options).shape[1] == 4
        places.clear()
        assert model.generate(**given, do_sample=False, max_new_tokens=3).shape[1] == 3
        loop(model, given, torch.tensor([[5, 6, 7]]), masked=False)
    first = size - 1 if method != "consensusdrop" else TOKENS + len(row(5, 6)) - 2
    assert places == 2 * [first, first + 1, first + 2]


@pytest.mark.parametrize("method", ["consensusdrop", "fastv"])
def test_packed_prompts_are_refused(model: Any, method: str) -> None:
    words = torch.tensor([[*row(5, 6), *row(7)]])
    positions = torch.cat((torch.arange(len(row(5, 6))), torch.arange(len(row(7)))))[None]
    with attach(model, method, TOKENS), pytest.raises(OptionError, match="packed into one row"):
        model(words, images=tiles(2), position_ids=positions)
