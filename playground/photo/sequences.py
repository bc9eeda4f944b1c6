"""Training sequences: a picture's patches and then several questions about it, kept apart by a block mask.

Every question sees the patches and itself, and its positions begin where the picture ends: to the model it is the only
question there is, as in the benchmarks. The words are those of the checkpoint's chat template. Answers begin with a
blank, so that they are the same tokens as in a question.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from playground.photo.catalogue import CATEGORY
from playground.photo.questions import QA, SHORT, PhotoView, write
from playground.photo.scenes import QUADRANTS, scene

FRONT, ASKED, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
MIX = {"existence": 0.24, "category": 0.20, "place": 0.14, "count": 0.12, "choose": 0.05, "description": 0.03,
       "relation": 0.04, "comparison": 0.02, "grounding": 0.06, "reading": 0.04, "letter": 0.06}  # fmt: skip
WITH_SUFFIX = 0.3  # of the questions are asked with LLaVA's words for a short answer


@dataclasses.dataclass(frozen=True)
class Drill:
    """Several facts in one answer, of which each second part is learned: more of them for the same tokens."""

    question: str
    parts: tuple[tuple[str, str], ...]  # given, learned
    kind: str = "drill"


Asked = tuple[QA | Drill, bool]  # a question, and whether it is asked with LLaVA's words for a short answer


@dataclasses.dataclass
class Batch:
    """Sequences of one length: `FRONT`, the patches, the questions.

    Args:
        ids: [B, T] text, the front first and the questions after it.
        position: [B, S], S = T + patches.
        segment: [B, S] number of the question that a row belongs to, 0 before the questions, -1 after them.
        target: [B, T] the token that follows each text token, or -1; `weight` of each.
        question: [B, T] number of the question that a token belongs to.
        asked: the questions of each sequence.
        front: tokens of `FRONT`.
    """

    ids: Tensor
    position: Tensor
    segment: Tensor
    target: Tensor
    weight: Tensor
    question: Tensor
    asked: list[list[QA | Drill]]
    front: int

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        moved = copy.copy(self)
        for name, part in vars(self).items():
            if isinstance(part, Tensor):
                setattr(moved, name, part.to(device))
        return moved

    def mask(self, kind: torch.dtype) -> Tensor:
        """[B, 1, S, S], added to the scores of attention: 0 where a row is seen."""
        segment, size = self.segment, self.segment.shape[1]
        same = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
        seen = (same & torch.ones(size, size, dtype=torch.bool, device=segment.device).tril()).unsqueeze(1)
        return torch.zeros(seen.shape, dtype=kind, device=segment.device).masked_fill(~seen, torch.finfo(kind).min)


class Encoder:
    """Questions to tokens."""

    def __init__(self, tokenizer: object) -> None:
        self.tokenizer = tokenizer
        self.front = self.ids(FRONT)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, without marks around it."""
        return self.tokenizer(text, add_special_tokens=False).input_ids  # type: ignore[operator]

    def encode(self, qa: QA | Drill, suffix: bool) -> tuple[list[int], list[float]]:
        """Tokens of a question and its answer, and the weight of each as a target."""
        if isinstance(qa, Drill):
            ids = self.ids(f"\n{qa.question}{ASKED}")
            weight = [0.0] * len(ids)
            for given, learned in qa.parts:
                before, after = self.ids(f" {given}:"), self.ids(f" {learned}")
                ids += [*before, *after, *self.ids(",")]
                weight += [0.0] * len(before) + [1.0] * len(after) + [0.0]
            return ids, weight
        words = f"{qa.question}\n{SHORT}" if suffix and qa.style == "short" else qa.question
        before, answer = self.ids(f"\n{words}{ASKED}"), self.ids(f" {qa.answer}{END}")
        return before + answer, [0.0] * len(before) + [1.0] * (len(answer) - 1) + [0.3]


def drills(view: PhotoView, rng: random.Random) -> list[Drill]:
    """What is there of a list of names, where the things are, and what is in the quarters of the picture."""
    present = list(view.names)
    absent = [name for name in view.known if name not in view.names]
    near = [name for name in absent if CATEGORY[name] and CATEGORY[name] in view.categories]
    listed = [(n, "no") for n in {*rng.sample(absent, 3), *rng.sample(near, min(2, len(near)))}]
    listed = sorted(listed + [(n, "yes") for n in present])
    rng.shuffle(listed)
    made = [Drill("Which of these are in the picture?", tuple(listed))]
    placed = [(view.items[k].name, where) for k in view.unique if (where := view.quadrant(view.items[k]))]
    if len(placed) > 1:
        rng.shuffle(placed)
        made.append(Drill("Where are these?", tuple(placed)))
    here = {where: [i.name for i in view.items if view.quadrant(i) == where] for where in QUADRANTS.values()}
    clear = view.scene.sign is None and all(view.quadrant(i) for i in view.items)
    named = [(where, names[0] if names else "nothing") for where, names in here.items() if len(names) < 2]
    if clear and named:
        rng.shuffle(named)
        made.append(Drill("What is in each corner?", tuple(named)))
    rng.shuffle(made)
    return made


def draw(index: int, moment: str, encoder: Encoder, room: int, drilled: float) -> list[Asked]:
    """Questions about a training scene that fill `room` tokens, each kind of drill with probability `drilled`; other
    ones at another `moment`.
    """
    rng, view = random.Random(f"{index}-{moment}"), PhotoView(scene("train", index))
    asked: list[Asked] = [(drill, False) for drill in drills(view, rng) if rng.random() < drilled]
    if view.scene.sign and (read := write(view, "reading", rng)):
        asked.append((read, rng.random() < WITH_SUFFIX))
    room -= sum(len(encoder.encode(*one)[0]) for one in asked)
    for _ in range(60):
        (kind,) = rng.choices(list(MIX), list(MIX.values()))
        made, suffix = write(view, kind, rng, 3), rng.random() < WITH_SUFFIX
        if made is None or any(made.question == known.question for known, _ in asked):
            continue
        room -= len(encoder.encode(made, suffix)[0])
        if room < 0:
            break
        asked.append((made, suffix))
    return asked


def one_of_each(kinds: Iterable[str], split: str, index: int, known: list[str] | None = None) -> list[Asked]:
    """A question of each kind that a scene supports, with LLaVA's words for a short answer."""
    rng, view = random.Random(f"{split}-{index}"), PhotoView(scene(split, index), known)
    return [(made, True) for kind in kinds if (made := write(view, kind, rng))]


def pack(
    asked: list[list[Asked]], patches: int, encoder: Encoder, at: Tensor | None = None, span: int | None = None
) -> Batch:
    """A batch of one row for each list of questions (with or without suffix).

    Args:
        asked: the questions about each image.
        patches: of an image.
        encoder: makes tokens of questions.
        at: [patches] positions of the patches within the image, if they are not 0, 1, 2, ...
        span: positions of an image, if they are not as many as its patches.
    """
    front, rows = len(encoder.front), []
    behind = front + (span or patches)
    for questions in asked:
        ids, number, place = list(encoder.front), [0] * front, list(range(front))
        target, weight = [-1] * front, [0.0] * front
        for k, (qa, suffix) in enumerate(questions, start=1):
            tokens, worth = encoder.encode(qa, suffix)
            place += range(behind, behind + len(tokens))
            ids, number = ids + tokens, number + [k] * len(tokens)
            target += [token if value else -1 for token, value in zip(tokens[1:], worth[1:], strict=True)] + [-1]
            weight += [*worth[1:], 0.0]
        rows.append((ids, number, place, target, weight))
    long = max(len(row[0]) for row in rows)
    long += -(long + patches) % 8  # fused kernels want masks whose rows are aligned
    words, segments, places, targets, weights = (
        torch.tensor([list(row[part]) + [filler] * (long - len(row[0])) for row in rows])
        for part, filler in enumerate((0, -1, 0, -1, 0.0))
    )
    visual = (front + (torch.arange(patches) if at is None else at)).expand(len(rows), -1)
    position = torch.cat([places[:, :front], visual, places[:, front:]], 1)
    segment = torch.cat([segments[:, :front], torch.zeros_like(visual), segments[:, front:]], 1)
    return Batch(words, position, segment, targets, weights, segments, [[qa for qa, _ in row] for row in asked], front)


def text_states(language: Any, seen: Tensor, batch: Batch) -> Tensor:
    """States [B, T, D] of the text rows after the last layer and its norm.

    Args:
        language: `LlamaModel`.
        seen: [B, patches, D] what the projector made of the patches; of no patches for the ablation.
    """
    words, seen = language.embed_tokens(batch.ids), seen.to(language.embed_tokens.weight.dtype)
    front = batch.front
    rows = torch.cat([words[:, :front], seen, words[:, front:]], 1)
    states = language(
        inputs_embeds=rows, attention_mask=batch.mask(rows.dtype), position_ids=batch.position, use_cache=False
    ).last_hidden_state
    return torch.cat([states[:, :front], states[:, front + seen.shape[1] :]], 1)


@torch.no_grad()
def right(language: Any, head: Any, seen: Tensor, batch: Batch) -> list[list[bool]]:
    """Whether each question's answer is the most likely one at every token: what greedy decoding says to the letter."""
    states, here = text_states(language, seen, batch), batch.target >= 0
    hit = torch.ones_like(here)
    hit[here] = head(states[here]).argmax(-1) == batch.target[here]
    return [
        [bool(row[number == k].all()) for k in range(1, len(asked) + 1)]
        for row, number, asked in zip(hit, batch.question, batch.asked, strict=True)
    ]
