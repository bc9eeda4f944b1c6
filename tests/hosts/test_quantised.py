"""Real quantised layers of other packages in the language model, where those are installed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import CASES, prompts
from torch import Tensor, nn

from llava_consensus import attach

GROUP = 32


def scales(linear: nn.Linear) -> Tensor:
    """Of four symmetric bits for every 32 inputs: [out, groups]."""
    return (linear.weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7).clamp_min(1e-6)


def gptq(linear: nn.Linear) -> nn.Module:
    package = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    size = dict(in_features=linear.in_features, out_features=linear.out_features, bias=linear.bias is not None)
    made = package.TorchLinear(bits=4, group_size=GROUP, sym=True, desc_act=False, **size)
    made.pack_original(copy.deepcopy(linear), scales(linear), torch.full_like(scales(linear), 8.0))
    made.post_init()
    return made.eval()


def awq(linear: nn.Linear) -> nn.Module:
    package = pytest.importorskip("awq.modules.linear.gemm")
    own = scales(linear).t().contiguous()
    return package.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=own, zeros=torch.full_like(own, 8.0)).eval()


def swapped(model: Any, make: Callable[[nn.Module], nn.Module]) -> None:
    """Other modules in place of the projections of the language model."""
    inner = model.model.language_model
    for name, module in list(inner.named_modules()):
        if hasattr(module, "in_features"):
            owner, _, own = name.rpartition(".")
            setattr(inner.get_submodule(owner), own, make(module))


def dense(module: Any) -> nn.Linear:
    """The plain projection that a quantised one computes."""
    bias = module(torch.zeros(1, 1, module.in_features))[0, 0]
    made = nn.Linear(module.in_features, len(bias))
    made.weight.data = (module(torch.eye(module.in_features)[None])[0] - bias).T.float().contiguous()
    made.bias.data = bias.float()
    return made


@pytest.mark.parametrize("kind", [gptq, awq])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_layers_of_gptq_and_awq_are_read_as_they_compute(name: str, kind: Callable[[Any], nn.Module]) -> None:
    case = CASES[name]
    model = case.build().requires_grad_(False)
    swapped(model, kind)
    reference, inputs = copy.deepcopy(model), prompts([1, 5, 6, case.picture(0), 7, 8, 9])
    swapped(reference, dense)
    plain = model(**inputs).logits
    with attach(model, "consensusdrop", tokens=4096):
        assert torch.equal(model(**inputs).logits, plain)
    for method in ("consensusdrop", "fastv"):
        answers, kept = [], []
        for one in (model, reference):
            with attach(one, method, tokens=case.tokens) as attached:
                answers.append(one(**inputs).logits)
                kept.append(attached.outcomes[0].reductions[0][1].source.tolist())
        assert kept[0] == kept[1] and torch.allclose(*answers, atol=0.05), "half precision inside AWQ's"
