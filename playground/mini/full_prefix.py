"""The last stage: projector and language model see all 576 patches only, as LLaVA's are trained.

    python -m playground.mini.full_prefix [--steps 1500] [--threads 1] [--out checkpoints/llava-mini]

It follows the joint rounds; where their state is missing it continues the committed checkpoint. The question forms of
all benchmarks are in its mix (`forms.py`). Every `SNAPSHOT` steps it saves its state, to resume from, and a loadable
snapshot without a tower of its own beside it, to see what more steps change.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from playground.mini import pool
from playground.mini.connect import SCENES, Eyes, Learner, features, trained_tower, validation_features
from playground.mini.export import export_language
from playground.mini.language import probe
from playground.mini.paths import CHECKPOINT, WORK
from playground.mini.scenes import scene
from playground.mini.sequences import Plan, collate
from playground.mini.tower import WIDTH, Tower

STEPS, SNAPSHOT, WARM_UP, FALL = 1500, 200, 100, 0.35
NAME, PEAK, SIZE = "full", 3e-4, 4
SIGNED, READING = 0.6, 6.0  # least share of scenes with a sign, weight of the questions about it


def load_committed(learner: Learner, folder: Path = CHECKPOINT) -> None:
    """Language model and projector of an exported checkpoint; the head is tied to the embedding and not stored."""
    state, mark = load_file(folder / "model.safetensors"), "model.mm_projector."
    learner.project.load_state_dict({k.removeprefix(mark): v for k, v in state.items() if k.startswith(mark)})
    language = {k: v for k, v in state.items() if not k.startswith(mark)}
    learner.model.load_state_dict(language | {"lm_head.weight": state["model.embed_tokens.weight"]})


def begin(learner: Learner, before: str) -> int:
    """Resume this stage, or take over the round before or the committed checkpoint; the number of steps done."""
    if (WORK / f"{NAME}.pt").exists():
        return learner.load(NAME)
    if (WORK / f"{before}.pt").exists():
        learner.load(before, optimiser=False)
    else:
        load_committed(learner)
    return 0


def rate(step: int, steps: int) -> float:
    """Learning rate: a warm-up, a level, and a cosine fall to 2 % over the last `FALL` of the steps."""
    falling = max(0.0, (step - (1 - FALL) * steps) / (FALL * steps))
    return PEAK * min(1.0, step / WARM_UP) * (0.51 + 0.49 * math.cos(math.pi * falling))


def draw(rng: np.random.Generator) -> int:
    """A training scene that the stages before were not shown."""
    signed = rng.random() < SIGNED
    while True:
        index = int(rng.integers(SCENES, 10**6))
        if scene("train", index).sign or not signed:
            return index


def update(learner: Learner, tower: Tower, step: int, half: bool) -> float:
    """One update on `SIZE` scenes that are drawn for it; the loss."""
    rng = np.random.default_rng([5, step])
    indices = [draw(rng) for _ in range(SIZE)]
    known = features(tower, np.stack([pool.picture(scene("train", index), index) for index in indices]))
    epoch = 100_000 + step
    plan = Plan("train", 600, full=True, epoch=epoch, reading=READING, forms=True)
    batch = collate(indices, plan, rng).to(learner.device)
    return learner.step(batch, lambda _: learner.project(known.float()), half)


def train_full(device: str, steps: int = STEPS, before: str = "joint3", half: bool = False) -> Learner:
    """Run or resume the stage."""
    tower, learner = trained_tower().to(device), Learner(device)
    check = Eyes(learner.project, validation_features(tower))
    done, started, mean = begin(learner, before), time.time(), 0.0
    first = done + 1
    for step in range(first, steps + 1):
        for group in learner.optimiser.param_groups:
            group["lr"] = rate(step, steps)
        loss = update(learner, tower, step, half)
        mean = loss if step == first else 0.98 * mean + 0.02 * loss
        if step % 50 == 0:
            print(f"{NAME} {step}/{steps} {time.time() - started:.0f}s loss {mean:.3f}", flush=True)
            learner.keep(NAME, step)
        if step % SNAPSHOT == 0 or step == steps:
            print("  val", probe(learner.model, check, Plan("val", 600, full=True, forms=True)), flush=True)
            learner.keep(NAME, step)
            export_language(learner.model, learner.project, WORK / f"llava-mini-{step:05d}", WIDTH)
    return learner


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the stage")
    parser.add_argument("--half", action="store_true", help="bfloat16 forward passes, for processors with such units")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="the checkpoint whose language model is replaced")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    learner = train_full(options.device, options.steps, half=options.half)
    export_language(learner.model, learner.project, options.out, WIDTH)


if __name__ == "__main__":
    main()
