"""Any two runs of a benchmark against each other, question by question, and by question type (`group` of a row)."""

from pathlib import Path

from llava_consensus.errors import DataError, plural
from llava_consensus.evaluation.report.rows import OF_SECTION, Row, compare, read_row, version
from llava_consensus.evaluation.report.section import signed
from llava_consensus.evaluation.report.stats import LEAST, corrected, counted, paired

RESAMPLES = 10000


def find(name: str, out: Path) -> Row:
    """A complete run by its folder, or by the beginning of the name of its folder in `out`. DataError for any other."""
    folders = [Path(name)] if Path(name).is_dir() else sorted(path for path in out.glob(f"{name}*") if path.is_dir())
    if len(folders) != 1:
        names = ", ".join(path.name for path in folders[:5]) or "none"
        raise DataError(f"{name}: must be the folder of one run, or the beginning of its name in {out}; found {names}")
    row = read_row(folders[0])
    if not row.complete:
        raise DataError(f"{folders[0]}: not complete, so it is not compared. The same `llava-consensus eval` goes on")
    return row


def lines(first: Row, second: Row) -> list[str]:
    """Both scores, their difference with interval and p, and the same for each question type, p corrected (Holm).
    DataError for runs that cannot be paired.
    """
    name = first.benchmark
    if version(first) != version(second):
        raise DataError("the runs were asked other questions or in another way (config.json): they cannot be paired")
    comparison = compare(first, second, RESAMPLES)
    if comparison is None:
        raise DataError(f"{name}: the scorer's rows do not make up the scores. Remove metrics.json and run eval again")
    output = [f"{name}, {plural(comparison.questions, 'question')} about {plural(comparison.images, 'image')}"]
    for letter, row in (("A", first), ("B", second)):
        output.append(f"{letter}: {row.score:.2f}  {row.label}, {'all' if row.full else row.config['tokens']} tokens")
    keys = (*OF_SECTION, "weights", "dtype", "loading")
    differing = [key for key in keys if first.config.get(key) != second.config.get(key)]
    output += [f"note: the runs differ in {', '.join(differing)} too"] * bool(differing)
    rows = zip(counted(first.report), counted(second.report), strict=True)
    steps = [one["correct"] - other["correct"] for one, other in rows]
    better = f"{sum(step > 0 for step in steps)} questions better in A, {sum(step < 0 for step in steps)} in B"
    p = comparison.test if comparison.p is None else f"p = {comparison.p:.2g} ({comparison.test})"
    output.append(f"A - B (95 % interval): {signed(comparison.difference, comparison.bounds, 2)}, {p}; {better}")

    groups = sorted({str(row["group"]) for row in counted(first.report) if row.get("group") is not None})
    found = {}
    for group in groups:
        own, other = (
            {**row.report, "extracted": [one for one in row.report["extracted"] if str(one.get("group")) == group]}
            for row in (first, second)
        )
        if (test := paired(own, other, name, RESAMPLES)) is not None:
            found[group] = test
    if len(found) < 2:
        return output
    output.append(f"{'by question type':24} {'questions':>9} {'pictures':>8}  {'A - B':30} {'p':>8} {'p (Holm)':>8}")
    holm = corrected({group: test.p for group, test in found.items()})
    for group, test in found.items():
        p = f"{test.p:8.2g} {holm[group]:8.2g}" if test.p is not None else f"too few images (< {LEAST})"
        difference = signed(test.difference, test.bounds, 2)
        output.append(f"{group:24} {test.questions:9d} {test.images:8d}  {difference:30} {p}")
    return output
