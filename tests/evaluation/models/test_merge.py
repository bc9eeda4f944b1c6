"""A LoRA checkpoint and its base as one: each adapted matrix is the base's plus the scaled product, the projector the
trained one.

Run: `pytest tests/evaluation/models/test_merge.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation.models import Loading, load
from llava_consensus.evaluation.models.merge import merge

pytest.importorskip("peft")
MINI = Path("checkpoints/llava-mini")
ADAPTED = "model.layers.0.self_attn.q_proj"
PROJECTOR = "model.mm_projector.0.bias"


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
    names = f"base_model.model.{ADAPTED}.lora_A.weight", f"base_model.model.{ADAPTED}.lora_B.weight"
    down, up = torch.randn(4, 192, generator=generator), torch.randn(192, 4, generator=generator)
    save_file(dict(zip(names, (down, up), strict=True)), folder / "adapter_model.safetensors")
    torch.save({f"base_model.model.{PROJECTOR}": torch.ones(192)}, folder / "non_lora_trainables.bin")
    return folder


def test_matrices_are_summed_and_the_projector_is_replaced(lora: Path, tmp_path: Path) -> None:
    out = tmp_path / "llava-merged"
    assert cli.main(["model", "merge", str(lora), str(MINI), str(out)]) == 0
    (file,) = out.glob("*.safetensors")
    before, after, adapter = (
        load_file(MINI / "model.safetensors"),
        load_file(file),
        load_file(next(lora.glob("*.saf*"))),
    )
    down, up = adapter.values() if "lora_A" in next(iter(adapter)) else reversed(adapter.values())
    assert torch.equal(after[f"{ADAPTED}.weight"], (before[f"{ADAPTED}.weight"].float() + 2 * up @ down).half())
    assert torch.equal(after[PROJECTOR], torch.ones(192))
    same = before.keys() - {f"{ADAPTED}.weight", PROJECTOR}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in same)
    assert (out / "config.json").is_file() and not (out / "adapter_config.json").exists()


def test_an_adapter_of_another_model_is_refused(lora: Path, tmp_path: Path) -> None:
    save_file({"base_model.model.model.layers.9.x.lora_A.weight": torch.ones(4, 8),
               "base_model.model.model.layers.9.x.lora_B.weight": torch.ones(8, 4)},
              lora / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(DataError, match=r"adapts model\.layers\.9\.x, which .* does not have"):
        merge(lora, MINI, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


class Code:
    """What a pickled file can run when it is read."""

    def __reduce__(self) -> Any:
        return print, ("this ran",)


@pytest.mark.parametrize("name", ["adapter_model.bin", "non_lora_trainables.bin"])
def test_pickled_code_is_refused_in_a_line_without_advice_to_run_it(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (lora / "adapter_model.safetensors").rename(lora / "other.safetensors")
    torch.save({"base_model.model.x.lora_A.weight": torch.ones(1)}, lora / "adapter_model.bin")
    torch.save({"x": Code()}, lora / name)
    assert cli.main(["model", "merge", str(lora), str(MINI), str(tmp_path / "out")]) == 3
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert f"{name}: cannot be read: weights hold pickled objects" in line and "weights_only" not in line
    assert "this ran" not in captured.out


def test_a_lora_checkpoint_loads_with_its_base(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loading = Loading("cpu", model_base=str(MINI))
    with caplog.at_level("INFO"):
        state = load(str(lora), loading).model.state_dict()
        load(str(lora), loading)
    adapter = load_file(lora / "adapter_model.safetensors")
    down, up = (adapter[f"base_model.model.{ADAPTED}.lora_{side}.weight"] for side in "AB")
    before = load_file(MINI / "model.safetensors")[f"{ADAPTED}.weight"].float()
    assert torch.equal(state[f"{ADAPTED}.weight"], (before + 2 * up @ down).half().float())
    assert torch.equal(state[PROJECTOR], torch.ones(192))
    assert caplog.text.count("are merged, once") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "is a LoRA checkpoint: give its base, --model-base lmsys/vicuna-7b-v1.5"),
        ("--model-base ./nowhere", "the base of {lora}: model './nowhere': no such folder"),
        ("--model-base {small}", "has num_hidden_layers=1, and {lora} was trained on a model of"),
        ("--model {mini} --model-base {mini}", "{mini} is no LoRA checkpoint, it has no adapter_config.json"),
    ],
)
def test_a_base_that_does_not_fit_is_a_line_before_weights_load(
    words: str, said: str, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    names = {"lora": lora, "small": small, "mini": MINI}
    line = f"eval gqa --model {lora} {words.format(**names)}".split()
    assert cli.main(line) in (2, 3)
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith("error: ") and said.format(**names) in shown
