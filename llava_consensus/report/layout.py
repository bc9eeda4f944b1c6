"""Tables as data: a title, a head, groups of lines by budget, a note. Pure functions of sections; no markup yet.

`markdown.py` and `latex.py` write them. The paper's layout is its Table 1: a block for each budget, the benchmarks, Acc
(plain mean, MME perception / 20) and Rel (Acc in percent of the full model's).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llava_consensus.report import paper
from llava_consensus.report.rows import RANDOM, Line
from llava_consensus.report.section import NINE, SIGNIFICANT, Cell, Mean, Section
from llava_consensus.report.stats import RESAMPLES, compare

ABSENT = "-"
TITLES = {
    "vqav2": "VQAv2",
    "gqa": "GQA",
    "sqa": "SQA",
    "textvqa": "TextVQA",
    "pope": "POPE",
    "mme": "MME",
    "mmbench": "MMB",
    "mmbench_cn": "MMB-CN",
    "mmvet": "MM-Vet",
    "seed": "SEED",
    "tgif": "TGIF",
    "msvd": "MSVD",
    "msrvtt": "MSRVTT",
}
MARKS = (
    "† differs from the full model, paired by question (exact McNemar, or bootstrap where a score is no mean of right "
    "and wrong; p < 0.05), ‡ also after Holm's correction over all cells."
)


@dataclass(frozen=True)
class Group:
    """Lines of one budget under a heading."""

    heading: str
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Table:
    """What any markup is written from; the first column holds names, the others numbers."""

    title: str
    head: tuple[str, ...]
    groups: tuple[Group, ...]
    note: str = ""


def title_of(name: str) -> str:
    """A benchmark's name as papers write it."""
    return TITLES.get(name, name)


def heading(tokens: int, full: int | None) -> str:
    """The paper's line over a budget."""
    if full is None or tokens > full:
        return f"Retain {tokens} tokens"
    return f"Retain {tokens} tokens ({100 * (1 - tokens / full):.1f} % fewer)"


def grouped(section: Section, lines: Sequence[tuple[Line, tuple[str, ...]]]) -> tuple[Group, ...]:
    """Written lines under the headings of their budgets, in order."""
    full = section.full
    groups: dict[str, list[tuple[str, ...]]] = {}
    for line, written in lines:
        upper = f"Upper bound, {line.tokens} tokens"
        over = upper if line is full else heading(line.tokens, full.tokens if full else None)
        groups.setdefault(over, []).append(written)
    return tuple(Group(over, tuple(found)) for over, found in groups.items())


def scores(section: Section, complete: bool = False) -> Table | None:
    """The paper's layout: bare scores, Acc, Rel; None where none of its benchmarks was run. `complete` leaves out lines
    without an Acc, if there is any line with one.
    """
    names = section.papers
    if not names:
        return None
    averaged = section.averaged
    count = "" if len(averaged) == len(NINE) else f" ({len(averaged)} of {len(NINE)})"
    left = [title_of(name) for name in names if name not in averaged]
    shown = [line for line in section.lines if section.accuracy(line)] if complete else section.lines
    shown = shown or section.lines
    beside = f", without {' and '.join(left)}, which nobody has judged" if left else ""
    lines = [
        (
            line,
            (
                line.label,
                *(score(section.cell(line, name)) for name in names),
                mean(section.accuracy(line)),
                mean(section.relative(line)),
            ),
        )
        for line in shown
    ]
    rest = " Lines with an incomplete cell are left out." if len(shown) < len(section.lines) else ""
    note = (
        f"Acc: plain mean of the columns (MME perception / 20){beside}. Rel: Acc in percent of the full model's. A "
        f"line with an incomplete cell has neither.{rest} {MARKS}"
    )
    return Table("Scores", ("method", *map(title_of, names), f"Acc{count}", "Rel (%)"), grouped(section, lines), note)


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
    lines = [
        (line, (line.label, *(_with_interval(section.cell(line, name)) for name in section.names)))
        for line in section.lines
    ]
    head = ("method", *(f"{title_of(name)} ({_questions(section, name)})" for name in section.names))
    note = (
        f"Score ± half of its 95 % interval: bootstrap over questions, {RESAMPLES} resamples. MME in points. {MARKS} "
        "A score without an interval has a scorer that does not say what it is made of."
    )
    return Table("Scores with 95 % intervals", head, grouped(section, lines), note)


def unjudged(section: Section) -> Table | None:
    """What benchmarks that need a judge give without one: contained matches, and agreement with the full model."""
    rows = [
        replace(row, metrics={**row.metrics, "score": row.report["contains"]})
        for row in section.rows
        if row.metrics is not None and row.score is None and row.report.get("contains") is not None
    ]
    if not rows:
        return None
    free = Section(rows)
    same = {(line.tokens, line.label): line for line in free.reduced}
    pairs = [
        (line, free.full if line is section.full else same.get((line.tokens, line.label))) for line in section.lines
    ]
    lines = [
        (line, (line.label, *(cell for name in free.names for cell in _matches(free, own, name))))
        for line, own in pairs
        if own is not None
    ]
    head = ("method", *(title for name in free.names for title in (title_of(name), "as full")))
    note = (
        "Answers that contain the reference, in percent ± half of the 95 % interval; as full: answers that read the "
        f"same as the full model's. Nobody has judged these runs. Tokens of a video are per frame. {MARKS}"
    )
    return Table("Without a judge", head, grouped(section, lines), note)


def _matches(section: Section, line: Line, name: str) -> tuple[str, str]:
    cell = section.cell(line, name)
    full = None if cell is None else section.reference(cell.row)
    if cell is None or full is None or not cell.row.complete:
        return _with_interval(cell), ABSENT
    said = {row["index"]: row["extracted"] for row in full.report["extracted"]}
    same = [row["extracted"] == said[row["index"]] for row in cell.row.report["extracted"]]
    return _with_interval(cell), f"{100 * sum(same) / len(same):.1f}"


def _with_interval(cell: Cell | None) -> str:
    return state(cell) or f"{cell.row.score:.1f}{half(cell.bounds)}{cell.mark}"  # type: ignore[union-attr]


def _questions(section: Section, name: str) -> str:
    done = [row.metrics for row in section.rows if row.metrics is not None and row.config["benchmark"] == name]
    return f"{done[0]['questions']} questions" if done else "no complete run"


def differences(section: Section) -> Table | None:
    """Paired difference to random selection with the same budget; None where random selection was not run."""
    floors = {line.tokens: line for line in section.reduced if line.label == RANDOM}
    lines = []
    for line in section.reduced:
        floor = floors.get(line.tokens)
        if floor is not None and line is not floor:
            shown = tuple(_difference(name, line, floor) for name in section.names)
            lines.append((line, (line.label, *shown)))
    if not any(cell != ABSENT for _, written in lines for cell in written[1:]):
        return None
    note = "Difference ± half of its 95 % interval (paired bootstrap over questions)."
    head = ("method", *map(title_of, section.names))
    return Table("Difference to random selection with the same budget", head, grouped(section, lines), note)


def _difference(name: str, line: Line, floor: Line) -> str:
    first, second = line.runs.get(name), floor.runs.get(name)
    found = None if first is None or second is None else compare(first, second)
    return ABSENT if found is None else f"{found.difference:+.1f}{half((found.low, found.high))}"


def printed(section: Section) -> list[Table]:
    """The paper's own numbers in the same layout."""
    tokens = section.full.tokens if section.full else max(row.config["tokens"] for row in section.rows)
    return [_printed(name) for name in paper.printed(section.names, tokens)]


def _printed(table: str) -> Table:
    rows = paper.tables()[table]
    columns = {paper.PRINTED[name]: title_of(name) for name in paper.PRINTED if paper.PRINTED[name] in rows[0]}
    columns |= {"acc": "Acc", "rel_percent": "Rel (%)", "avg_acc": "Acc"}
    columns |= {"kv_mb": "KV (MB)", "ttft_ms": "TTFT (ms)", "tpot_ms": "TPOT (ms)"}
    columns = {key: title for key, title in columns.items() if key in rows[0]}
    groups: dict[str, list[tuple[str, ...]]] = {}
    full = rows[0]["tokens"]
    for row in rows:
        over = f"Upper bound, {full} tokens" if row is rows[0] else heading(row["tokens"], full)
        groups.setdefault(over, []).append((row["method"], *(_number(row[key]) for key in columns)))
    model = paper.MODELS[table]
    note = f"As printed, for {model} on the complete benchmarks: another model and other data than ours above."
    lines = tuple(Group(over, tuple(found)) for over, found in groups.items())
    return Table(f"The paper's numbers ({model})", ("method", *columns.values()), lines, note)


def _number(value: Any) -> str:
    return ABSENT if value is None else f"{value:.1f}"
