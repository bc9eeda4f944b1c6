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


def told(module: Any, run: Any) -> tuple[Tensor, Any]:
    """Input and output of a module in a run."""
    seen: list[Any] = []
    hook = module.register_forward_hook(lambda module, args, output: seen.extend((args and args[0], output)))
    run()
    hook.remove()
    return seen[0], seen[1]


def by_hand(kind: str, model: Any, run: Any) -> tuple[Tensor, Tensor]:
    """Attention [H, n, n] of the last block, and the share [N, n] of each patch in each token."""
    tower, place = model.model.vision_tower, torch.arange(16)
    if kind == "got_ocr2":  # two convolutions of 3 x 3 with a stride of 2 behind one of 3 x 3
        near = ((place - 4 * torch.arange(4)[:, None]).abs() <= 4).double()
        share = torch.einsum("ir,jc->ijrc", near, near).flatten(2).flatten(0, 1)
        return told(tower.layers[-1].attn, run)[1][1], share / share.sum(1, keepdim=True)
    if kind == "perception_lm":
        attention = tower.timm_model.blocks[-1].attn
        attention.fused_attn = False
        corner = 2 * (torch.arange(4) // 2) * 4 + 2 * (torch.arange(4) % 2)
        near = (place == corner[:, None] + torch.tensor([0, 1, 4, 5])[:, None, None]).any(0).double()
        return told(attention.attn_drop, run)[1][0], near / 4
    attention = tower.encoder.layers[-1].self_attn
    query, key = (
        told(part, run)[1][0].unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
        for part in (attention.q_proj, attention.k_proj)
    )
    share = told(model.model.multi_modal_projector.cross_attn.multihead_attn, run)[1][1][0]
    return (query @ key.transpose(1, 2) * query.shape[-1] ** -0.5).softmax(-1), share


@pytest.mark.parametrize("kind", SMALL)
@torch.no_grad()
def test_saliency_is_that_of_attention_by_hand(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "perception_lm":
        pytest.importorskip("timm")
    monkeypatch.setitem(compatibility.FIXED, kind, {**compatibility.FIXED.get(kind, {}), **SMALL[kind]})
    model = compatibility.small_model(kind)
    inputs = compatibility.prompt_of(model).inputs
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    with attach(model.double(), "consensusdrop", tokens=3, merged=1) as attached:
        model(**inputs)
        ((_, found),) = attached.outcomes[0].reductions
    weights, share = by_hand(kind, model, lambda: model.model.get_image_features(inputs["pixel_values"]))
    weights = weights.mean(0)
    received = (weights.sum(0) - weights.diagonal()) / (len(weights) - 1)
    saliency = weights[0, 1:] if kind == "perception_lm" else received  # which has a class token
    torch.testing.assert_close(found.vision[0].double(), share @ saliency, rtol=1e-4, atol=1e-8)
    assert found.vision.std() > 1e-3 * found.vision.mean()
