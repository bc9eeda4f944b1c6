"""Video-LLaVA: clips of eight frames of 257 rows, their class tokens, which stay, and the paper's budgets."""

from typing import Any

import hf_models
import pytest
import torch
import transformers
from hf_models import VIDEO, Picture, noise, prompts, rows_read

from llava_consensus import attach

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")
FRAMES, PATCHES = 8, 256


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_models.video_llava(224)


def clip(number: int = 0, size: int = 224) -> Picture:
    rows = FRAMES * ((size // 14) ** 2 + 1)
    return Picture([VIDEO] * rows, {"pixel_values_videos": noise(1, FRAMES, 3, size, size, seed=number)})


@pytest.mark.parametrize("tile_budget", ["global", "per_tile"])
def test_the_budgets_of_a_clip(model: Any, tile_budget: str) -> None:
    budget = 455
    inputs = prompts([1, 5, 6, clip(), 7, 8, 9])
    with attach(model, "consensusdrop", budget, tile_budget=tile_budget) as attached, torch.no_grad():
        rows = rows_read(model, inputs)
        (outcome,) = attached.outcomes
    assert (outcome.before, outcome.after, outcome.structural) == (2048, budget, 8)
    assert rows == 6 + budget + 8
    counts = [one.tokens.shape[1] for _, one in outcome.reductions]
    shares = [budget // FRAMES + (frame < budget % FRAMES) for frame in range(FRAMES)]
    assert counts == ([budget] if tile_budget == "global" else shares)


def test_a_batch_of_clips_and_pictures_answers_like_single_prompts() -> None:
    small = hf_models.video_llava(56)
    rows: list[list[Any]] = [
        [1, 5, clip(0, 56), 6, 7, 8],
        [1, 9, hf_models.square(0), 11],
        [1, 21, 22],
        [1, clip(1, 56), 31],
    ]
    with attach(small, "consensusdrop", 9):
        together = small.generate(**prompts(*rows), max_new_tokens=4, do_sample=False)[:, -4:]
        singles = [small.generate(**prompts(row), max_new_tokens=4, do_sample=False)[:, -4:] for row in rows]
    assert torch.equal(together, torch.cat(singles))
