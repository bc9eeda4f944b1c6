"""All tables of a folder of results, as Markdown, LaTeX or CSV. No torch, no model; pure functions of files.

`llava-consensus report --out results --write docs/results.md` puts them between the markers of a page. The paper's
layout is its Table 1: a block for each budget, the benchmarks, Acc (plain mean, MME perception / 20) and Rel (Acc in
percent of the full model's).

`COSTS` is the only list of what a method costs; `section.record` has the other columns of CSV. Counts, FLOPs and bytes
come from `account` in metrics.json (means over the benchmarks that all lines have finished; the cache as measured where
a run measured it); times from `bench.json` in the folder of results: rows with `method` (its name, or its label in
tables), `tokens`, `ttft_ms`, `tpot_ms`, `share` (the method's own part of the time to first token).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError, plural
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report import table as engine
from llava_consensus.evaluation.report.efficiency import read
from llava_consensus.evaluation.report.rows import FULL, RANDOM, Line, Row, by_setting, compare
from llava_consensus.evaluation.report.section import ScoreCell, Section, half, record, score, with_interval
from llava_consensus.evaluation.report.stats import (
    LEAST,
    RESAMPLES,
    Mean,
    mark,
)
from llava_consensus.evaluation.report.table import (
    ABSENT,
    Column,
    Table,
    count,
    csv_text,
    groups,
    number,
    retained,
    upper_bound,
)

NOTHING = "No results yet: `make tables` measures them."
BENCH = "bench.json"
AGAIN = "Measure again, or move it away"
MARKS = (
    "† differs from the full model, paired by picture (exact sign flips, McNemar's test where each has one question; "
    f"of right answers for F1; p < 0.05), ‡ also after Holm's correction over all cells; from fewer than {LEAST} "
    "pictures no test."
)
ALIKE = "Where no answer differs, the interval is what so many pictures can exclude."
SIMPLE_WAYS = ("resize", "uniform_grid", "random")  # which no method is compared without
NAME = Column("method", lambda line: line.label)

Bench = Sequence[Mapping[str, Any]]


def in_sections(rows: Iterable[Row]) -> list[Section]:
    """Runs in sections, those of all questions before those of the first few."""
    return sorted(map(Section, by_setting(rows)), key=lambda section: bool(section.rows[0].part))


def title(section: Section) -> str:
    """Heading of a section: model, data and setting."""
    config = section.rows[0].config
    parts = {row.benchmark: row.part for row in section.rows if row.limited}
    limit = "".join(f", of {section.title(name)} {part}" for name, part in parts.items())
    if len({row.part for row in section.rows}) == 1:
        limit = "".join(f", {part}" for part in {row.part for row in section.rows if row.part})
    versions = config["versions"]
    where = f"{config['device']}, torch {versions.get('torch')}, transformers {versions.get('transformers')}"
    raised = {name: versions[name] for name in ("reduction", "host", "serving") if versions.get(name, 1) != 1}
    raised |= {row.benchmark: number for row in section.rows if (number := row.config.get("benchmark_version", 1)) != 1}
    where += "".join(f", {name} version {number}" for name, number in raised.items())
    return f"**{config['model']}** on `{config['data']}`{limit} ({where})"


def section_tables(section: Section, bench: Bench = (), layout: bool = True) -> list[Table]:
    """The tables of a section in order: the paper's layout where `layout` asks for it, each benchmark with its
    interval, costs, what needs a judge, differences.
    """
    parts: list[Table | None] = [scores(section)] if layout else []
    parts += [intervals(section), costs(section, bench), unjudged(section), differences(section)]
    return [table for table in parts if table is not None]


def tabulate(
    section: Section, title: str, columns: Sequence[Column], note: str, lines: Sequence[Line] | None = None
) -> Table:
    """Lines of a section (all of them unless given) under the headings of their budgets, a cell for each column."""
    full, found = section.full, []
    for line in section.lines if lines is None else lines:
        heading = upper_bound(line.tokens) if line is full else retained(line.tokens, full.tokens if full else None)
        found.append((heading, tuple(column.text(line) for column in (NAME, *columns))))
    return Table(title, tuple(column.title for column in (NAME, *columns)), groups(found), note)


def of_benchmarks(section: Section, names: Sequence[str], write: Callable[[ScoreCell | None], str]) -> list[Column]:
    """A column for each benchmark."""
    return [Column(section.title(name), partial(section.cell, name=name), write) for name in names]


def means(section: Section, count: str = "") -> list[Column]:
    """Acc and Rel of a line."""
    return [Column(f"Acc{count}", section.accuracy, mean), Column("Rel (%)", section.relative, mean)]


def mean(average: Mean | None) -> str:
    """Acc or Rel with half of its interval, marked where it differs from the full model."""
    return ABSENT if average is None else f"{average.value:.1f}{half(average.bounds)}{mark(average.p, 1.0)}"


def scores(section: Section) -> Table | None:
    """The paper's layout: bare scores, Acc, Rel; None where none of its benchmarks was run."""
    names, paper_count = section.papers, len(paper.averaged())
    if not names:
        return None
    count = "" if len(section.averaged) == paper_count else f" ({len(section.averaged)} of {paper_count})"
    unjudged_titles = [section.title(name) for name in section.unjudged]
    exclusion = f", without {' and '.join(unjudged_titles)}, which nobody has judged" if unjudged_titles else ""
    near = section.guessed(names)
    guessed = f" In no average, because all tokens cannot be told from guessing there: {near}." if near else ""
    note = (
        f"Acc: plain mean of the columns (MME perception / 20){exclusion}. Rel: Acc in percent of the full model's. A "
        f"line with an incomplete cell has neither.{guessed} {MARKS}"
    )
    return tabulate(section, "Scores", [*of_benchmarks(section, names, score), *means(section, count)], note)


def without_simple_ways(section: Section) -> str:
    """A warning about budgets at which methods are compared without the simple ways; empty where none is missing."""
    missing = []
    for tokens in dict.fromkeys(line.tokens for line in section.reduced):
        runs = [run for line in section.reduced if line.tokens == tokens for run in line.runs.values()]
        names = {run.config["method"] for run in runs}
        absent = [name for name in SIMPLE_WAYS if name not in names]
        if absent and len(names.difference(SIMPLE_WAYS)) > 1:
            missing.append(f"{', '.join(absent)} at {tokens:g} tokens")
    return f" Missing beside these methods, and simpler than any: {'; '.join(missing)}." if missing else ""


def intervals(section: Section) -> Table:
    """Every benchmark that was run, each score with its interval."""
    columns = []
    for name, column in zip(section.names, of_benchmarks(section, section.names, with_interval), strict=True):
        done = [row.metrics for row in section.rows if row.metrics is not None and row.benchmark == name]
        pictures = [row.pictures for row in section.rows if row.benchmark == name and row.pictures]
        about = f" about {plural(pictures[0], 'picture')}" if pictures else ""
        asked = f"{plural(done[0]['questions'], 'question')}{about}" if done else "no complete run"
        columns.append(replace(column, title=f"{column.title} ({asked})"))
    note = (
        f"Score ± half of its 95 % interval: bootstrap over pictures, {RESAMPLES} resamples; sd: over seeds. MME in "
        f"points. {ALIKE} {MARKS} "
        f"A score without an interval has a scorer that does not say what it is made of.{without_simple_ways(section)}"
    )
    return tabulate(section, "Scores with 95 % intervals", columns, note)


def unjudged(section: Section) -> Table | None:
    """Scores of judged benchmarks without a judge: contained matches, and agreement with the full model."""
    rows = [
        replace(row, metrics={**row.metrics, "score": row.metrics["report"]["contains"]})
        for row in section.rows
        if row.metrics is not None and row.score is None and row.metrics["report"].get("contains") is not None
    ]
    if not rows:
        return None
    free = Section(rows)
    free_lines = {(line.tokens, line.label): line for line in free.reduced}

    def cell(line: Line, name: str) -> ScoreCell | None:
        free_line = free.full if line is section.full else free_lines.get((line.tokens, line.label))
        return None if free_line is None else free.cell(free_line, name)

    def agreement(line: Line, name: str) -> str:
        """The share of answers that read the same as the full model's; absent where one of the two is not complete."""
        found = cell(line, name)
        full = None if found is None else free.reference(Line(0, "", {name: found.row}), name)
        if found is None or full is None or not found.row.complete:
            return ABSENT
        full_answers = {row["index"]: row["extracted"] for row in full.report["extracted"]}
        matches = [row["extracted"] == full_answers[row["index"]] for row in found.row.report["extracted"]]
        return f"{100 * (sum(matches) / len(matches)):.1f}"

    columns = []
    for name in free.names:
        columns.append(Column(free.title(name), partial(cell, name=name), with_interval))
        columns.append(Column("as full", partial(agreement, name=name)))
    lines = [line for line in section.lines if any(cell(line, name) for name in free.names)]
    note = (
        "Answers that contain the reference, in percent ± half of the 95 % interval; as full: answers that read the "
        f"same as the full model's. Nobody has judged these runs. Tokens of a video are per frame. {MARKS}"
    )
    return tabulate(section, "Without a judge", columns, note, lines)


def differences(section: Section) -> Table | None:
    """Paired difference to random selection with the same budget; None where random selection was not run."""
    floors = {line.tokens: line for line in section.reduced if line.label == RANDOM}
    lines = [line for line in section.reduced if floors.get(line.tokens, line) is not line]

    def difference(line: Line, name: str) -> str:
        first, second = line.runs.get(name), floors[line.tokens].runs.get(name)
        test = None if first is None or second is None else compare(first, second)
        return ABSENT if test is None else f"{test.difference:+.1f}{half(test.bounds)}"

    columns = [Column(section.title(name), partial(difference, name=name)) for name in section.names]
    note = f"Difference ± half of its 95 % interval (bootstrap over pictures, paired by question). {ALIKE}"
    table = tabulate(section, "Difference to random selection with the same budget", columns, note, lines)
    return None if table.empty else table


# ---- costs


Cost = Mapping[str, Mapping[str, Any]]  # of a run: `account` of its metrics, `times`, the row of bench.json


def account(key: str) -> Callable[[Cost], float | None]:
    """Reads one number of a run's account: as measured where it was, the total where it has parts."""

    def value(cost: Cost) -> float | None:
        known = cost["account"]
        found = (known.get("measured") or {}).get(key, known.get(key))
        return found.get("total") if isinstance(found, Mapping) else found

    return value


COUNTED = "Visual tokens that enter the language model, that are kept after the last cut, and the mean over its layers."
FLOPS = "FLOPs of one prefill: language model, vision tower and the method's own work."
TIMES = "TTFT, TPOT: time to the first and to each further token, medians of interleaved measurements in one process."
COSTS = (  # of one Cost
    Column("entering", account("entering"), count, note=COUNTED),
    Column("kept", account("kept"), count),
    Column("layer average", account("average"), count, "average"),
    Column("GFLOPs", account("flops"), number(1e-9), "flops", FLOPS),
    Column("KV (MiB)", account("kv_bytes"), number(2**-20), "kv_bytes", "KV: bytes of the cache after it."),
    Column("TTFT (ms)", read("times", "ttft_ms"), number(), "ttft_ms", TIMES),
    Column("TPOT (ms)", read("times", "tpot_ms"), number(), "tpot_ms"),
    Column("selection (% of TTFT)", read("times", "share"), number(100.0), "share"),
)


def read_bench(path: Path) -> list[dict[str, Any]]:
    """The rows of a bench file; none where there is no file. DataError for another kind of file."""
    if not path.is_file():
        return []
    rows = read_json(path, AGAIN)
    rows = rows.get("rows") if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"method", "tokens"} <= row.keys() for row in rows
    ):
        raise DataError(f"{path}: not a list of rows with method and tokens. {AGAIN}")
    return rows


def costs(section: Section, bench: Bench = ()) -> Table | None:
    """Every line with its scores and costs; None where no cost is known."""
    columns = [Column(column.title, partial(_mean_cost, section, bench, column), column.format) for column in COSTS]
    scope = f" Counts, FLOPs and KV: over {', '.join(map(section.title, section.common))}." if section.common else ""
    note = " ".join(column.note for column in COSTS if column.note) + scope
    if tabulate(section, "", columns, "").empty:
        return None
    return tabulate(section, "Scores and costs", [*means(section), *columns], note)


def _mean_cost(section: Section, bench: Bench, column: Column, line: Line) -> float | None:
    """Mean of one cost over the benchmarks that all lines have finished, or over the line's own benchmarks where there
    are none in common; None unless the cost is known for each of these runs.
    """
    runs = [line.runs[name] for name in section.common or section.papers or section.names if name in line.runs]
    times = _times(section, line, bench)
    values = [column.read(_cost(row, times)) for row in runs] or [column.read({"account": {}, "times": times})]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _cost(row: Row, times: Mapping[str, Any]) -> Cost:
    return {"account": (row.metrics or {}).get("account") or {}, "times": times}


def _times(section: Section, line: Line, bench: Bench) -> Mapping[str, Any]:
    """The bench row about a line: the full model's, or that of its label or plain method with its budget."""
    names = {line.label, *(run.config["method"] for run in line.runs.values() if not run.config["changed"])}
    for row in bench:
        if row["method"] == FULL if line is section.full else row["tokens"] == line.tokens and row["method"] in names:
            return row
    return {}


# ---- CSV


def as_csv(sections: Iterable[Section], bench: Bench = (), layout: bool = True) -> str:
    """Every cell of all sections as a line, with its costs, in whatever layout."""
    lines: list[dict[str, Any]] = []
    for section in sections:
        for line, name in product(section.lines, section.names):
            cell = section.cell(line, name)
            if cell is not None:
                config, cost = cell.row.config, _cost(cell.row, _times(section, line, bench))
                about = {key: config.get(key) for key in ("model", "data", "limit", "sample")}
                costs = {column.key or column.title: column.read(cost) for column in COSTS}
                lines.append({**about, **record(line, cell), **costs})
    return csv_text(lines) if lines else ""


# ---- all sections as text


def as_markdown(sections: Iterable[Section], bench: Bench = (), layout: bool = True) -> str:
    """All tables: one part for every model, data and setting."""
    parts = [
        "\n\n".join([title(section), *map(engine.markdown, section_tables(section, bench, layout))])
        for section in sections
    ]
    return "\n\n".join(parts) if parts else NOTHING


def as_latex(sections: Iterable[Section], bench: Bench = (), layout: bool = True) -> str:
    """All tables, to be input into a document that uses booktabs."""
    parts = [r"% needs \usepackage{booktabs}; written by llava-consensus report"]
    for section in sections:
        parts += [f"% {title(section)}", *map(engine.latex, section_tables(section, bench, layout))]
    return "\n\n".join(parts)


FORMATS = {"markdown": as_markdown, "csv": as_csv, "latex": as_latex}
