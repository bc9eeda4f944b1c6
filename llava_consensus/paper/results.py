"""Results of presets, and their tables: ours beside the paper's, and which differences are significant."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.report.rows import ALL, FULL, Line, Row, compare, read_rows, version
from llava_consensus.evaluation.report.section import Grid, signed
from llava_consensus.evaluation.report.stats import SIGNIFICANT, above_chance, corrected, mean_difference
from llava_consensus.evaluation.report.table import ABSENT, Table, decimal, pivoted
from llava_consensus.paper import preset
from llava_consensus.paper.preset import Preset, PresetRow

# keys in which runs of one table are equal
SAME = ("model", "weights", "data", "device", "dtype", "loading", "limit", "sample")
Runs = Mapping[tuple[PresetRow | None, str], Row]  # by row and benchmark; None is all tokens
PRINTED = {  # our column of costs: the paper's
    "Acc": "acc",
    "Rel (%)": "rel_percent",
    "TTFT (ms)": "ttft_ms",
    "TPOT (ms)": "tpot_ms",
    "KV (MiB)": "kv_mb",
}


class Results(Grid):
    """A preset and its runs, each compared with the reference that has as many tokens."""

    full: Line

    def __init__(self, preset: Preset, runs: Runs, benches: Sequence[Mapping[str, Any]] = ()) -> None:
        self.preset, self.runs = preset, runs
        self._by_row: dict[PresetRow | None, Line] = {}  # None is all tokens
        for row in (None, *preset.rows):
            tokens, label = (0, ALL) if row is None else (row.tokens, row.label)
            own = {name: run for name in preset.benchmarks if (run := runs.get((row, name))) is not None}
            self._by_row[row] = Line(tokens, label, own)
        self.full, *self.reduced = self._by_row.values()
        self.names, self.against = list(preset.benchmarks), preset.reference
        self.bench = [row for content in benches for row in content["rows"]]  # contents of bench files, for times

    def _row(self, line: Line) -> PresetRow | None:
        return next(row for row, other in self._by_row.items() if other is line)

    def reference(self, line: Line) -> Line | None:
        row = self._row(line)
        return None if row is None else self._by_row.get(self.preset.reference_of(row) or row)

    def about(self, line: Line) -> str:
        return ALL if line is self.full else f"{line.tokens:g} tokens"

    def percent(self, row: PresetRow | None, name: str) -> tuple[float, float, float] | None:
        """Score of a complete run and its interval, in percent; the score itself if it has none."""
        run = self.runs.get((row, name))
        if run is None or not run.complete or run.score is None:
            return None
        low, high = run.bounds or (run.score, run.score)
        return run.score / run.scale, low / run.scale, high / run.scale

    def printed(self, line: Line | PresetRow | None, name: str) -> float | None:
        row = self._row(line) if isinstance(line, Line) else line
        return self.preset.printed_row(row).get(self.preset.benchmarks[name])

    @cached_property
    def near_chance(self) -> list[str]:
        """Benchmarks in which the full model is not above guessing, so scores of reduced runs mean nothing."""
        full = {name: run for (row, name), run in self.runs.items() if row is None and run.complete}
        return [name for name, run in full.items() if not above_chance(run.score, run.bounds, run.chance)]

    @cached_property
    def averaged(self) -> list[str]:  # type: ignore[override]
        """The benchmarks of the mean: without those that nobody judged, and those near chance."""
        scored = {name for (_, name), run in self.runs.items() if run.score is not None}
        return [name for name in self.preset.benchmarks if name in scored and name not in self.near_chance]

    def printed_mean(self, line: Line) -> str:
        columns = {name: scale(self.preset.benchmarks[name]) for name in self.averaged}
        scores = [value / columns[name] for name in columns if (value := self.printed(line, name)) is not None]
        return f"{fmean(scores):.1f}" if scores and len(scores) == len(columns) else ABSENT

    # ---- tables

    def tables(self) -> list[Table]:
        """Our scores and the paper's; differences to the reference; costs and judged scores if the paper has them."""
        lines, rows = self.lines, [self.preset.printed_row(self._row(line)) for line in self.lines]
        means, costs, judged = self.mean_columns(), dict[str, Sequence[str]](), dict[str, Sequence[str]]()
        printed = [self.printed_mean(line) for line in lines]
        scores = {**self.score_columns(), **({"mean": means["Acc"], "mean, paper": printed} if means else {})}
        for title, cells in {**means, **self.cost_columns()}.items():
            costs[title] = cells
            if title in PRINTED:
                costs[f"{title}, paper"] = [decimal(row.get(PRINTED[title])) for row in rows]
        for name, column in self.preset.benchmarks.items():
            runs = [line.runs.get(name) for line in lines]
            judged[self.title(name)] = [decimal(run.report.get("average_score") if run else None, 2) for run in runs]
            theirs = [decimal(row.get(column.replace("_acc", "_score")), 2) for row in rows]
            judged[f"{self.title(name)}, paper"] = theirs
        parts = {name: run.part for name, run in self.full.runs.items() if run.limited}
        notes = [
            self.note,
            "The paper's numbers are for its own checkpoint on the complete benchmarks." if self.preset.printed else "",
            *(f"{self.title(name)}: {part}." for name, part in parts.items()),
            f"Not above guessing with all tokens: {', '.join(map(self.title, self.near_chance))}."
            if self.near_chance
            else "",
        ]
        title = self.preset.title
        found = [self.tabulated(title, scores, " ".join(filter(None, notes)), lines), self.differences()]
        if "rel_percent" in rows[0]:
            timed = "Times: bench*.json in the folder of results, the paper's on its GPU. KV: mean over benchmarks."
            found.append(self.tabulated(f"{title}: accuracy and cost", costs, timed, lines))
        if any(name.endswith("_score") for name in rows[0]):
            note = "Of runs that a judge graded (llava-consensus judge)."
            found.append(self.tabulated(f"{title}: scores of the judge", judged, note, lines))
        return [table for table in found if table.groups]

    @property
    def csv_rows(self) -> list[dict[str, Any]]:
        frame = self.frame
        found = [self.printed(self.lines[row.line], row.benchmark) for row in frame.itertuples()]
        return frame.drop(columns="line").assign(printed=found).to_dict("records")


def scale(column: str) -> float:
    """Divisor that makes a printed number a percentage."""
    return 20.0 if column.startswith("mme") else 1.0


class NotMeasured(Exception):
    """Results of a figure are missing; the message names them."""


@dataclass(frozen=True)
class Material:
    rows: Sequence[Row] = ()
    benches: Sequence[dict[str, Any]] = ()  # contents of bench files, by name of the file
    study: dict[str, Any] | None = None
    scap: dict[str, Any] | None = None

    def of(self, chosen: Preset) -> Results:
        found = find(chosen, self.rows, self.benches)
        if found is None:
            raise NotMeasured(f"no two complete rows of the preset {chosen.name} with one budget")
        return found

    @property
    def measured(self) -> list[dict[str, Any]]:
        """One bench file for each model, the one with most rows."""
        if not self.benches:
            raise NotMeasured("no bench*.json")
        largest = {one["model"]: one for one in sorted(self.benches, key=lambda one: len(one["rows"]))}
        return [largest[model] for model in dict.fromkeys(one["model"] for one in self.benches)]

    def bench_of(self, budgets: Iterable[float]) -> list[dict[str, Any]]:
        """The rows of the bench file that has most of these budgets."""
        if not self.benches:
            raise NotMeasured("no bench*.json")
        wanted, found = set(budgets), [content["rows"] for content in self.benches]
        return max(found, key=lambda rows: len(wanted & {row["tokens"] for row in rows}))


def read(out: Path) -> Material:
    """Reads a folder of results. DataError for a file that its command did not write."""
    again = "Remove it; llava-consensus paper study makes it again"
    files = [sorted([*out.glob(name), *out.glob(f"*/{name}")])[:1] for name in ("study.json", "scap.json")]
    study, scap = (read_json(file[0], again, dict) if file else None for file in files)
    return Material(read_rows(out), read_benches(out), study, scap)


def read_benches(out: Path) -> list[dict[str, Any]]:
    again = "Measure again with llava-consensus bench, or move it away"
    found = [read_json(path, again) for path in sorted(out.glob("bench*.json"))]
    return [content for content in found if isinstance(content, dict) and content.get("rows")]


def matches(preset: Preset, rows: Iterable[Row]) -> list[Runs]:
    """The preset's runs, found by their questions, for each setting. Of each benchmark those about the questions that
    most runs have; of several runs a complete one, then the longest.
    """
    from llava_consensus.evaluation.runs.configuration import describe_reduction

    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row.benchmark in preset.benchmarks and not row.config.get("match") and not row.config.get("choices"):
            setting = str([row.config.get(key) for key in SAME])
            groups.setdefault(setting, {}).setdefault(row.benchmark, []).append(row)
    wanted: dict[PresetRow | None, str] = {None: FULL}
    wanted |= {row: _reduction(describe_reduction(*row.reduction)) for row in preset.rows}
    found: list[Runs] = []
    for group in groups.values():
        runs: dict[tuple[PresetRow | None, str], Row] = {}
        for name in (name for name in preset.benchmarks if name in group):
            ((usual, _),) = Counter(version(row, "judge") for row in group[name]).most_common(1)
            own = sorted(group[name], key=lambda row: (row.complete, row.answered, row.folder.name))
            by_reduction = {_reduction(row.config): row for row in own if version(row, "judge") == usual}
            runs |= {(line, name): by_reduction[one] for line, one in wanted.items() if one in by_reduction}
        found.append(runs)
    return found


def _reduction(config: Mapping[str, Any]) -> str:
    chosen = {key: config[key] for key in ("method", "changed", "tokens", "merged")}
    return FULL if chosen["method"] == FULL else json.dumps(chosen, sort_keys=True)


def find(preset: Preset, rows: Sequence[Row], benches: Sequence[Mapping[str, Any]] = ()) -> Results | None:
    """A preset's complete runs in a folder of results, on any benchmark: of the setting that has most of its rows, then
    most runs. A preset of one budget is found at any. None unless two of its rows have been run.
    """
    complete = [row for row in rows if row.complete]
    names = dict.fromkeys(sorted(row.benchmark for row in complete), "") | dict(preset.benchmarks)
    asked = replace(preset, benchmarks={**preset.benchmarks, **names}, fewer={})
    budgets = {row.tokens for row in preset.rows}
    tries = [asked]
    if len(budgets) == 1:
        most = max(row.merged or 0 for row in preset.rows)
        measured = sorted(tokens for tokens in {row.tokens for row in complete if not row.full} if tokens > most)
        tries = [replace(asked, rows=tuple(replace(row, tokens=tokens) for row in asked.rows)) for tokens in measured]
    found = [Results(one, runs, benches) for one in tries for runs in matches(one, complete)]
    found = [one for one in found if len({line for line, _ in one.runs if line}) > 1]
    return max(found, key=lambda one: (len({line for line, _ in one.runs if line}), len(one.runs)), default=None)


# ---- the paper's claims as families of paired differences

CLAIMS = (  # words; the differences; the preset, or contrasts of study.json and scap.json, that measure them
    ("Recovery beats both single signals at every retention", "recovery minus its student", ("gain",)),
    ("Vision-only beats cross-only", "at each retention", ("sides",)),
    (
        "Lower retention: more disagreement, correction and gain",
        "the least retention minus the most",
        ("disagreement", "correction", "rise"),
    ),
    ("The correction falls with the rate", "each rate minus the next", ("fall",)),
    ("alpha = 0.7 is best", "minus each other alpha", "alpha"),
    ("Temperatures do not matter", "both 1 minus each other pair", "temperature"),
    ("Vision is the better student", "minus cross, at each rate", "recovery"),
    ("20 merged of 128 is best", "minus each other number", "anchors"),
    ("Class attention with all text rows is best", "minus each other pair", "score"),
    ("ConsensusDrop is first in Table 1", "minus each other method, at each budget", "t1"),
    ("SCAP leans toward late patches", "last third minus first; minus that without rotation", ("late", "rotation")),
)
CLAIM_COLUMNS = {"n": "differences", "above": "above 0", "below": "below 0", "least": "least (95 % interval)"}


def claims(material: Material) -> tuple[list[Table], list[dict[str, Any]]]:
    """Each claim of the paper as paired differences, which it says are above zero, in points: a table with their
    number, how many are significant after Holm's correction over the claim, and the least; every difference as a line.
    """
    lines: list[dict[str, Any]] = []
    contrasts = [*(material.study or {}).get("contrasts", ()), *(material.scap or {}).get("contrasts", ())]
    for rank, (words, differences, source) in enumerate(CLAIMS, 1):
        for policy in ("renumber", "keep", None):
            if isinstance(source, str):
                family = list(_of_preset(material, source, policy)) if policy else []
            else:
                own = (one for one in contrasts if one["of"] in source and one.get("positions") == policy)
                family = [_of_study(contrast) for contrast in own]
            after = corrected({place: line["p"] for place, line in enumerate(family)})
            for place, line in enumerate(family):
                about = {"claim": f"{rank}. {words}: {differences}", "positions": policy or "any"}
                low, high = line.pop("bounds") or (None, None)
                lines.append({**about, **line, "low": low, "high": high, "p_corrected": after.get(place)})
    texts = []
    groups = pd.DataFrame(lines).groupby(["claim", "positions"], sort=False) if lines else ()
    for (claim, policy), family in groups:
        real = family[family.p_corrected.astype(float) < SIGNIFICANT]
        least = family.sort_values("difference").iloc[0]
        bounds = None if pd.isna(least.low) else (least.low, least.high)
        counts = len(family), (real.difference > 0).sum(), (real.difference < 0).sum()
        values = (*map(str, counts), signed(least.difference, bounds))
        for key, text in zip(CLAIM_COLUMNS, values, strict=True):
            texts.append((claim, f"positions: {policy}", key, text))
    note = (
        "Above, below: significant after Holm's correction over the claim (p < 0.05). Differences are means "
        "over benchmarks in points, paired by question; those of SCAP are in percent."
    )
    table = pivoted("The paper's claims as paired differences", "", CLAIM_COLUMNS, texts, note)
    return ([table] if lines else []), lines


def _of_study(contrast: Mapping[str, Any]) -> dict[str, Any]:
    setting = {key: contrast.get(key) for key in ("of", "retention", "student", "rate")}
    words = ", ".join(f"{key} {value}" for key, value in setting.items() if value is not None)
    test = {key: contrast[key] for key in ("difference", "p", "pictures")}
    return {"what": words, "bounds": contrast["interval"], **test}


def _of_preset(material: Material, name: str, policy: str) -> Iterable[dict[str, Any]]:
    """The reference minus each row that is compared with it, mean over benchmarks; nothing if that was not run."""
    chosen = preset.read(name)
    try:
        results = material.of(chosen.keeping_positions() if policy == "keep" else chosen)
    except NotMeasured:
        return
    rows = [row for row in results.preset.rows if row.against] or results.preset.rows
    for line in rows:
        other = results.preset.reference_of(line)
        names = [name for name in results.averaged if {(other, name), (line, name)} <= results.runs.keys()]
        tests = [compare(results.runs[other, name], results.runs[line, name]) for name in names if other is not line]
        if found := [test for test in tests if test is not None]:
            scales = [results.runs[line, test.benchmark].scale for test in found]
            mean = mean_difference(found, scales)
            test = {"difference": mean.difference, "bounds": mean.bounds, "p": mean.p, "pictures": mean.images}
            yield {"what": f"{line.label}, {line.tokens:g} tokens", **test}
