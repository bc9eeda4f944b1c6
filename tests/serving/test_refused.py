"""What goes with no reduction is refused in one line before weights load, and plain models of vLLM stay as they are."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asking
import pytest
import small

from llava_consensus.errors import OptionError

pytestmark = [pytest.mark.vllm]


def configuration(**changes: dict[str, Any]) -> Any:
    """As much of vLLM's configuration as is looked at, of a server that was asked for nothing beside the reduction."""
    multimodal = SimpleNamespace(mm_encoder_tp_mode="weights", is_multimodal_pruning_enabled=lambda: False)
    parts: dict[str, Any] = {
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "compilation_config": {"cudagraph_mm_encoder": False, "compile_mm_encoder": False},
        "model_config": {"multimodal_config": multimodal},
    }
    found: dict[str, Any] = {"quant_config": None, "lora_config": None, "speculative_config": None}
    found |= {name: SimpleNamespace(**{**values, **changes.get(name, {})}) for name, values in parts.items()}
    return SimpleNamespace(**{**found, **{name: value for name, value in changes.items() if name not in parts}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_config": {"tensor_parallel_size": 2}}, "tensor parallelism"),
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline parallelism"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"compilation_config": {"cudagraph_mm_encoder": True}}, "captured graphs of the vision tower"),
        ({"compilation_config": {"compile_mm_encoder": True}}, "a compiled vision tower"),
    ],
)
def test_what_takes_another_machine_is_refused(changes: Any, words: str) -> None:
    from llava_consensus.serving.models import check

    check(configuration())
    with pytest.raises(OptionError, match=f"^{words}.*Leave it out$"):
        check(configuration(**changes))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    small.llava(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [({"enable_lora": True}, "LoRA adapters"), ({"quantization": "fp8", "dtype": "bfloat16"}, "quantised weights")],
)
def test_an_engine_with_it_does_not_start(llava: Path, settings: Any, words: str, monkeypatch: Any) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    monkeypatch.setattr(DefaultModelLoader, "load_weights", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(OptionError, match=words), asking.served(llava, "visionzip", 5, settings):
        pass
