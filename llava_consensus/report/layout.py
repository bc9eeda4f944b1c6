"""The tables of scores: the paper's layout, intervals, what was scored without a judge, differences, printed numbers.

The paper's layout is its Table 1: a block for each budget, the benchmarks, Acc (plain mean, MME perception / 20) and
Rel (Acc in percent of the full model's).
"""

from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from llava_consensus.report import paper
from llava_consensus.report.catalogue import Catalogue
from llava_consensus.report.columns import ABSENT, NAME, Column, Group, Table, heading, tabulate, upper_bound
from llava_consensus.report.rows import RANDOM, Line
from llava_consensus.report.section import SIGNIFICANT, Cell, Mean, Section
from llava_consensus.report.stats import RESAMPLES, Comparison, compare

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
    names, nine = section.papers, len(paper.averaged())
    if not names:
        return None
    averaged = section.averaged
    count = "" if len(averaged) == nine else f" ({len(averaged)} of {nine})"
    left = [section.title(name) for name in names if name not in averaged]
    shown = [line for line in section.lines if section.accuracy(line)] if complete else section.lines
    shown = shown or section.lines
    beside = f", without {' and '.join(left)}, which nobody has judged" if left else ""
    rest = " Lines with an incomplete cell are left out." if len(shown) < len(section.lines) else ""
    note = (
        f"Acc: plain mean of the columns (MME perception / 20){beside}. Rel: Acc in percent of the full model's. A "
        f"line with an incomplete cell has neither.{rest} {MARKS}"
    )
    benchmarks = [Column(section.title(name), partial(section.cell, name=name), score) for name in names]
    return tabulate(section, "Scores", [NAME, *benchmarks, *means(section, count)], note, shown)


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


def mean(found: Mean | None) -> str:
    """Acc or Rel with half of its interval, marked where it differs from the full model."""
    if found is None:
        return ABSENT
    return f"{found.value:.1f}{half(found.bounds)}" + ("†" if found.p is not None and found.p < SIGNIFICANT else "")


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
    free = Section(rows)
    same = {(line.tokens, line.label): line for line in free.reduced}

    def cell(line: Line, name: str) -> Cell | None:
        own = free.full if line is section.full else same.get((line.tokens, line.label))
        return None if own is None else free.cell(own, name)

    def agreement(line: Line, name: str) -> float | None:
        return _agreement(free, cell(line, name))

    columns = []
    for name in free.names:
        columns.append(Column(free.title(name), partial(cell, name=name), _with_interval))
        columns.append(Column("as full", partial(agreement, name=name), _share))
    shown = [line for line in section.lines if any(cell(line, name) for name in free.names)]
    note = (
        "Answers that contain the reference, in percent ± half of the 95 % interval; as full: answers that read the "
        f"same as the full model's. Nobody has judged these runs. Tokens of a video are per frame. {MARKS}"
    )
    return tabulate(section, "Without a judge", [NAME, *columns], note, shown)


def _agreement(section: Section, cell: Cell | None) -> float | None:
    """The share of answers that read the same as the full model's; None where one of the two is not complete."""
    full = None if cell is None else section.reference(cell.row)
    if cell is None or full is None or not cell.row.complete:
        return None
    said = {row["index"]: row["extracted"] for row in full.report["extracted"]}
    same = [row["extracted"] == said[row["index"]] for row in cell.row.report["extracted"]]
    return sum(same) / len(same)


def _share(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f}"


def _with_interval(cell: Cell | None) -> str:
    return state(cell) or f"{cell.row.score:.1f}{half(cell.bounds)}{cell.mark}"  # type: ignore[union-attr]


def _questions(section: Section, name: str) -> str:
    done = [row.metrics for row in section.rows if row.metrics is not None and row.benchmark == name]
    return f"{done[0]['questions']} questions" if done else "no complete run"


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
    found = tabulate(section, title, [NAME, *columns], note, lines)
    return found if any(cell != ABSENT for group in found.groups for line in group.lines for cell in line[1:]) else None


def _difference(found: Comparison | None) -> str:
    return ABSENT if found is None else f"{found.difference:+.1f}{half((found.low, found.high))}"


def printed(section: Section) -> list[Table]:
    """The paper's own numbers in the same layout."""
    tokens = section.full.tokens if section.full else max(row.tokens for row in section.rows)
    found = [section.catalogue.benchmark(name).column for name in section.names]
    return [_printed(table, section.catalogue) for table in paper.printed(found, tokens)]


def _printed(table: str, catalogue: Catalogue) -> Table:
    rows = paper.tables()[table]
    shown = [(key, catalogue.benchmark(catalogue.named(key)).title) for key in paper.columns(table)]
    shown += [(key, title) for key, title in PRINTED if key in rows[0]]
    columns = [Column(title, itemgetter(key), _number) for key, title in shown]
    groups: dict[str, list[tuple[str, ...]]] = {}
    full = rows[0]["tokens"]
    for row in rows:
        over = upper_bound(full) if row is rows[0] else heading(row["tokens"], full)
        cells = (column.format(column.read(row)) for column in columns)
        groups.setdefault(over, []).append((row["method"], *cells))
    model = paper.MODELS[table]
    note = f"As printed, for {model} on the complete benchmarks: another model and other data than ours above."
    lines = tuple(Group(over, tuple(found)) for over, found in groups.items())
    return Table(f"The paper's numbers ({model})", ("method", *(column.title for column in columns)), lines, note)


def _number(value: Any) -> str:
    return ABSENT if value is None else f"{value:.1f}"
