"""Training sequences: one visual prefix and several questions about it, kept apart by a block mask.

A sequence is laid out as system prompt, visual prefix, questions. Every question sees the system prompt, the prefix
and itself, and its positions begin where the image ends: to the model it is the only question there is.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import sentencepiece
import torch

from playground.mini import forms
from playground.mini.catalogue import NAMES
from playground.mini.labels import label
from playground.mini.paths import CHECKPOINT
from playground.mini.probes import PROBES, truth
from playground.mini.questions import QA
from playground.mini.scenes import GRID, SPLITS, Scene, sample, scene
from playground.mini.styles import EXTRA, TRAIN_MIX, prompt, training_questions
from playground.mini.tokenizer import SYSTEM

PATCHES = GRID * GRID
PIECES = sentencepiece.SentencePieceProcessor(model_file=str(CHECKPOINT / "tokenizer.model"))
SYSTEM_IDS = [1, *PIECES.encode(SYSTEM)]
PROBE_IDS = [PIECES.piece_to_id("▁" + name) for name in NAMES]


@dataclasses.dataclass
class Batch:
    """Sequences with one visual prefix and several questions each."""

    where: torch.Tensor  # [B, P] patch numbers of the prefix
    labels: torch.Tensor  # [B, 6, P]
    prefix: torch.Tensor  # [B] length of the prefix
    ids: torch.Tensor  # [B, T] system prompt (front) and questions (back)
    segment: torch.Tensor  # [B, T] 0 system, k question k, -1 padding
    position: torch.Tensor  # [B, T + P], in the order system, prefix, questions
    weight: torch.Tensor  # [B, T] loss weight of the token as a target
    known: torch.Tensor  # [B, probes, ...] what the word probes at the head of the questions are asked
    start: int  # length of the system prompt
    indices: list[int]

    def to(self, device: str) -> Batch:
        """The same on a device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return dataclasses.replace(self, **moved)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How sequences are made: `budget` tokens of questions; `bare` leaves out LLaVA's system prompt and suffixes;
    `full` shows all 576 patches instead of a sparse choice; `probes` adds the word probes."""

    split: str = "train"
    budget: int = 300
    bare: bool = False
    full: bool = False
    probes: bool = False
    epoch: int = 0
    reading: float = 4.0  # weight of the reading questions in the mix
    forms: bool = False  # the forms of all benchmarks, as `forms.MIX` weighs them


@dataclasses.dataclass
class Row:
    """One sequence before it is padded."""

    where: np.ndarray
    labels: np.ndarray
    ids: list[int]
    segment: list[int]
    weight: list[float]


def encode(qa: QA, bare: bool) -> tuple[list[int], list[float]]:
    """Token ids of question and answer, and the weight of each as a target."""
    question = PIECES.encode("\n" + (qa.question if bare else prompt(qa)) + " ASSISTANT:")
    answer = [*PIECES.encode(qa.answer), 2]
    worth = [0.3 if len(answer) > 6 else 1.0] * (len(answer) - 1) + [0.2]
    return question + answer, [0.0] * len(question) + worth


def choose(packed: np.ndarray, rng: np.random.Generator, ground: int, keep: float) -> np.ndarray:
    """Patches of a sparse prefix: each shown patch with probability `keep`, and some of the background."""
    kind = packed[0].reshape(-1)
    shown = np.flatnonzero(kind > 0)
    rest = np.flatnonzero(kind <= 0)
    return np.sort(np.concatenate([shown[rng.random(len(shown)) < keep], rng.choice(rest, ground, replace=False)]))


def look_up(split: str, index: int) -> Scene:
    """A scene of a split; "easy" scenes are training scenes with two or three objects."""
    return sample(SPLITS["train"] + 7 * 10**8 + index, least=2, most=3) if split == "easy" else scene(split, index)


def questions(index: int, plan: Plan) -> list[QA]:
    """The questions about a scene, more than a sequence will hold."""
    seed = (10**9 + index if plan.split == "val" else index) + plan.epoch * 10**10
    mix, writers = (forms.MIX, forms.WRITERS) if plan.forms else (TRAIN_MIX, EXTRA)
    weights = {**mix, "reading": plan.reading}
    return training_questions(look_up(plan.split, index), random.Random(seed), 24, weights, writers)


def row(index: int, plan: Plan, where: np.ndarray, packed: np.ndarray) -> Row:
    """The sequence about one scene."""
    flat = packed[:6].reshape(6, -1)[:, where].astype(np.int64)
    flat[0] = np.maximum(flat[0], 0)
    made = Row(where, flat, [], [], [])
    for number, qa in enumerate(questions(index, plan), start=1):
        tokens, worth = encode(qa, plan.bare)
        if len(made.ids) + len(tokens) > plan.budget:
            break
        made.ids, made.weight = made.ids + tokens, made.weight + worth
        made.segment = made.segment + [number] * len(tokens)
    if plan.probes:
        made.ids, made.weight = [*PROBE_IDS, *made.ids], [0.0] * PROBES + made.weight
        made.segment = [*range(1000, 1000 + PROBES), *made.segment]
    return made


def collate(indices: list[int], plan: Plan, rng: np.random.Generator) -> Batch:
    """A batch about the scenes `indices`."""
    system = [1] if plan.bare else SYSTEM_IDS
    keep, ground = rng.choice([0.5, 0.7, 1.0]), int(rng.integers(8, 20 if plan.split == "easy" else 60))
    renumber = not plan.full and rng.random() < 0.4
    rows = []
    for index in indices:
        packed = label(look_up(plan.split, index)).packed()
        rows.append(row(index, plan, np.arange(PATCHES) if plan.full else choose(packed, rng, ground, keep), packed))
    return pad(rows, indices, system, renumber, plan)


def pad(rows: list[Row], indices: list[int], system: list[int], renumber: bool, plan: Plan) -> Batch:
    """Rows to tensors; `renumber` counts the patches of the prefix instead of keeping their places as positions."""
    start, size = len(system), len(rows)
    wide, long = max(len(r.where) for r in rows), start + max(len(r.ids) for r in rows)
    known = torch.stack([truth(look_up(plan.split, i)) for i in indices]) if plan.probes else torch.zeros(size, 0)
    batch = Batch(
        where=torch.zeros(size, wide, dtype=torch.long), labels=torch.zeros(size, 6, wide, dtype=torch.long),
        prefix=torch.zeros(size, dtype=torch.long), ids=torch.zeros(size, long, dtype=torch.long),
        segment=torch.full((size, long), -1), position=torch.zeros(size, long + wide, dtype=torch.long),
        weight=torch.zeros(size, long), known=known, start=start, indices=indices,
    )  # fmt: skip
    for b, r in enumerate(rows):
        count, end = len(r.where), start + len(r.ids)
        batch.where[b, :count], batch.labels[b, :, :count] = torch.from_numpy(r.where), torch.from_numpy(r.labels)
        batch.prefix[b], batch.ids[b, :end] = count, torch.tensor(system + r.ids)
        batch.segment[b, :end], batch.weight[b, start:end] = (
            torch.tensor([0] * start + r.segment),
            torch.tensor(r.weight),
        )
        _, first, which = np.unique(r.segment, return_index=True, return_inverse=True)
        inside = torch.from_numpy(np.arange(len(r.segment)) - first[which])
        numbers = np.arange(count) if renumber else r.where
        batch.position[b, :start] = torch.arange(start)
        batch.position[b, start : start + count] = start + torch.from_numpy(numbers)
        batch.position[b, start + wide : end + wide] = start + (count if renumber else PATCHES) + inside
    return batch


def block_mask(batch: Batch) -> torch.Tensor:
    """Who may see whom: causal, and a question sees the system prompt, the prefix and itself; [B, 1, S, S] bool."""
    wide = batch.where.shape[1]
    visual = torch.where(torch.arange(wide, device=batch.ids.device)[None] < batch.prefix[:, None], 0, -1)
    segment = torch.cat([batch.segment[:, : batch.start], visual, batch.segment[:, batch.start :]], 1)
    size = segment.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=segment.device).tril()
    fits = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    mask = causal & fits & (segment >= 0)[:, None, :]
    return (mask | torch.eye(size, dtype=torch.bool, device=segment.device)).unsqueeze(1)
