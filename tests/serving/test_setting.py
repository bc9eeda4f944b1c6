"""What a server may be asked for, checked before anything is loaded."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import llava_consensus
from llava_consensus.errors import MissingDependency, OptionError
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Place
from llava_consensus.serving import supported
from llava_consensus.serving.setting import Setting, asked, check_keys, config_of, further, of_config


def test_methods_behind_the_tower_are_taken_and_the_others_refused_with_the_reason() -> None:
    reasons = {Place.DECODER: "one length for all layers", Place.TOKENS: "tokens depends on the image"}
    for name in METHODS:
        method = make(name)
        if method.place is Place.TOKENS and not method.adaptive:
            assert Setting(name, 64).made == method
            continue
        reason = reasons.get(method.place, "inside the vision tower or before it")
        with pytest.raises(OptionError, match=f"^{name}.*{reason}"):
            Setting(name, 64)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "visionzap", "tokens": 64}, "visionzip"),
        ({"method": "visionzip", "tokens": 0}, "tokens=0"),
        ({"method": "visionzip", "tokens": 1.5}, "tokens=1.5"),
        ({"method": "visionzip", "tokens": "64"}, "tokens='64'"),
        ({"method": "visionzip", "tokens": 64, "largest": -1}, "largest=-1"),
        ({"method": "visionzip", "tokens": 64, "largest": 32}, "largest=32 is below tokens=64"),
        ({"method": "visionzip", "tokens": 0.5, "largest": 0.1}, "largest=0.1 is below tokens=0.5"),
        ({"method": "visionzip", "tokens": 64, "options": {"alpha": 1}}, "alpha"),
        ({"method": "visionzip", "tokens": "much"}, "or a share"),
        ({"method": "prumerge", "tokens": 64, "options": {"budget": "adaptive"}}, "number of tokens depends on"),
    ],
)
def test_bad_settings_name_the_argument_and_the_value(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Setting(**given)


@pytest.mark.parametrize("value", [True, "64", None, 0, 1.5, [64]])
def test_bad_budgets_of_requests_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match=re.escape(f"visual_tokens={value!r}")):
        asked(value)


def test_budgets_are_numbers_or_shares() -> None:
    assert [asked(value) for value in (64, 0.5)] == [Budget(64), Share(0.5)]
    assert [Setting("visionzip", 64, most).most for most in (None, 64, 65, 0.1)] == [64, 64, 65, 0.1]


def test_a_setting_goes_through_the_configuration_of_an_adapted_model_and_back() -> None:
    setting = Setting("consensusdrop", 0.25, 128, {"alpha": 0.5})
    config = setting(SimpleNamespace(model_type="llava"))
    assert config.architectures == ["ConsensusDropLlava"] and of_config(config) == setting
    with pytest.raises(OptionError, match="'gemma3' are not adapted"):
        setting(SimpleNamespace(model_type="gemma3"))


def test_vllm_asks_for_positions_where_they_are_kept() -> None:
    def asks(positions: str, kind: str) -> bool:
        config = Setting("visionzip", 64, options={"positions": positions})(SimpleNamespace(model_type=kind))
        return hasattr(config, "rope_parameters")

    assert asks("keep", "llava") and asks("mean", "llava") and not asks("renumber", "llava")
    assert not asks("keep", "qwen2_5_vl")  # of which vLLM always asks


def test_a_request_may_say_no_other_arguments_of_processors() -> None:
    check_keys({"visual_tokens": 8, "question": "?"})
    with pytest.raises(OptionError, match="mm_processor_kwargs: 'crop', 'size': a request may only say visual_tokens"):
        check_keys({"size": 1, "visual_tokens": 8, "crop": 2})


def test_arguments_of_vllm_that_go_with_a_reduction() -> None:
    text = "--port 80 -pp 1 --mm_encoder_tp_mode weights --video-pruning-rate=0.0"
    assert further(text) == text.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--port 80 -pp 2", "^-pp: not adapted"),
        ("-pp", "^-pp: not adapted"),
        ("1 -pp", "^-pp: not adapted"),
        ('--speculative-config "{}"', "^--speculative-config: not adapted"),
        ("--data-parallel-size 2", "^--data-parallel-size: not adapted"),
        ("--pipeline_parallel_size=2", "^--pipeline_parallel_size=2: not adapted"),
        ("--enable-lora", "^--enable-lora: not adapted"),
        ("--mm-encoder-tp-mode data", "^--mm-encoder-tp-mode: not adapted"),
        ("--hf_overrides {}", "^--hf-overrides: this command gives vLLM its own"),
        ("--model 'a", "Close the quote"),
    ],
)
def test_arguments_of_vllm_that_do_not_are_refused(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        further(text)


def test_a_checkpoint_without_a_configuration_for_vllm_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(OptionError, match="its configuration cannot be read"):
        config_of(str(tmp_path))
    file.write_text('{"model_type": "llava_llama"}')
    with pytest.raises(OptionError, match=f"official LLaVA.* model convert {tmp_path} OUT"):
        config_of(str(tmp_path))
    file.write_text('{"model_type": "clip"}')
    assert config_of(str(tmp_path)).model_type == "clip"


@pytest.mark.parametrize(
    ("kind", "entry", "value"),
    [
        ("llava", "vision_config.model_type", "dinov2"),
        ("llava_onevision", "vision_aspect_ratio", "anyres_max_4"),
        ("internvl", "vision_feature_layer", -2),
        ("gemma4", "text_config.use_bidirectional_attention", "vision"),
    ],
)
def test_a_model_that_vllm_would_run_in_another_way_is_refused(kind: str, entry: str, value: Any) -> None:
    for name in reversed(entry.split(".")):
        value = SimpleNamespace(**{name: value})
    value.model_type = kind
    with pytest.raises(OptionError, match=f"{entry}="):
        Setting("visionzip", 64)(value)
    assert Setting("divprune", 64)(SimpleNamespace(model_type=kind)).architectures


def test_another_version_is_taken_unless_a_function_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "wire.py"
    source.write_text("class Encoder:\n    by: int\n    def encode(self, obj, more=0): ...\ndef check(one, two): ...\n")
    private = {"wire.py:Encoder.encode": ("obj",), "wire.py:Encoder.by": (), "wire.py:check": ("one",)}
    monkeypatch.setattr(supported, "PRIVATE", private)
    monkeypatch.setattr(supported, "version", lambda name: "0.33.0")
    monkeypatch.setattr(supported, "find_spec", lambda name: SimpleNamespace(origin=tmp_path / "__init__.py"))
    assert llava_consensus.vllm()
    source.write_text(source.read_text().replace("(self, obj", "(self, tensor"))
    with pytest.raises(OptionError, match=r"vllm 0\.33\.0: .*Encoder\.encode has the parameters tensor, more; "):
        llava_consensus.vllm()


def test_without_vllm_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "version", Mock(side_effect=supported.PackageNotFoundError))
    with pytest.raises(MissingDependency, match=r"pip install .*\[vllm\]"):
        llava_consensus.vllm()
