"""The tiny Llama and the inputs behind the golden files of methods that cut between decoder layers: from seeds alone,
the same under every version of transformers, so that only what the authors' code made of them is stored.
"""

import zlib
from typing import Any

import torch

CONFIG = dict(
    hidden_size=128,
    intermediate_size=160,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=64,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
BEFORE, AFTER = 35, 20  # text rows around the image
STEPS = 3  # rows decoded after the prompt


def fill(model: torch.nn.Module) -> Any:
    """Weights from the names of the parameters: matrices normal with deviation 0.1, norms one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(values if parameter.ndim > 1 else torch.ones_like(parameter))
    return model.float().eval()


def inputs(visual: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of a prompt [1, 35 + visual + 20, 128] and of the rows decoded after it [1, 3, 128]."""
    generator = torch.Generator().manual_seed(1000 * seed + visual)
    rows = torch.randn(1, BEFORE + visual + AFTER + STEPS, CONFIG["hidden_size"], generator=generator)
    return rows[:, :-STEPS], rows[:, -STEPS:]
