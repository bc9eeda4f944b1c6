"""`model check` compares a model with a method to the model itself; code of a checkpoint never runs unasked."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import remote_cases
import torch
from hf_models import CASES

import llava_consensus
from llava_consensus.cli import main
from llava_consensus.errors import DataError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models.base import Runner
from llava_consensus.evaluation.models.check_host import findings
from llava_consensus.evaluation.models.loading import Loading
from llava_consensus.evaluation.models.remote import CogVLMRunner
from llava_consensus.hosts import view_of
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

MINI = "checkpoints/llava-mini"
PACKAGE = Path(llava_consensus.__file__).parent


@pytest.fixture(params=["qwen_vl", "cogvlm"])
def folder(request: Any, tmp_path: Path) -> Path:
    return remote_cases.checkpoint(request.param, tmp_path)


def test_code_of_a_checkpoint_does_not_run_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in folder.glob("*.py"):
        file.write_text("raise SystemExit('this ran')")
    (folder / "model.safetensors").write_text("no weights")
    for command in (["model", "check"], ["ask", "picture.png", "what?", "--model"]):
        assert main([*command, str(folder)]) == 2
        assert "--trust-remote-code" in capsys.readouterr().err


def test_one_function_loads_everything() -> None:
    callers = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                callers.append(str(path.relative_to(PACKAGE)))
    # PEFT reads the tensors and the JSON of an adapter, and no code
    assert callers == ["evaluation/models/convert.py", "hosts/environment.py"]


def test_a_yes_on_standard_input_runs_nothing(tmp_path: Path) -> None:
    """The configuration of the checkpoint is made by code of its own."""
    own = "class Own(PretrainedConfig):\n    model_type='own'\n"
    (tmp_path / "own.py").write_text(f"from transformers import PretrainedConfig\nopen('ran', 'w')\n{own}")
    config: dict[str, Any] = {"model_type": "own", "architectures": ["LlavaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "own.Own"}}))
    given = [sys.executable, "-m", "llava_consensus.cli", "serve", str(tmp_path)]
    done = subprocess.run(given, input="y\n" * 99, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode not in (0, 1) and not (tmp_path / "ran").exists(), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("method", ["consensusdrop", "divprune", "fastv"])
def test_llava_mini_passes(method: str) -> None:
    found = findings(models.load(MINI, Loading(device="cpu")), make(method))
    assert all(one.passed for one in found), found


def test_a_command_says_what_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken_detach(monkeypatch)
    assert main(["model", "check", MINI, "--device", "cpu"]) == 7
    captured = capsys.readouterr()
    assert "1 of 4 checks failed" in captured.err
    (line,) = [line for line in captured.out.splitlines() if "FAIL" in line]
    assert line.startswith("detached")


def test_a_model_that_answers_nothing_is_a_line(cog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old_code = Mock(side_effect=AttributeError("'DynamicCache' object has no attribute 'seen_tokens'"))
    monkeypatch.setattr(cog.model, "generate", old_code, raising=False)
    with pytest.raises(DataError, match="own generate fails, with no method attached: AttributeError"):
        findings(cog, make("consensusdrop"))


@pytest.fixture
def cog(tmp_path: Path) -> Iterator[Any]:
    return remote_cases.host_of(remote_cases.double("cogvlm", tmp_path))


def broken_detach(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Attachment._attach

    def attach(self: Any) -> None:
        original(self)
        self.entrance.model().register_forward_hook(lambda *args: None)

    monkeypatch.setattr(Attachment, "_attach", attach)


def broken_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    half, original = lambda one: Budget(one.tokens // 2 or 1), Runner.attach
    monkeypatch.setattr(Runner, "attach", lambda self, method, one: original(self, method, half(one)))


def broken_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CogVLMRunner.pixels
    monkeypatch.setattr(CogVLMRunner, "pixels", lambda self, *given: original(self, *given).flip(-1))


def broken_count(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Runner.answer
    monkeypatch.setattr(Runner, "answer", lambda *given: [one._replace(after=one.before) for one in original(*given)])


@pytest.mark.parametrize(
    "broken, found",
    [
        (broken_detach, {"detached"}),
        (broken_budget, {"all tokens kept"}),
        (broken_pixels, {"encoded before"}),
        (broken_count, {"budgets"}),
    ],
)
def test_a_broken_host_is_found_out(cog: Any, monkeypatch: pytest.MonkeyPatch, broken: Any, found: set[str]) -> None:
    broken(monkeypatch)
    assert found <= {one.check for one in findings(cog, make("consensusdrop")) if not one.passed}


def test_facts_of_tiles_are_those_of_configuration_and_processor() -> None:
    names = ("pixtral", "mistral_3", "llava_next", "llava", "smolvlm", "qwen2_5_vl")
    views = {name: view_of(CASES[name].build()) for name in names}
    facts = {name: view.tower for name, view in views.items() if name != "llava_next"}
    found = {name: (own.tokens, own.side, own.merged, own.varies, own.feature_block) for name, own in facts.items()}
    sides = {"pixtral": (144, 0, 1, True, 3), "mistral_3": (36, 0, 4, True, 3)}  # of 168 pixels, 14 for a patch
    assert found.pop("qwen2_5_vl")[2:] == (4, True, 3)
    assert found == sides | {"llava": (16, 4, 1, False, 2), "smolvlm": (16, 4, 4, False, 3)}
    views["llava"].config.vision_feature_layer = 3  # counted from the input of the first block
    views["qwen2_5_vl"].config.vision_config.spatial_merge_size = 0
    assert (views["llava"].tower.feature_block, views["qwen2_5_vl"].tower.merged) == (2, 1)
    sizes = (100, 40), (40, 100), (110, 100)
    assert [views["llava_next"].grid_columns(size) for size in sizes] == [2, 1, 2]
    assert [views["llava"].grid_columns(size) for size in sizes] == [0] * 3
    for name, splits, most in (("smolvlm", True, 17), ("smolvlm", False, 1), ("internvl", True, 6)):
        view = view_of(CASES[name].build())
        sides = dict(size={"longest_edge": 2000}, max_image_size={"longest_edge": 512}, max_patches=5)
        without, view.image_processor = view.most_tiles, SimpleNamespace(**sides, do_image_splitting=splits)
        assert view.most_tiles == most and without == (13 if name == "internvl" else 17)
    film, ids = view_of(CASES["glm4v video"].build()), torch.tensor([[1, 500, 500, 7]])
    ids[ids == 500] = film.placeholder("image")
    assert film.row_inputs(ids, video=True)["mm_token_type_ids"].tolist() == [[0, 2, 2, 0]]
    assert film.row_inputs(ids)["mm_token_type_ids"].tolist() == [[0, 1, 1, 0]]
    both = views["qwen2_5_vl"]
    ids[0, 1], ids[0, 2] = both.placeholder("image"), both.placeholder("video")
    assert both.row_inputs(ids, video=True)["mm_token_type_ids"].tolist() == [[0, 1, 2, 0]]
