"""The runs that a preset asks for, found in a folder of results: by what was asked with which method, whatever version
of this code answered and whichever command asked.

    sections(preset, wanted, rows)    # as tables of a folder have them, one for each set of benchmarks
    missing(preset, wanted, found)    # what a page of the preset still lacks
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import inf
from typing import Any

from llava_consensus.evaluation.report.rows import FULL, Row, version
from llava_consensus.evaluation.report.section import Section
from llava_consensus.paper.preset import Preset

Reduction = Mapping[str, Any]  # of a configuration: method, changed, tokens, merged
Wanted = Sequence[Reduction]  # one for each row of a preset, in its order
KEYS = ("method", "changed", "tokens", "merged")
SAME = ("model", "weights", "data", "device", "dtype", "loading")  # in which all runs of a section agree
ALL_TOKENS: Reduction = {"method": FULL, "changed": {}, "tokens": None, "merged": None}


def sections(preset: Preset, wanted: Wanted, rows: Iterable[Row]) -> list[Section]:
    """The preset's runs on each model and data that has any, one section for the budgets that are asked on the same
    benchmarks; those with most benchmarks first.

    Args:
        preset: whose runs.
        wanted: of each of its rows, what the configuration of its runs says.
        rows: runs of a folder, in any order.
    """
    found = []
    for group in _grouped(rows, preset):
        for budgets in _budgets(preset):
            names = preset.asked_at(budgets[0])
            asked = [ALL_TOKENS, *(one for one in wanted if one["tokens"] in budgets)]
            runs = [run for name in names for one in asked if (run := _run(group, one, name)) is not None]
            found += [Section(runs)] if any(not run.full for run in runs) else []
    return found


def missing(preset: Preset, wanted: Wanted, found: Sequence[Section]) -> list[str]:
    """A line for each run that the preset asks for and the sections do not have whole."""
    lines = [] if found else ["there are no runs"]
    for section in found:
        budgets = {row.tokens for row in section.rows if not row.full}
        shown = [(row.label, one) for row, one in zip(preset.rows, wanted, strict=True) if one["tokens"] in budgets]
        for (label, one), name in product([("all tokens", ALL_TOKENS), *shown], preset.asked_at(min(budgets))):
            why = lack(_run(section.rows, one, name))
            lines += [f"{name} {label} {one['tokens'] or ''}".strip() + f": {why}"] if why else []
    absent = {row.tokens for row in preset.rows} - {row.tokens for one in found for row in one.rows}
    return lines + [f"no runs at {tokens:g} tokens" for tokens in sorted(absent)]


def lack(run: Row | None) -> str:
    """What keeps a run from being whole; nothing where it is."""
    if run is None:
        return "not run"
    return f"{run.answered} questions answered, not all" if run.metrics is None or run.unanswered else ""


def holds(row: Row, limit: int | None) -> bool:
    """Whether a run asked the first `limit` questions, all of them for None. A run that came to the end of the
    questions before its own limit asked all there are.
    """
    own = inf if row.config["limit"] is None else row.config["limit"]
    wanted = inf if limit is None else limit
    whole = row.metrics is not None and row.metrics["questions"] < own
    return own == wanted or (whole and row.metrics is not None and row.metrics["questions"] <= wanted)


def _grouped(rows: Iterable[Row], preset: Preset) -> list[list[Row]]:
    """Runs that ask what the preset asks, by model, data and device; of each benchmark the version that most have."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        plain = not row.config.get("match") and not row.config.get("choices")
        if plain and row.benchmark in preset.benchmarks and holds(row, preset.limits.get(row.benchmark)):
            groups.setdefault(str([row.config.get(key) for key in SAME]), []).append(row)
    return [_one_version(group) for group in groups.values()]


def _one_version(rows: Sequence[Row]) -> list[Row]:
    """Runs of each benchmark that asked the same questions; a judge may have graded some of them."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row.benchmark, Counter())[version(row, "judge")] += 1
    usual = {name: count.most_common(1)[0][0] for name, count in counts.items()}
    return [row for row in rows if version(row, "judge") == usual[row.benchmark]]


def _budgets(preset: Preset) -> list[list[float]]:
    """Budgets that are asked on the same benchmarks together, those with most benchmarks first."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for tokens in dict.fromkeys(row.tokens for row in preset.rows):
        groups.setdefault(tuple(preset.asked_at(tokens)), []).append(tokens)
    return [groups[names] for names in sorted(groups, key=len, reverse=True)]


def _run(rows: Iterable[Row], reduction: Reduction, benchmark: str) -> Row | None:
    """The run of a benchmark with a reduction; of several a complete one, then the one with most answers."""
    found = [row for row in rows if row.benchmark == benchmark and _is(row, reduction)]
    ranked = sorted(found, key=lambda row: (row.complete, row.answered, row.folder.name))
    return ranked[-1] if ranked else None


def _is(row: Row, reduction: Reduction) -> bool:
    if reduction["method"] == FULL:
        return bool(row.config["method"] == FULL)
    return all(row.config[key] == reduction[key] for key in KEYS)
