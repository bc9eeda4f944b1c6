"""A checkpoint whose weights are not those of its config.json is refused with the names of the tensors."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_data import mini_checkpoint
from transformers import PreTrainedModel

from llava_consensus.errors import DataError
from llava_consensus.evaluation.models import Loading, check, load

Tensors = dict[str, torch.Tensor]
FC1 = "encoder.layers.1.mlp.fc1.weight"


def change_weights(folder: Path, change: Callable[[Tensors], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def without_projector(tensors: Tensors) -> None:
    for name in [name for name in tensors if "mm_projector" in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: one.pop(f"vision_model.{FC1}"), rf"CLIPVisionModel: 1 tensor missing .*{re.escape(FC1)}"),
        (without_projector, r"4 tensors missing .*model\.mm_projector\.0\.bias"),
        (lambda one: one.pop("model.layers.2.mlp.down_proj.weight"), r"missing.*model\.layers\.2\.mlp\.down_proj"),
        (lambda one: one.update({"model.layers.9.mlp.weight": torch.ones(1)}), r"left over.*model\.layers\.9\.mlp"),
        (lambda one: one.update({"model.norm.weight": torch.ones(5)}), r"1 tensor of another shape.*model\.norm"),
    ],
)
def test_weights_that_are_not_the_models_are_named(tmp_path: Path, change: Callable[[Tensors], Any], why: str) -> None:
    folder, before = mini_checkpoint(tmp_path / "llava-mini"), PreTrainedModel.__dict__["from_pretrained"]
    load(str(folder), Loading("cpu"))
    change_weights(folder / "vision_tower" if "CLIP" in why else folder, change)
    with pytest.raises(DataError, match=why):
        load(str(folder), Loading("cpu"))
    assert PreTrainedModel.__dict__["from_pretrained"] is before, "loading leaves transformers as it was"


@pytest.mark.parametrize("content", ["{}", "[]", "", '{"architectures": 5}', "\xff", "[" * 9999])
def test_an_empty_or_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    folder = mini_checkpoint(tmp_path / "llava-mini")
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"config\.json"):
        check(str(folder))
        load(str(folder), Loading("cpu"))


@pytest.mark.parametrize("changes", [{"num_attention_heads": 7}, {"hidden_act": "no"}, {"rope_scaling": 3}])
def test_a_config_that_breaks_the_loader_is_a_message(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = mini_checkpoint(tmp_path / "llava-mini", **changes)
    with pytest.raises(DataError, match=r"cannot be loaded|do not fit"):
        load(str(folder), Loading("cpu"))


@pytest.mark.parametrize("kind", ["official", "transformers"])
def test_code_of_a_checkpoint_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "transformers":
        from hf_checkpoints import checkpoint

        folder = checkpoint("llava", tmp_path / "llava-hf")
    else:
        folder = mini_checkpoint(tmp_path / "llava-mini")
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"from pathlib import Path; Path({str(marker)!r}).touch()\nclass Evil: pass\n")
    names = {"AutoConfig": "evil.Evil", "AutoProcessor": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    for name in ("config.json", "tokenizer_config.json", "processor_config.json"):
        if (folder / name).is_file():
            known = json.loads((folder / name).read_text())
            kinds = {"processor_class": "Evil", "tokenizer_class": "Evil"} if name != "config.json" else {}
            (folder / name).write_text(json.dumps(known | kinds | {"auto_map": names}))
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    with contextlib.suppress(DataError):  # it loads without that code, or is refused
        load(str(folder), Loading("cpu"))
    assert not marker.exists()
