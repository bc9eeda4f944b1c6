"""The wheel where torch and transformers are installed and nothing else: every command works, or says in one line what
to install.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llava_consensus import attach, cli
from llava_consensus.cli import arguments
from llava_consensus.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CORE = {"torch", "transformers"}
BARE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may lead to this checkout
EXTRAS = {  # commands that need more than torch and transformers, and the extra that each must name
    "eval gqa --tokens 64": "eval",
    "data mini": "eval",
    'ask photo.jpg "What is on the table?"': "eval",
    "model check checkpoints/llava-mini": "eval",
    "bench": "eval",
    "demo": "demo",
    "serve model --tokens 64": "vllm",
}
TYPE = """
import contextlib, io, json, sys
from llava_consensus import cli

found = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code or 0
    found.append((code, said.getvalue().splitlines()))
print(json.dumps(found))
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
for method in ("consensusdrop", "divprune", "fastv", "tome"):  # after the tower, between layers, inside the tower
    with attach(model, method, tokens=4) as attached:
        said = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        (outcome,) = attached.outcomes
    assert said.shape[1] - ids.shape[1] == 3 and (outcome.before, outcome.after) == (16, 4), method
"""


def closure(names: set[str]) -> dict[str, Distribution]:
    """Distributions that come with others, these included: what they require where nobody asks for an extra."""
    found: dict[str, Distribution] = {}
    for name in names:
        with suppress(PackageNotFoundError):  # of another platform
            found[name] = distribution(name)
    needed = [Requirement(text) for one in found.values() for text in one.requires or ()]
    more = {canonicalize_name(one.name) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
    return found if more <= names else closure(names | more)


def test_the_project_requires_torch_and_transformers_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {Requirement(text).name for text in project["dependencies"]} == CORE
    assert {"eval", "paper", "demo", "train"} <= project["optional-dependencies"].keys()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an empty venv with the wheel, and links to the packages that torch and transformers come with."""
    pytest.importorskip("setuptools")
    place = tmp_path_factory.mktemp("wheel")
    build = ["egg_info", "--egg-base", place, "build", "--build-base", place / "build", "bdist_wheel", "-d", place]
    done = subprocess.run([sys.executable, "setup.py", "-q", *build], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("*.whl")
    venv.create(place / "venv")
    (packages,) = (place / "venv").glob("lib/python*/site-packages")
    for one in closure(CORE).values():
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(one.locate_file(top))
    made = place / "venv" / "bin" / "python"
    install = ["install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(made), *install], env=BARE, check=True)
    return made


def told(python: Path, program: str, folder: Path, given: str = "") -> str:
    """What a program prints in the venv."""
    words = [python, "-c", program]
    done = subprocess.run(words, input=given, cwd=folder, env=BARE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def typed() -> list[str]:
    """Commands of README, every command's help and every example of it; none that fetches, nor the matrix of hosts,
    which takes long and test_front_door.py prints.
    """
    cli.parser()
    readme = (ROOT / "README.md").read_text("utf-8")
    lines = [" ".join(line.split()) for line in re.findall(r"`llava-consensus ([^`]+)`", readme)]
    lines += re.findall(r"^llava-consensus (.+?)(?: +#.*)?$", readme, re.MULTILINE)
    lines += [f"{name} --help" for name in ("", *arguments.COMMANDS, *cli.GROUPS)]
    lines += [example for one in arguments.COMMANDS.values() for example in one.examples]
    return [line for line in dict.fromkeys(map(str.strip, lines)) if not {"--yes", "--hosts"} & set(line.split())]


def test_every_command_works_or_names_its_extra(python: Path, tmp_path: Path) -> None:
    lines = [*EXTRAS, *typed()]
    out = told(python, TYPE, tmp_path, json.dumps([shlex.split(line) for line in lines]))
    for line, (code, said) in zip(lines, json.loads(out.splitlines()[-1]), strict=True):
        assert code == 0 or said[0].startswith("error: "), (line, code, said)
        assert code == 0 or len(said) == 1 or "missing file" in said[0], (line, code, said)  # which are listed
        assert code == 0 or "--help" not in line, (line, said)
        assert line not in EXTRAS or said[0].endswith(f"[{EXTRAS[line]}]'"), (line, said)


def test_methods_are_attached_where_nothing_else_is_installed(python: Path, tmp_path: Path) -> None:
    told(python, USE, tmp_path)


@pytest.mark.parametrize("installed", ["4.57.1", "5.24.0"])
def test_transformers_without_official_llava_is_named(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llava_consensus.hosts.official_model.version", lambda name: installed)
    said = f"transformers {installed}: official LLaVA runs here on 4.37.2, its own pin, and on 5.19 to 5.23"
    with pytest.raises(OptionError, match=re.escape(said)):
        attach(type("LlavaLlamaForCausalLM", (), {})())
