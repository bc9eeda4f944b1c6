"""Steps a second, and memory, of a training step with all visual tokens and with fewer, in turns in one process.

    python -m eval_scripts.adaptation_speed --out results/adaptation/speed.json

A step is a forward and a backward pass over one batch of conversations about training scenes, with everything but the
tower trained. Time is that of the processor as well as of the clock, because machines are shared; memory is what the
forward pass keeps for the backward pass, counted exactly, parameters left out.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from llava_consensus import attach
from llava_consensus.evaluation import models
from llava_consensus.evaluation.files import write_json
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.models.llava import to_ids
from llava_consensus.evaluation.runs.pictures import open_image

MODEL = "checkpoints/llava-mini"
SETTINGS = (("full", None), ("consensusdrop", 64), ("consensusdrop", 32), ("visionzip", 64), ("random", 64))
ANSWER = 4  # ids of the end of each row that are its answer


def batch(host: Any, data: Path, size: int) -> dict[str, Any]:
    """The first questions of a file of conversations with their pictures, padded on the right."""
    entries = json.loads(data.read_text(encoding="utf-8"))[:size]
    pictures = [open_image(data.parent / "images" / entry["image"]) for entry in entries]
    texts = [" ".join(turn["value"].replace("<image>\n", "") for turn in entry["conversations"]) for entry in entries]
    rows = [to_ids(models.Prompt(text), 1, host.tokenizer) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        labels[number, len(row) - ANSWER : len(row)] = row[-ANSWER:]
    from llava.mm_utils import process_images

    images = process_images(pictures, host.image_processor, host.model.config).float()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "images": images}


def step(model: Any, inputs: dict[str, Any], method: str, tokens: int | None) -> dict[str, float]:
    """One forward and backward pass: seconds, seconds of the processor, and bytes kept in between."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.zero_grad()
    clock, processor = time.perf_counter(), time.process_time()
    with ExitStack() as stack:
        if tokens is not None:
            stack.enter_context(attach(model, method, tokens=tokens))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
    return {
        "seconds": time.perf_counter() - clock,
        "processor": time.process_time() - processor,
        "bytes": sum(kept.values()),
    }


def measure(data: Path, size: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds after the first, each setting once a round."""
    host: Any = models.load(MODEL, Loading("cpu"))
    model = host.model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision_tower" not in name)
    inputs = batch(host, data, size)
    seen: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds + 1):
        for method, tokens in SETTINGS:
            seen.setdefault(f"{method} {tokens or 'all'}", []).append(step(model, inputs, method, tokens))
    rows = {name: {key: median(one[key] for one in steps[1:]) for key in steps[0]} for name, steps in seen.items()}
    return {"model": MODEL, "batch": size, "rounds": rounds, "torch": torch.__version__, "rows": rows}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, default=Path("playground/mini-train/conversations.json"))
    parser.add_argument("--out", type=Path, default=Path("results/adaptation/speed.json"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.data_path, given.batch, given.rounds)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(given.out, found)
    for name, row in found["rows"].items():
        print(
            f"{name}: {row['seconds']:.2f} s, processor {row['processor']:.2f} s, {row['bytes'] / 2**20:.1f} MiB kept"
        )


if __name__ == "__main__":
    main()
