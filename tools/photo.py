"""Tables and numbers of docs/results.md and docs/positions.md, computed from the kept runs of llava-photo.

The templates in tools/templates call the methods of `Photo`; no number stands in a template. What was not run says so.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from llava_consensus.evaluation.report.rows import ALL, FULL, Row, compare, one_word, over_seeds, policy, read_rows
from llava_consensus.evaluation.report.section import Section, can_move, half, signed
from llava_consensus.evaluation.report.stats import (
    SIGNIFICANT,
    Comparison,
    MeanDifference,
    Sample,
    calibration,
    corrected,
    holm,
    mean_difference,
)
from llava_consensus.evaluation.report.table import ABSENT, markdown, p_value
from llava_consensus.methods import METHODS, about

NOT_RUN = "not run"
AFTER = "after the vision tower"  # a place of methods
SEEDS = 5
REST = ("keep", "renumber")  # the policies that `spread` is compared with
BENCHMARKS = ("gqa", "pope", "vqav2", "mmbench", "seed", "refcoco")  # of tables; the model does not read: no TextVQA
OWN = "consensusdrop"
PEERS = (
    *(OWN, f"{OWN}:alpha=1.0", f"{OWN}:alpha=0.0", "anchorprune", "cdpruner:relevance=cosine", "dart", "divprune"),
    *("eadp", "fastv", "hiprune", "holov", "hydart", "idpruner", "ivcprune", "mfpruner:relevance=cosine", "mmtok"),
    *("prumerge_plus", "pyramiddrop", "restore", "scope", "sparsevlm", "vidcom2", "visionzip", "vispruner", "vscan"),
    *("resize", "uniform_grid", "random"),
)
MISFITS = ("evs", "flashvid", "otprune")  # made for video, or with a constant that does not transfer
Key = tuple[str, str, str | None, float]  # benchmark, method and options of one word, positions, tokens


@dataclass(frozen=True)
class Named:
    """A comparison that was named beforehand, as far as it was run."""

    first: str
    second: str
    benchmarks: Sequence[str]
    tokens: float
    runs: Sequence[tuple[Row, Row]]  # one pair for each benchmark; fewer than these if one was not run
    found: MeanDifference | None
    corrected: float = 1.0

    def __str__(self) -> str:
        if self.found is None:
            return NOT_RUN
        return f"{signed(self.found.difference, self.found.bounds)}, corrected p {p_value(self.corrected)}"


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
        found = [row for row in read_rows(runs) if row.complete and row.config["sample"] == self.sample]
        self.rows = [_of_scenes(row) for row in found]  # without the study's, which asks fewer
        self.seeds = SEEDS

    @cached_property
    def runs(self) -> Mapping[Key, Row]:
        """Every run; those of a method that draws are one, if all seeds are there."""
        found: dict[Key, list[Row]] = {}
        for row in (row for row in self.rows if row.config["merged"] is None):
            word = one_word(row.config["method"], row.config["changed"])
            found.setdefault((row.benchmark, word, policy(row.config), row.tokens), []).append(row)
        return {key: over_seeds(own) for key, own in found.items() if key[1] != "random" or len(own) == SEEDS}

    def run(self, benchmark: str, method: str, tokens: float | None = None) -> Row | None:
        """The run of a method of one word; without `positions=` in it the renumbered one."""
        if method == FULL:
            return self.runs.get((benchmark, FULL, None, 0))
        word, way = self._split(method)
        return self.runs.get((benchmark, word, way, tokens or self.tokens))

    @staticmethod
    def _split(method: str) -> tuple[str, str]:
        word, _, way = method.partition("positions=")
        return word.rstrip(":,"), way or "renumber"

    def section(self, methods: Iterable[str], budgets: Iterable[float], benchmarks: Iterable[str]) -> Section:
        """All tokens and some methods at some budgets."""
        wanted, at, on = set(methods), set(budgets), set(benchmarks)
        rows = [
            row
            for row in self.rows
            if row.benchmark in on
            and policy(row.config) in (None, *REST)
            and (row.full or (row.tokens in at and one_word(row.config["method"], row.config["changed"]) in wanted))
        ]
        return Section([row for row in rows if row.config["merged"] is None or row.full])

    def table(self, *budgets: float, misfits: bool = False) -> str:
        """Scores with intervals at some budgets, a ranking for each position policy; benchmarks that were run there."""
        ran = {(key[0], key[3]) for key in self.runs}
        on = [name for name in BENCHMARKS if all((name, one) in ran for one in budgets)]
        return markdown(self.section(MISFITS if misfits else PEERS, budgets, on).scores())

    def means(self) -> str:
        """Mean scores at the other budgets by position policy, over the benchmarks that were run there."""
        on = [name for name in BENCHMARKS if all(self.run(name, "visionzip", tokens) for tokens in self.others)]
        section = self.section(PEERS, self.others, on)
        records = [
            {
                "method": line.label.removesuffix(f", positions={line.policy}"),
                "setting": f"{line.tokens:g}, {line.policy}",
                "mean": f"{mean.value:.1f}{half(mean.bounds)}",
            }
            for line in section.reduced
            if (mean := section.accuracy(line))
        ]
        settings = [f"{tokens:g}, {way}" for tokens in self.others for way in ("renumber", "keep")]
        frame = pd.DataFrame(records).pivot(index="method", columns="setting", values="mean")[settings].fillna(ABSENT)
        titles, whole = ", ".join(section.title(name) for name in on), section.full and section.accuracy(section.full)
        note = f"Mean of {titles}" + (f"; all tokens: {whole.value:.1f}{half(whole.bounds)}" if whole else "")
        return f"{frame.to_markdown(colalign=('left', *['right'] * len(settings)))}\n\n{note}."

    @property
    def calibrated(self) -> str:
        """Every run with its calibration, and the named difference to it, p corrected for all that were named."""
        lines = [
            [
                "method",
                "tokens",
                "right (%)",
                "ECE (%)",
                "AURC (%)",
                "ConsensusDrop - it",
                f"p (Holm, {len(self.named)})",
            ]
        ]
        lines += [["---", *["--:"] * 6]]
        for (_, word, way, tokens), row in self.runs.items():
            sure = calibration(row.report) or {}
            other = f"{word}{',' if ':' in word else ':'}positions={way}"
            named = next((one for one in self.named if (one.second, one.tokens) == (other, tokens)), None)
            cells = [ABSENT, ABSENT]
            if named and named.found:
                cells = [signed(named.found.difference, named.found.bounds), p_value(named.corrected)]
            right = f"{row.score:.1f}{half(row.bounds)}"
            shown = [f"{sure[key]:.1f}" if sure else ABSENT for key in ("ece", "aurc")]
            lines.append([ALL if row.full else row.variant, f"{tokens or ABSENT}", right, *shown, *cells])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    @property
    def others(self) -> list[float]:
        """The other budgets that peers were run at."""
        return sorted({key[3] for key in self.runs if key[1] == "visionzip"} - {self.tokens}, reverse=True)

    def front_points(self) -> dict[str, list[tuple[float, ...]]]:
        """README's plot: tokens, score and interval of some methods on GQA scenes, positions kept. The best peer is the
        method after the tower with the highest score at the budget.
        """
        after = [name for name in PEERS if ":" not in name and about(name).place == AFTER]
        peers = [
            (row.score, name)
            for name in after
            if name not in (OWN, "random", "uniform_grid") and (row := self.kept(name))
        ]
        best = max(peers)[1]
        names = {"ConsensusDrop": OWN, f"best of {len(peers)} peers ({METHODS.title(best)})": best}
        budgets = sorted({*self.others, self.tokens})
        found = {}
        for label, name in {**names, "uniform grid": "uniform_grid", "random (mean of seeds)": "random"}.items():
            rows = [(int(tokens), row) for tokens in budgets if (row := self.kept(name, tokens))]
            points = [(tokens, row.score or 0.0, *(row.bounds or (0.0, 0.0))) for tokens, row in rows]
            found[label] = [(tokens, *(round(one, 6) for one in ends)) for tokens, *ends in points]  # on any processor
        return found

    def kept(self, method: str, tokens: float | None = None) -> Row | None:
        """The run of a method on GQA scenes with positions kept."""
        return self.run("gqa", f"{method}:positions=keep", tokens)

    def front_plot(self) -> bytes:
        """README's plot as PNG. Its metadata hold the points, so that a test can compare them on any matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3.2), dpi=120, layout="constrained")
        axes, points = figure.subplots(), self.front_points()
        for label, line in points.items():
            tokens, scores, low, high = zip(*line, strict=True)
            axes.plot(tokens, scores, marker="o", label=label)
            axes.fill_between(tokens, low, high, alpha=0.15)
        full = self.run("gqa", FULL)
        assert full is not None and full.score is not None
        axes.axhline(full.score, color="black", linestyle="--", label="all 576 tokens")
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            [line[0] for line in points["ConsensusDrop"]], [str(line[0]) for line in points["ConsensusDrop"]]
        )
        axes.minorticks_off()
        axes.set(xlabel="visual tokens per image", ylabel="accuracy (%), GQA scenes")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Description": json.dumps(points), "Software": None})
        return out.getvalue()

    # ---- comparisons

    def between(
        self, first: str, second: str, benchmarks: Iterable[str], tokens: float | None = None
    ) -> tuple[list[tuple[Row, Row]], MeanDifference | None]:
        """The runs of two methods that can be compared, one pair for each benchmark, and their mean difference."""
        pairs = [(self.run(name, first, tokens), self.run(name, second, tokens)) for name in benchmarks]
        runs = [(one, other) for one, other in pairs if one is not None and other is not None]
        tested = [(pair, test) for pair in runs if (test := compare(*pair)) is not None]
        found = [pair for pair, _ in tested]
        mean = mean_difference([test for _, test in tested], [one.scale for one, _ in found]) if tested else None
        return found, mean

    def moving(self, first: str, second: str, everywhere: bool = False) -> str:
        """The difference over benchmarks that can move, with its interval: not named beforehand.

        Args:
            everywhere: over all benchmarks of the tables, not only those of the first named comparison.
        """
        names = BENCHMARKS if everywhere else self.plan["comparisons"][0]["benchmarks"]
        full = {name: self.run(name, FULL) for name in names}
        _, mean = self.between(first, second, [name for name, row in full.items() if row and can_move(row)])
        return NOT_RUN if mean is None else signed(mean.difference, mean.bounds)

    @cached_property
    def named(self) -> list[Named]:
        """The comparisons that were named, Holm's correction over all of them, run or not."""
        found = []
        for one in self.plan["comparisons"]:
            tokens = one.get("tokens", self.tokens)
            runs, mean = self.between(one["first"], one["second"], one["benchmarks"], tokens)
            whole = len(runs) == len(one["benchmarks"])
            found.append(Named(one["first"], one["second"], one["benchmarks"], tokens, runs, mean if whole else None))
        values = holm([1.0 if one.found is None or one.found.p is None else one.found.p for one in found])
        return [replace(one, corrected=p) for one, p in zip(found, values, strict=True)]

    def compared(self, first: str, second: str, *benchmarks: str) -> Named:
        """A named comparison, by default over the benchmarks of the first one."""
        wanted = (first, second, list(benchmarks or self.plan["comparisons"][0]["benchmarks"]))
        return next(one for one in self.named if (one.first, one.second, one.benchmarks) == wanted)

    def named_table(self, other: Photo | None = None) -> str:
        """The named comparisons with n, difference, exact p, and p after the correction; then the difference on
        another seed of the model, over those of the benchmarks that were run there.
        """
        lines = [["compared", "on (images)", "difference, points", "p", f"p (Holm, {len(self.named)})"]]
        lines += [["---", "---", *["--:"] * 3]]
        for line, more in zip(lines, ("second seed, points", "--:"), strict=True):
            line += [more] if other else []
        for one in self.named:
            n = [f"{first.facts.title} ({first.images})" for first, _ in one.runs]
            cells = [NOT_RUN, ABSENT, ABSENT]
            if one.found is not None:
                cells = [signed(one.found.difference, one.found.bounds), p_value(one.found.p), p_value(one.corrected)]
            if other:
                _, again = other.between(one.first, one.second, one.benchmarks)
                cells.append(signed(again.difference, again.bounds) if again else ABSENT)
            at = "" if one.tokens == self.tokens else f", {one.tokens:g} tokens"
            lines.append([f"{self.words(one.first)} - {self.words(one.second)}{at}", ", ".join(n), *cells])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Every pair of runs that differ in positions only: keep - renumber, p after Holm's correction over all."""
        found = []
        for (name, method, way, tokens), row in self.runs.items():
            other = self.runs.get((name, method, "renumber", tokens))
            shown = name in BENCHMARKS and method in (*PEERS, *MISFITS) and way == "keep"
            if shown and other and (test := compare(row, other)):
                mean = mean_difference([test], [row.scale])
                found.append((row.facts.title, tokens, BENCHMARKS.index(name), mean.difference, mean.p))
        frame = pd.DataFrame(found, columns=["on", "tokens", "place", "difference", "p"])
        holm = corrected(dict(enumerate(frame["p"])))
        return frame.assign(corrected=[holm.get(place, 1.0) for place in frame.index])

    @property
    def policies(self) -> str:
        """`pairs` by benchmark and budget: methods that scored higher, significant ones, and the differences."""
        lines = ["| on | tokens | higher | significant | median (range) |"]
        lines.append("|---" + "|--:" * 4 + "|")
        for (_, tokens, title), own in self.pairs.groupby(["place", "tokens", "on"], sort=True):
            values = own["difference"]
            cells = [title, f"{tokens:g}", f"{sum(values > 0)} of {len(own)}", sum(own["corrected"] < SIGNIFICANT)]
            cells += [f"{values.median():+.1f} ({values.min():+.1f} to {values.max():+.1f})"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(lines)

    @property
    def spread(self) -> str:
        """ConsensusDrop's scores with each policy, and `spread` against the others: not named beforehand."""
        ways = {way: f"{OWN}:positions={way}" for way in ("renumber", "keep", "spread")}
        asked = {name: self.run(name, ways["spread"]) for name in (*BENCHMARKS, "textvqa")}
        on = {name: row.facts.title for name, row in asked.items() if row}
        tests = {(name, way): self.between(ways["spread"], ways[way], [name])[1] for name in on for way in REST}
        found = corrected({key: test.p for key, test in tests.items() if test})
        lines = ["| on | renumber | keep | spread | spread - keep | spread - renumber |", "|---" + "|--:" * 5 + "|"]
        for name, title in on.items():
            cells = [self.score(name, method) for method in ways.values()]
            for way in REST:
                test = tests[name, way]
                p = p_value(found.get((name, way), 1.0))
                cells.append(f"{signed(test.difference, test.bounds)}, corrected p {p}" if test else NOT_RUN)
            lines.append(f"| {' | '.join([title, *cells])} |")
        head = "ConsensusDrop with each policy; `spread` was not named beforehand:\n\n"
        return head + "\n".join(lines) if on else "There is no kept result of `spread` yet."

    def retrained(self, **others: Photo) -> str:
        """ConsensusDrop's scores with other adapters beside these, the changes, and keep - renumber of each, on
        benchmarks that all of them were run on; not named beforehand. p: corrected for all of the table.
        """
        ways = {"renumber": OWN, "keep": f"{OWN}:positions=keep"}
        found: dict[tuple[str, str], tuple[list[str], Comparison]] = {}
        for name in BENCHMARKS:
            tried = {
                label: [one.run(name, way) for way in ways.values()]
                for label, one in {"released": self, **others}.items()
            }
            runs = {label: [row for row in rows if row] for label, rows in tried.items()}
            if any(len(rows) < len(ways) for rows in runs.values()):
                continue
            released = runs["released"]
            before, title = _paired(released[1], released[0]), released[0].facts.title
            for label, rows in runs.items():
                word, after = label.replace("_", " "), _paired(rows[1], rows[0])
                found[title, word] = [f"{row.score:.1f}{half(row.bounds)}" for row in rows], after
                if rows is not released:
                    shifts = [_paired(*pair) for pair in zip(rows, released, strict=True)]
                    cells = [signed(test.difference, test.bounds) for test in shifts]
                    found[title, f"{word} - released"] = cells, Comparison(_gain(after), _gain(before), name)
        values = corrected({key: test.p for key, (_, test) in found.items()})
        lines = [f"| on | adapter | {' | '.join(ways)} | keep - renumber |", "|---|---" + "|--:" * 3 + "|"]
        for key, (cells, test) in found.items():
            last = f"{signed(test.difference, test.bounds)}, corrected p {p_value(values.get(key, 1.0))}"
            lines.append(f"| {' | '.join([*key, *cells, last])} |")
        return "\n".join(lines)

    def ahead(self, way: str) -> list[str]:
        """The peers whose mean at the budget is above ConsensusDrop's, with the same position policy, best first."""
        section = self.section(PEERS, [self.tokens], BENCHMARKS)
        means = {
            line.label: mean for line in section.reduced if line.policy == way and (mean := section.accuracy(line))
        }
        plain = {label.removesuffix(f", positions={way}"): mean.value for label, mean in means.items()}
        ranked = sorted(plain, key=lambda label: -plain[label])
        return ranked[: ranked.index("ConsensusDrop")]

    # ---- words and numbers

    def words(self, method: str) -> str:
        """A method of one word, in words."""
        if method == FULL:
            return "all tokens"
        word, way = self._split(method)
        row = next((row for key, row in self.runs.items() if key[1] == word), None)
        return (row.variant if row else word) + ("" if way == "renumber" else f", positions={way}")

    def score(self, benchmark: str, method: str) -> str:
        """A score with half of its interval, of several seeds with their spread."""
        row = self.run(benchmark, method)
        if row is None or row.score is None:
            return NOT_RUN
        return f"{row.score:.1f}{half(row.bounds)}" + ("" if row.spread is None else f" (sd {row.spread:.1f})")

    @property
    def resolution(self) -> str:
        """Half of the interval of a named difference of several benchmarks, the median of those that were run."""
        found = [one.found.bounds for one in self.named if one.found and one.found.bounds and len(one.benchmarks) > 1]
        return f"{median((high - low) / 2 for low, high in found):.0f}" if found else NOT_RUN

    @property
    def versions(self) -> str:
        """Number, versions and arithmetic of the runs; if runs differ, all of them."""
        seen: dict[str, set[str]] = {}
        for row in self.rows:
            versions = {
                name: row.config["versions"].get(name) for name in ("torch", "transformers", "reduction", "host")
            }
            own = {**versions, "arithmetic": row.config["dtype"], "weights": row.config["weights"][:12]}
            for name, value in own.items():
                seen.setdefault(name, set()).add(str(value))
        words = ", ".join(f"{name} {' and '.join(sorted(values))}" for name, values in seen.items())
        return f"{len(self.rows)} runs, {words}"


def _paired(first: Row, second: Row) -> Comparison:
    test = compare(first, second)
    assert test is not None, f"{first.folder} and {second.folder} asked other questions"
    return test


def _gain(test: Comparison) -> Sample:
    """The difference of two runs as the score of one sample, so that two differences can be compared."""
    width, first, second = test.first.sums.shape[1], test.first, test.second
    return first._replace(
        sums=np.hstack([first.sums, second.sums]),
        score=lambda sums: first.score(sums[..., :width]) - second.score(sums[..., width:]),
        points=first.points - second.points,
    )


def _of_scenes(row: Row) -> Row:
    """A run whose benchmark is called what it is: composed scenes in the form of a benchmark."""
    assert row.metrics is not None
    titles = {**row.metrics["titles"], "benchmark": f"{row.metrics['titles']['benchmark']} scenes"}
    return replace(row, metrics={**row.metrics, "titles": titles})
