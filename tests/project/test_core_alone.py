"""The core works where torch and transformers are installed and nothing else: every other package is hidden."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import transformers

from llava_consensus import attach
from llava_consensus.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CORE = {"torch", "transformers"}
needs_5 = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="hosts of transformers need >= 5")

HIDE = """
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    '''As if what is hidden were not installed.'''

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

sys.meta_path = [Installed if one is PathFinder else one for one in sys.meta_path]
"""
USE = """
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration
from llava_consensus import attach

text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 50}
vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
          "num_attention_heads": 4, "image_size": 56, "patch_size": 14}
model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=49)).eval()
ids = torch.tensor([[1, 2, *[49] * 16, 3, 4, 5]])
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 56, 56)}
for method in METHODS:
    with attach(model, method, tokens=4) as attached:
        said = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        (outcome,) = attached.outcomes
    assert said.shape[1] - ids.shape[1] == 3 and (outcome.before, outcome.after) == (16, 4), method
print(sorted(name for name in sys.modules if name.partition(".")[0] in HIDDEN))
"""


def closure(names: set[str]) -> set[str]:
    """Distributions that come with others, these included: what they require where nobody asks for an extra."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    while names - found:
        name = min(names - found)
        found.add(name)
        try:
            needed = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # of another platform
            continue
        names = names | {
            canonicalize_name(one.name) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})
        }
    return found


def test_the_project_requires_torch_and_transformers_alone() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {Requirement(text).name for text in project["dependencies"]} == CORE
    assert {"eval", "paper", "demo", "train"} <= project["optional-dependencies"].keys()


@needs_5
def test_methods_are_attached_where_nothing_else_is_installed() -> None:
    kept = closure(CORE)
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if not kept & {owner.lower().replace("_", "-") for owner in owners} and module != "llava_consensus"
    }
    assert {"PIL", "pandas", "openpyxl", "llava"} <= hidden
    methods = ["consensusdrop", "divprune", "fastv", "tome"]  # after the tower, between layers and inside the tower
    code = f"HIDDEN = {hidden!r}\nMETHODS = {methods!r}\n{HIDE}\n{USE}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("installed", ["4.57.1", "5.24.0"])
def test_versions_of_transformers_that_official_llava_does_not_run_on_are_named(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llava_consensus.hosts.environment.version", lambda name: installed)
    said = f"transformers {installed}: official LLaVA runs here on 4.37.2, its own pin, and on 5.19 to 5.23"
    with pytest.raises(OptionError, match=re.escape(said)):
        attach(type("LlavaLlamaForCausalLM", (), {})())
