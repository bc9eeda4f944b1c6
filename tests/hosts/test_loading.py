"""Loading options: checked before weights, given to the loader, recorded; and quantised models, whose projections are
no plain linear layers.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fakes import config, make_place
from torch import Tensor, nn

from llava_consensus import attach, cli
from llava_consensus.cli import arguments, parser
from llava_consensus.errors import OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.configuration import prepare
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.hosts.facts import check_version

main_stack = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="models of transformers need version 5.19 or later"
)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"device_map": "everywhere"}, "unknown device map"),
        ({"device_map": "auto", "device": "cpu"}, "a map takes all devices"),
        ({"bits": 3}, "unknown bits 3. Known: 4, 8"),
        ({"attention": "flash"}, "unknown attention 'flash'.*flash_attention_2"),
    ],
)
def test_a_value_outside_its_bound_is_refused(told: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        Loading(**told)


def test_every_option_of_the_command_line_arrives() -> None:
    told = "--device cpu --dtype bfloat16 --load-8bit --attn eager --revision v1 --trust-remote-code"
    for command in (["eval", "gqa"], ["sweep"], ["ask", "p.png", "what?"]):
        given = parser().parse_args([*command, *told.split()])
        assert arguments.loading(given) == Loading("cpu", "bfloat16", None, 8, "eager", "v1", True)
    given = parser().parse_args(["eval", "gqa", "--device-map", "auto", "--load-4bit"])
    assert arguments.loading(given) == Loading(device_map="auto", bits=4)


def test_what_may_change_an_answer_is_in_the_configuration(tmp_path: Path) -> None:
    data = make_place(tmp_path)
    plain = config(data, data / "model")
    assert "loading" not in prepare(plain).description
    eager = prepare(replace(plain, loading=Loading("cpu", attention="eager"))).description
    assert eager["loading"] == {"attention": "eager"} and eager["dtype"] == "auto" and eager["device"] == "cpu"


def test_methods_between_decoder_layers_need_masks(tmp_path: Path) -> None:
    data = make_place(tmp_path)
    flash = Loading("cpu", attention="flash_attention_2")
    assert prepare(replace(config(data, data / "model"), loading=flash)).loading == flash
    with pytest.raises(OptionError, match=r"FastV cuts between decoder layers.*Take sdpa"):
        prepare(replace(config(data, data / "model", method="fastv"), loading=flash))


def test_a_map_of_devices_is_for_one_worker(tmp_path: Path) -> None:
    data = make_place(tmp_path)
    mapped = replace(config(data, data / "model"), loading=Loading(device_map="auto"))
    with pytest.raises(OptionError, match="Take one worker"):
        loop.run(mapped, tmp_path / "out", Execution(workers=2))


def test_another_version_of_transformers_is_told_before_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("4.57.6", "5.18.1", "5.25.0", "6.0"):
        with pytest.raises(OptionError, match=rf"transformers {version}: .*run on 5\.19 to 5\.24"):
            check_version(version)
    check_version("5.19.0.dev0")
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaForConditionalGeneration"]}')
    monkeypatch.setattr("llava_consensus.evaluation.models.hf.version", lambda package: "4.37.2")
    with pytest.raises(OptionError, match=r"transformers 4\.37\.2"):
        models.check(str(tmp_path))


def test_official_llava_takes_no_map_but_auto() -> None:
    with pytest.raises(OptionError, match="with auto only"):
        models.load("checkpoints/llava-mini", Loading(device_map="balanced"))


def test_official_llava_is_given_the_kernel() -> None:
    host: Any = models.load("checkpoints/llava-mini", Loading("cpu", attention="eager"))
    kernel = getattr(host.model.config, "_attn_implementation", None)
    assert kernel == "eager"


@main_stack
def test_a_model_of_transformers_is_given_kernel_and_type(tmp_path: Path) -> None:
    assert cli.main(["model", "convert", "checkpoints/llava-mini", str(tmp_path / "mini")]) == 0
    host: Any = models.load(str(tmp_path / "mini"), Loading(dtype="float32", device_map="auto", attention="eager"))
    assert host.model.config._attn_implementation == "eager" and host.model.dtype == torch.float32


class Packed(nn.Module):
    """A linear layer as a quantiser leaves it: whole numbers and a scale, unpacked when it runs. No plain weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.scale = nn.Parameter(weight.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        packed = (weight / self.scale).round().to(torch.int8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def unpacked(self) -> nn.Linear:
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        linear.weight = nn.Parameter(self.packed * self.scale)
        linear.bias = self.bias
        return linear

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.packed * self.scale, self.bias)


def replace_linear(model: nn.Module, kind: type[nn.Module], made: Any) -> None:
    for module in model.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, kind) and name != "lm_head":
                setattr(module, name, made(child))


@main_stack
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_quantised_projections_work_by_hooks(family: str) -> None:
    from hf_models import CASES, prompts

    case = CASES[family]
    packed, plain = case.build(), case.build()
    replace_linear(packed, nn.Linear, Packed)
    replace_linear(plain, nn.Linear, lambda linear: Packed(linear).unpacked())
    inputs = prompts([1, 7, case.picture(0), 8, 9], [1, case.picture(1), 5])
    for name in ("consensusdrop", "consensusdrop+", "prumerge", "tome", "resize", "fastv", "sparsevlm", "dart"):
        answers: list[Any] = []
        for model in (packed, plain):
            try:
                with attach(model, name, tokens=case.square):
                    answers.append(model.generate(**inputs, max_new_tokens=4, do_sample=False).tolist())
            except OptionError as error:  # what this family cannot do at all is refused alike
                answers.append(str(error))
        assert answers[0] == answers[1], name
