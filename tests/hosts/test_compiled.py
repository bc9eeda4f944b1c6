"""The recipe of docs/efficiency.md for `torch.compile` with a static cache, run as printed.

On a CPU `generate` compiles a step only on request, and the backend `eager` traces as the default one does without
compiling C++ for half a minute.
"""

import re
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import transformers

PAGE = Path(__file__).parents[2] / "docs" / "efficiency.md"
RECIPE = re.findall(r"```python\n(.*?)```", PAGE.read_text().split("## Use torch.compile\n")[1], re.DOTALL)[0]
CURRENT = int(transformers.__version__.split(".")[0]) >= 5


def on_request() -> Any:
    compiling = transformers.CompileConfig(backend="eager", fullgraph=False)
    compiling._compile_all_devices = True
    return compiling


@pytest.mark.skipif(not CURRENT, reason="static caches of transformers 5")
@pytest.mark.parametrize("method", ["consensusdrop", "consensusdrop+"])
def test_a_compiled_step_gives_the_ids_of_the_plain_path(method: str) -> None:
    case = hf_models.CASES["llava"]
    model, inputs = case.build(), hf_models.prompts([1, case.picture(0), 7, 8, 9])
    recipe = RECIPE.replace('"consensusdrop"', repr(method)).replace("tokens=64", "tokens=4")
    plain = recipe.replace('cache_implementation="static", ', "")
    torch._dynamo.reset()
    found: dict[str, torch.Tensor] = {}
    for name, text, more in (("plain", plain, {}), ("compiled", recipe, {"compile_config": on_request()})):
        given: dict[str, Any] = {"model": model, "inputs": {**inputs, **more}}
        exec(text.replace("max_new_tokens=128", "max_new_tokens=8"), given)
        found[name] = given["output"]
    assert torch.equal(found["plain"], found["compiled"])
    assert not torch.equal(found["plain"], model.generate(**inputs, max_new_tokens=8, do_sample=False)), "not reduced"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
