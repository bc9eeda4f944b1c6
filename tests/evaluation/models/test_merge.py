"""A LoRA checkpoint and its base as one: adapted matrices are sums with the scaled product."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llava_consensus import cli

pytest.importorskip("peft")
MINI = Path("checkpoints/llava-mini")
ADAPTED = "model.layers.0.self_attn.q_proj"
PROJECTOR = "model.mm_projector.0.bias"


def adapt(folder: Path, down: torch.Tensor, up: torch.Tensor) -> None:
    tensors = {f"base_model.model.{ADAPTED}.lora_{one}.weight": matrix for one, matrix in (("A", down), ("B", up))}
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    folder = tmp_path / "llava-mini-lora"
    folder.mkdir()
    tower = {"mm_vision_tower": str((MINI / "vision_tower").resolve())}
    (folder / "config.json").write_text(json.dumps(json.loads((MINI / "config.json").read_text()) | tower))
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "lmsys/vicuna-7b-v1.5"}
    settings |= {"target_modules": [ADAPTED], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(0)
    adapt(folder, torch.randn(4, 192, generator=generator), torch.randn(192, 4, generator=generator))
    torch.save({f"base_model.model.{PROJECTOR}": torch.ones(192)}, folder / "non_lora_trainables.bin")
    return folder


def test_matrices_are_summed_and_the_projector_is_replaced(lora: Path, tmp_path: Path) -> None:
    out = tmp_path / "llava-merged"
    assert cli.main(["model", "merge", str(lora), str(MINI), str(out)]) == 0
    (file,) = out.glob("*.safetensors")
    before, after, adapter = map(load_file, (MINI / "model.safetensors", file, next(lora.glob("*.saf*"))))
    down, up = adapter.values() if "lora_A" in next(iter(adapter)) else reversed(adapter.values())
    assert torch.equal(after[f"{ADAPTED}.weight"], (before[f"{ADAPTED}.weight"].float() + 2 * up @ down).half())
    assert torch.equal(after[PROJECTOR], torch.ones(192))
    same = before.keys() - {f"{ADAPTED}.weight", PROJECTOR}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in same)
    assert (out / "config.json").is_file() and not (out / "adapter_config.json").exists()


def test_an_adapter_of_another_size_is_refused(lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapt(lora, torch.ones(4, 384), torch.ones(384, 4))
    assert cli.main(["model", "merge", str(lora), str(MINI), str(tmp_path / "out")]) == 3
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "size mismatch" in line
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


class Code:
    """What a pickled file can run when it is read."""

    def __reduce__(self) -> Any:
        return print, ("this ran",)


def test_pickled_code_is_refused_in_a_line_without_advice_to_run_it(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"x": Code()}, lora / "non_lora_trainables.bin")
    assert cli.main(["model", "merge", str(lora), str(MINI), str(tmp_path / "out")]) == 3
    captured = capsys.readouterr()
    *_, line = captured.err.splitlines()
    assert "non_lora_trainables.bin: cannot be read: weights hold pickled objects" in line
    assert "weights_only" not in line and "this ran" not in captured.out


def test_a_lora_checkpoint_names_the_command_that_merges_it(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "gqa", "--model", str(lora)]) == 2
    assert f"llava-consensus model merge {lora} BASE OUT" in capsys.readouterr().err
