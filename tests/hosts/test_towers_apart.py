"""Towers whose attention asks no kernel of transformers: the saliency of a token is that of attention by hand."""

from typing import Any

import compatibility
import pytest
import torch
from torch import Tensor

from llava_consensus import attach

SMALL = {
    "got_ocr2": {"vision_config.image_size": 256, "image_seq_length": 16},
    "perception_lm": {"projector_pooling_ratio": 2},
    "aria": {},
}


def got_ocr2(model: Any, told: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A token is made of the 9 x 9 patches around every fourth, by convolutions of 3 x 3: two of stride 2, and one."""
    tower = model.model.vision_tower
    tower.layers[-1].attn.register_forward_hook(lambda module, args, output: told.update(weights=output[1]))
    model.model.get_image_features(**told["pixels"])
    place = torch.arange(16)
    near = (place - 4 * torch.arange(4)[:, None]).abs() <= 4
    share = torch.einsum("ir,jc->ijrc", near.double(), near.double()).flatten(2).flatten(0, 1)
    return told["weights"].unflatten(0, (1, -1)), share / share.sum(1, keepdim=True)


def perception_lm(model: Any, told: dict[str, Any]) -> tuple[Tensor, Tensor]:
    attention = model.model.vision_tower.timm_model.blocks[-1].attn
    attention.fused_attn = False
    attention.attn_drop.register_forward_hook(lambda module, args, output: told.update(weights=output))
    model.model.get_image_features(**told["pixels"])
    whole = torch.eye(4).double().view(2, 2, 2, 2)
    return told["weights"], whole.repeat_interleave(2, 2).repeat_interleave(2, 3).reshape(4, 16) / 4


def aria(model: Any, told: dict[str, Any]) -> tuple[Tensor, Tensor]:
    attention, projector = model.model.vision_tower.encoder.layers[-1].self_attn, model.model.multi_modal_projector
    attention.q_proj.register_forward_hook(lambda module, args, output: told.update(query=output))
    attention.k_proj.register_forward_hook(lambda module, args, output: told.update(key=output))
    projector.cross_attn.multihead_attn.register_forward_hook(
        lambda module, args, output: told.update(share=output[1][0])
    )
    model.model.get_image_features(**told["pixels"])
    query, key = (told[name].unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for name in ("query", "key"))
    return (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).softmax(-1), told["share"]


BY_HAND = {"got_ocr2": got_ocr2, "perception_lm": perception_lm, "aria": aria}


@pytest.mark.parametrize("kind", SMALL)
@torch.no_grad()
def test_saliency_is_that_of_attention_by_hand(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "perception_lm":
        pytest.importorskip("timm")
    monkeypatch.setitem(compatibility.FIXED, kind, {**compatibility.FIXED.get(kind, {}), **SMALL[kind]})
    model = compatibility.small_model(kind)
    for name, weight in model.named_parameters():
        if "rel_pos" in name:
            weight.data.mul_(3)
    prompt = compatibility.prompt_of(model)
    model = model.double()
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in prompt.inputs.items()}
    with attach(model, "consensusdrop", tokens=3, merged=1) as attached:
        model(**inputs)
        ((_, found),) = attached.outcomes[0].reductions
    told = {"pixels": {name: value for name, value in inputs.items() if "pixel" in name or "mask" in name}}
    told["pixels"].pop("attention_mask")
    weights, share = BY_HAND[kind](model, told)
    weights = weights[0].mean(0)
    received = (weights.sum(0) - weights.diagonal()) / (len(weights) - 1)
    saliency = weights[0, 1:] if kind == "perception_lm" else received  # which has a class token
    torch.testing.assert_close(found.vision[0].double(), share @ saliency, rtol=1e-4, atol=1e-8)
    assert found.vision.std() > 1e-3 * found.vision.mean()
