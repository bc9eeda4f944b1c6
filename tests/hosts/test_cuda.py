"""Every method on a GPU beside the CPU: the same tokens kept and the same answer, in float64."""

from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES, prompts

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.methods import METHODS
from llava_consensus.reduction.method import Place

current = pytest.mark.skipif(transformers.__version__ < "5", reason="methods on models of transformers need >= 5.19")
FAMILIES = ("llava", "llava_next", "qwen2_5_vl", "gemma3")  # one for each mechanism: plain, tiles, windows, two-way


def told(model: Any, inputs: dict[str, Any], method: str, tokens: int) -> tuple[torch.Tensor, list[Any]]:
    """The ids of an answer, and of every image how many tokens it had and which sources the rest have."""
    with attach(model, method, tokens) as attached:
        ids = model.generate(**inputs, max_new_tokens=2, do_sample=False).cpu()
        kept = [
            (outcome.row, outcome.before, outcome.after, [one.source.tolist() for _, one in outcome.reductions])
            for outcome in attached.outcomes
        ]
    return ids, kept


@current
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FAMILIES)
def test_methods_answer_as_on_the_cpu(name: str) -> None:
    case = CASES[name]
    a, b, c, d = (case.picture(number) for number in range(4))
    inputs = prompts([1, 5, a, 6, 7, 8], [1, b, 9, c, 11, 12], [1, 21, 22, 23, 24], [1, 5, 6, 7, d, 31])
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    moved = {key: value.cuda() for key, value in inputs.items()}
    plain, device = case.build().double(), case.build().double().cuda()
    worked = 0
    for method, made in METHODS.items():
        tokens = case.square if made.place is Place.IMAGE else case.tokens
        try:
            expected = told(plain, inputs, method, tokens)
        except OptionError:
            continue  # refused, see the matrix
        found = told(device, moved, method, tokens)
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1], method
        worked += 1
    assert worked > 10
