"""A method attached to a model, compared with the model itself. It takes a minute on real weights."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image
from torch import Tensor

from llava_consensus.errors import DataError
from llava_consensus.evaluation.models.base import Answer, Prompt, Runner
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method

BOUNDS = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of relative differences of logits; 1e-4 in float32
PROMPT = Prompt("What is in this image?", max_new_tokens=3, min_new_tokens=3)


class Finding(NamedTuple):
    """Result of one check: a note on the largest relative difference and its bound, or on why there is none."""

    check: str
    passed: bool
    note: str


class Trial:
    """A model with an image and a prompt about it, and the logits it computes with no method attached."""

    def __init__(self, runner: Runner, method: Method, folder: Path) -> None:
        self.runner, self.method, self.module = runner, method, runner.model
        noise = numpy.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
        self.image = Image.fromarray(noise).resize((224, 160), Image.Resampling.BICUBIC)
        self.inputs = runner.own_inputs(PROMPT, self.image, folder)
        try:
            self.plain = self.generate()
            self.state = self.attributes()
        except Exception as error:  # a model's own code may break in any way
            raise DataError(
                f"the model's own generate fails, with no method attached: {type(error).__name__}: {error}. Use the "
                "version of transformers for which its code was written"
            ) from error
        self.available = self.answer().before
        self.budget = Budget(max(self.available // 2, 1))

    @torch.no_grad()
    def generate(self) -> list[Tensor]:
        """Last row's logits [1, V] of every forward of the model's own greedy `generate`."""
        options = {"do_sample": False, "use_cache": True, "pad_token_id": self.runner.padding}
        with self.logits() as steps:
            self.module.generate(**self.inputs, max_new_tokens=3, min_new_tokens=3, **options)
        return steps

    def attached(self, budget: Budget) -> list[Tensor]:
        with self.runner.attach(self.method, budget) as attached, attached.asking([PROMPT.text]):
            return self.generate()

    def answer(self) -> Answer:
        (answer,) = self.runner.answer([self.runner.encode([self.image])], [PROMPT])
        return answer

    @contextmanager
    def logits(self) -> Iterator[list[Tensor]]:
        """The last row's logits [1, V] of every forward in the body."""
        steps: list[Tensor] = []
        # clone: generate of transformers 4.37 writes to them
        keep = lambda module, args, output: steps.append(output.logits[:, -1].detach().float().clone())  # noqa: E731
        with self.module.register_forward_hook(keep):
            yield steps

    def attributes(self) -> dict[str, Any]:
        """Names of the attributes of every module, and how many hooks it has."""
        return {
            name: (sorted(vars(part)), len(part._forward_hooks), len(part._forward_pre_hooks))
            for name, part in self.module.named_modules()
        }


def all_tokens(trial: Trial) -> float:
    return largest(trial.attached(Budget(trial.available)), trial.plain)


def budgets(trial: Trial) -> float:
    """Tokens that remain beyond the budget, of half of the tokens and of all of them."""
    excess = 0
    for budget in (trial.budget, Budget(trial.available)):
        with trial.runner.attach(trial.method, budget):
            excess = max(excess, trial.answer().after - budget.tokens)
    return float(excess)


def harness(trial: Trial) -> float:
    """An image encoded before the question is answered as the model's own `generate` does."""
    own = trial.attached(trial.budget)
    with trial.runner.attach(trial.method, trial.budget), trial.logits() as steps:
        trial.answer()
    return largest(steps[:1], own[:1])


def detached(trial: Trial) -> float:
    """A model that a method was detached from computes the same bits, and nothing is left on it."""
    trial.attached(trial.budget)
    after = trial.attributes()
    if after != trial.state:
        changed = [name for name in after if after[name] != trial.state.get(name)]
        raise RuntimeError(f"attributes or hooks are left on {', '.join(changed[:4])}")
    return largest(trial.generate(), trial.plain)


CHECKS: dict[str, tuple[Callable[[Trial], float], bool]] = {  # and whether nothing at all may differ
    "all tokens kept": (all_tokens, True),
    "budgets": (budgets, True),
    "encoded before": (harness, False),
    "detached": (detached, True),
}


def findings(runner: Runner, method: Method) -> list[Finding]:
    """Results of all checks. OptionError for a method that cannot be attached, DataError for a model that fails."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(runner, method, Path(folder))
        with runner.attach(method, trial.budget):
            pass
        return [_finding(trial, name, *check) for name, check in CHECKS.items()]


def _finding(trial: Trial, name: str, check: Callable[[Trial], float], exact: bool) -> Finding:
    bound = 0.0 if exact else BOUNDS.get(trial.module.dtype, 1e-4)
    try:
        difference = check(trial)
    except Exception as error:  # a model's own code may break in any way, which is a finding too
        return Finding(name, False, f"{type(error).__name__}: {error}")
    return Finding(name, difference <= bound, f"difference {difference:.1g}, bound {bound:.1g}")


def largest(steps: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of logits, relative to the largest expected value."""
    ours, plain = torch.cat(steps), torch.cat(expected)  # [steps, V]
    if ours.shape != plain.shape:
        raise RuntimeError(f"{len(ours)} steps, and {len(plain)} of the model itself")
    return float((ours - plain).abs().max() / plain.abs().max())
