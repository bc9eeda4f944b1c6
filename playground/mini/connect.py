"""Give the language model its eyes: fit the projector, then train projector and language model on real patch features.

    python -m playground.mini.connect [--device cpu] [--threads 2]

The tower is frozen here, so each training scene goes through it once. The projector first learns to say of a patch
what the symbolic prefix said of it (regression); then answers are trained on real features, on sparse prefixes and
at the end on all 576 patches, with LLaVA's prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable

import numpy as np
import torch
from llava.model.language_model.llava_llama import LlavaLlamaForCausalLM
from torch import nn
from transformers import CLIPVisionModel

from playground.mini import pool
from playground.mini.language import HIDDEN, Words, answer_logits, answer_loss, language_config, probe
from playground.mini.paths import CHECKPOINT, WORK
from playground.mini.scenes import GRID, padded, render, scene
from playground.mini.sequences import PATCHES, Batch, Plan, collate
from playground.mini.tower import WIDTH, Tower, normalise, save

SCENES, PROBE_SCENES = 4000, 24


def projector(hidden: int) -> nn.Sequential:
    """LLaVA's mlp2x_gelu."""
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, hidden))


@torch.no_grad()
def features(tower: Tower, images: np.ndarray, size: int = 16) -> torch.Tensor:
    """Patch features of uint8 images [n, 192, 192, 3] after the penultimate block, float16 [n, 576, width]."""
    device = next(tower.parameters()).device
    window = torch.arange(GRID * GRID, device=device)
    parts = []
    for first in range(0, len(images), size):
        pixels = normalise(torch.from_numpy(images[first : first + size]).to(device))
        parts.append(tower.body(pixels, window, end=False)[0][:, 1:].half())
    return torch.cat(parts)


def cached_features(tower: Tower, count: int) -> torch.Tensor:
    """Features of the first `count` scenes of the pool, computed once for each state of the tower."""
    mark = float(sum(p.detach().double().abs().sum() for p in tower.clip.parameters()))
    path = WORK / "features.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        if state["mark"] == mark and len(state["features"]) >= count:
            return state["features"][:count]
    parts = []
    for number in range(-(-count // pool.SHARD)):
        images, _ = pool.load(pool.draw_shard(WORK, "scene", number))
        parts.append(features(tower, images).cpu())
        print(f"features {(number + 1) * pool.SHARD}/{count}", flush=True)
    save(path, mark=mark, features=torch.cat(parts)[:count])
    return torch.cat(parts)[:count]


def fit_projector(
    project: nn.Sequential, words: Words, embed: nn.Embedding, known: torch.Tensor, steps: int = 3000
) -> None:
    """Regress the projector's output on the symbolic prefix: all shown patches and a tenth of the background."""
    device, rng = next(project.parameters()).device, np.random.default_rng(3)
    inputs, labels, places = [], [], []
    for number in range(-(-len(known) // pool.SHARD)):
        _, packed = pool.load(pool.shard_path(WORK, "scene", number))
        block = packed[: len(known) - number * pool.SHARD, :6].reshape(-1, 6, PATCHES).transpose(0, 2, 1)
        taken = np.nonzero((block[..., 0] > 0) | ((block[..., 0] == 0) & (rng.random(block.shape[:2]) < 0.1)))
        inputs.append(known[torch.from_numpy(taken[0] + number * pool.SHARD), torch.from_numpy(taken[1])])
        labels.append(torch.from_numpy(block[taken].astype(np.int64)))
        places.append(torch.from_numpy(taken[1]))
    data, truth, where = torch.cat(inputs), torch.cat(labels), torch.cat(places)
    optimiser = torch.optim.AdamW(project.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1, step / 100) * (1 - 0.97 * step / steps)
        rows = torch.from_numpy(rng.integers(len(data), size=1024))
        with torch.no_grad():
            wanted = words(truth[rows].T[None].to(device), where[rows][None].to(device), embed)[0]
        loss = (project(data[rows].to(device).float()) - wanted).pow(2).mean() / wanted.var()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 500 == 0:
            print(f"projector {step}/{steps}: error {loss.item():.3f} of the variance", flush=True)


class Eyes:
    """Visual prefixes from real features: `batch.indices` and `batch.where` say which scenes and patches."""

    def __init__(self, project: nn.Sequential, known: torch.Tensor) -> None:
        self.project, self.known = project, known

    def __call__(self, batch: Batch) -> torch.Tensor:
        rows = torch.tensor(batch.indices)[:, None]
        return self.project(self.known[rows, batch.where.cpu()].to(batch.where.device).float())


def validation_features(tower: Tower) -> torch.Tensor:
    """Features of the scenes that `probe` asks about."""
    images = np.stack([np.asarray(padded(render(scene("val", i)))) for i in range(PROBE_SCENES)])
    return features(tower, images).cpu()


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of joint training: sparse prefixes first, all 576 patches after `sparse` of the steps; at least
    `signed` of the scenes carry a sign, and `reading` weighs the questions about it."""

    name: str
    steps: int
    peak: float
    sparse: float
    signed: float = 0.0
    reading: float = 4.0
    size: int = 8


ROUNDS = (
    Round("joint", 600, 5e-4, 0.4),
    Round("joint2", 900, 5e-4, 0.66, signed=0.6),
    Round("joint3", 560, 5e-4, 0.7, signed=1.0, reading=9.0),
)


class Learner:
    """Model and projector with their optimiser; a round begins where the one before it ended."""

    def __init__(self, device: str) -> None:
        self.model = LlavaLlamaForCausalLM(language_config()).to(device)
        self.project = projector(HIDDEN).to(device)
        self.device = device
        self.weights = [*self.model.parameters(), *self.project.parameters()]
        self.optimiser = torch.optim.AdamW(self.weights, lr=1e-4, betas=(0.9, 0.98), weight_decay=0.02)

    def load(self, name: str, optimiser: bool = True) -> int:
        """Take over a saved state; the number of its steps."""
        state = torch.load(WORK / f"{name}.pt", map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.project.load_state_dict(state["project"])
        if optimiser:
            self.optimiser.load_state_dict(state["optimiser"])
        return int(state["step"])

    def keep(self, name: str, step: int) -> None:
        """Save the state."""
        parts = {"model": self.model.state_dict(), "project": self.project.state_dict()}
        save(WORK / f"{name}.pt", **parts, optimiser=self.optimiser.state_dict(), step=step)

    def begin(self, known: torch.Tensor) -> None:
        """The language model of the symbolic stage and a projector fitted to its words."""
        state = torch.load(WORK / "language.pt", map_location=self.device, weights_only=True)
        words = Words(HIDDEN).to(self.device)
        self.model.load_state_dict(state["model"])
        words.load_state_dict(state["words"])
        fit_projector(self.project, words, self.model.get_input_embeddings(), known)

    def step(self, batch: Batch, see: Callable[[Batch], torch.Tensor], half: bool = False) -> float:
        """One update; the loss. With `half` the forward pass runs in bfloat16 where autocast allows it."""
        with torch.autocast(self.device, torch.bfloat16, enabled=half):
            logits, target, weight, _ = answer_logits(self.model, see(batch), batch)
            loss = answer_loss(logits, target, weight)
        self.optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimiser.step()
        return loss.item()


def train_round(
    number: int, rounds: tuple[Round, ...], known: torch.Tensor, seen: torch.Tensor, learner: Learner
) -> None:
    """Run or resume one round."""
    round_, device, begin = rounds[number], learner.device, 0
    torch.manual_seed(4 + number)
    if (WORK / f"{round_.name}.pt").exists():
        begin = learner.load(round_.name)
    elif number:
        learner.load(rounds[number - 1].name, optimiser=False)
    else:
        learner.begin(known)
        learner.keep(round_.name, 0)
    signed = [i for i in range(len(known)) if scene("train", i).sign]
    look, check = Eyes(learner.project, known), Eyes(learner.project, seen)
    started, mean = time.time(), 0.0
    for step in range(begin + 1, round_.steps + 1):
        full, rng = step > round_.sparse * round_.steps, np.random.default_rng([4, number, step])
        for group in learner.optimiser.param_groups:
            group["lr"] = round_.peak * min(1.0, step / 50) * (1 - 0.93 * step / round_.steps)
        size = max(2, round_.size // 2) if full else round_.size
        indices = [int(rng.choice(signed)) if rng.random() < round_.signed else int(rng.integers(len(known)))
                   for _ in range(size)]  # fmt: skip
        epoch = 10_000 * number + step
        plan = Plan("train", 400 if full else 300, full=full, epoch=epoch, reading=round_.reading)
        loss = learner.step(collate(indices, plan, rng).to(device), look)
        mean = loss if step == begin + 1 else 0.97 * mean + 0.03 * loss
        if step % 50 == 0:
            print(f"{round_.name} {step}/{round_.steps} {time.time() - started:.0f}s loss {mean:.3f}", flush=True)
        if step % 200 == 0 or step == round_.steps:
            print("  val", probe(learner.model, check, Plan("val", 400, full=True)), flush=True)
            learner.keep(round_.name, step)


def trained_tower() -> Tower:
    """The tower of the stage before or, where its state is missing, that of the committed checkpoint."""
    tower = Tower()
    if (WORK / "tower.pt").exists():
        tower.load_state_dict(torch.load(WORK / "tower.pt", map_location="cpu", weights_only=True)["tower"])
    else:
        tower.clip.load_state_dict(CLIPVisionModel.from_pretrained(CHECKPOINT / "vision_tower").state_dict())
    return tower.eval()


def train_joint(device: str, rounds: tuple[Round, ...] = ROUNDS, scenes: int = SCENES) -> None:
    """All rounds on the frozen tower."""
    tower = trained_tower().to(device)
    known, seen = cached_features(tower, scenes), validation_features(tower)
    for number in range(len(rounds)):
        train_round(number, rounds, known, seen, Learner(device))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train_joint(arguments.device)
