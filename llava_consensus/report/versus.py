"""Any two runs of a benchmark against each other, question by question: `llava-consensus compare RUN_A RUN_B`.

A pure function of two run folders' files; by question type where the scorer's rows name a `group`.
"""

from pathlib import Path

from llava_consensus.errors import DataError
from llava_consensus.report.rows import OF_SECTION, Row, read_row, version
from llava_consensus.report.samples import Report, counted
from llava_consensus.report.stats import Comparison, compare, holm, paired

RESAMPLES = 10000


def find(name: str, out: Path) -> Row:
    """A run by its folder, or by its folder's name below `out` or the beginning of it that only one has.

    Raises:
        DataError: no such run, more than one, or one that is not complete.
    """
    folder = Path(name)
    if not folder.is_dir():
        found = sorted(path.parent for path in out.glob("*/config.json") if path.parent.name.startswith(name))
        if len(found) != 1:
            some = ", ".join(path.name for path in found[:5]) or "none"
            raise DataError(
                f"{name}: must be the folder of one run, or the beginning of its name in {out}; found {some}"
            )
        folder = found[0]
    row = read_row(folder)
    if not row.complete:
        raise DataError(f"{folder}: not complete, so it is not compared. The same `llava-consensus eval` goes on")
    return row


def lines(first: Row, second: Row) -> list[str]:
    """Both scores, their difference with interval and p, and the same for each question type.

    Raises:
        DataError: other questions, or scores that their scorers' rows do not make up.
    """
    name = first.benchmark
    if version(first) != version(second):
        raise DataError("the runs were asked other questions or in another way (config.json): they cannot be paired")
    found = compare(first, second, RESAMPLES)
    if found is None:
        raise DataError(f"{name}: the scorer's rows do not make up the scores. Remove metrics.json and run eval again")
    shown = [f"{name}, {found.questions} questions"]
    shown += [_run(letter, row) for letter, row in (("A", first), ("B", second))]
    other = [key for key in (*OF_SECTION, "weights", "dtype") if first.config.get(key) != second.config.get(key)]
    shown += [f"note: the runs differ in {', '.join(other)} too"] * bool(other)
    return [*shown, f"A - B: {_difference(found)}", *_by_type(first.report, second.report, name)]


def _run(letter: str, row: Row) -> str:
    tokens = "all" if row.full else row.config["tokens"]
    return f"{letter}: {row.score:.2f}  {row.label}, {tokens} tokens"


def _difference(found: Comparison) -> str:
    test = found.name
    if found.only is not None:
        test += f": {found.only[0]} right in A only, {found.only[1]} in B only"
    return f"{found.difference:+.2f}, 95 % interval {found.low:+.2f} to {found.high:+.2f}, p = {found.p:.2g} ({test})"


def _by_type(first: Report, second: Report, name: str) -> list[str]:
    """One line for each group of questions, p corrected for their number (Holm)."""
    groups = sorted({str(row["group"]) for row in counted(first) if row.get("group") is not None})
    tests = [(group, paired(_only(first, group), _only(second, group), name, RESAMPLES)) for group in groups]
    known = [(group, test) for group, test in tests if test is not None]
    if len(known) < 2:
        return []
    corrected = holm([test.p for _, test in known])
    head = f"{'by question type':24} {'questions':>9} {'A - B':>8}  {'95 % interval':19} {'p':>8} {'p (Holm)':>8}"
    return [
        head,
        *(
            f"{group:24} {test.questions:9d} {test.difference:+8.2f}  {test.low:+8.2f} to {test.high:+7.2f} "
            f"{test.p:8.2g} {p:8.2g}"
            for (group, test), p in zip(known, corrected, strict=True)
        ),
    ]


def _only(report: Report, group: str) -> Report:
    """A report of one group's rows."""
    return {**report, "extracted": [row for row in report["extracted"] if str(row.get("group")) == group]}
