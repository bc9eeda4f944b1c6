"""`model check`: a model with a method is compared with the model itself, and a broken host is found out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import remote_cases
from remote_doubles.base import OLD

from llava_consensus.cli import main
from llava_consensus.errors import DataError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models.base import Runner
from llava_consensus.evaluation.models.check_host import CHECKS, Finding, findings
from llava_consensus.evaluation.models.convert import convert
from llava_consensus.evaluation.models.loading import Loading
from llava_consensus.evaluation.models.remote import CogVLMRunner
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

MINI = "checkpoints/llava-mini"


def failed(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.note for one in findings if not one.passed}


@pytest.fixture(params=["qwen_vl", "cogvlm"])
def folder(request: Any, tmp_path: Path) -> Path:
    return remote_cases.checkpoint(request.param, tmp_path)


def test_doubles_pass_from_their_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "check", str(folder), "--trust-remote-code"]) == 0
    said = capsys.readouterr().out
    assert said.count(" pass ") == len(CHECKS)


def test_code_of_a_checkpoint_does_not_run_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in folder.glob("*.py"):
        file.write_text("raise SystemExit('this ran')")
    (folder / "model.safetensors").write_text("no weights")
    for command in (["model", "check"], ["ask", "picture.png", "what?", "--model"]):
        assert main([*command, str(folder)]) == 2
        assert "--trust-remote-code" in capsys.readouterr().err


def test_internvl_chat_passes(internvl: Any) -> None:
    found = findings(internvl, make("consensusdrop"))
    assert all(one.passed for one in found), found


def test_internvl_chat_passes_by_the_command_with_its_own_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llava.model import builder
    from llava.model.multimodal_encoder import clip_encoder

    model = remote_cases.double("internvl_chat", tmp_path).model
    processor = model.get_vision_tower().image_processor
    loaded = remote_cases.tokenizer(), model, processor, 2048
    monkeypatch.setattr(clip_encoder, "is_intern_vit_6b_model", lambda name: True, raising=False)
    monkeypatch.setattr(builder, "load_pretrained_model", lambda *given, **options: loaded)
    config = '{"architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "OpenGVLab/InternViT-6B-224px"}'
    (tmp_path / "config.json").write_text(config)
    assert main(["model", "check", str(tmp_path), "--trust-remote-code", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count(" pass ") == len(CHECKS)


@pytest.fixture
def internvl(tmp_path: Path) -> Any:
    return remote_cases.host_of(remote_cases.double("internvl_chat", tmp_path))


@pytest.mark.parametrize("method", ["consensusdrop", "divprune", "fastv"])
def test_llava_mini_passes(method: str) -> None:
    found = findings(models.load(MINI, Loading(device="cpu")), make(method))
    assert all(one.passed for one in found), found


@pytest.mark.skipif(OLD, reason="models of transformers need >= 5.19")
def test_its_hugging_face_layout_passes(tmp_path: Path) -> None:
    convert(Path(MINI), tmp_path / "mini")
    found = findings(models.load(str(tmp_path / "mini"), Loading(device="cpu")), make("consensusdrop"))
    assert all(one.passed for one in found), found


@pytest.mark.skipif(OLD, reason="models of transformers need >= 5.19")
@pytest.mark.parametrize("method", ["consensusdrop", "divprune", "fastv"])
def test_a_tiny_qwen_passes(method: str, tmp_path: Path) -> None:
    from hf_checkpoints import host_of

    found = findings(host_of("qwen2_5_vl", tmp_path / "qwen"), make(method))
    assert len(found) == len(CHECKS) and all(one.passed for one in found), found


def test_a_command_says_what_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken_detach(monkeypatch)
    assert main(["model", "check", MINI, "--device", "cpu"]) == 7
    captured = capsys.readouterr()
    assert "1 of 4 checks failed" in captured.err
    (line,) = [line for line in captured.out.splitlines() if "FAIL" in line]
    assert line.startswith("detached")


# ---- broken hosts


def test_a_model_that_answers_nothing_is_a_line(cog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def old_code(*args: Any, **kwargs: Any) -> None:
        raise AttributeError("'DynamicCache' object has no attribute 'seen_tokens'")

    monkeypatch.setattr(cog.model, "generate", old_code, raising=False)
    with pytest.raises(DataError, match="own generate fails, with no method attached: AttributeError"):
        findings(cog, make("consensusdrop"))


@pytest.fixture
def cog(tmp_path: Path) -> Iterator[Any]:
    return remote_cases.host_of(remote_cases.double("cogvlm", tmp_path))


def broken_detach(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Attachment.attach

    def attach(self: Any) -> None:
        original(self)
        self.entrance.model().register_forward_hook(lambda *args: None)

    monkeypatch.setattr(Attachment, "attach", attach)


def broken_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Runner.attach
    monkeypatch.setattr(
        Runner, "attach", lambda self, method, one: original(self, method, Budget(one.tokens // 2 or 1))
    )


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
    assert found <= failed(findings(cog, make("consensusdrop"))).keys()
