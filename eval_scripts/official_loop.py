"""LLaVA's own `llava/eval/model_vqa_loader.py`, unmodified, on a machine without CUDA: its device calls are redirected.

Run it like LLaVA's: python eval_scripts/official_loop.py --model-path checkpoints/llava-mini --question-file ... as its
scripts do. The last line of standard output is JSON: the seconds its loop took, loading not counted.
"""

import json
import runpy
import time
from typing import Any

import torch
from llava.model import builder

started = 0.0


def redirect(loader: Any, to: Any) -> tuple[Any, Any]:
    """Stand-ins for the official loader and `Tensor.to` that stay on the CPU in float32."""

    def load(*args: Any, **kwargs: Any) -> Any:
        global started
        tokenizer, model, processor, length = loader(*args, **kwargs, device="cpu")
        model.float()
        started = time.perf_counter()
        return tokenizer, model, processor, length

    def stay(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs |= {"device": "cpu"} | ({"dtype": torch.float32} if kwargs.get("dtype") == torch.float16 else {})
        result: torch.Tensor = to(tensor, *args, **kwargs)
        return result

    return load, stay


if __name__ == "__main__":
    builder.load_pretrained_model, torch.Tensor.to = redirect(builder.load_pretrained_model, torch.Tensor.to)  # type: ignore[method-assign]
    runpy.run_module("llava.eval.model_vqa_loader", run_name="__main__")
    print(json.dumps({"seconds": time.perf_counter() - started}))
