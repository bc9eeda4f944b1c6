"""Many calls at once on one attached model: plain, under autocast, on copies made meanwhile, and some that fail.

Run: `pytest tests/hosts/test_load.py`. `test_attachment.py` holds each of these by itself.
"""

import contextlib
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_llava
from prompts import row, tiles

from llava_consensus import attach

THREADS, CALLS = 8, 160
KINDS = ("plain", "autocast", "copy", "failure")


def kind(number: int) -> str:
    return KINDS[number * 7 // 3 % len(KINDS)]


@pytest.mark.parametrize("name", ["consensusdrop", "fastv", "tome", "visionzip"])
def test_what_is_kept_is_the_same_under_load(tower_folder: Path, name: str) -> None:
    model = tiny_llava(tower_folder)
    prompts = [(torch.tensor([row(5 + n % 5, images=1, after=4 + n % 3)]), tiles(1, n)) for n in range(CALLS)]
    start = threading.Barrier(THREADS)
    model(prompts[0][0], images=prompts[0][1])  # transformers installs hooks of its own at the first call
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}

    @torch.no_grad()
    def ask(number: int) -> Any:
        words, images = prompts[number]
        if kind(number) == "failure":
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                model(words, images=images[..., :3])  # no picture of this tower
            return "failed"
        asked = copy.deepcopy(model) if kind(number) == "copy" else model
        mixed = torch.autocast("cpu", torch.bfloat16) if kind(number) == "autocast" else contextlib.nullcontext()
        with mixed:
            return asked(words, images=images).logits

    def work(worker: int) -> dict[int, Any]:
        start.wait()
        return {number: ask(number) for number in range(worker, CALLS, THREADS)}

    with attach(model, name, tokens=6):
        alone = {number: ask(number) for number in range(CALLS)}
        with ThreadPoolExecutor(THREADS) as pool:
            together = {number: one for part in pool.map(work, range(THREADS)) for number, one in part.items()}
    for number, expected in alone.items():
        found = together[number]
        same = found == expected if isinstance(expected, str) else torch.equal(found, expected)
        assert same, f"call {number} ({kind(number)})"
    assert {name: len(module._forward_hooks) for name, module in model.named_modules()} == hooks
