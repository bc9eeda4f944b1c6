"""Train the projector and a low-rank adaptation of the language model on the photographs.

    python -m playground.photo.train --side 168 --first 0 --last 2000
    python -m playground.photo.train --side 336 --first 2000 --last 2400 --rates 1 0

The second of LLaVA's stages, from an aligned projector (`align.py`, which stands in the place of the first) and cached
features. The state lies in `PHOTO_WORK/state.pt`, is written every two minutes and when the command ends, and every
command goes on from it; without a state, from the committed adapter of `checkpoints/llava-photo`, where there is one.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from playground.photo.align import Projector
from playground.photo.features import SHARD, opened, take
from playground.photo.parts import converted
from playground.photo.paths import CHECKPOINT, WORK
from playground.photo.sequences import Batch, Encoder, draw, one_of_each, pack, right, text_states

RANK, GAIN = 12, 2.0
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = ("existence", "category", "place", "count", "choose", "relation", "grounding", "reading")
STATE = "state.pt"


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


def adapted(kind: torch.dtype = torch.bfloat16) -> Any:
    """The language model, frozen, with a low-rank part beside every matrix of its layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        converted() / "language",
        dtype=kind,
        attn_implementation="eager",  # with a mask, the quickest on a CPU
    )
    model.requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in ADAPTED:
                if hasattr(part, name):
                    setattr(part, name, LowRank(getattr(part, name), RANK))
    return model


class Learner:
    """Projector, language model and optimiser."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self.model, self.projector, self.step = adapted(), Projector(), 0
        self.encoder = Encoder(AutoTokenizer.from_pretrained(converted() / "language"))
        self.low = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.groups: list[dict[str, Any]] = [
            {"params": list(self.low.values()), "peak": 1e-3},
            {"params": list(self.projector.parameters()), "peak": 3e-4},
        ]
        self.optimiser = torch.optim.AdamW(self.groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
        self.minutes = 0.0

    def learn(self, features: Tensor, batch: Batch, rate: float) -> float:
        """One step; the loss."""
        states, here = text_states(self.model.model, self.projector(features), batch), batch.target >= 0
        logits = self.model.lm_head(states[here]).float()
        each = functional.cross_entropy(logits, batch.target[here], reduction="none")
        loss = (each * batch.weight[here]).sum() / batch.weight[here].sum()
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
        part = WORK / f"{STATE}.part"
        torch.save({"low": self.low, "projector": self.projector.state_dict(), "step": self.step,
                    "optimiser": self.optimiser.state_dict(), "minutes": self.minutes}, part)  # fmt: skip
        os.replace(part, WORK / STATE)

    def resume(self) -> str:
        """Take the state where there is one, else the committed adapter, else the aligned projector; says which."""
        if (WORK / STATE).exists():
            state: dict[str, Any] = torch.load(WORK / STATE, weights_only=True)
            with torch.no_grad():
                for name, value in state["low"].items():
                    self.low[name].copy_(value)
            self.projector.load_state_dict(state["projector"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.step, self.minutes = state["step"], state["minutes"]
            return f"state of step {self.step}"
        from playground.photo.checkpoint import ADAPTER, LOW, PROJECTOR, part_of, read_adapter

        if (CHECKPOINT / ADAPTER).exists():
            tensors, about = read_adapter()
            with torch.no_grad():
                for name, value in part_of(tensors, LOW).items():
                    self.low[name].copy_(value)
            self.projector.load_state_dict(part_of(tensors, PROJECTOR))
            self.step = about["step"]
            return f"the committed adapter of step {self.step}"
        self.projector.load_state_dict(torch.load(WORK / "projector.pt", weights_only=True))
        return "the aligned projector"


def evaluate(learner: Learner, side: int, scenes: int, size: int = 5) -> dict[str, tuple[float, int]]:
    """Share of right answers to one held-out question of each kind a picture, and how many were asked."""
    shards = opened("val", side, scenes)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for first in range(0, scenes, size):
        indices = range(first, min(first + size, scenes))
        batch = pack([one_of_each(KINDS, "val", i) for i in indices], shards[0].shape[1], learner.encoder)
        with torch.no_grad():
            seen = learner.projector(take(shards, indices))
        answers = right(learner.model.model, learner.model.lm_head, seen, batch)
        for asked, hits in zip(batch.asked, answers, strict=True):
            for qa, hit in zip(asked, hits, strict=True):
                found[qa.kind].append(hit)
    return {kind: (sum(hits) / len(hits), len(hits)) for kind, hits in found.items() if hits}


def note(row: list[Any]) -> None:
    """Add a row to the curve."""
    path = WORK / "curve.csv"
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(["step", "side", "minutes", "loss", *KINDS])
        writer.writerow(row)


def train(
    side: int, first: int, last: int, rates: tuple[float, float], drilled: float = 1.0, size: int = 2,
    scenes: int = 6000, room: int = 220, every: int = 250, held: int = 50,
) -> None:  # fmt: skip
    """Train from step `first` to `last`.

    Args:
        side: pixels of a picture.
        rates: learning rate at both ends, as multiples of the peak.
        drilled: probability of each drill.
        size: pictures of a step, of the first `scenes` scenes.
        room: tokens of questions a picture.
        every: steps between looks at `held` held-out scenes.
    """
    learner = Learner()
    print(f"from {learner.resume()}", flush=True)
    shards = opened("train", side, scenes)
    losses: list[float] = []
    saved = time.time()
    while learner.step < last:
        started = time.process_time()
        if learner.step % 50 == 0:
            shards = opened("train", side, scenes)  # more may have been made
        rng = np.random.default_rng(learner.step)
        indices = rng.choice(len(shards) * SHARD, size, replace=False).tolist()
        asked = [draw(i, learner.step, learner.encoder, room, drilled) for i in indices]
        batch = pack(asked, shards[0].shape[1], learner.encoder)
        share = (learner.step - first) / (last - first)
        rate = min(1.0, (learner.step + 1) / 30) * (rates[0] + (rates[1] - rates[0]) * share)
        losses.append(learner.learn(take(shards, indices), batch, rate))
        learner.minutes += (time.process_time() - started) / 60
        if learner.step % 10 == 0:
            print(f"step {learner.step} loss {np.mean(losses[-10:]):.3f} core-minutes {learner.minutes:.1f} "
                  f"questions {sum(map(len, asked)) / size:.1f}", flush=True)  # fmt: skip
        if learner.step % every == 0 or learner.step == last:
            scores = evaluate(learner, side, held)
            note([learner.step, side, round(learner.minutes, 1), round(float(np.mean(losses[-every:])), 4),
                  *(round(scores[k][0], 3) if k in scores else "" for k in KINDS)])  # fmt: skip
            print(f"held-out { ({k: (round(v, 3), n) for k, (v, n) in scores.items()}) }", flush=True)
        if time.time() - saved > 120 or learner.step == last:
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
    given = parser.parse_args()
    train(given.side, given.first, given.last, tuple(given.rates), given.drilled)


if __name__ == "__main__":
    main()
