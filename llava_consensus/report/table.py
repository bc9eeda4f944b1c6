"""Result folders -> Markdown tables. Pure functions of files: no torch, no model; only the command line imports this.

`llava-consensus report --out results --write docs/results.md` puts the tables between the markers
`<!-- results:begin -->` and `<!-- results:end -->`. Runs that differ in anything but method, budget and benchmark
(model, data, limit, versions, ...) stand in tables of their own.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
CHOICE = ("method", "options", "changed", "tokens", "merged")  # keys of a configuration in which compared runs differ
OF_BENCHMARK = ("benchmark", "questions", "conversation", "max_new_tokens")
OF_SECTION = ("model", "data", "limit", "device", "versions")  # what a section's heading says


@dataclass(frozen=True)
class Variant:
    """A method with options under the name it has in tables."""

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)


LINEUP = (
    Variant("ConsensusDrop", "consensusdrop"),
    Variant("vision-only (alpha 1)", "consensusdrop", {"alpha": 1.0}),
    Variant("cross-only (alpha 0)", "consensusdrop", {"alpha": 0.0}),
    Variant("recovery (vision student, rate 0.1)", "consensusdrop", {"fuser": "recovery"}),
    Variant("random", "random"),
)
RANDOM = LINEUP[-1].label


@dataclass(frozen=True)
class Row:
    """One run as its folder tells it; `metrics` is None while it is incomplete, `answered` counts what is there."""

    config: Mapping[str, Any]
    metrics: Mapping[str, Any] | None
    answered: int

    @property
    def full(self) -> bool:
        """Whether the language model received every visual token."""
        return self.metrics is not None and self.metrics["tokens"]["before"] == self.metrics["tokens"]["after"]

    @property
    def score(self) -> float | None:
        """The headline number in percent."""
        return None if self.metrics is None else self.metrics["score"]

    @property
    def label(self) -> str:
        """The variant's name, or method and changed options where it has none."""
        changed = dict(self.config["changed"])
        extra = "" if self.config["merged"] is None else f", merged={self.config['merged']}"
        for variant in LINEUP:
            if (variant.method, variant.options) == (self.config["method"], changed):
                return variant.label + extra
        return ", ".join([self.config["method"], *(f"{key}={changed[key]}" for key in sorted(changed))]) + extra

    @property
    def correct(self) -> dict[int, float]:
        """Correctness of each answer by question index, where the scorer tells it."""
        report = {} if self.metrics is None else self.metrics["report"]
        return {one["index"]: float(one["correct"]) for one in report.get("extracted", ())}


def read_rows(out: Path) -> list[Row]:
    """Every run below a folder of results, complete or not."""
    return [_read_row(path.parent) for path in sorted(out.glob("*/config.json"))]


def _read_row(folder: Path) -> Row:
    metrics = _read(folder / "metrics.json") if (folder / "metrics.json").exists() else None
    config, answers = _read(folder / "config.json"), folder / "answers.jsonl"
    absent = [key for key in CHOICE + OF_BENCHMARK + OF_SECTION if key not in config]
    if absent:
        raise DataError(f"{folder / 'config.json'}: no {', '.join(absent)} in it. Move the folder away")
    return Row(config, metrics, answers.read_bytes().count(b"\n") if answers.exists() else 0)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}). Move its folder away") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: not the file of a run. Move its folder away")
    return content


def full_score(out: Path, config: Mapping[str, Any]) -> float | None:
    """The score of the full-token run that differs from a configuration in method and budget only; None without one."""
    wanted = _without(config, CHOICE)
    for row in read_rows(out):
        if row.full and _without(row.config, CHOICE) == wanted:
            return row.score
    return None


def _without(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def markdown(rows: Iterable[Row]) -> str:
    """All tables: one section for every model, data and setting."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps(_without(row.config, CHOICE + OF_BENCHMARK), sort_keys=True), []).append(row)
    sections = [_section(group) for group in groups.values()]
    return "\n\n".join(sections) if sections else "No results yet: `make tables` measures them."


def _section(rows: list[Row]) -> str:
    config = rows[0].config
    limit = "" if config["limit"] is None else f", first {config['limit']} questions"
    versions = config["versions"]
    where = f"{config['device']}, torch {versions.get('torch')}, transformers {versions.get('transformers')}"
    tables = [_scores(rows), _differences(rows)]
    return "\n\n".join([f"**{config['model']}** on `{config['data']}`{limit} ({where})", *filter(None, tables)])


def _scores(rows: list[Row]) -> str:
    """Score and 95 % half-width of every method, budget and benchmark, the full model on top."""
    names = sorted({row.config["benchmark"] for row in rows})
    full = {row.config["benchmark"]: row for row in rows if row.full}
    cells = _cells(rows)
    header = [f"{name} ({_questions(rows, name)})" for name in names]
    lines = [_line("tokens", "method", *header, "relative"), _line("--:", "---", *["--:"] * len(names), "--:")]
    if full:
        tokens = max(row.metrics["tokens"]["before"] for row in full.values() if row.metrics)
        shown = [_cell(full.get(name)) for name in names]
        lines.append(_line(f"{tokens:g}", "all tokens (the unpatched model)", *shown, "100 %"))
    for (tokens, label), found in cells.items():
        shown = [_cell(found.get(name)) for name in names]
        lines.append(_line(str(tokens), label, *shown, _relative([found.get(name) for name in names], full)))
    note = (
        "Score in percent ± half of its 95 % interval, from the correctness of single answers taken as independent "
        "(for POPE that of accuracy stands in for F1). Relative: mean over benchmarks of score / score with all tokens."
    )
    return "\n".join([*lines, "", note])


def _cells(rows: list[Row]) -> dict[tuple[int, str], dict[str, Row]]:
    """Reduced runs by (tokens, label), most tokens first, then the line-up's order, then by name."""
    order = {variant.label: place for place, variant in enumerate(LINEUP)}
    found: dict[tuple[int, str], dict[str, Row]] = {}
    ranked = sorted(rows, key=lambda row: (-row.config["tokens"], order.get(row.label, len(order)), row.label))
    for row in ranked:
        if not row.full:
            found.setdefault((row.config["tokens"], row.label), {})[row.config["benchmark"]] = row
    return found


def _questions(rows: list[Row], benchmark: str) -> str:
    """How many questions were asked, and how many at most could not be."""
    done = [row.metrics for row in rows if row.metrics is not None and row.config["benchmark"] == benchmark]
    if not done:
        return "no complete run"
    errors = max(metrics["errors"] for metrics in done)
    return f"{done[0]['questions']} questions" + (f", {errors} unreadable" if errors else "")


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.metrics is None:
        return f"incomplete ({row.answered} answered)"
    if row.score is None:
        return "none"
    width = half_width(list(row.correct.values()))
    return f"{row.score:.1f}" + ("" if width is None else f" ± {width:.1f}")


def _relative(found: list[Row | None], full: Mapping[str, Row]) -> str:
    """Mean of score / full score; nothing unless every benchmark of the table has both."""
    shares = []
    for row in found:
        reference = None if row is None else full.get(row.config["benchmark"])
        if row is None or reference is None or row.score is None or not reference.score:
            return ""
        shares.append(row.score / reference.score)
    return f"{100 * sum(shares) / len(shares):.1f} %"


def _differences(rows: list[Row]) -> str:
    """Paired difference to random selection with the same budget: the same questions, answer by answer."""
    names = sorted({row.config["benchmark"] for row in rows})
    cells = _cells(rows)
    lines = []
    for (tokens, label), found in cells.items():
        floor = cells.get((tokens, RANDOM), {})
        shown = [difference(found.get(name), floor.get(name)) for name in names]
        if label != RANDOM and any(shown):
            lines.append(_line(str(tokens), label, *shown))
    if not lines:
        return ""
    head = [_line("tokens", "method", *names), _line("--:", "---", *["--:"] * len(names))]
    return "\n".join(["More correct answers than random selection, in points, paired by question:", "", *head, *lines])


def difference(row: Row | None, floor: Row | None) -> str:
    """Mean difference of correctness over common questions in points, ± half of its 95 % interval."""
    if row is None or floor is None:
        return ""
    mine, other = row.correct, floor.correct
    pairs = [mine[index] - other[index] for index in mine.keys() & other.keys()]
    width = half_width(pairs)
    return "" if width is None else f"{100 * sum(pairs) / len(pairs):+.1f} ± {width:.1f}"


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean, in points (normal approximation); None for fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return 100 * 1.96 * math.sqrt(variance / count)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def replace_block(text: str, block: str, name: str) -> str:
    """`text` with `block` between the two markers, and not a character changed elsewhere.

    Raises:
        DataError: unless both markers are there once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise DataError(f"{name}: needs the two lines {BEGIN} and {END}, once each; the tables go between them")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"
