"""A host held against its model: whether what methods are handed, and what the model answers with a method attached, is
what the model itself computes. `findings(runner, method)` takes a minute on real weights.

Each check gives the largest difference from what the model itself computes, relative to the largest value, and the
bound it must stay within. What the model computes is read off its own softmax while it runs (`watching`): nothing of
the host is used for that.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llava_consensus.errors import ConsensusError, DataError
from llava_consensus.evaluation.models.base import FULL, Answer, Prompt, Runner
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import AfterTower, Method
from llava_consensus.reduction.saliency import class_saliency, text_attention
from llava_consensus.reduction.selection import assemble
from llava_consensus.reduction.tokens import Need, Reduction, VisualTokens

BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # by the numbers a model computes with
HIDDEN = "the model's attention kernel does not show its weights: load it with --attn sdpa or eager"
NEW = 3  # tokens that are generated
SIZES = ((224, 160), (160, 224))  # of the pictures
TEXTS = ("What is in this picture?", "Which colours does this picture have, and where are they?")
ROWS = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}  # arguments by row: what generated tokens get
KERNEL, SOFTMAX = "scaled_dot_product_attention", "softmax"  # names of torch's functions


class Finding(NamedTuple):
    """Result of one check; no difference where it does not apply or could not be carried out."""

    check: str
    passed: bool | None  # None: does not apply
    difference: float | None = None
    bound: float | None = None
    note: str = ""


class NotApplicable(Exception):
    """A check that this model gives no occasion for."""


@dataclass(frozen=True, kw_only=True)
class Witness(AfterTower):
    """Keep tokens at equal distances: the same ones for every picture and prompt."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.PROBE})
    seen: list[VisualTokens] = field(default_factory=list, compare=False, repr=False)

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """The tokens at equal distances."""
        self.seen.append(tokens)
        units, size = tokens.projected.shape[:2]
        places = torch.arange(budget.tokens, device=tokens.projected.device) * size // budget.tokens
        return assemble(tokens.projected, places.expand(units, -1), self.order)


@dataclass(frozen=True, kw_only=True)
class TowerWitness(Witness):
    """Witness that also reads the attention of the vision tower."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.PROBE, Need.ATTENTION})


class Trial:
    """A host under trial.

    Args:
        runner: with tokenizer and preprocessing.
        method: the one to try.
        folder: for pictures of models that read files.
    """

    def __init__(self, runner: Runner, method: Method, folder: Path) -> None:
        self.runner, self.method, self.module = runner, method, runner.model
        self.pictures = [_picture(size, seed) for seed, size in enumerate(SIZES)]
        self.prompts = [Prompt(text, max_new_tokens=NEW, min_new_tokens=NEW) for text in TEXTS]
        with runner.attach(*FULL) as attached:
            self.view = attached.model
        assert self.view.tower is not None  # a model that pictures can be shown to
        self.tower = self.view.tower
        self.inputs = runner.own_inputs(self.prompts[0], self.pictures[0], folder)
        try:
            self.plain, _ = self.generate(self.inputs)
        except ConsensusError:
            raise
        except Exception as error:  # a model's own code may break in any way
            raise DataError(
                f"the model's own generate fails, with no method attached: {type(error).__name__}: {error}. Take the "
                "version of transformers for which its code was written"
            ) from error
        with runner.attach(self.witness(), Budget(1)) as attached:
            self.generate(self.inputs, 1)
            self.available = attached.outcomes[0].before
        self.budget = Budget(max(self.available // 2, 1))

    def witness(self) -> Witness:
        """A method that remembers what this model hands to it."""
        return TowerWitness() if Need.ATTENTION in self.tower.offers else Witness()

    @torch.no_grad()
    def generate(self, inputs: dict[str, Any], new: int = NEW) -> tuple[list[Tensor], Tensor]:
        """Greedy, by the model's own `generate`: the last row's logits [R, V] of every forward, and the new ids."""
        options = {"do_sample": False, "use_cache": True, "pad_token_id": self.runner.padding}
        with self.logits() as found:
            ids = self.module.generate(**inputs, max_new_tokens=new, min_new_tokens=new, **options)
        return found, ids[:, -new:]

    def attached(self, method: Method, budget: Budget) -> tuple[list[Tensor], Tensor]:
        """Generates for the first prompt with a method attached."""
        with self.runner.attach(method, budget) as attached, attached.asking([self.prompts[0].text]):
            return self.generate(self.inputs)

    @contextmanager
    def logits(self) -> Iterator[list[Tensor]]:
        """The last row's logits [R, V] of every forward of the model while the body runs."""
        found: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found.append(output.logits[:, -1].detach().float().clone())  # generate of 4.37 writes to them

        handle = self.module.register_forward_hook(keep)
        try:
            yield found
        finally:
            handle.remove()

    def extended(self, ids: Tensor) -> dict[str, Any]:
        """The arguments of a prompt with these ids [1, n] after it."""
        name = "input_ids" if "input_ids" in self.inputs else "inputs"
        longer = {name: torch.cat((self.inputs[name], ids.to(self.inputs[name].device)), dim=1)}
        for row, value in ROWS.items():
            if row in self.inputs:
                before = self.inputs[row]
                longer[row] = torch.cat((before, torch.full_like(ids, value).to(before)), dim=1)
        return {**self.inputs, **longer}


def _picture(size: tuple[int, int], seed: int) -> Image.Image:
    """A picture of soft patches of colour."""
    values = numpy.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
    return Image.fromarray(values).resize(size, Image.Resampling.BICUBIC)


def findings(runner: Runner, method: Method) -> list[Finding]:
    """Tries a host with its model.

    Args:
        runner: with tokenizer and preprocessing, as `models.load` gives it.
        method: the one that is attached where selection matters.
    Raises:
        OptionError: for a method that cannot be attached to this model.
        DataError: for a model that answers nothing without a method either.
    """
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(runner, method, Path(folder))
        with runner.attach(method, trial.budget):
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
    tower, witness = trial.tower, trial.witness()
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
    with trial.runner.attach(trial.method, trial.budget):
        encoded = [trial.runner.encode([picture]) for picture in trial.pictures]
        with trial.logits() as together:
            answers = trial.runner.answer(encoded, trial.prompts)
        apart, singles = [], []
        for pictures, prompt in zip(encoded, trial.prompts, strict=True):
            with trial.logits() as alone:
                singles += trial.runner.answer([pictures], [prompt])
            apart.append(alone[0])
    if len(together[0]) == 1:  # the host asks prompt by prompt
        return float(_texts(answers) != _texts(singles))
    return largest([together[0]], [torch.cat(apart)])


def encoded_before(trial: Trial) -> float:
    """A picture that went through the tower before the question is answered as the model's own `generate` does."""
    own, _ = trial.attached(trial.method, trial.budget)
    with trial.runner.attach(trial.method, trial.budget), trial.logits() as found:
        trial.runner.answer([trial.runner.encode([trial.pictures[0]])], trial.prompts[:1])
    return largest(found[:1], own[:1])


def decoding(trial: Trial) -> float:
    """Logits of generated tokens are those of one forward over the reduced prompt followed by these tokens."""
    with trial.runner.attach(trial.witness(), trial.budget):
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


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Names of the attributes of every module, and how many hooks it has."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return {
        name: (sorted(vars(part)), *(len(getattr(part, kind)) for kind in hooks))
        for name, part in module.named_modules()
    }


class Watch(TorchFunctionMode):
    """Keeps square attention weights, of as many queries as keys, that are computed inside a module.

    Args:
        module: a block of a tower or a layer of a language model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weights: list[Tensor] = []  # [..., n, n] each, float32
        self._inside = 0
        self._module = module

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if self._inside and name == KERNEL:
            self._keep(attention_weights(*args, **kwargs))
        output = function(*args, **kwargs)
        if self._inside and name == SOFTMAX:
            self._keep(output)
        return output

    def _keep(self, weights: Tensor) -> None:
        if weights.ndim > 2 and weights.shape[-1] == weights.shape[-2] > 1:
            self.weights.append(weights.detach().float())

    def _enter(self, *args: Any) -> None:
        self._inside += 1

    def _leave(self, *args: Any) -> None:
        self._inside -= 1


@contextmanager
def watching(module: nn.Module) -> Iterator[Watch]:
    """The weights that a module computes while the body runs."""
    watch = Watch(module)
    handles = [
        module.register_forward_pre_hook(watch._enter),
        module.register_forward_hook(watch._leave, always_call=True),
    ]
    try:
        with watch:
            yield watch
    finally:
        for handle in handles:
            handle.remove()


def attention_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights of torch's attention, given its arguments: [..., L, S] in float32."""
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query.float() @ key.float().transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), float("-inf"))
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, float("-inf")) if hidden else logits + attn_mask.float()
    return logits.softmax(-1)
