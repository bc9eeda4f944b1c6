"""What reductions dispatch besides the model: the bookkeeping of a known prompt, waits for the device, blocks of the
vision tower that nobody reads.
"""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import runnable, tiny_llava
from PIL import Image
from prompts import batch, row, tiles

from llava_consensus import attach, load, make
from llava_consensus.bench.operations import count
from llava_consensus.hosts.base import Host, Prompt
from llava_consensus.hosts.llava.prepare import PREPARE
from llava_consensus.hosts.remembered import Remembered
from llava_consensus.reduction.budget import Budget

MINI = str(Path(__file__).parents[1] / "checkpoints" / "llava-mini")
PICTURE = Image.linear_gradient("L").convert("RGB")
PROMPT = Prompt("What is in the picture?")
RUNNABLE = runnable()


@pytest.fixture(scope="module")
def mini() -> Host:
    return load(MINI)


@pytest.fixture(scope="module")
def full(mini: Host) -> Any:
    return count(mini, PICTURE, PROMPT, (make("full"), Budget(1)))


def test_bookkeeping_of_a_known_prompt_is_at_most_forty_operations(mini: Host, full: Any) -> None:
    assert count(mini, PICTURE, PROMPT, (make("random"), Budget(64))).total - full.total <= 40


@pytest.mark.parametrize("tokens", [64, 192, 288])
def test_consensusdrop_itself_is_at_most_sixty_operations_with_its_loop_captured(mini: Host, tokens: int) -> None:
    """At every budget; in eager mode four more for each anchor (docs/efficiency.md says why)."""
    ours, random = (count(mini, PICTURE, PROMPT, (make(name), Budget(tokens))) for name in ("consensusdrop", "random"))
    assert ours.launches - random.launches <= 60
    assert ours.total - ours.launches <= 4 * Budget(tokens).split(576)[1] + 30


@pytest.mark.parametrize("name", RUNNABLE)
def test_no_method_waits_for_the_device_more_often_than_the_full_model(mini: Host, full: Any, name: str) -> None:
    assert count(mini, PICTURE, PROMPT, (make(name), Budget(64))).waits <= full.waits


# ---- what is remembered


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that grows with each call of the official function."""
    official, calls = getattr(type(model), PREPARE), []
    monkeypatch.setattr(type(model), PREPARE, lambda *arguments: calls.append(arguments[0]) or official(*arguments))
    return calls


@torch.no_grad()
def test_the_official_function_is_asked_once_for_a_structure(
    tower_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llava(tower_folder)
    calls = counted(model, monkeypatch)
    with attach(model, tokens=6):
        for text in ((5, 6), (7, 8), (5,), (9, 9)):
            ids, mask = batch(row(*text))
            model(ids, images=tiles(1), attention_mask=mask)
        assert len(calls) == 2
        ids, mask = batch(row(5), row(5, 6))
        right = model(ids, images=tiles(2), attention_mask=mask).logits
        model.config.tokenizer_padding_side = "left"
        left = model(ids, images=tiles(2), attention_mask=mask).logits
        assert len(calls) == 4 and torch.allclose(right[0, :-1], left[0, 1:], atol=1e-5)


def test_training_after_inference_on_the_same_structure(tower_folder: Path, prompt: SimpleNamespace) -> None:
    model = tiny_llava(tower_folder)
    with attach(model, tokens=6):
        with torch.inference_mode():
            model(prompt.ids, images=prompt.images)
        model(prompt.ids, images=prompt.images).logits.sum().backward()
    assert model.get_model().embed_tokens.weight.grad.abs().sum() > 0


def test_what_is_remembered_is_bounded_shared_by_threads_and_not_copied() -> None:
    known = Remembered(3)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: known.get(number % 5, lambda: number % 5), range(200)))
    assert found == [number % 5 for number in range(200)] and len(known) == 3
    known.get("old", lambda: 1)
    known.get("old", lambda: pytest.fail("made twice"))
    assert len(copy.deepcopy(known)) == 0


# ---- blocks that nobody reads


@contextmanager
def blocks_run(blocks: Any) -> Iterator[list[int]]:
    """Numbers of the blocks that ran in the body."""
    runs: list[int] = []
    handles = [
        block.mlp.register_forward_hook(lambda *_, index=index: runs.append(index))
        for index, block in enumerate(blocks)
    ]
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def test_blocks_behind_the_features_are_not_run_and_change_no_bit(mini: Any) -> None:
    blocks = mini.view.tower.blocks
    with blocks_run(blocks) as runs:
        with mini.attach(make("consensusdrop"), Budget(64)):
            skipped = mini.encode([PICTURE])[0].tiles.projected
            assert runs == list(range(len(blocks) - 1))
            runs.clear()
            side = mini.model.get_vision_tower().config.image_size
            mini.model.get_vision_tower()(torch.zeros(1, 3, side, side))  # by somebody else
            assert runs == list(range(len(blocks)))
        runs.clear()
        with mini.attach(make("prumerge"), Budget(64)):  # reads the attention of the last block
            assert torch.equal(mini.encode([PICTURE])[0].tiles.projected, skipped)
            assert runs == list(range(len(blocks)))
    assert all("forward" not in vars(block) for block in blocks)


@torch.no_grad()
def test_nor_where_a_method_cuts_in_the_language_model_and_the_official_function_encodes(mini: Any) -> None:
    model, blocks = mini.model, mini.view.tower.blocks
    pixels = mini.image_processor(PICTURE, return_tensors="pt")["pixel_values"]
    given = (torch.tensor([[1, -200, 40, 41]]), None, None, None, None, pixels)
    plain = getattr(model, PREPARE)(*given)[4]
    with blocks_run(blocks) as runs, mini.attach(make("fastv"), Budget(64)):
        assert torch.equal(getattr(model, PREPARE)(*given)[4], plain)
    assert runs == list(range(len(blocks) - 1))
