"""A method attached to one model instance.

    new -> attached -> ended -> attached ...

Hooks are registered when a method is attached. `detach`, or the end of a `with` block, ends the attachment: later
prompts are read whole, and hooks go as soon as no shortened cache needs them. Entering an ended attachment attaches it
again. The class of the model is never touched.
"""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.arguments import joined_outcomes
from llava_consensus.hosts.before_tower import READABLE
from llava_consensus.hosts.entrance import Entrance
from llava_consensus.hosts.images import UNKNOWN, family_of, kind_of
from llava_consensus.hosts.inputs import NO_TEXT
from llava_consensus.hosts.outcomes import ImageOutcome, Report, cached_layers, joined_parts
from llava_consensus.hosts.prompts import Prompt
from llava_consensus.hosts.rows import cache_in, remove_all
from llava_consensus.hosts.tower import READ
from llava_consensus.hosts.units import over_parts, whole_images
from llava_consensus.reduction.budget import Budget, Share, amount, of_prompts
from llava_consensus.reduction.composition import Composition
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import ClipSides, Need

_LOCK = threading.Lock()
# types whose `generate` asks the language model only
OWN_GENERATE = ("blip-2", "instructblip", "instructblipvideo", "kosmos-2")


class BudgetedMethod(NamedTuple):
    method: Method
    budget: Budget | Share


@dataclass(eq=False)
class Call:
    """One call of the model, or several in a `with` block, with its inputs that are no arguments, and its report."""

    questions: list[str] | None = None  # text asked in each row of the batch, for methods that read it
    settings: Mapping[str, Any] = field(default_factory=dict)  # entries of the configuration that differ in this call
    report: Report = field(default_factory=Report)


class Attachment:
    """A method on one model. `outcomes` holds the per-image results of the last call.

    Args:
        model: a model of transformers.
        method: the reduction method.
        budget: of one image, a number of tokens, or a share of those it has.
        total: the most tokens of the images of one prompt; None is any number.
        options: of its family (`HostEntry.options`).
        entrance: how rows leave this model.
    Raises:
        OptionError: for a method this model has no parts for, or a model that has a method already.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        budget: Budget | Share,
        total: int | None = None,
        options: Mapping[str, str] | None = None,
        entrance: Callable[..., Entrance] = Entrance,
    ) -> None:
        self._options = options or {}
        self.asked, self.budget, self._total = method, budget, total
        self._stages = [BudgetedMethod(method, budget)]
        if isinstance(method, Composition):
            own = method.budgets(budget)
            self._stages = [BudgetedMethod(part.method, one) for part, one in zip(method.parts, own, strict=True)]
        self.method = self._stages[0].method
        self.active = False
        self._name, self._warned = type(model).__name__, set[str]()
        # whether a budget is for each run of image tokens, as it is not known how the processor groups them
        self._per_tile = family_of(model.config) is UNKNOWN
        self._scope: ContextVar[Call | None] = ContextVar("llava_consensus_call", default=None)
        self._local, self._latest = threading.local(), Report()
        self._check(model)
        self.entrance = entrance(self, model, self._options)
        self._clip = self._clip_text(model)
        self._handles: list[Any] = []
        self._attach()

    def _check(self, model: Any) -> None:
        if len(self._stages) > 1:
            check_stages(self._stages, model)
        if self._total is not None and isinstance(self.budget, Budget) and self._total < self.budget.tokens:
            raise OptionError(
                f"total={self._total} is below tokens={self.budget.tokens} of one image: give at least that"
            )
        if self._total is not None and self.method.place is not Place.TOKENS:
            raise OptionError(
                f"total={self._total}: is for methods that act after the vision tower, and "
                f"{type(self.method).__name__} acts elsewhere: give tokens as a number or a share"
            )
        config: Any = getattr(model, "config", None)
        if getattr(config, "model_type", None) in OWN_GENERATE:
            raise OptionError(
                f"{self._name}: its `generate` passes by its forward, which methods act in. Take another model"
            )
        width = getattr(getattr(config, "text_config", None) or config, "hidden_size", None)
        for method in (stage.method for stage in self._stages):
            if method.width not in (None, width) and width:
                raise OptionError(
                    f"{type(method).__name__}: trained for tokens of width {method.width}, and those of {self._name} "
                    f"have {width}. Take weights that were trained for this model"
                )
            moves = method.positions == "spread" or ("positions" in method.asked and method.positions == "renumber")
            if moves and keeps_positions(model):
                raise OptionError(
                    f"positions={method.positions}: {self._name} has positions of three axes, which are kept. Leave "
                    "it out, or take positions=keep"
                )

    def _clip_text(self, model: Any) -> Any:
        """CLIP's text side, if a method reads the question and the vision configuration names its CLIP model."""
        if not any(Need.QUESTION in stage.method.needs for stage in self._stages):
            return None
        name = self.entrance.clip_name
        if not name:
            return None
        from llava_consensus.hosts.clip import load_clip_text

        return load_clip_text(name, model.device)

    # State

    def _attach(self) -> None:
        """Attaches the method, also after `detach`. OptionError for a model that has one already."""
        with _LOCK:
            if self.active:
                return
            model = self.entrance.model()
            if model is None:
                raise OptionError("the model of this attachment is gone: attach to one that is loaded")
            if any(isinstance(getattr(hook, "__self__", None), Entrance) and hook.__self__.open
                   for hook in model._forward_pre_hooks.values()):  # fmt: skip
                raise OptionError("this model has a method attached already: detach it first")
            self.entrance.install()
            self._handles.append(model.register_forward_hook(self._read_cache))
            self.active = True

    def detach(self) -> None:
        """Gives the model back as it was, bit for bit. It waits for no call: calls of other threads whose images are
        encoded end with the method, later ones are plain. A cache that was filled with fewer rows keeps the
        hooks that it needs, also under another method; they leave with the last such cache. Detaching twice does
        nothing, and entering again attaches again.
        """
        with _LOCK:
            self.active = False
            remove_all(self._handles)
            self.entrance.remove()

    def __enter__(self) -> "Attachment":
        self._attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Attachment":
        """A copy of an attached model is attached; the reports of its calls stay with the original."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            twin.__dict__[name] = copy.deepcopy(value, memo) if name in ("entrance", "_handles") else value
        twin._local, twin._latest, twin._warned = threading.local(), Report(), set()
        twin._scope = ContextVar("llava_consensus_call", default=None)
        return twin

    def __reduce__(self) -> Any:
        """Raises OptionError: an attachment belongs to its process."""
        raise OptionError("a model with a method attached cannot be pickled: detach first, or save its state_dict()")

    # Calls

    @contextmanager
    def call(self, questions: list[str] | None = None, settings: Mapping[str, Any] | None = None) -> Iterator[Call]:
        """The calls of the model in the body, with inputs that are no arguments of it."""
        call = Call(questions, settings or {})
        token = self._scope.set(call)
        try:
            yield call
        finally:
            self._scope.reset(token)
            self._local.report = self._latest = call.report

    def asking(self, questions: list[str]) -> Any:
        """A call for methods that read the question itself: `with attached.asking(["..."]): model.generate(...)`, with
        the text asked in each row of the batch.
        """
        return self.call(questions=questions)

    @property
    def _settings(self) -> Mapping[str, Any]:
        """Entries of the model's configuration that differ in the call of this context."""
        call = self._scope.get()
        return {} if call is None else call.settings

    def _tell(self, report: Report) -> None:
        call = self._scope.get()
        if call is not None:
            report = call.report = replace(report, cache=call.report.cache)
        self._local.report = self._latest = report
        if NO_TEXT in report.notes:
            self._warn(NO_TEXT)
        outcomes = report.outcomes
        cuts = self._stages[-1].method.place is Place.DECODER  # whose outcomes follow
        if self._per_tile and not cuts and len(outcomes) > 1 and all(own.after == own.before for own in outcomes):
            self._warn(
                f"nothing was reduced: how {self._name} groups the tiles of an image is not known, so the budget is "
                f"per tile (each run of image tokens), and none of {len(outcomes)} runs has more. Give fewer tokens, "
                "or a share"
            )

    def _tell_plain(self) -> None:
        """Stores that a prompt shows no image. Within `with attached.call()` others may, and their results stay."""
        if self._scope.get() is None:
            self._local.report = self._latest = Report()

    def _finish(self, later: dict[int, ImageOutcome]) -> None:
        report = self._report
        whole = len(self._stages) > 1
        self._tell(replace(report, outcomes=joined_outcomes(report.outcomes, later, whole)))

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)

    def _read_cache(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._scope.get()
        if call is not None and not call.report.cache:
            cache = cache_in(output) if hasattr(output, "get") else None
            call.report = replace(call.report, cache=cached_layers(cache, self.entrance.cache_axis))

    @property
    def _report(self) -> Report:
        """Report of the last call of this thread, or of any thread if this one made none."""
        call = self._scope.get()
        return call.report if call is not None else getattr(self._local, "report", self._latest)

    @property
    def outcomes(self) -> list[ImageOutcome]:
        """Per-image results of the last call of this thread, or of any thread if this one made none."""
        return joined_parts(self._report.outcomes)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._report.notes

    def milliseconds(self) -> dict[str, float]:
        """Time the last reduction took, by step: the bookkeeping and the method's own work."""
        reductions = [reduction for outcome in self.outcomes for _, reduction in outcome.reductions]
        watches = {id(reduction.watch): reduction.watch for reduction in reductions}
        spent: dict[str, float] = {}
        for watch in (self._report.watch, *watches.values()):
            for name, time in watch.milliseconds().items() if watch else ():
                spent[name] = spent.get(name, 0.0) + time
        return spent

    # Called during a forward pass

    def _budgets(self, stage: BudgetedMethod, prompt: Prompt) -> list[Budget | Share]:
        images, whole = prompt.images, whole_images(prompt.images)
        found: list[Any] = [stage.budget] * len(whole)
        sizes = [[int((images[part].token >= 0).sum()) for part in parts] for parts in whole]
        if self._total is not None:
            rows = [images[parts[0]].row for parts in whole]
            found = list(of_prompts(found, [sum(own) for own in sizes], rows, self._total))
        return [share for budget, own in zip(found, sizes, strict=True) for share in over_parts(budget, own)]

    def _clip_sides(self, prompt: Prompt, base: nn.Module) -> Callable[[list[int]], ClipSides] | None:
        """Images and questions in CLIP's space, given images; None if the tower is of no whole CLIP model.

        Raises:
            OptionError: if the questions are not known.
        """
        if self._clip is None:
            return None
        call, rows = self._scope.get(), len(prompt.real) // prompt.beams
        questions = None if call is None else call.questions
        if questions is None or len(questions) != rows:
            raise OptionError(
                "this method reads the question: say it around the call, `with attached.asking([...]):`, "
                f"{rows} texts, one for each prompt"
            )
        norm = next(module for name, module in base.named_modules() if name.endswith("post_layernorm"))
        method = next(stage.method for stage in self._stages if Need.QUESTION in stage.method.needs)
        queries = [method.query(question) for question in questions]
        sides: Callable[[list[int]], ClipSides] = self._clip.sides(prompt, queries, norm)
        return sides

    def __repr__(self) -> str:
        given = f"{self.budget.share:g} of the" if isinstance(self.budget, Share) else f"{amount(self.budget)}"
        names = (stage.method.title or type(stage.method).__name__ for stage in self._stages)
        before, after = (sum(getattr(outcome, side) for outcome in self.outcomes) for side in ("before", "after"))
        tokens = "tokens per tile" if self._per_tile else "tokens"
        last = f"last call {before} -> {after} ({after / before:.1%} kept)" if before else "no call yet"
        return f"<{' + '.join(names)} on {self._name}, {given} {tokens}, {last if self.active else 'detached'}>"


def keeps_positions(model: Any) -> bool:
    """Whether positions have several axes, so that they can only be kept."""
    return hasattr(getattr(model, "model", model), "rope_deltas")


def check_stages(stages: list[BudgetedMethod], model: Any) -> None:
    """Raises OptionError for methods that do not act one after the other on this model."""
    names = [type(stage.method).__name__ for stage in stages]
    if sum(bool(stage.method.needs & (READ | {Need.PROJECTOR})) for stage in stages) > 1:
        raise OptionError(f"{' and '.join(names)} both read the vision tower, once each. Take one that reads none")
    readable = kind_of(model.config) in READABLE
    for name, stage in zip(names[1:], stages[1:], strict=True):
        if stages[0].method.acts_inside and stage.method.needs and not readable:
            raise OptionError(
                f"{name} behind {names[0]}: what it reads of a smaller image is known on LLaVA and Qwen-VL, not on "
                f"{type(model).__name__}. Take one that reads tokens only (divprune, uniform_grid)"
            )
        if stages[0].method.place is Place.TOWER and (
            Need.EARLIER in stage.method.needs
            or (Need.ATTENTION in stage.method.needs and not stage.method.blocks_ahead)
        ):
            raise OptionError(
                f"{name} behind {names[0]}: the block whose attention {name} reads merges patches after it, so that it "
                "is of more tokens than are left. Take one that reads tokens only (divprune, uniform_grid)"
            )
    closes = stages[-1].method.place is Place.DECODER and stages[-1].method.positions == "renumber"
    if closes and stages[-2].method.positions != "renumber" and not keeps_positions(model):
        raise OptionError(f"positions=renumber of {names[-1]} behind {names[-2]}, which keeps them. Give both the same")
