"""The reduction's own share of the time to the first token, on the official LLaVA and on that of transformers, with
random weights of one published size.

Run it: python eval_scripts/host_share.py [--shape llava-1.5-1b --tokens 64 --repeats 3]. Both hosts take turns on one
picture of noise; a line of medians for each.
"""

import argparse
import random
import statistics
import tempfile
from typing import Any

import torch
import transformers
from llava.model.language_model.llava_llama import LlavaConfig, LlavaLlamaForCausalLM
from PIL import Image

from llava_consensus import make
from llava_consensus.evaluation.bench.timing import Timing, answer_once
from llava_consensus.hosts import Loading, Prompt, wrap
from llava_consensus.hosts.hf.random_weights import SIZES, plan
from llava_consensus.reduction.budget import Budget

SIDE = 336  # of the picture, in pixels


def official(shape: str, dtype: torch.dtype) -> Any:
    """The official host with random weights of a size of LLaVA-1.5."""
    vision = transformers.CLIPVisionConfig(**{k: v for k, v in SIZES[shape].vision.items() if k != "model_type"})
    text = {name: value for name, value in SIZES[shape].text.items() if name != "model_type"}
    with tempfile.TemporaryDirectory() as tower:
        vision.save_pretrained(tower)
        sees = {"mm_hidden_size": vision.hidden_size, "mm_vision_select_layer": -2, "mm_projector_type": "mlp2x_gelu"}
        model = LlavaLlamaForCausalLM._from_config(LlavaConfig(mm_vision_tower=tower, **sees, **text), dtype=dtype)
    holder = model.get_vision_tower()
    holder.vision_tower, holder.is_loaded = transformers.CLIPVisionModel._from_config(vision, dtype=dtype), True
    host: Any = wrap(model.eval())
    host.tokenizer = transformers.AutoTokenizer.from_pretrained("checkpoints/llava-mini")
    host.image_processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    return host


def line(name: str, samples: list[Timing]) -> str:
    """Medians of the time to the first token and of the reduction, and the median share."""
    first = statistics.median(sample.ttft_ms for sample in samples)
    own = statistics.median(sample.reduction_ms for sample in samples)
    share = statistics.median(sample.reduction_ms / sample.ttft_ms for sample in samples)
    return f"{name:16} first token {first:9.1f} ms, reduction {own:7.1f} ms, share {100 * share:.2f} %"


def main() -> None:
    """Measures both hosts in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llava-1.5-1b", choices=["llava-1.5-1b", "llava-1.5-7b", "llava-1.5-13b"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    hosts = {
        "official": official(given.shape, torch.bfloat16),
        "transformers": plan(given.shape, Loading("cpu", "bfloat16")).host(),
    }
    picture = Image.frombytes("RGB", (SIDE, SIDE), random.Random(0).randbytes(3 * SIDE * SIDE))
    prompt, side = Prompt("What is this?", max_new_tokens=1), (make("consensusdrop"), Budget(given.tokens))
    samples: dict[str, list[Timing]] = {name: [] for name in hosts}
    for turn in range(given.repeats + 1):
        for name, host in hosts.items():
            sample = answer_once(host, picture, prompt, side)
            samples[name] += [sample] if turn else []  # the first is warm-up
    print("\n".join(line(name, found) for name, found in samples.items()))


if __name__ == "__main__":
    main()
