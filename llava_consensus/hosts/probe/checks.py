"""What a host is held against, check by check: the largest difference from what the model itself computes, relative to
the largest value, and the bound it must stay within.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.base import Answer
from llava_consensus.hosts.probe.trial import Trial
from llava_consensus.hosts.probe.watch import watching
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.saliency import class_saliency, text_attention

BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # by the numbers a model computes with
HIDDEN = "the model's attention kernel does not show its weights: load it with --attn sdpa or eager"


class Finding(NamedTuple):
    """What one check found; no difference where it does not apply or could not be carried out."""

    check: str
    passed: bool | None  # None: does not apply
    difference: float | None = None
    bound: float | None = None
    note: str = ""


class NotApplicable(Exception):
    """A check that this model gives no occasion for."""


def probe(host: Any, method: Method) -> list[Finding]:
    """Tries a host with its model.

    Args:
        host: with tokenizer and preprocessing, as `hosts.load` gives it.
        method: the one that is attached where selection matters.
    Raises:
        OptionError: for a method that cannot be attached to this model.
    """
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(host, method, Path(folder))
        with host.attach(method, trial.budget):
            pass
        return [_finding(trial, name, *check) for name, check in CHECKS.items()]


def _finding(trial: Trial, name: str, check: Callable[[Trial], float], exact: bool) -> Finding:
    """One check carried out. A model's own code may break in any way, which is a finding too."""
    bound = 0.0 if exact else BOUNDS.get(trial.module.dtype, BOUNDS[torch.float32])
    try:
        difference = check(trial)
    except NotApplicable as reason:
        return Finding(name, None, note=str(reason))
    except Exception as error:
        return Finding(name, False, note=f"{type(error).__name__}: {error}")
    return Finding(name, difference <= bound, difference, bound)


def all_tokens(trial: Trial) -> float:
    """A budget of all tokens changes nothing."""
    return largest(trial.attached(trial.method, Budget(trial.available))[0], trial.plain)


@torch.no_grad()
def vision_attention(trial: Trial) -> float:
    """Queries and keys taken from the tower give the attention that its block computes."""
    tower, witness = trial.view.tower, trial.witness()
    with watching(tower.blocks[tower.feature_block]) as watch:
        trial.generate(trial.inputs, 1)
    trial.attached(witness, trial.budget)
    attention = witness.seen[0].attention
    if attention is None:
        raise NotApplicable("the tower offers no attention")
    size = attention.query.shape[2]
    maps = [weights.reshape(-1, size, size) for weights in watch.weights if weights.shape[-1] == size]
    if not maps:
        raise NotApplicable(HIDDEN)
    weights = torch.cat(maps).unflatten(0, (-1, attention.query.shape[1])).mean(1)  # [U, n, n]
    own = weights[:, 0, 1:] if attention.classes else weights.sum(1) - weights.diagonal(dim1=1, dim2=2)
    found = class_saliency(attention) * (1 if attention.classes else size - 1)
    if getattr(tower, "reorders", False):
        own, found = own.sort(1).values, found.sort(1).values
    return largest([found], [own])


@torch.no_grad()
def text_probe(trial: Trial) -> float:
    """The rows of the probe are those of the language model's first layer."""
    with watching(trial.view.decoder.layers[0]) as watch:
        trial.generate(trial.inputs, 1)
    witness = trial.witness()
    trial.attached(witness, trial.budget)
    handed = witness.seen[0].probe
    if handed is None or not handed.rows.shape[1]:
        raise NotApplicable("no words follow the picture in this model's prompt")
    size = handed.key.shape[2]
    maps = [weights for weights in watch.weights if weights.shape[-1] == size]
    if not maps:
        raise NotApplicable(HIDDEN)
    own = maps[0].reshape(-1, size, size).mean(0)  # [S, S]
    return largest([text_attention(handed)[0]], [own[handed.rows[0]]])


def batch(trial: Trial) -> float:
    """Two prompts about two pictures are answered together as one by one."""
    with trial.host.attach(trial.method, trial.budget):
        encoded = [trial.host.encode([picture]) for picture in trial.pictures]
        with trial.logits() as together:
            answers = trial.host.answer(encoded, trial.prompts)
        apart, singles = [], []
        for pictures, prompt in zip(encoded, trial.prompts, strict=True):
            with trial.logits() as alone:
                singles += trial.host.answer([pictures], [prompt])
            apart.append(alone[0])
    if len(together[0]) == 1:  # the host asks prompt by prompt
        return float(_texts(answers) != _texts(singles))
    return largest([together[0]], [torch.cat(apart)])


def encoded_before(trial: Trial) -> float:
    """A picture that went through the tower before the question is answered as the model's own `generate` does."""
    own, _ = trial.attached(trial.method, trial.budget)
    with trial.host.attach(trial.method, trial.budget), trial.logits() as found:
        trial.host.answer([trial.host.encode(trial.pictures[:1])], trial.prompts[:1])
    return largest(found[:1], own[:1])


def decoding(trial: Trial) -> float:
    """Logits of generated tokens are those of one forward over the reduced prompt with these tokens behind it."""
    with trial.host.attach(trial.witness(), trial.budget):
        steps, ids = trial.generate(trial.inputs)
        whole = [trial.generate(trial.extended(ids[:, :count]), 1)[0][0] for count in range(1, len(steps))]
    return largest(steps[1:], whole)


def detached(trial: Trial) -> float:
    """A model that a method was detached from is as it was."""
    before = _attributes(trial.module)
    trial.attached(trial.method, trial.budget)
    after = _attributes(trial.module)
    if before != after:
        changed = [name for name in before if before[name] != after[name]]
        raise RuntimeError(f"attributes or hooks are left on {', '.join(changed[:4]) or 'new modules'}")
    return largest(trial.generate(trial.inputs)[0], trial.plain)


CHECKS: dict[str, tuple[Callable[[Trial], float], bool]] = {  # and whether nothing at all may differ
    "all tokens kept": (all_tokens, True),
    "vision attention": (vision_attention, False),
    "text probe (SCAP)": (text_probe, False),
    "encoded before": (encoded_before, False),
    "batch as one by one": (batch, False),
    "decoding": (decoding, False),
    "detached": (detached, True),
}


def largest(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of tensors, relative to the largest expected value."""
    if len(found) != len(expected) or any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        shapes = [[tuple(one.shape) for one in side] for side in (found, expected)]
        raise RuntimeError(f"shapes {shapes[0]} where the model itself has {shapes[1]}")
    pairs = [(a.float().cpu(), b.float().cpu()) for a, b in zip(found, expected, strict=True)]
    scale = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / max(scale, 1e-12)


def _texts(answers: list[Answer]) -> list[str]:
    return [answer.text for answer in answers]


def _attributes(module: Any) -> dict[str, Any]:
    """Names of the attributes of every module, and how many hooks it has."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return {
        name: (sorted(vars(part)), *(len(getattr(part, kind)) for kind in hooks))
        for name, part in module.named_modules()
    }
