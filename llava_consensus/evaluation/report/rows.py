"""Result folders -> rows, one for each run. Pure functions of files: no torch, no model; reports are made of these.

    row = read_row(Path("results/gqa-random-64-3f"))   # one run
    rows = read_rows(Path("results"))                    # all runs of a folder, with scores that judges gave
    for group in by_setting(rows): ...                   # runs that differ in method, budget and benchmark only

Runs that differ in anything else (model, data, limit, versions, ...) are never compared with each other. A finished
run says itself what tables call its method and benchmark (`titles`, `scale`, `column` in metrics.json).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.evaluation.files import (
    ANSWERS,
    CONFIG,
    METRICS,
    SCORES,
    Record,
    read_bytes,
    read_json,
    read_lines,
)
from llava_consensus.evaluation.report.stats import RESAMPLES, Bounds, Comparison, Sample, bounds, pooled, sample
from llava_consensus.methods import METHODS, RENAMED

CHOICE = ("method", "options", "changed", "tokens", "merged")  # keys of a configuration in which compared runs differ
OF_BENCHMARK = ("benchmark", "questions", "conversation", "max_new_tokens")
OF_SECTION = ("model", "data", "limit", "device", "versions")  # shown in the heading of a section
# keys that only some runs have, as `sample`
LATER = ("match", "judge", "frames", "videos", "choices", "benchmark_version", "method_version")
AGAIN = "Remove it; the same `llava-consensus eval` makes it again"
AWAY = "Move its folder away"
OF_VIDEO = ("av",)  # packages that only runs on videos name
JUDGED = "judge"  # folder in that of results
FULL = "full"  # the method that reduces nothing
ALL = "all tokens"  # its name in tables


class Variant(NamedTuple):
    label: str
    method: str
    options: Mapping[str, Any] = {}


LINEUP = (
    Variant("ConsensusDrop", "consensusdrop"),
    Variant("vision-only (alpha 1)", "consensusdrop", {"alpha": 1.0}),
    Variant("cross-only (alpha 0)", "consensusdrop", {"alpha": 0.0}),
    Variant("recovery (vision student, rate 0.1)", "consensusdrop", {"fuser": "recovery"}),
    Variant("random", "random"),
)
RANDOM = LINEUP[-1].label


class Facts(NamedTuple):
    title: str
    scale: float = 1.0  # its score divided by this is a percentage
    column: str | None = None  # of the paper's tables


def policy(config: Mapping[str, Any]) -> str | None:
    found: str | None = config["options"].get("positions")
    return found


def one_word(method: str, changed: Mapping[str, Any]) -> str:
    """A method with its changed options, as the command line takes it; without positions and seed."""
    options = [f"{key}={changed[key]}" for key in sorted(changed) if key not in ("positions", "seed")]
    return ":".join(filter(None, (method, ",".join(options))))


@dataclass(frozen=True)
class Row:
    """One run as read from its folder; `metrics` is None while it is incomplete, `answered` counts its answers."""

    config: Mapping[str, Any]
    metrics: Mapping[str, Any] | None
    answered: int
    folder: Path
    seeds: tuple["Row", ...] = ()  # the runs of a method that draws, which this one represents; none for a single run

    @property
    def benchmark(self) -> str:
        return str(self.config["benchmark"])

    @property
    def facts(self) -> Facts:
        if self.metrics and "titles" in self.metrics:
            return Facts(self.metrics["titles"]["benchmark"], self.metrics["scale"], self.metrics["column"])
        if self.benchmark not in BENCHMARKS:
            return Facts(self.benchmark)
        known = BENCHMARKS[self.benchmark]
        return Facts(known.title, known.scale, known.column)

    @property
    def tokens(self) -> float:
        """The budget it was given, a fraction if it is a share; 0 if that is every token there is."""
        return self.config["tokens"] or 0

    @property
    def full(self) -> bool:
        """True if the language model receives every visual token."""
        if self.config["method"] == FULL or self.metrics is None:
            return bool(self.config["method"] == FULL)
        return bool(self.metrics["tokens"]["before"] == self.metrics["tokens"]["after"])

    @property
    def score(self) -> float | None:
        """The headline number, in percent where the benchmark's scale is 1."""
        if self.seeds and self.complete:
            return fmean(row.score or 0.0 for row in self.seeds)
        if self.metrics is None or self.metrics["report"].get("rounded") is None or self.sample is None:
            return None if self.metrics is None else self.metrics["score"]
        return self.sample.value  # what the scorer rounds is rounded once, when it is printed

    @property
    def spread(self) -> float | None:
        return stdev(row.score or 0.0 for row in self.seeds) if self.seeds and self.complete else None

    @property
    def scale(self) -> float:
        """The score divided by this is a percentage: if fewer tasks of a sum were asked, of those only."""
        return self.facts.scale if self.sample is None or self.facts.scale == 1 else self.sample.most / 100

    @property
    def images(self) -> int | None:
        """Number of images; None if the rows do not make up the score."""
        return None if self.sample is None else len(self.sample.sums)

    @property
    def chance(self) -> float:
        """Chance level of its questions, in the score's unit; 0 if answers are free, or it is unknown."""
        known = BENCHMARKS[self.benchmark].guess if self.benchmark in BENCHMARKS else 0.0
        return float((self.metrics or {}).get("chance", known))

    @property
    def complete(self) -> bool:
        """True if every question of the run was asked, answered and scored: only such a run enters an average."""
        if self.seeds:
            return all(row.complete for row in self.seeds)
        return self.metrics is not None and self.metrics["score"] is not None and self.unanswered == 0

    @property
    def part(self) -> str:
        if self.config.get("sample"):
            return f"{self.config['sample']} questions drawn at random"
        return f"the first {self.config['limit']} questions" if self.config["limit"] else ""

    @property
    def limited(self) -> bool:
        """True if questions of its benchmark were left out, as far as the run records it."""
        asked = self.config["limit"] or self.config.get("sample")
        return asked is not None and not (self.metrics is not None and self.metrics["questions"] < asked)

    @property
    def unanswered(self) -> int:
        return 0 if self.metrics is None else self.metrics["questions"] - self.metrics["answered"]

    @property
    def label(self) -> str:
        changed = self.config["changed"].get("positions")
        return self.variant + (f", positions={changed}" if changed else "")

    @property
    def variant(self) -> str:
        """Name in tables without the position policy: from the line-up, or the method's title and changed options."""
        method = self.config["method"]
        changed = {key: value for key, value in self.config["changed"].items() if key not in ("positions", "seed")}
        suffix = "" if self.config["merged"] is None else f", merged={self.config['merged']}"
        match = self.config.get("match") or "kept"
        suffix += "" if match == "kept" else f", match={match}"
        for variant in LINEUP:
            if (variant.method, variant.options) == (method, changed):
                return variant.label + suffix
        titles = (self.metrics or {}).get("titles") or {}
        title = titles.get("method") or (METHODS.title(method) if method in METHODS else method)
        return ", ".join([title, *(f"{key}={changed[key]}" for key in sorted(changed))]) + suffix

    @cached_property
    def report(self) -> Mapping[str, Any]:
        """The scorer's report with each scored answer; nothing while it is incomplete."""
        if self.metrics is None:
            return {}
        report, scores = self.metrics["report"], self.folder / SCORES
        if "extracted" in report or not scores.exists():  # a judge's scores are in the report already
            return dict(report)
        return {**report, "extracted": read_lines(scores, ("index",), AGAIN)}

    @cached_property
    def sample(self) -> Sample | None:
        """Per-image sums of the score; None while it is incomplete, or where its scorer gives none."""
        if self.seeds:
            samples = [row.sample for row in self.seeds]
            return pooled([one for one in samples if one is not None]) if all(samples) else None
        return sample(self.report, self.metrics["score"]) if self.metrics and self.complete else None

    @cached_property
    def bounds(self) -> Bounds | None:
        return None if self.sample is None else bounds(self.sample, self.benchmark)


def compare(first: Row, second: Row, count: int = RESAMPLES) -> Comparison | None:
    """Difference of two runs' scores, paired by question; None unless both asked the same and have samples."""
    one, other = first.sample, second.sample
    if one is None or other is None or not np.array_equal(one.questions, other.questions):
        return None
    return Comparison(one, other, first.benchmark, count)


def flipped(row: Row, full: Row) -> float | None:
    """Percent of answers unlike those with all tokens, mean over seeds; None unless both runs keep them."""
    if row.seeds:
        parts = [flipped(one, full) for one in row.seeds]
        return None if None in parts else fmean(part for part in parts if part is not None)
    answers = [{one["index"]: one.get("extracted") for one in run.report.get("extracted", ())} for run in (row, full)]
    if answers[0].keys() != answers[1].keys() or not all(any(one.values()) for one in answers):
        return None
    return 100 * fmean(answers[0][index] != answers[1][index] for index in answers[0])


def read_row(folder: Path) -> Row:
    """The run in one folder; DataError unless it is one."""
    if not (folder / CONFIG).is_file():
        raise DataError(f"{folder}: no {CONFIG} in it, so it is not the folder of a run")
    metrics = read_json(folder / METRICS, AWAY, dict) if (folder / METRICS).exists() else None
    config, answers = read_json(folder / CONFIG, AWAY, dict), folder / ANSWERS
    if config.get("method") in RENAMED:
        old, config["method"] = config["method"], RENAMED[config["method"]]
        if metrics and metrics.get("titles", {}).get("method") == old:
            metrics["titles"]["method"] = config["method"]
    absent = [key for key in CHOICE + OF_BENCHMARK + OF_SECTION if key not in config]
    if absent:
        raise DataError(f"{folder / CONFIG}: no {', '.join(absent)} in it. Move the folder away")
    answered = read_bytes(answers).count(b"\n") if answers.exists() else 0
    return Row(config, metrics, answered, folder)


def read_rows(out: Path) -> list[Row]:
    """Every run below a folder of results that has an answer, with a judge's score where it needs one and has it."""
    grades, rows = _read_judged(out), [read_row(path.parent) for path in sorted(out.glob(f"*/{CONFIG}"))]
    return [judged for row in rows if row.answered or row.metrics for judged in _with_grades(row, grades)]


def with_grades(rows: Mapping[Any, Row], out: Path) -> dict[Any, Row]:
    """Runs with the score of a judge where they need one and have it in a folder of results; of several the first."""
    grades = _read_judged(out)
    return {place: _with_grades(row, grades)[0] for place, row in rows.items()}


def _read_judged(out: Path) -> dict[str, list[tuple[Record, Record]]]:
    """(config, metrics) of every judged run, by the sha256 of the file of answers that it graded."""
    runs: dict[str, list[tuple[Record, Record]]] = {}
    for path in sorted((out / JUDGED).glob(f"*/{METRICS}")):
        away = f"{path.parent} is not the folder of a judged run: move it away"
        config, metrics = (read_json(path.parent / name, away, dict) for name in (CONFIG, METRICS))
        if "answers" not in config:
            raise DataError(f"{path.parent / CONFIG}: no answers in it. {away}")
        scores = path.parent / SCORES
        if "extracted" not in metrics and scores.exists():
            metrics["extracted"] = read_lines(scores, ("index",), away)
        runs.setdefault(config["answers"], []).append((config, metrics))
    return runs


def _with_grades(row: Row, grades: Mapping[str, Sequence[tuple[Record, Record]]]) -> list[Row]:
    """A run as it is, or if it needs a judge and has some, with the score of each; incomplete grades do not count."""
    if not grades or row.metrics is None or row.score is not None:
        return [row]
    found = []
    for config, metrics in grades.get(hashlib.sha256((row.folder / ANSWERS).read_bytes()).hexdigest(), ()):
        if metrics.get("complete") and metrics.get("score") is not None:
            told = {key: metrics[key] for key in ("extracted", "rounded", "counted") if key in metrics}
            graded: Record = {"score": metrics["score"], "metric": metrics["metric"], "report": {**row.report, **told}}
            own: Record = {**row.config, "judge": config["judge"]}
            found.append(replace(row, config=own, metrics={**row.metrics, **graded}))
    return found or [row]


def version(row: Row, ignored: str = "") -> str:
    """Fingerprint of the questions: equal for runs that can be paired."""
    keys = [key for key in OF_BENCHMARK + LATER if key not in ("match", "method_version", ignored)]
    return json.dumps({key: row.config.get(key) for key in keys}, sort_keys=True)


def _setting(row: Row) -> str:
    config = {key: value for key, value in row.config.items() if key not in CHOICE + OF_BENCHMARK + LATER}
    versions = {key: value for key, value in config["versions"].items() if key not in OF_VIDEO}
    return json.dumps(config | {"versions": versions}, sort_keys=True)


def by_setting(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows in groups that differ in method, budget and benchmark only. Within a group the runs of a benchmark asked the
    same questions: other versions of its questions follow in groups of their own, the version with most runs first.
    Runs that no judge has graded join those of the judge that graded most.
    """
    keyed = [(row, _setting(row), version(row, "judge"), row.config.get("judge")) for row in rows]
    judges: dict[tuple[str, str], Counter[str]] = {}
    for _, setting, asked, judge in keyed:
        if judge:
            judges.setdefault((setting, asked), Counter())[str(judge)] += 1
    versions: dict[tuple[str, str], dict[tuple[str, str], list[Row]]] = {}
    for row, setting, asked, judge in keyed:
        usual = judges.get((setting, asked))
        key = asked, str(judge) if judge or not usual else usual.most_common(1)[0][0]
        versions.setdefault((setting, row.benchmark), {}).setdefault(key, []).append(row)
    groups: dict[tuple[str, int], list[Row]] = {}
    for (setting, _), found in versions.items():
        for place, own in enumerate(sorted(found.values(), key=len, reverse=True)):
            groups.setdefault((setting, place), []).extend(own)
    return list(groups.values())


@dataclass(frozen=True)
class Line:
    """A line of a table: a method with a budget, and its run of each benchmark."""

    tokens: float  # 0 if every token there is was meant and no finished run has their number
    label: str
    runs: Mapping[str, Row]  # by the benchmark's name

    @property
    def policy(self) -> str | None:
        return next((policy(row.config) for row in self.runs.values()), None)


def full_line(rows: Sequence[Row]) -> Line | None:
    """The full model's runs; where there are two of a benchmark, a complete one."""
    full = sorted((row for row in rows if row.full), key=lambda row: row.complete)
    if not full:
        return None
    # a run on videos counts more tokens, one on text none: the number that most runs have is taken
    before = Counter(round(row.metrics["tokens"]["before"]) for row in full if row.metrics)
    tokens = before.most_common(1)[0][0] if before else max(row.tokens for row in full)
    return Line(tokens, ALL, {row.benchmark: row for row in full})


def reduced_lines(rows: Sequence[Row]) -> list[Line]:
    """Reduced runs, most tokens first, then by position policy, in the line-up's order, others by name, random last.
    Runs that differ only in `seed` are one; answers of several versions of a method are lines of their own.
    """
    made: dict[str, set[int | None]] = {}  # versions of each method among the runs
    for row in rows:
        made.setdefault(row.config["method"], set()).add(row.config.get("method_version"))
    order = {variant.label: place for place, variant in enumerate(LINEUP)} | {RANDOM: len(LINEUP) + 1}

    def rank(row: Row) -> tuple[Any, ...]:
        return -row.tokens, policy(row.config) == "keep", order.get(row.variant, len(order)), row.variant, row.label

    lines: dict[tuple[float, str], dict[str, list[Row]]] = {}
    for row in sorted((row for row in rows if not row.full), key=rank):
        mixed = len(made[row.config["method"]]) > 1  # one line for each version, which says so
        label = f"{row.label} (version {row.config.get('method_version') or 'unknown'})" if mixed else row.label
        lines.setdefault((row.tokens, label), {}).setdefault(row.benchmark, []).append(row)
    return [
        Line(tokens, label, {name: over_seeds(own) for name, own in runs.items()})
        for (tokens, label), runs in lines.items()
    ]


def over_seeds(rows: Sequence[Row]) -> Row:
    by_seed = {row.config["changed"].get("seed"): row for row in rows}
    if len(by_seed) == 1:
        return rows[-1]
    return replace(next(iter(by_seed.values())), seeds=tuple(by_seed.values()))
