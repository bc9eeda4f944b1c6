"""Makes tests/golden/pyramiddrop.npz with the authors' code, which is run and not copied:

git clone https://github.com/Cooperx521/PyramidDrop /tmp/pyramiddrop
PYTHONPATH=. .venv-pinned/bin/python tests/golden/make_pyramiddrop.py /tmp/pyramiddrop
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llava_consensus.methods import make

sys.path.insert(0, str(Path(__file__).parent))
from tiny_decoder import AFTER, BEFORE, CONFIG, STEPS, fill, inputs

CASES = [(576, t, s) for t in (192, 128, 72, 64, 32) for s in (0, 1)] + [(333, 50, 0), (575, 101, 0), (2880, 640, 0)]

CHOSEN = []


def topk(*args: Any, **kwargs: Any) -> Any:
    """The ranking's last step, overheard."""
    CHOSEN.append(torch.topk(*args, **kwargs))
    return CHOSEN[-1]


@torch.no_grad()
def main(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    spec = importlib.util.spec_from_file_location("pdrop", checkout / "llava/model/modeling_llama_pdrop.py")
    pdrop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pdrop)
    model = fill(pdrop.LlamaForCausalLM(pdrop.LlamaConfig(**CONFIG, tokenizer_model_max_length=8192)))
    inner, arrays = model.model, {}
    for visual, tokens, seed in CASES:
        counts = [stage.kept for stage in make("pyramiddrop").plan(tokens, visual, 32)]
        inner.layer_list, inner.image_token_ratio_list = [8, 16, 24], [1.0, *((c + 0.5) / visual for c in counts)]
        inner.image_token_posi, inner.prompt_len, inner.image_tokens = [BEFORE], [BEFORE + AFTER], [visual]
        prompt, answer = inputs(visual, seed)
        torch.Tensor.topk = topk
        out, _ = inner.pdrop_forward(inputs_embeds=prompt, use_cache=True, return_dict=True)
        kept, torch.Tensor.topk = [one.indices.sort().values.tolist() for one in CHOSEN], torch.topk
        CHOSEN.clear()
        logits = [model.lm_head(out.last_hidden_state)[0, -1]]
        cache = out.past_key_values
        for step in range(STEPS):
            out, _ = inner.pdrop_forward(
                inputs_embeds=answer[:, step : step + 1], past_key_values=cache, use_cache=True, return_dict=True
            )
            logits.append(model.lm_head(out.last_hidden_state)[0, -1])
            cache = out.past_key_values
        assert [len(one) for one in kept] == counts
        case = f"{visual}_{tokens}_{seed}"
        arrays |= {f"{case}_kept{number}": np.array(one, np.int16) for number, one in enumerate(kept)}
        arrays[f"{case}_logits"] = torch.stack(logits).numpy()
        print(case, counts)
    np.savez_compressed(Path(__file__).with_name("pyramiddrop.npz"), **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
