"""Video-LLaVA: clips of eight frames of 257 rows, what becomes of their class tokens, and the paper's budgets."""

from typing import Any

import hf_models
import pytest
import torch
import transformers
from hf_models import VIDEO, Picture, noise, prompts, rows_read
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.reduction.saliency import class_saliency, received_saliency
from llava_consensus.reduction.tokens import VisionAttention

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")
FRAMES, PATCHES = 8, 256
CLASS_ROWS = torch.arange(FRAMES * (PATCHES + 1)) % (PATCHES + 1) == 0


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_models.video_llava(224)


def clip(number: int = 0, size: int = 224) -> Picture:
    rows = FRAMES * ((size // 14) ** 2 + 1)
    return Picture([VIDEO] * rows, {"pixel_values_videos": noise(1, FRAMES, 3, size, size, seed=number)})


@pytest.mark.parametrize(
    ("class_tokens", "before", "structural"), [("keep", 2048, 8), ("drop", 2048, 0), ("candidates", 2056, 0)]
)
@pytest.mark.parametrize("tile_budget", ["global", "per_tile"])
def test_the_budgets_of_a_clip(model: Any, class_tokens: str, before: int, structural: int, tile_budget: str) -> None:
    budget = 455
    inputs = prompts([1, 5, 6, clip(), 7, 8, 9])
    options: dict[str, Any] = {"host_options": {"class_tokens": class_tokens}, "tile_budget": tile_budget}
    with attach(model, "consensusdrop", budget, **options) as attached, torch.no_grad():
        rows = rows_read(model, inputs)
        (outcome,) = attached.outcomes
    assert (outcome.before, outcome.after, outcome.structural) == (before, budget, structural)
    assert rows == 6 + budget + structural
    counts = [one.tokens.shape[1] for _, one in outcome.reductions]
    shares = [budget // FRAMES + (frame < budget % FRAMES) for frame in range(FRAMES)]
    assert counts == ([budget] if tile_budget == "global" else shares)


@torch.no_grad()
def test_without_class_tokens_equals_masking_them(model: Any) -> None:
    inputs = prompts([1, 5, 6, clip(), 7, 8, 9])
    options: dict[str, Any] = {"host_options": {"class_tokens": "drop"}, "positions": "keep", "merged": 0}
    options |= {"tile_budget": "global"}
    with attach(model, "consensusdrop", 114, **options, order="raster") as attached:
        found = model(**inputs).logits[:, -1]
        (outcome,) = attached.outcomes
    stays = torch.zeros(FRAMES * PATCHES, dtype=torch.bool)
    stays[outcome.reductions[0][1].kept[0]] = True
    visual = torch.zeros(len(CLASS_ROWS), dtype=torch.bool)
    visual[~CLASS_ROWS] = stays
    mask = inputs["attention_mask"].clone()
    mask[0, 3 : 3 + len(visual)] = visual.long()
    positions = torch.arange(mask.shape[1])[None]
    expected = model(**{**inputs, "attention_mask": mask}, position_ids=positions).logits[:, -1]
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("class_tokens", ["drop", "candidates"])
def test_a_batch_of_clips_and_pictures_answers_like_single_prompts(class_tokens: str) -> None:
    small = hf_models.video_llava(56)
    rows: list[list[Any]] = [
        [1, 5, clip(0, 56), 6, 7, 8],
        [1, 9, hf_models.square(0), 11],
        [1, 21, 22],
        [1, clip(1, 56), 31],
    ]
    with attach(small, "consensusdrop", 9, host_options={"class_tokens": class_tokens}):
        together = small.generate(**prompts(*rows), max_new_tokens=4, do_sample=False)[:, -4:]
        singles = [small.generate(**prompts(row), max_new_tokens=4, do_sample=False)[:, -4:] for row in rows]
    assert torch.equal(together, torch.cat(singles))


def test_a_method_between_layers_refuses_to_take_rows_out_before() -> None:
    small = hf_models.video_llava(56)
    with pytest.raises(OptionError, match="class_tokens=drop: FastV cuts between decoder layers"):
        attach(small, "fastv", 9, host_options={"class_tokens": "drop"})
    with attach(small, "fastv", 9, host_options={"class_tokens": "candidates"}) as attached:
        small.generate(**prompts([1, 5, clip(0, 56), 6, 7]), max_new_tokens=2)
        assert (attached.outcomes[0].before, attached.outcomes[0].structural) == (FRAMES * 17, 0)


def test_a_class_token_that_is_a_token_has_the_attention_it_pays_to_itself() -> None:
    query, key = (noise(2, 4, 17, 8, seed=seed) for seed in (0, 1))
    apart, among = (VisionAttention(query, key, 0.3, 1, own) for own in (False, True))
    weights: Tensor = torch.softmax(query @ key.transpose(-1, -2) * 0.3, -1).mean(1)
    assert torch.allclose(class_saliency(apart), weights[:, 0, 1:]) and class_saliency(apart).shape == (2, 16)
    assert torch.allclose(class_saliency(among), weights[:, 0])
    received = (weights.sum(1) - weights.diagonal(dim1=1, dim2=2)) / 16
    assert torch.allclose(received_saliency(among), received, atol=1e-6)
    assert among.patch_keys().shape[1] == 17 and apart.patch_keys().shape[1] == 16
