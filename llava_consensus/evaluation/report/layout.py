"""The tables of scores: the paper's layout, intervals, what was scored without a judge, differences, printed numbers.

The paper's layout is its Table 1: a block for each budget, the benchmarks, Acc (plain mean, MME perception / 20) and
Rel (Acc in percent of the full model's).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.catalogue import Catalogue
from llava_consensus.evaluation.report.columns import ABSENT, NAME, Column, Group, Table, heading, tabulate, upper_bound
from llava_consensus.evaluation.report.rows import RANDOM, Line
from llava_consensus.evaluation.report.section import SIGNIFICANT, Cell, Mean, Section
from llava_consensus.evaluation.report.stats import RESAMPLES, Comparison, compare

PRINTED = (  # means and times in the paper's tables
    ("acc", "Acc"),
    ("rel_percent", "Rel (%)"),
    ("avg_acc", "Acc"),
    ("kv_mb", "KV (MB)"),
    ("ttft_ms", "TTFT (ms)"),
    ("tpot_ms", "TPOT (ms)"),
)
MARKS = (
    "† differs from the full model, paired by question (exact McNemar, or bootstrap where a score is no mean of right "
    "and wrong; p < 0.05), ‡ also after Holm's correction over all cells."
)


def means(section: Section, count: str = "") -> list[Column]:
    """Acc and Rel of a line."""
    return [Column(f"Acc{count}", section.accuracy, mean), Column("Rel (%)", section.relative, mean)]


def scores(section: Section, complete: bool = False) -> Table | None:
    """The paper's layout: bare scores, Acc, Rel; None where none of its benchmarks was run. `complete` leaves out lines
    without an Acc, if there is any line with one.
    """
    names, paper_count = section.papers, len(paper.averaged())
    if not names:
        return None
    averaged = section.averaged
    count = "" if len(averaged) == paper_count else f" ({len(averaged)} of {paper_count})"
    unjudged_titles = [section.title(name) for name in section.unjudged]
    lines = [line for line in section.lines if section.accuracy(line)] if complete else section.lines
    lines = lines or section.lines
    exclusion = f", without {' and '.join(unjudged_titles)}, which nobody has judged" if unjudged_titles else ""
    omission = " Lines with an incomplete cell are left out." if len(lines) < len(section.lines) else ""
    note = (
        f"Acc: plain mean of the columns (MME perception / 20){exclusion}. Rel: Acc in percent of the full model's. A "
        f"line with an incomplete cell has neither.{omission}{guessed(section, names)} {MARKS}"
    )
    benchmarks = [Column(section.title(name), partial(section.cell, name=name), score) for name in names]
    return tabulate(section, "Scores", [NAME, *benchmarks, *means(section, count)], note, lines)


def guessed(section: Section, names: Sequence[str]) -> str:
    """Says which of the benchmarks are in no average because the full model's interval does not lie above chance."""
    cells = {section.title(name): cell for name, cell in section.near_chance.items() if name in names}
    if not cells:
        return ""
    words = "; ".join(f"{title} {beside_chance(cell)}" for title, cell in cells.items())
    return f" In no average, because all tokens cannot be told from guessing there: {words}."


def beside_chance(cell: Cell) -> str:
    """A score with its interval, and what guessing scores."""
    between = "" if cell.bounds is None else f" [{cell.bounds[0]:.1f}, {cell.bounds[1]:.1f}]"
    return f"{cell.row.score:.1f}{between}, chance {cell.row.chance:.1f}"


def score(cell: Cell | None) -> str:
    """A score as papers print it, marked where it differs from the full model."""
    return state(cell) or f"{cell.row.score:.1f}{cell.mark}"  # type: ignore[union-attr]


def state(cell: Cell | None) -> str:
    """Why there is no number; nothing if there is one."""
    if cell is None:
        return ABSENT
    row = cell.row
    if row.metrics is None:
        return f"incomplete ({row.answered} answered)"
    if row.score is None:
        return "not scored"
    return f"incomplete ({row.metrics['answered']} of {row.metrics['questions']})" if row.unanswered else ""


def mean(average: Mean | None) -> str:
    """Acc or Rel with half of its interval, marked where it differs from the full model."""
    if average is None:
        return ABSENT
    mark = "†" if average.p is not None and average.p < SIGNIFICANT else ""
    return f"{average.value:.1f}{half(average.bounds)}{mark}"


def half(bounds: tuple[float, float] | None) -> str:
    """Half the width of an interval, after its number."""
    return "" if bounds is None else f" ± {(bounds[1] - bounds[0]) / 2:.1f}"


def intervals(section: Section) -> Table:
    """Every benchmark that was run, each score with its interval."""
    columns = [
        Column(f"{section.title(name)} ({_questions(section, name)})", partial(section.cell, name=name), _with_interval)
        for name in section.names
    ]
    note = (
        f"Score ± half of its 95 % interval: bootstrap over questions, {RESAMPLES} resamples. MME in points. {MARKS} "
        "A score without an interval has a scorer that does not say what it is made of."
    )
    return tabulate(section, "Scores with 95 % intervals", [NAME, *columns], note)


def unjudged(section: Section) -> Table | None:
    """What benchmarks that need a judge give without one: contained matches, and agreement with the full model."""
    rows = [
        replace(row, metrics={**row.metrics, "score": row.metrics["report"]["contains"]})
        for row in section.rows
        if row.metrics is not None and row.score is None and row.metrics["report"].get("contains") is not None
    ]
    if not rows:
        return None
    without_judge = Section(rows)
    free_lines = {(line.tokens, line.label): line for line in without_judge.reduced}

    def cell(line: Line, name: str) -> Cell | None:
        free_line = without_judge.full if line is section.full else free_lines.get((line.tokens, line.label))
        return None if free_line is None else without_judge.cell(free_line, name)

    def agreement(line: Line, name: str) -> float | None:
        return _agreement(without_judge, cell(line, name))

    columns = []
    for name in without_judge.names:
        columns.append(Column(without_judge.title(name), partial(cell, name=name), _with_interval))
        columns.append(Column("as full", partial(agreement, name=name), _share))
    lines = [line for line in section.lines if any(cell(line, name) for name in without_judge.names)]
    note = (
        "Answers that contain the reference, in percent ± half of the 95 % interval; as full: answers that read the "
        f"same as the full model's. Nobody has judged these runs. Tokens of a video are per frame. {MARKS}"
    )
    return tabulate(section, "Without a judge", [NAME, *columns], note, lines)


def _agreement(section: Section, cell: Cell | None) -> float | None:
    """The share of answers that read the same as the full model's; None where one of the two is not complete."""
    full = None if cell is None else section.reference(cell.row)
    if cell is None or full is None or not cell.row.complete:
        return None
    full_answers = {row["index"]: row["extracted"] for row in full.report["extracted"]}
    matches = [row["extracted"] == full_answers[row["index"]] for row in cell.row.report["extracted"]]
    return sum(matches) / len(matches)


def _share(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f}"


def _with_interval(cell: Cell | None) -> str:
    return state(cell) or f"{cell.row.score:.1f}{half(cell.bounds)}{cell.mark}"  # type: ignore[union-attr]


def _questions(section: Section, name: str) -> str:
    finished = [row.metrics for row in section.rows if row.metrics is not None and row.benchmark == name]
    return f"{finished[0]['questions']} questions" if finished else "no complete run"


def differences(section: Section) -> Table | None:
    """Paired difference to random selection with the same budget; None where random selection was not run."""
    floors = {line.tokens: line for line in section.reduced if line.label == RANDOM}
    lines = [line for line in section.reduced if floors.get(line.tokens, line) is not line]

    def difference(line: Line, name: str) -> Comparison | None:
        first, second = line.runs.get(name), floors[line.tokens].runs.get(name)
        return None if first is None or second is None else compare(first, second)

    columns = [Column(section.title(name), partial(difference, name=name), _difference) for name in section.names]
    note = "Difference ± half of its 95 % interval (paired bootstrap over questions)."
    title = "Difference to random selection with the same budget"
    table = tabulate(section, title, [NAME, *columns], note, lines)
    return table if any(cell != ABSENT for group in table.groups for line in group.lines for cell in line[1:]) else None


def _difference(comparison: Comparison | None) -> str:
    return ABSENT if comparison is None else f"{comparison.difference:+.1f}{half((comparison.low, comparison.high))}"


def printed(section: Section) -> list[Table]:
    """The paper's own numbers in the same layout."""
    tokens = section.full.tokens if section.full else max(row.tokens for row in section.rows)
    columns = [section.catalogue.benchmark(name).column for name in section.names]
    return [_printed(table, section.catalogue) for table in paper.printed(columns, tokens)]


def _printed(table: str, catalogue: Catalogue) -> Table:
    rows = paper.tables()[table]
    titled_keys = [(key, catalogue.benchmark(catalogue.named(key)).title) for key in paper.columns(table)]
    titled_keys += [(key, title) for key, title in PRINTED if key in rows[0]]
    columns = [Column(title, itemgetter(key), _number) for key, title in titled_keys]
    lines_by_heading: dict[str, list[tuple[str, ...]]] = {}
    full = rows[0]["tokens"]
    for row in rows:
        group_heading = upper_bound(full) if row is rows[0] else heading(row["tokens"], full)
        cells = (column.format(column.read(row)) for column in columns)
        lines_by_heading.setdefault(group_heading, []).append((row["method"], *cells))
    model = paper.MODELS[table]
    note = f"As printed, for {model} on the complete benchmarks: another model and other data than ours above."
    groups = tuple(Group(group_heading, tuple(group_lines)) for group_heading, group_lines in lines_by_heading.items())
    return Table(f"The paper's numbers ({model})", ("method", *(column.title for column in columns)), groups, note)


def _number(value: Any) -> str:
    return ABSENT if value is None else f"{value:.1f}"
