"""`positions=spread`: the tokens of an image are evenly over the span it had; decode steps continue behind it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES, prompts

from llava_consensus import attach
from llava_consensus.errors import OptionError

needs_5 = pytest.mark.skipif(transformers.__version__.startswith("4."), reason="kept positions need transformers 5")


@needs_5
@torch.no_grad()
def test_kept_tokens_are_evenly_over_the_span_of_their_image() -> None:
    """Two prompts, of 2 and 1 words before 16 tokens; the shorter one is padded on the left."""
    case = CASES["llava"]
    model, seen = case.build(), []
    inputs = prompts([1, 5, case.picture(0), 7, 8], [1, case.picture(1), 9])
    with attach(model, "divprune", tokens=6, positions="spread"):
        rotary = model.model.language_model.rotary_emb
        handle = rotary.register_forward_pre_hook(
            lambda _, given, named: seen.append((*given, *named.values())[-1]), with_kwargs=True
        )
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
        handle.remove()
    first, second, third = seen[:3]
    assert first[0].tolist() == [0, 1, 2, 5, 8, 11, 14, 17, 18, 19]  # 2 to 17 in steps of three
    assert first[1].tolist()[-8:] == [0, 1, 4, 7, 10, 13, 16, 17]
    assert second[:, 0].tolist() == [20, 18] and third[:, 0].tolist() == [21, 19]


@needs_5
@torch.no_grad()
def test_official_llava_spreads_too(llava_model: Any, prompt: SimpleNamespace) -> None:
    with attach(llava_model, "divprune", tokens=6, positions="spread"):
        given = (prompt.ids, torch.zeros(1, 1), None, None, None, prompt.images)
        placed = llava_model.prepare_inputs_labels_for_multimodal(*given)[1][0].tolist()
    assert placed[5:12] == [5, 8, 11, 14, 17, 20, 21]


@needs_5
def test_models_with_positions_of_three_axes_refuse_it() -> None:
    with pytest.raises(OptionError, match=r"positions=spread: Qwen\w+ has positions of three axes"):
        attach(CASES["qwen2_5_vl"].build(), "divprune", tokens=4, positions="spread")
