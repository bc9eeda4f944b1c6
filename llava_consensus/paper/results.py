"""Results of presets as frames, and their tables: ours beside the paper's, and which differences are significant."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.report.rows import Row, compare, read_rows
from llava_consensus.evaluation.report.section import ScoreCell, signed, with_interval
from llava_consensus.evaluation.report.stats import (
    LEAST,
    SIGNIFICANT,
    above_chance,
    corrected,
    mean_difference,
)
from llava_consensus.evaluation.report.table import Table, one_decimal, pivoted
from llava_consensus.paper import preset
from llava_consensus.paper.preset import SAME, Preset, PresetRow, Runs, matches

FULL = "all tokens"
COSTS = {"acc": "Acc", "rel_percent": "Rel (%)", "ttft_ms": "TTFT (ms)", "tpot_ms": "TPOT (ms)", "kv_mb": "KV (MiB)"}


@dataclass(frozen=True)
class Results:
    """A preset and its runs, each compared with the reference that has as many tokens."""

    preset: Preset
    runs: Runs
    benches: Sequence[Mapping[str, Any]] = ()  # contents of bench files, for times

    @cached_property
    def lines(self) -> list[PresetRow | None]:
        return [None, *self.preset.rows]

    @cached_property
    def cells(self) -> dict[tuple[PresetRow | None, str], ScoreCell]:
        """Every run with its test, p corrected over all of them."""
        tests = {}
        for line, name in self.runs:
            other = None if line is None else self.preset.reference_of(line)
            if other is not line and (other, name) in self.runs and other is not None:
                tests[line, name] = compare(self.runs[line, name], self.runs[other, name])
        after = corrected({key: test.p for key, test in tests.items() if test is not None})
        places = [key for line in self.lines for name in self.preset.benchmarks if (key := (line, name)) in self.runs]
        return {key: ScoreCell(self.runs[key], tests.get(key), after.get(key, 1.0)) for key in places}

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Every run as a line, with interval, test against the reference and the paper's number."""
        lines = []
        for (line, name), cell in self.cells.items():
            lines.append(
                {
                    "label": FULL if line is None else line.label,
                    "method": cell.row.config["method"],
                    "tokens": None if line is None else line.tokens,
                    "merged": cell.row.config["merged"],
                    **cell.record,
                    "printed": self.printed(line, name),
                }
            )
        return pd.DataFrame(lines, dtype=object)

    def percent(self, line: PresetRow | None, name: str) -> tuple[float, float, float] | None:
        """Score of a complete run and its interval, in percent; the score itself if it has none."""
        run = self.runs.get((line, name))
        if run is None or not run.complete or run.score is None:
            return None
        low, high = run.bounds or (run.score, run.score)
        return run.score / run.scale, low / run.scale, high / run.scale

    def printed(self, line: PresetRow | None, name: str) -> float | None:
        return self.preset.printed_row(line).get(self.preset.benchmarks[name])

    def title(self, name: str) -> str:
        return next((run.facts.title for (_, found), run in self.runs.items() if found == name), name)

    @cached_property
    def near_chance(self) -> list[str]:
        """Benchmarks in which the full model is not above guessing, so scores of reduced runs mean nothing."""
        full = {name: run for (line, name), run in self.runs.items() if line is None and run.complete}
        return [name for name, run in full.items() if not above_chance(run.score, run.bounds, run.chance)]

    @cached_property
    def averaged(self) -> list[str]:
        """The benchmarks of the mean: without those that nobody judged, and those near chance."""
        scored = {name for (_, name), run in self.runs.items() if run.score is not None}
        return [name for name in self.preset.benchmarks if name in scored and name not in self.near_chance]

    def mean(self, line: PresetRow | None) -> float | None:
        """Mean over the averaged benchmarks in percent; None unless all are complete."""
        scores = [score[0] for name in self.averaged if (score := self.percent(line, name)) is not None]
        return fmean(scores) if scores and len(scores) == len(self.averaged) else None

    def printed_mean(self, line: PresetRow | None) -> float | None:
        """The same of the paper's numbers."""
        columns = {name: scale(self.preset.benchmarks[name]) for name in self.averaged}
        scores = [value / columns[name] for name in columns if (value := self.printed(line, name)) is not None]
        return fmean(scores) if scores and len(scores) == len(columns) else None

    def timed(self, line: PresetRow | None) -> Mapping[str, Any]:
        """The first measurement of a row's method and budget in the bench files; empty without one."""
        method, tokens = ("full", None) if line is None else (line.method, line.tokens)
        rows = (row for content in self.benches for row in content["rows"])
        return next((row for row in rows if row["method"] == method and tokens in (None, row["tokens"])), {})


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
        """The runs of a preset. NotMeasured unless two of its rows were run."""
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
    """Reads a folder of results.

    Raises:
        DataError: a file is not what its command writes.
    """
    again = "Remove it; llava-consensus paper study makes it again"
    files = [sorted([*out.glob(name), *out.glob(f"*/{name}")])[:1] for name in ("study.json", "scap.json")]
    study, scap = (read_json(file[0], again, dict) if file else None for file in files)
    return Material(read_rows(out), read_benches(out), study, scap)


def read_benches(out: Path) -> list[dict[str, Any]]:
    """Contents of the bench files of a folder, by name of the file."""
    again = "Measure again with llava-consensus bench, or move it away"
    found = [read_json(path, again) for path in sorted(out.glob("bench*.json"))]
    return [content for content in found if isinstance(content, dict) and content.get("rows")]


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
    found = [
        Results(one, runs, benches) for one in tries for runs in matches(one, complete, (*SAME, "limit", "sample"))
    ]
    found = [one for one in found if len({line for line, _ in one.runs if line}) > 1]
    return max(found, key=lambda one: (len({line for line, _ in one.runs if line}), len(one.runs)), default=None)


# ---- tables


def tables(results: Results) -> list[Table]:
    """Our scores and the paper's; the differences to the reference; accuracy beside cost and the judge's scores, if the
    paper's table has them.
    """
    printed = results.preset.printed_row(None)
    found = [beside(results), differences(results)]
    found += [costs(results)] if "rel_percent" in printed else []
    return found + ([judged(results)] if any(name.endswith("_score") for name in printed) else [])


def _table(results: Results, title: str, columns: Mapping[str, str], cells: Iterable[Any], note: str) -> Table:
    """A table of (row, column, ours, the paper's)."""
    whose = bool(results.preset.printed)
    heads: dict[str, str] = {}
    for key, words in columns.items():
        heads |= {key: words, f"{key} paper": "paper"} if whose else {key: words}
    texts = []
    for line, key, ours, theirs in cells:
        place = (FULL, FULL) if line is None else (f"{line.tokens:g} tokens", line.label)
        texts += [(*place, key, ours), (*place, f"{key} paper", theirs)]
    return pivoted(title, "", heads, texts, note)


def beside(results: Results) -> Table:
    """Our scores and the paper's."""
    preset, cells = results.preset, []
    for line in results.lines:
        for name in preset.benchmarks:
            ours = with_interval(results.cells.get((line, name)))
            cells.append((line, name, ours, one_decimal(results.printed(line, name))))
        cells.append((line, "mean", one_decimal(results.mean(line)), one_decimal(results.printed_mean(line))))
    parts = {name: run.part for (line, name), run in results.runs.items() if line is None and run.limited}
    near = ", ".join(map(results.title, results.near_chance))
    notes = [
        "Ours: score ± half of its 95 % interval (MME in points).",
        "The paper's numbers are for its own checkpoint on the complete benchmarks." if preset.printed else "",
        *(f"{results.title(name)}: {part}." for name, part in parts.items()),
        "Mean: of the columns that have scores, MME / 20. † differs from "
        f"{preset.reference or 'the row it is compared with'} with as many tokens, paired by question (p < 0.05); ‡ "
        "also after Holm's correction over the table.",
        f"Not in the mean, because all tokens cannot be told from guessing there: {near}." if near else "",
    ]
    columns = {**{name: results.title(name) for name in preset.benchmarks}, "mean": "mean"}
    return _table(results, preset.title, columns, cells, " ".join(filter(None, notes)))


def differences(results: Results) -> Table:
    """Each row minus its reference, with its interval."""
    preset, texts, marks = results.preset, [], []
    for (line, name), cell in results.cells.items():
        if line is not None and cell.test is not None:
            other = preset.reference_of(line)
            label = f"{line.label} minus {other.label}" if line.against and other else line.label
            marks += [cell.mark] if cell.test.enough else []
            text = signed(cell.test.difference, cell.test.bounds) + cell.mark
            texts.append((f"{line.tokens:g} tokens", label, name, text))
    note = (
        f"Difference and 95 % interval, paired by question, images resampled together. Of {len(marks)} differences "
        f"{marks.count('‡')} are significant after Holm's correction (‡), {marks.count('†')} more only without it (†). "
        f"From fewer than {LEAST} images there is no interval and no test."
    )
    title = f"Difference to {preset.reference}" if preset.reference else "Differences"
    return pivoted(title, "", {name: results.title(name) for name in preset.benchmarks}, texts, note)


def costs(results: Results) -> Table:
    """Acc, Rel, times and KV cache of every row, ours and the paper's."""
    cells, full = [], results.mean(None)
    for line in results.lines:
        acc, timed = results.mean(line), results.timed(line)
        accounts = [run.metrics["account"] for (row, _), run in results.runs.items() if row is line and run.metrics]
        caches = [account["measured"]["kv_bytes"] for account in accounts if account and account.get("measured")]
        ours = {
            "acc": acc,
            "rel_percent": 100 * acc / full if acc is not None and full else None,
            "ttft_ms": timed.get("ttft_ms"),
            "tpot_ms": timed.get("tpot_ms"),
            "kv_mb": fmean(caches) / 2**20 if caches else None,
        }
        printed = results.preset.printed_row(line)
        cells += [(line, key, one_decimal(value), one_decimal(printed.get(key))) for key, value in ours.items()]
    note = (
        f"Acc and Rel over {', '.join(map(results.title, results.averaged)) or 'no benchmark'}. Times: bench*.json "
        "in the folder of results (llava-consensus bench with these methods and budgets), the paper's on its GPU. KV: "
        "the caches of these runs, mean over benchmarks."
    )
    return _table(results, f"{results.preset.title}: accuracy and cost", COSTS, cells, note)


def judged(results: Results) -> Table:
    cells = []
    for line in results.lines:
        printed = results.preset.printed_row(line)
        for name, column in results.preset.benchmarks.items():
            run = results.runs.get((line, name))
            pair = (run and run.report.get("average_score"), printed.get(column.replace("_acc", "_score")))
            cells.append((line, name, *("-" if value is None else f"{value:.2f}" for value in pair)))
    columns = {name: results.title(name) for name in results.preset.benchmarks}
    note = "Of runs that a judge graded (llava-consensus judge); the others are blank."
    return _table(results, f"{results.preset.title}: scores of the judge", columns, cells, note)


def csv_rows(results: Results) -> list[dict[str, Any]]:
    return results.frame.to_dict("records")


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
    for number, (words, differences, source) in enumerate(CLAIMS, 1):
        for policy in ("renumber", "keep", None):
            if isinstance(source, str):
                family = list(_of_preset(material, source, policy)) if policy else []
            else:
                own = (one for one in contrasts if one["of"] in source and one.get("positions") == policy)
                family = [_of_study(contrast) for contrast in own]
            after = corrected({place: line["p"] for place, line in enumerate(family)})
            for place, line in enumerate(family):
                about = {"claim": f"{number}. {words}: {differences}", "positions": policy or "any"}
                lines.append({**about, **line, "p_corrected": after.get(place)})
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
    low, high = contrast["interval"] or (None, None)
    test = {key: contrast[key] for key in ("difference", "p", "pictures")}
    return {"what": words, "low": low, "high": high, **test}


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
            low, high = mean.bounds or (None, None)
            words = f"{line.label}, {line.tokens:g} tokens"
            test = {"difference": mean.difference, "p": mean.p, "pictures": mean.pictures}
            yield {"what": words, "low": low, "high": high, **test}
