"""Makes tests/golden/sparsevlm.npz with the authors' code (main branch), which is run and not copied:

    git clone https://github.com/Gumpest/SparseVLMs /tmp/sparsevlm; .venv-pinned/bin/pip install einops
    PYTHONPATH=. .venv-pinned/bin/python tests/golden/make_sparsevlm.py /tmp/sparsevlm

Its timing on CUDA is replaced by nothing, so that it runs on a CPU; its noise draws are stored.
"""

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_decoder import AFTER, BEFORE, CONFIG, STEPS, fill, inputs

CASES = [("1.5", 576, t, s) for t in (192, 128, 96, 64) for s in (0, 1)] + [("2.0", 576, t, 0) for t in (192, 128, 64)]
CASES += [("1.5", 333, 128, 0), ("1.5", 900, 192, 0), ("2.0", 333, 128, 0)]


class Nothing:
    """Stands for a CUDA event."""

    def __init__(self, **kwargs: Any) -> None: ...
    def record(self) -> None: ...
    def elapsed_time(self, other: Any) -> float:
        return 0.0


def load(folder: Path, version: str, tokens: int) -> Any:
    """The authors' module for one version and budget; both are read from the environment when it is imported."""
    os.environ |= {"USE_VERSION": {"1.5": "1_0", "2.0": "2_0"}[version], "RETAIN_TOKN": str(tokens)}
    for name in [name for name in sys.modules if name.startswith("sparse.")]:
        del sys.modules[name]
    package = types.ModuleType("sparse")
    package.__path__ = [str(folder / "llava/model/language_model")]
    sys.modules["sparse"] = package
    return importlib.import_module("sparse.modelling_sparse_llama")


@torch.no_grad()
def run(module: Any, visual: int, seed: int) -> tuple[list[Any], list[Any], Any]:
    """Tokens kept at each stage, noise draws, and logits after the prompt and every decoded row."""
    config = module.LlamaConfig(**CONFIG, attn_implementation="sdpa")
    model = module.LlamaDynamicvitForCausalLM(config)
    model.model = module.LlamaDynamicvitModel(config)
    model.lm_head = torch.nn.Linear(CONFIG["hidden_size"], CONFIG["vocab_size"], bias=False)
    inner, (prompt, answer) = fill(model).model, inputs(visual, seed)
    kept, noise, choose, rand = [], [], module.attn_postprocess_topk, torch.rand

    def chosen(*args: Any) -> Any:
        found = choose(*args)
        kept.append(found[0][0].nonzero()[:, 0].numpy().astype(np.int16))
        return found

    def drawn(*args: Any, **kwargs: Any) -> Any:
        noise.append(rand(*args, **kwargs))
        return noise[-1]

    module.attn_postprocess_topk, torch.rand = chosen, drawn
    torch.manual_seed(seed)
    inner.init_token_total_shape = prompt.shape[1]
    given = dict(use_cache=True, return_dict=True, image_shape=visual, token_length_list=[BEFORE + AFTER])
    out = inner(inputs_embeds=prompt, pre_prompt_length_list=[BEFORE], **given)[2]
    torch.rand = rand
    logits = [model.lm_head(out.last_hidden_state)[0, -1]]
    for step in range(STEPS):
        inner.generate_process_count = step + 1
        past = prompt.shape[1] + step
        out = inner(
            inputs_embeds=answer[:, step : step + 1],
            past_key_values=out.past_key_values,
            position_ids=torch.tensor([[past]]),
            **given,
        )[2]
        logits.append(model.lm_head(out.last_hidden_state)[0, -1])
    return kept, [one[0].numpy() for one in noise], torch.stack(logits).numpy()


def main(checkout: Path) -> None:
    torch.cuda.Event, torch.cuda.synchronize, torch.Tensor.cuda = Nothing, lambda *_: None, lambda self: self
    arrays = {}
    for version, visual, tokens, seed in CASES:
        kept, noise, logits = run(load(checkout, version, tokens), visual, seed)
        case = f"{version}_{visual}_{tokens}_{seed}"
        arrays |= {f"{case}_kept{number}": one for number, one in enumerate(kept)}
        arrays |= {f"{case}_noise{number}": one for number, one in enumerate(noise)}
        arrays[f"{case}_logits"] = logits
        print(case, [len(one) for one in kept], [len(one) for one in noise])
    np.savez_compressed(Path(__file__).with_name("sparsevlm.npz"), **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
