"""What goes with no reduction is refused in one line before weights load, and plain models of vLLM stay as they are."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asking
import pytest
import small
import torch

from llava_consensus.cli import main
from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.serving.setting import Setting

pytestmark = [pytest.mark.vllm]


def configuration(**changes: dict[str, Any]) -> Any:
    """As much of vLLM's configuration as is looked at, of a server that was asked for nothing beside the reduction."""
    multimodal = SimpleNamespace(mm_encoder_tp_mode="weights", is_multimodal_pruning_enabled=lambda: False)
    hf_config = Setting("consensusdrop", 64)(SimpleNamespace(model_type="llava"))
    parts: dict[str, Any] = {
        "parallel_config": {"pipeline_parallel_size": 1, "data_parallel_size": 1},
        "compilation_config": {"cudagraph_mm_encoder": False, "compile_mm_encoder": False},
        "model_config": {"multimodal_config": multimodal, "hf_config": hf_config},
    }
    found: dict[str, Any] = dict.fromkeys(("lora_config", "speculative_config", "ec_transfer_config")) | changes
    found |= {name: SimpleNamespace(**{**values, **changes.get(name, {})}) for name, values in parts.items()}
    return SimpleNamespace(**found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline parallelism"),
        ({"parallel_config": {"data_parallel_size": 2}}, "data parallelism"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA adapters"),
        ({"ec_transfer_config": object()}, "disaggregation of the vision tower"),
        ({"compilation_config": {"cudagraph_mm_encoder": True}}, "captured graphs of the vision tower"),
        ({"compilation_config": {"compile_mm_encoder": True}}, "a compiled vision tower"),
    ],
)
def test_what_takes_another_machine_is_refused(changes: Any, words: str) -> None:
    from llava_consensus.serving.server import check

    check(configuration())
    with pytest.raises(OptionError, match=f"^{words}.*Leave it out$"):
        check(configuration(**changes))


def test_another_format_than_vllms_kernel_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from llava_consensus.serving import server

    monkeypatch.setattr(server, "BFLOAT16", frozenset({"llava"}))
    server.check(configuration(model_config={"dtype": torch.bfloat16}))
    with pytest.raises(OptionError, match=r"^--dtype other than bfloat16"):
        server.check(configuration(model_config={"dtype": torch.float32}))


@pytest.mark.slow
def test_an_engine_with_it_does_not_start(tmp_path: Path, monkeypatch: Any) -> None:
    small.llava(tmp_path)
    small.ready()
    from vllm.v1.engine.llm_engine import LLMEngine

    monkeypatch.setattr(LLMEngine, "__init__", lambda *_, **__: pytest.fail("an engine was started"))
    lora = asking.served(tmp_path, "visionzip", 5, {"enable_lora": True})
    with pytest.raises(ConsensusError, match=r"^LoRA adapters: .*Leave it out$"), lora:
        pass


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--vllm=--enable-lora", "--enable-lora: not adapted"),
        ("--print --tokens 64 --largest 32", "largest=32 is below tokens=64"),
        ("--print", "llava-consensus model convert checkpoints/llava-mini OUT"),
    ],
)
def test_a_command_with_it_ends_in_a_line(words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "checkpoints/llava-mini", *shlex.split(words)]) == OptionError.exit_code
    said = capsys.readouterr().err
    assert reason in said and said.startswith("error: ") and said.count("\n") == 1
