"""Train the projector and a low-rank adaptation of the language model on the photographs.

    python -m playground.photo.train --side 168 --first 0 --last 2000
    python -m playground.photo.train --side 336 --first 2000 --last 2400 --rates 1 0
    python -m playground.photo.train --seed 7 --start checkpoints/llava-photo --side 336 --last 400 --rates 0.3 0 \
        --jittered 0.9 --most 192   # a committed adapter, on shortened spans

The second of LLaVA's stages, from an aligned projector (`align.py`, which stands in the place of the first) and cached
features. The state of a seed lies in `PHOTO_WORK`, is written every two minutes and when the command ends, and every
command goes on from it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from playground.photo.align import Projector
from playground.photo.checkpoint import LOW, PROJECTOR, part_of, read_adapter
from playground.photo.features import SHARD, device, opened, take
from playground.photo.parts import converted
from playground.photo.paths import WORK
from playground.photo.sequences import Batch, Encoder, draw, one_of_each, pack, right, text_states

RANK, GAIN = 12, 2.0
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = ("existence", "category", "place", "count", "choose", "relation", "grounding", "reading", "letter")
FEWEST = 32  # patches of a step with some of them only
WORKERS = 6  # processes that make batches beside a GPU


def state_path(seed: int) -> Path:
    """Where the state of a seed lies."""
    return WORK / f"state-{seed}.pt"


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        low = functional.linear(x, self.down.to(x.dtype))
        return self.base(x) + functional.linear(low, GAIN * self.up.to(x.dtype))


def adapted(seed: int, kind: torch.dtype = torch.bfloat16) -> Any:
    """The language model, frozen, with a low-rank part beside every matrix of its layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        converted() / "language",
        dtype=kind,
        attn_implementation="eager" if device().type == "cpu" else "sdpa",  # with a mask, the quickest
    )
    model.requires_grad_(False)
    torch.manual_seed(seed)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in ADAPTED:
                if hasattr(part, name):
                    setattr(part, name, LowRank(getattr(part, name), RANK))
    return model.to(device())


class Learner:
    """Projector, language model and optimiser of a seed."""

    def __init__(self, seed: int) -> None:
        from transformers import AutoTokenizer

        self.seed, self.model, self.projector, self.step = seed, adapted(seed), Projector().to(device()), 0
        self.encoder = Encoder(AutoTokenizer.from_pretrained(converted() / "language"))
        self.low = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.groups: list[dict[str, Any]] = [
            {"params": list(self.low.values()), "peak": 1e-3},
            {"params": list(self.projector.parameters()), "peak": 3e-4},
        ]
        self.optimiser = torch.optim.AdamW(self.groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
        self.minutes = 0.0

    def loss(self, features: Tensor, batch: Batch) -> Tensor:
        """The mean over the tokens of answers."""
        batch, features = batch.to(device()), features.to(device()).float()
        states, here = text_states(self.model.model, self.projector(features), batch), batch.target >= 0
        logits = self.model.lm_head(states[here]).float()
        each = functional.cross_entropy(logits, batch.target[here], reduction="none")
        return (each * batch.weight[here]).sum() / batch.weight[here].sum()

    def learn(self, features: Tensor, batch: Batch, rate: float) -> float:
        """One step; the loss."""
        loss = self.loss(features, batch)
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group["peak"]
        self.optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for g in self.groups for p in g["params"]], 1.0)
        self.optimiser.step()
        self.step += 1
        return loss.item()

    def save(self) -> None:
        """Write the state."""
        part = state_path(self.seed).with_suffix(".part")
        torch.save({"low": self.low, "projector": self.projector.state_dict(), "step": self.step,
                    "optimiser": self.optimiser.state_dict(), "minutes": self.minutes}, part)  # fmt: skip
        os.replace(part, state_path(self.seed))

    def resume(self, start: Path | None = None) -> str:
        """Take the state if there is one, else the adapter in the folder `start`, else the aligned projector; says
        which.
        """
        if state_path(self.seed).exists():
            state: dict[str, Any] = torch.load(state_path(self.seed), weights_only=True, map_location="cpu")
            with torch.no_grad():
                for name, value in state["low"].items():
                    self.low[name].copy_(value)
            self.projector.load_state_dict(state["projector"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.step, self.minutes = state["step"], state["minutes"]
            return f"state of step {self.step}"
        if start:
            tensors, about = read_adapter(start)
            with torch.no_grad():
                for name, value in part_of(tensors, LOW).items():
                    self.low[name].copy_(value)
            self.projector.load_state_dict(part_of(tensors, PROJECTOR))
            return f"the adapter {about['sha256'][:12]} of {start}"
        self.projector.load_state_dict(torch.load(WORK / "projector.pt", weights_only=True))
        return "the aligned projector"


def evaluate(learner: Learner, side: int, scenes: int, size: int = 5) -> dict[str, tuple[float, int]]:
    """Share of right answers to one held-out question of each kind a picture, and how many were asked."""
    shards = opened("val", side, scenes)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for first in range(0, scenes, size):
        indices = range(first, min(first + size, scenes))
        questions = [one_of_each(KINDS, "val", i) for i in indices]
        batch = pack(questions, shards[0].shape[1], learner.encoder).to(device())
        with torch.no_grad():
            seen = learner.projector(take(shards, indices).to(device()).float())
        answers = right(learner.model.model, learner.model.lm_head, seen, batch)
        for asked, hits in zip(batch.asked, answers, strict=True):
            for qa, hit in zip(asked, hits, strict=True):
                found[qa.kind].append(hit)
    return {kind: (sum(hits) / len(hits), len(hits)) for kind, hits in found.items() if hits}


@torch.no_grad()
def by_position(learner: Learner, side: int, scenes: int, count: int = 64, size: int = 5) -> dict[str, float]:
    """Loss on held-out questions with `count` random patches, renumbered and at the positions that they had, and with
    all patches.
    """
    shards = opened("val", side, scenes)
    patches, found = shards[0].shape[1], dict[str, list[float]](renumber=[], keep=[], all=[])
    for first in range(0, scenes, size):
        indices = range(first, min(first + size, scenes))
        questions, features = [one_of_each(KINDS, "val", i) for i in indices], take(shards, indices)
        kept = torch.from_numpy(np.sort(np.random.default_rng(first).choice(patches, count, replace=False)))
        some, whole = features[:, kept], pack(questions, patches, learner.encoder)
        found["renumber"].append(learner.loss(some, pack(questions, count, learner.encoder)).item())
        found["keep"].append(learner.loss(some, pack(questions, count, learner.encoder, kept, patches)).item())
        found["all"].append(learner.loss(features, whole).item())
    return {policy: float(np.mean(losses)) for policy, losses in found.items()}


def curve_path(seed: int) -> Path:
    """Where the curve of a seed lies."""
    return WORK / f"curve-{seed}.csv"


def note(path: Path, row: list[Any]) -> None:
    """Add a row to a curve."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(["step", "side", "minutes", "loss", *KINDS])
        writer.writerow(row)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training.

    Args:
        side: pixels of a picture.
        first, last: steps.
        rates: learning rate at both ends, as multiples of the peak.
        drilled: probability of each drill.
        size: pictures of a step.
        scenes: how many are drawn from, as far as their features are there.
        room: tokens of questions a picture.
        jittered: probability that a step has some of the patches only, at random places of a span that is as long as
            they are many, as long as the whole image's, or between, each as often.
        most: patches of such a step; all if not given.
    """

    side: int
    first: int
    last: int
    rates: tuple[float, float]
    drilled: float = 1.0
    size: int = 2
    scenes: int = 6000
    room: int = 220
    jittered: float = 0.0
    most: int | None = None

    def rate(self, step: int) -> float:
        """Multiple of the peak at a step, after 30 steps of warm-up at the very beginning."""
        share = (step - self.first) / (self.last - self.first)
        return min(1.0, (step + 1) / 30) * (self.rates[0] + (self.rates[1] - self.rates[0]) * share)


@dataclasses.dataclass(frozen=True)
class Steps(Dataset[tuple[Tensor, Batch]]):
    """What each step of a stage sees: features [B, n, 384] and questions, drawn from the seed and the step."""

    stage: Stage
    seed: int
    encoder: Encoder

    def __getitem__(self, step: int) -> tuple[Tensor, Batch]:
        """The features and questions of a step."""
        shards = opened("train", self.stage.side, self.stage.scenes)  # more may have been made
        rng = np.random.default_rng((self.seed, step))
        indices = rng.choice(len(shards) * SHARD, self.stage.size, replace=False).tolist()
        moment = f"{self.seed}-{step}"
        asked = [draw(i, moment, self.encoder, self.stage.room, self.stage.drilled) for i in indices]
        features, patches = take(shards, indices), shards[0].shape[1]
        if rng.random() >= self.stage.jittered:
            return features, pack(asked, patches, self.encoder)
        count = int(rng.integers(FEWEST, (self.stage.most or patches) + 1))
        span = int(rng.choice([count, rng.integers(count, patches + 1), patches]))
        kept, places = (torch.from_numpy(np.sort(rng.choice(of, count, replace=False))) for of in (patches, span))
        return features[:, kept], pack(asked, count, self.encoder, places, span)


def train(stage: Stage, seed: int = 0, every: int = 250, held: int = 50, start: Path | None = None) -> None:
    """Train through a stage, looking at `held` held-out scenes after so many steps. `start`: see `Learner.resume`."""
    learner = Learner(seed)
    print(f"seed {seed} from {learner.resume(start)}", flush=True)
    workers = 0 if device().type == "cpu" else WORKERS
    steps = Steps(stage, seed, learner.encoder)
    loader = DataLoader(steps, batch_size=None, sampler=range(learner.step, stage.last), num_workers=workers)
    losses: list[float] = []
    saved, started = time.time(), time.process_time()
    for features, batch in loader:
        losses.append(learner.learn(features, batch, stage.rate(learner.step)))
        learner.minutes += (time.process_time() - started) / 60
        started = time.process_time()
        if learner.step % 10 == 0:
            questions = sum(map(len, batch.asked)) / stage.size
            print(f"step {learner.step} loss {np.mean(losses[-10:]):.3f} core-minutes {learner.minutes:.1f} "
                  f"questions {questions:.1f} at {time.strftime('%H:%M:%S')}", flush=True)  # fmt: skip
        if learner.step % every == 0 or learner.step == stage.last:
            scores = evaluate(learner, stage.side, held)
            row = [learner.step, stage.side, round(learner.minutes, 1), round(float(np.mean(losses[-every:])), 4)]
            note(curve_path(seed), [*row, *(round(scores[k][0], 3) if k in scores else "" for k in KINDS)])
            print(f"held-out { ({k: (round(v, 3), n) for k, (v, n) in scores.items()}) }", flush=True)
            if stage.jittered:
                losses_by = by_position(learner, stage.side, held)
                print(f"held-out loss { ({k: round(v, 3) for k, v in losses_by.items()}) }", flush=True)
        if time.time() - saved > 120 or learner.step == stage.last:
            learner.save()
            saved = time.time()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=168, help="pixels of a picture (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="step at which the rate is the first one")
    parser.add_argument("--last", type=int, default=2000, help="step at which training ends")
    parser.add_argument("--rates", type=float, nargs=2, default=(1.0, 1.0), help="multiples of the peak")
    parser.add_argument("--drilled", type=float, default=1.0, help="probability of each drill (%(default)s)")
    parser.add_argument("--size", type=int, default=2, help="pictures of a step (%(default)s)")
    parser.add_argument("--scenes", type=int, default=6000, help="how many are drawn from (%(default)s)")
    parser.add_argument("--jittered", type=float, default=0.0, help="probability of a step with jittered positions")
    parser.add_argument("--most", type=int, help="patches of a step with jittered positions (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the adaptation and of what each step sees")
    parser.add_argument("--start", type=Path, help="folder of the adapter to start from (the aligned projector)")
    parser.add_argument("--every", type=int, default=250, help="steps between looks at held-out scenes (%(default)s)")
    given = vars(parser.parse_args())
    others = {name: given.pop(name) for name in ("seed", "start", "every")}
    train(Stage(**{**given, "rates": tuple(given["rates"])}), **others)


if __name__ == "__main__":
    main()
