"""vLLM's gated delta nets on a CPU in float32, by the rule of transformers: its own kernel takes bfloat16 alone, in
which plain vLLM and plain transformers differ by 0.1.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Puts `core` in place of the kernel, before a model of this process asks for it."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from llava_consensus.serving import server

    server.BFLOAT16 = frozenset()
    core.__annotations__["layer_name"] = gdn_attention.LayerNameType  # torch makes a schema of it
    gdn_attention.cpu_gdn_attention_core = core


def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any) -> None:
    """Convolution and recurrence of the sequences of a step, one by one."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import (
        _conv_buffer_view,
        _resolve_layer_name,
        _ssm_state_view,
        _unpacked_conv_weight,
    )

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    step = context.attn_metadata[layer.prefix]
    rows_before, states, weight = _conv_buffer_view(layer), _ssm_state_view(layer), _unpacked_conv_weight(layer)
    slots, starts = step.non_spec_state_indices_tensor.tolist(), step.non_spec_query_start_loc.tolist()
    for number, (start, stop) in enumerate(pairwise(starts[: step.num_decodes + step.num_prefills + 1])):
        slot, known = slots[number], number < step.num_decodes or bool(step.has_initial_state[number])
        rows = torch.cat((rows_before[slot] * known, mixed_qkv[start:stop].T), 1)  # [channels, 3 + n]
        rows_before[slot] = rows[:, -rows_before.shape[-1] :]
        mixed = torch.nn.functional.conv1d(rows[None], weight[:, None], layer.conv1d.bias, groups=len(rows))
        query, key, value = layer.rearrange_mixed_qkv(torch.nn.functional.silu(mixed[0].T))
        query, key = (one.repeat_interleave(value.shape[2] // one.shape[2], 2) for one in (query, key))
        decay = -layer.A_log.exp() * torch.nn.functional.softplus(a[start:stop] + layer.dt_bias)
        found, state = torch_recurrent_gated_delta_rule(
            query,
            key,
            value,
            g=decay[None],
            beta=b[start:stop].sigmoid()[None],
            initial_state=states[slot][None] * known,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        core_attn_out[start:stop], states[slot] = found[0], state[0]
