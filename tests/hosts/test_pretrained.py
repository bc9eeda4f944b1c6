"""A checkpoint's own code never runs unless that is said, and no question is asked about it."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

import llava_consensus
from llava_consensus.hosts.environment import load_pretrained

PACKAGE = Path(llava_consensus.__file__).parent


def callers(package: Path) -> list[str]:
    return [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]


def test_one_function_loads_everything(tmp_path: Path) -> None:
    # PEFT reads the tensors and the JSON of an adapter, and no code
    assert callers(PACKAGE) == ["evaluation/models/convert.py", "hosts/environment.py"]
    (tmp_path / "a.py").write_text("def f():\n    return A.from_pretrained('x')\n")
    assert callers(tmp_path) == ["a.py"]


@pytest.fixture
def carrying(tmp_path: Path) -> Path:
    """A checkpoint whose configuration is made by code of its own."""
    own = "class Own(PretrainedConfig):\n    model_type='own'\n"
    (tmp_path / "own.py").write_text(f"from transformers import PretrainedConfig\nopen('ran', 'w')\n{own}")
    config: dict[str, Any] = {"model_type": "own", "architectures": ["LlavaForConditionalGeneration"]}
    config["auto_map"] = {"AutoConfig": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_code_of_a_checkpoint_is_refused(carrying: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_pretrained(transformers.AutoConfig, carrying)


def test_a_yes_on_standard_input_runs_nothing(carrying: Path, tmp_path: Path) -> None:
    given = [sys.executable, "-m", "llava_consensus.cli", "serve", str(carrying)]
    where = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run(given, input="y\n" * 99, **where)
    assert done.returncode not in (0, 1) and not (tmp_path / "ran").exists(), done.stderr
    assert "Traceback" not in done.stderr
