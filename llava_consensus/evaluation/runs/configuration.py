"""Configuration of a run: checked before any weight loads, and recorded with all that can change an answer.

    plan = prepare(RunConfig(make_benchmark("gqa"), make("consensusdrop"), Budget(64)))

`RunPlan.description` becomes config.json and names the run: options of the method with defaults filled in, contents of
question files and weights, versions. `Execution` and the folder of results are not in it.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.checksums import checksum_of_weights
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.models import CLIPS, Loading, Prompt
from llava_consensus.evaluation.runs import MODEL
from llava_consensus.evaluation.runs.questions import (
    OWN,
    Asked,
    Plan,
    describe_questions,
    place,
    read_questions,
    versions,
)
from llava_consensus.hosts import known_hosts
from llava_consensus.methods import method_name
from llava_consensus.reduction.budget import Budget, Share, amount
from llava_consensus.reduction.costs import MATCHES
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.options import choose

# Versions of the answers of code that all runs share, as `answer_version` is of one method, host or benchmark. The name
# of a run holds these numbers and no bytes of source, so that an edit which changes no answer restarts nothing.
REDUCTION = 1  # raise it when reduction/ or hosts/ change the answers of every method


@dataclass(frozen=True)
class RunConfig(Asked):
    """Configuration of a run: everything that may change an answer; `Execution` holds the rest.

    Args:
        benchmark: benchmark to run, its options chosen.
        method: how visual tokens are reduced.
        budget: of one image; None, and of no meaning, for a method that reduces nothing.
        match: by which count the budget is meant, `kept` | `entering` | `average` | `flops` (`reduction.costs.match`).
        model: folder of a checkpoint, or its name on the hub.
        data: folder that holds `eval/<benchmark>/...` in LLaVA's layout.
        limit: the first N questions, for a smoke test: biased, as they share images or are of one kind.
        sample: N questions drawn at random from all: the same ones for every run, and those of a smaller
            sample among them. Questions that belong together (`Benchmark.together`) come whole,
            so that there may be a few more.
        loading: how the model is loaded.
        conversation: template of the prompts; None is the model's own.
        max_new_tokens: bound on an answer's length; None is the benchmark's own.
        host_options: options of the model's host (`hosts.HostEntry`); the default for each that is left out.
    """

    method: Method
    budget: Budget | Share | None = None
    match: str = "kept"
    model: str = MODEL
    loading: Loading = field(default_factory=Loading)
    conversation: str | None = None
    host_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunPlan(RunConfig, Plan):
    """A plan whose model is loaded here."""

    def shown(self, question: Question) -> int:
        """Number of images the model sees with a question: of a video its frames, unless it is one clip."""
        return len(question.images) * max(1, 0 if self.clips else self.benchmark.frames)

    @property
    def clips(self) -> bool:
        return bool(self.description.get("videos") == CLIPS)

    def prompt(self, question: Question) -> Prompt:
        length = self.max_new_tokens or self.benchmark.max_new_tokens
        return Prompt(question.text, self.conversation, length, sure=True)

    def check_inside(self) -> None:
        """Raises DataError if a question names a file outside the folder of images."""
        root = os.path.join(os.path.realpath(self.folder), "")
        for path in dict.fromkeys(path for question in self.questions for path in self.images(question)):
            with contextlib.suppress(ValueError, OSError):  # a name that no file can have
                if not os.path.join(os.path.realpath(path), "").startswith(root):
                    raise DataError(f"{path}: leads out of {self.folder}. If that is meant, give --allow-outside")

    def reduced_by(self, method: Method, budget: Budget | Share | None, match: str) -> "RunPlan":
        budget, match = _meant(method, budget, match)
        self.loading.check_method(method)
        same = {key: value for key, value in self.description.items() if key != "match"}
        description = same | describe_reduction(method, budget) | ({} if match == "kept" else {"match": match})
        return replace(self, method=method, budget=budget, match=match, description=description)


def prepare(config: RunConfig) -> RunPlan:
    """Checks everything that needs no weights, and completes the configuration.

    Raises:
        ConsensusError: everything the user can mend, see `errors.py`.
    """
    benchmark = config.benchmark
    for name in ("limit", "sample", "max_new_tokens"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} must be at least 1")
    if config.limit and config.sample:
        raise OptionError(f"limit={config.limit} and sample={config.sample}: give one of them, a sample can be quoted")
    choose("match", config.match, MATCHES)
    budget, match = _meant(config.method, config.budget, config.match)
    config.loading.check_method(config.method)
    of_host = models.check(
        config.model,
        config.conversation,
        config.loading,
        videos=bool(benchmark.frames),
        host_options=config.host_options,
    )
    checked = replace(
        config,
        budget=budget,
        match=match,
        model=place(config.model),
        data=Path(config.data).expanduser(),
        loading=models.pinned(config.model, config.loading),
        conversation=of_host.get("conversation", config.conversation),
    )
    if benchmark.frames:
        from llava_consensus.evaluation.media import decoder  # only now: it takes a while

        decoder()  # raises with the package to install
    return RunPlan(**vars(checked), questions=read_questions(checked), description=_describe(checked, of_host))


def _meant(method: Method, budget: Budget | Share | None, match: str) -> tuple[Budget | Share | None, str]:
    """Budget and match as far as they act: a method that reduces nothing has neither."""
    if not method.reduces:
        return None, "kept"
    if budget is None:
        raise OptionError(f"tokens: method {method_name(method)!r} needs a budget, for example tokens=64")
    if isinstance(budget, Share) and match != "kept":
        raise OptionError(
            f"match={match} with tokens={budget.share}: a share of tokens costs a different amount for each image. "
            "Take match=kept, or tokens as a whole number"
        )
    return budget, match


def _describe(config: RunConfig, of_host: Record) -> Record:
    """The whole configuration. Equal texts mean equal answers."""
    usual = asdict(Loading(config.loading.device, config.loading.dtype))
    loading = {name: value for name, value in asdict(config.loading).items() if value != usual[name]}
    checkpoint = models.find(config.model, config.loading.revision)
    packages = versions(*(("av",) if config.benchmark.frames else ()))
    del packages[OWN]  # a release that changes no answer asks nothing again
    host = known_hosts()[models.name_of(config.model, config.loading)].answer_version
    return {
        **describe_questions(config),
        **describe_reduction(config.method, config.budget),
        "model": config.model,
        "weights": checksum_of_weights(checkpoint.folder, checkpoint.files()),
        **of_host,
        "dtype": config.loading.dtype,
        "versions": {**packages, "reduction": REDUCTION, "host": host},
        **({} if config.match == "kept" else {"match": config.match}),
        "device": config.loading.device,
        **({"loading": loading} if loading else {}),
    }


def describe_reduction(method: Method, budget: Budget | Share | None) -> Record:
    """Method, budget and options in config.json; `tokens` is null if nothing is reduced, a fraction for a share."""
    options, changed = {}, {}
    for one in fields(method):
        value = method.recorded.get(one.name, getattr(method, one.name))
        if isinstance(one.default, float) and isinstance(value, int):
            value = float(value)  # a whole number given for a fraction counts as one: 1 is 1.0
        options[one.name] = value if value is None or isinstance(value, bool | int | float | str) else repr(value)
        if options[one.name] != one.default:
            changed[one.name] = options[one.name]
    return {
        "method": method_name(method),
        "method_version": method.answer_version,
        "tokens": None if budget is None else amount(budget),
        "merged": budget.merged if isinstance(budget, Budget) else None,
        "options": options,
        "changed": changed,
    }
