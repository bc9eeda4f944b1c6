"""What docs/results.md and docs/positions.md say of the photograph model, computed from its kept runs.

The templates in tools/templates call the methods of `Photo`; a number, a sign, a name beside it and a verdict stand in
no template. What was not run says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from llava_consensus.cli.arguments import one_word_method
from llava_consensus.cli.report import known
from llava_consensus.evaluation.report.rows import FULL, Row, compare, over_seeds, read_rows
from llava_consensus.evaluation.report.section import half, signed
from llava_consensus.evaluation.report.stats import SIGNIFICANT, MeanDifference, holm, mean_difference

NOT_RUN = "not run"
SEEDS = 5
BENCHMARKS = ("gqa", "pope", "vqav2", "mmbench", "seed", "refcoco")  # of tables; it does not read, so no TextVQA
WAYS = ("renumber", "keep")
ROWS = {  # of the table, by the method of one word
    "consensusdrop": "ConsensusDrop",
    "consensusdrop:alpha=1.0": "vision side alone (alpha 1)",
    "consensusdrop:alpha=0.0": "question side alone (alpha 0)",
    "visionzip": "VisionZip",
    "vispruner": "VisPruner",
    "divprune": "DivPrune",
    "scope": "SCOPE",
    "anchorprune": "AnchorPrune",
    "mmtok": "MMTok",
    "hydart": "HyDART",
    "eadp": "EADP",
    "hiprune": "HiPrune",
    "flashvid": "FlashVID (the picture as one frame)",
    "vidcom2": "VidCom2",
    "vscan": "VScan's scans",
    "holov": "HoloV",
    "idpruner": "IDPruner, untrained",
    "otprune": "OTPrune",
    "restore": "RESTORE's merging",
    "prumerge_plus": "PruMerge+",
    "cdpruner:relevance=cosine": "CDPruner, plain cosines",
    "mfpruner:relevance=cosine": "MFPruner, plain cosines",
    "evs": "EVS (the picture as one frame)",
    "fastv": "FastV",
    "sparsevlm": "SparseVLM",
    "pyramiddrop": "PyramidDrop",
    "dart": "DART",
    "ivcprune": "IVC-Prune",
    "resize": "a smaller picture (resize)",
    "uniform_grid": "uniform grid",
    "random": "random",
}
FRONT = (  # of these, in README.md
    *("consensusdrop", "visionzip", "vispruner", "scope", "anchorprune", "mmtok", "fastv"),
    *("resize", "uniform_grid", "random"),
)
NAMES = {**ROWS, FULL: "all tokens"}
Key = tuple[str, str, str | None, float]  # benchmark, method and options of one word, positions, tokens


@dataclass(frozen=True)
class Named:
    """A comparison that was named beforehand, as far as it was run."""

    first: str
    second: str
    benchmarks: Sequence[str]
    runs: Sequence[tuple[Row, Row]]  # one pair for each benchmark; fewer than these if one was not run
    found: MeanDifference | None
    corrected: float = 1.0

    @property
    def verdict(self) -> str:
        """What its p says."""
        if self.found is None:
            return NOT_RUN
        return "shown" if self.corrected < SIGNIFICANT else "not shown"

    @property
    def difference(self) -> str:
        """The difference with its interval, its p after the correction, and the verdict."""
        if self.found is None:
            return NOT_RUN
        found = signed(self.found.difference, self.found.bounds)
        return f"{found}, {self.verdict}, corrected p {p_value(self.corrected)}"


class Photo:
    """The runs of a folder on one model, and the comparisons that were named for them.

    Args:
        runs: folder of results.
        named: file of the comparisons.
    """

    def __init__(self, runs: Path, named: Path) -> None:
        self.plan: dict[str, Any] = json.loads(named.read_text("utf-8"))
        self.tokens: int = self.plan["tokens"]
        self.sample: int = self.plan["sample"]
        found = (row for row in read_rows(runs, known()) if row.complete)
        self.rows = [row for row in found if row.config["sample"] == self.sample]  # the study asks fewer
        self.seeds = SEEDS

    @cached_property
    def runs(self) -> Mapping[Key, Row]:
        """Every run; those of a method that draws are one where all seeds are there."""
        found: dict[Key, list[Row]] = {}
        for row in self.rows:
            changed = {key: value for key, value in row.config["changed"].items() if key not in ("positions", "seed")}
            word = word_of(row.config["method"], changed)
            place = row.benchmark, word, row.config["options"].get("positions"), row.tokens
            found.setdefault(place, []).append(row)
        single = {key: own for key, own in found.items() if key[1] != "random" or len(own) == SEEDS}
        return {key: over_seeds(own) for key, own in single.items()}

    def run(self, benchmark: str, method: str, tokens: float | None = None) -> Row | None:
        """The run of a method of one word, whose options may name its positions."""
        if method == FULL:
            return self.runs.get((benchmark, FULL, None, 0))
        made = one_word_method(method)
        name, _, rest = method.partition(":")
        changed = dict(word.split("=") for word in rest.split(",") if word and not word.startswith("positions="))
        word = word_of(name, {key: getattr(made, key) for key in changed})
        return self.runs.get((benchmark, word, getattr(made, "positions", None), tokens or self.tokens))

    def between(
        self, first: str, second: str, benchmarks: Iterable[str]
    ) -> tuple[list[tuple[Row, Row]], MeanDifference | None]:
        """The runs of two methods that can be compared, one pair for each of the benchmarks, and their mean
        difference.
        """
        pairs = [(self.run(name, first), self.run(name, second)) for name in benchmarks]
        runs = [(one, other) for one, other in pairs if one is not None and other is not None]
        tested = [(pair, test) for pair in runs if (test := compare(*pair)) is not None]
        found = [pair for pair, _ in tested]
        mean = mean_difference([test for _, test in tested], [one.scale for one, _ in found]) if tested else None
        return found, mean

    @cached_property
    def named(self) -> list[Named]:
        """The comparisons that were named, Holm's correction over all of them, run or not."""
        found = []
        for one in self.plan["comparisons"]:
            runs, mean = self.between(one["first"], one["second"], one["benchmarks"])
            whole = len(runs) == len(one["benchmarks"])
            found.append(Named(one["first"], one["second"], one["benchmarks"], runs, mean if whole else None))
        values = holm([1.0 if one.found is None or one.found.p is None else one.found.p for one in found])
        return [replace(one, corrected=p) for one, p in zip(found, values, strict=True)]

    def comparison(self, first: str, second: str, *benchmarks: str) -> Named:
        """A named comparison, by default over the benchmarks of the first one."""
        wanted = (first, second, list(benchmarks or self.plan["comparisons"][0]["benchmarks"]))
        return next(one for one in self.named if (one.first, one.second, one.benchmarks) == wanted)

    def compared(self, first: str, second: str, *benchmarks: str) -> str:
        """A named comparison in words."""
        return self.comparison(first, second, *benchmarks).difference

    @cached_property
    def pairs(self) -> list[tuple[str, float, str, MeanDifference, float]]:
        """Every pair of runs that differ in positions alone, kept less renumbered: benchmark, tokens, method, the
        difference, and its p after Holm's correction over all of them.
        """
        budgets = sorted({key[3] for key in self.runs if key[1] != FULL}, reverse=True)
        found = []
        for name, tokens, method in product(BENCHMARKS, budgets, ROWS):
            renumbered, kept = self.ways(name, method, tokens)
            if renumbered and kept and (test := compare(kept, renumbered)):
                found.append((name, tokens, method, mean_difference([test], [kept.scale])))
        corrected = holm([1.0 if one.p is None else one.p for *_, one in found])
        return [(*one, p) for one, p in zip(found, corrected, strict=True)]

    @property
    def policies(self) -> str:
        """What `pairs` say of each benchmark and budget: methods, how many scored higher with kept positions, of how
        many the difference is shown, and the differences.
        """
        places: dict[tuple[str, float], list[tuple[float, float]]] = {}
        for name, tokens, _, found, p in self.pairs:
            places.setdefault((name, tokens), []).append((found.difference, p))
        lines = [
            "| on | tokens | methods | higher | lower | shown | median | least to most |",
            "|---" + "|--:" * 7 + "|",
        ]
        for (name, tokens), pairs in places.items():
            values = [value for value, _ in pairs]
            signs = [sum(value > 0 for value in values), sum(value < 0 for value in values)]
            shown = sum(p < SIGNIFICANT for _, p in pairs)
            spread = f"{median(values):+.1f}", f"{min(values):+.1f} to {max(values):+.1f}"
            cells = [self.title(name), f"{tokens:g}", len(pairs), *signs, shown, *spread]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(lines)

    def named_table(self, other: Photo) -> str:
        """The named comparisons with n, difference, exact p, p after the correction, and the verdict; then the
        difference on another seed of the model, over those of the benchmarks that were run there.
        """
        columns = f"difference, points | p | p (Holm, {len(self.named)}) | verdict | second seed, points"
        lines = [f"| compared | on (pictures) | {columns} |", "|---|---|--:|--:|--:|---|--:|"]
        for one in self.named:
            n = {first.benchmark: f" ({first.pictures})" for first, _ in one.runs}
            titles = ", ".join(self.title(name) + n.get(name, "") for name in one.benchmarks)
            cells = ["-"] * 3
            if one.found is not None:
                p = [p_value(one.found.p), p_value(one.corrected)]
                cells = [signed(one.found.difference, one.found.bounds), *p]
            words = f"{self.words(one.first)} less {self.words(one.second)}"
            _, again = other.between(one.first, one.second, one.benchmarks)
            last = signed(again.difference, again.bounds) if again else "-"
            lines.append(f"| {' | '.join((words, titles, *cells, one.verdict, last))} |")
        return "\n".join(lines)

    def front_table(self) -> str:
        """Scores at the budget with intervals, positions renumbered and kept, of some methods: README's."""
        names = BENCHMARKS[:3]
        titles = [f"{self.title(name)} ({self.asked(name)})" for name in names]
        lines = ["| | " + " | ".join(titles) + " |", "|---" + "|--:" * len(names) + "|"]
        lines.append("| all tokens | " + " | ".join(score(self.run(name, FULL)) for name in names) + " |")
        for method in FRONT:
            lines.append(f"| {ROWS[method]} | {' | '.join(self.both(name, method) for name in names)} |")
        return "\n".join(lines)

    def ways(self, benchmark: str, method: str, tokens: float | None = None) -> list[Row | None]:
        """The runs with positions renumbered and kept; all tokens have one."""
        if method == FULL:
            return [self.run(benchmark, method)]
        words = (f"{method}{',' if ':' in method else ':'}positions={way}" for way in WAYS)
        return [self.run(benchmark, word, tokens) for word in words]

    def both(self, benchmark: str, method: str) -> str:
        """Scores with positions renumbered and kept; one alone where the other was not run, nothing without a run."""
        first, second = (score(run) if run else "" for run in self.ways(benchmark, method))
        return f"{first} → {second}".strip() if first or second else ""

    @property
    def others(self) -> list[float]:
        """The other budgets that peers were run at."""
        return sorted({key[3] for key in self.runs if key[1] == "visionzip"} - {self.tokens}, reverse=True)

    def table(self, *budgets: float) -> str:
        """Scores at some budgets, positions renumbered and kept, of what was run at several places of the table."""
        places = [(name, one) for name in BENCHMARKS for one in budgets if self.run(name, "visionzip", one)]
        lines = ["| | " + " | ".join(f"{self.title(name)}, {one:g} tokens" for name, one in places) + " |"]
        lines.append("|---" + "|--:" * len(places) + "|")
        bounds = []
        for method, label in {FULL: NAMES[FULL], **ROWS}.items():
            found = [self.ways(name, method, one) for name, one in places]
            bounds += [run.bounds for pair in found for run in pair if run and run.bounds]
            cells = [" → ".join(plain_score(run) for run in pair).strip() if any(pair) else "" for pair in found]
            lines += [f"| {label} | {' | '.join(cells)} |"] if sum(map(bool, cells)) > 1 else []
        halves = sorted((high - low) / 2 for low, high in bounds)
        return (
            "\n".join(lines)
            + f"\n\nHalf of an interval is {halves[0]:.1f} to {halves[-1]:.1f} points, its median {median(halves):.1f} "
            "([csv](results.csv))."
        )

    def order(self, benchmark: str) -> str:
        """The highest and the lowest score of all methods that ran at the budget, as published; no settings of ours."""
        here = dict.fromkeys(key[1] for key in self.runs if (key[0], key[3]) == (benchmark, self.tokens))
        runs = {word: self.run(benchmark, word) for word in here if not word.startswith("consensusdrop:")}
        found = {word: run for word, run in runs.items() if run is not None}
        ranked = sorted(found, key=lambda word: -(found[word].score or 0.0))
        ends = ", ".join(f"{self.words(word)} {found[word].score:.1f}" for word in ranked[:3])
        last = ", ".join(f"{self.words(word)} {found[word].score:.1f}" for word in ranked[-3:])
        return f"of {len(ranked)} methods {ends} are the highest and {last} the lowest" if len(ranked) > 5 else NOT_RUN

    def title(self, benchmark: str) -> str:
        """A benchmark's name as papers write it."""
        return known().benchmark(benchmark).title

    def words(self, method: str) -> str:
        """A method of one word, in words."""
        plain, kept = method.replace(",positions=keep", "").replace(":positions=keep", ""), "positions=keep" in method
        return NAMES.get(plain, plain) + (", positions kept" if kept else "")

    def asked(self, benchmark: str) -> str:
        """Numbers of questions and pictures of a benchmark."""
        row = next(row for row in self.rows if row.benchmark == benchmark and row.pictures)
        return f"{(row.metrics or {}).get('questions')} questions, {row.pictures} pictures"

    def score(self, benchmark: str, method: str) -> str:
        """A score with half of its interval."""
        return score(self.run(benchmark, method))

    @property
    def pictures(self) -> str:
        """The least and the most pictures of a benchmark's sample."""
        found = sorted({row.pictures for row in self.rows if row.benchmark in BENCHMARKS and row.pictures})
        return f"{found[0]} to {found[-1]}"

    @property
    def resolution(self) -> str:
        """Half of the interval of a named difference of several benchmarks, the median of those that were run."""
        found = [one.found.bounds for one in self.named if one.found and one.found.bounds and len(one.benchmarks) > 1]
        return f"{median((high - low) / 2 for low, high in found):.0f}" if found else NOT_RUN

    @property
    def plus(self) -> str:
        """What the comparisons of positions say of the name `consensusdrop+`."""
        own = [(found.difference, p) for *_, method, found, p in self.pairs if method == "consensusdrop"]
        gains = sum(p < SIGNIFICANT and difference > 0 for difference, p in own)
        said = (
            f"its gain is shown at {gains} of {len(own)} benchmarks and budgets" if gains else "no gain of it is shown"
        )
        return f"is `positions=keep` under another name: {said}, so take it as an option to try"

    @property
    def sentence(self) -> str:
        """What the README says."""
        scores = "; ".join(
            f"{self.title(name)} {self.both(name, 'consensusdrop')}, all tokens {self.score(name, FULL)}"
            for name in ("gqa", "pope")
        )
        grid = self.comparison("consensusdrop", "uniform_grid")
        gain = f"{grid.found.difference:+.1f} points, " if grid.found else ""
        verdict = "no shown difference" if grid.verdict == "not shown" else grid.verdict
        head = f"ConsensusDrop with {self.tokens} tokens, positions renumbered → kept"
        return f"{head}: {scores}. Against a uniform grid: {gain}{verdict}."

    @property
    def versions(self) -> str:
        """Versions and arithmetic of the runs; where runs differ, all of them, which a reader must know."""
        seen: dict[str, set[str]] = {}
        for row in self.rows:
            own = {name: row.config["versions"].get(name) for name in ("torch", "transformers", "reduction", "host")}
            for name, value in {
                **own,
                "arithmetic": row.config["dtype"],
                "weights": row.config["weights"][:12],
            }.items():
                seen.setdefault(name, set()).add(str(value))
        mixed = [name for name, values in seen.items() if len(values) > 1]
        words = ", ".join(f"{name} {' and '.join(sorted(values))}" for name, values in seen.items())
        return f"{len(self.rows)} runs, {words}" + (f" (mixed: {', '.join(mixed)})" if mixed else "")


def word_of(method: str, options: Mapping[str, Any]) -> str:
    """A method with options as one word."""
    rest = ",".join(f"{key}={options[key]}" for key in sorted(options))
    return f"{method}:{rest}" if rest else method


def score(row: Row | None) -> str:
    """A score with half of its interval, of several seeds with their spread."""
    if row is None or row.score is None:
        return NOT_RUN
    return f"{row.score:.1f}{half(row.bounds)}" + ("" if row.spread is None else f" (sd {row.spread:.1f})")


def plain_score(row: Row | None) -> str:
    """A score alone; nothing without a run."""
    return "" if row is None or row.score is None else f"{row.score:.1f}"


def p_value(p: float | None) -> str:
    """A p in two digits."""
    return "-" if p is None else f"{p:.2g}" if p >= 1e-4 else f"{p:.0e}"
