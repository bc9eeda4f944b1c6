"""Makes tests/golden/fastv.npz with the authors' code (the in-place variant, a fork of transformers 4.31), which is
run, neither read nor copied:

    git clone https://github.com/pkunlp-icler/FastV /tmp/fastv
    .venv-pinned/bin/python tests/golden/make_fastv.py /tmp/fastv

The fork checks for an older tokenizers, of which nothing is used here: the check is told what it wants to hear.
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_decoder import AFTER, BEFORE, CONFIG, fill, inputs

CASES = [(576, t, s) for t in (192, 128, 64, 32) for s in (0, 1)] + [(333, 50, 0), (575, 101, 0), (900, 128, 0)]
LAYER = 2


@torch.no_grad()
def main(checkout: Path) -> None:
    known = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.13.3" if name == "tokenizers" else known(name)
    sys.path.insert(0, str(checkout / "src/transformers/src"))
    from transformers import LlamaConfig, LlamaForCausalLM

    model, arrays, seen = fill(LlamaForCausalLM(LlamaConfig(**CONFIG))), {}, []

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["position_ids"][0])

    model.model.layers[LAYER].register_forward_pre_hook(watch, with_kwargs=True)
    model.config.use_fast_v, model.config.fast_v_inplace = True, True
    model.config.fast_v_sys_length, model.config.fast_v_agg_layer = BEFORE, LAYER
    for visual, tokens, seed in CASES:
        model.config.fast_v_image_token_length, model.config.fast_v_attention_rank = visual, tokens
        model.model.reset_fastv()
        prompt, _ = inputs(visual, seed)
        logits = model(inputs_embeds=prompt, output_attentions=True, use_cache=False).logits[0, -1:]
        places = seen.pop() - BEFORE
        kept = places[(places >= 0) & (places < visual)]
        assert len(kept) == tokens and len(places) == BEFORE + tokens + AFTER
        case = f"{visual}_{tokens}_{seed}"
        arrays |= {f"{case}_kept0": kept.numpy().astype(np.int16), f"{case}_logits": logits.numpy()}
        print(case, kept[:8].tolist())
    np.savez_compressed(Path(__file__).with_name("fastv.npz"), **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
