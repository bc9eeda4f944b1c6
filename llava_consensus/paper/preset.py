"""Presets: a grid of runs as a file anyone can read and copy, one for each table of the paper (`presets/*.json`), and
its runs in a folder of results, found by what was asked with which method, whatever version of this code answered
and whichever command asked it.

    sections(preset, wanted, rows)    # as tables of a folder have them, one for each set of benchmarks

A file:

    {"title": "T5: weight of the vision side", "about": "alpha of the convex fuser at 128 tokens",
     "printed": "ablation_alpha",                     the table of paper.json whose numbers stand beside
     "reference": "consensusdrop",                    the method that every row is compared with, at the same tokens
     "benchmarks": {"pope": "pope_f1", ...},          benchmark -> its column in that table
     "rows": [{"label": "alpha 0.3", "method": "consensusdrop:alpha=0.3", "tokens": 128,
               "printed": {"alpha": 0.3}}, ...]}      the printed row: the one with these values; left out if none is

A row may have `merged`, how many of its tokens are merged ones, and `against`, the method it is compared with in place
of the reference; `tokens` may be a list, which stands for a row each. A preset may have `full` (the printed row of all
tokens), `samples` (benchmark -> number of its questions, drawn at random), `fewer` (budget -> the benchmarks that
alone are asked at it, where not all are), `host_options` (of the model's host), and `needs`, where not any model will
do: `weights` says which, `model` names a checkpoint, `remote_code` whether it brings code of its own, `hosts` whose
hosts (names of `llava-consensus list`). A preset of which the paper prints nothing has an empty `printed` and empty
columns.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.files import misread, read_json
from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import FULL, Row, version
from llava_consensus.evaluation.report.section import Section

FOLDER = "presets"
AGAIN = "Mend it; llava_consensus/paper/preset.py says what is in it"
CHOSEN = ("method", "changed", "tokens", "merged")  # keys of a configuration by which a run is found
SAME_IN_SECTION = ("model", "weights", "data", "device", "dtype", "loading")

Reduction = Mapping[str, Any]  # of a configuration: method, changed, tokens, merged
Wanted = Sequence[Reduction]  # one for each row of a preset, in its order
ALL_TOKENS: Reduction = {"method": FULL, "changed": {}, "tokens": None, "merged": None}


@dataclass(frozen=True, eq=False)
class PresetRow:
    """One line of a preset: a method as on the command line, and its budget."""

    label: str
    method: str
    tokens: int | float
    merged: int | None = None
    against: str = ""
    printed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """A grid of runs with the numbers that the paper prints for it; see the head of this file."""

    name: str
    title: str
    about: str
    printed: str
    reference: str
    benchmarks: Mapping[str, str]
    rows: tuple[PresetRow, ...]
    full: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    limit: int | None = None  # only the first questions of each
    fewer: Mapping[str, Sequence[str]] = field(default_factory=dict)
    host_options: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""
    model: str = "liuhaotian/llava-v1.5-7b"  # a checkpoint with these weights
    remote_code: bool = False  # whether it brings code of its own
    hosts: tuple[str, ...] = ()

    def asked_at(self, tokens: int | float) -> list[str]:
        """The benchmarks that are asked at a budget."""
        chosen = self.fewer.get(f"{tokens:g}", self.benchmarks)
        return [name for name in self.benchmarks if name in chosen]

    def reference_of(self, row: PresetRow) -> PresetRow | None:
        """The row that another is compared with: its own or the common reference with as many tokens, split as the
        paper does.
        """
        method = row.against or self.reference
        same = (one for one in self.rows if one.method == method and one.tokens == row.tokens)
        return next((one for one in same if one.merged is None), None)

    def printed_row(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The paper's row with these values; None for no values."""
        rows = paper.printed_tables()[self.printed] if values else ()
        return next((row for row in rows if values.items() <= row.items()), None)


def names() -> list[str]:
    """The presets that come with the package."""
    folder = resources.files("llava_consensus.paper") / FOLDER
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def read(name: str) -> Preset:
    """The preset called `name`, or the one in a file.

    Raises:
        OptionError: for a name that is neither.
        DataError: for a file that is no preset.
    """
    shipped = Path(str(resources.files("llava_consensus.paper") / FOLDER / f"{name}.json"))
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        raise OptionError(f"preset {name!r}: must be one of {', '.join(names())}, or a file like theirs")
    with misread(str(path), AGAIN):
        return _preset(read_json(path, AGAIN, dict), path)


def _preset(content: dict[str, Any], path: Path) -> Preset:
    if content["printed"] not in ("", *paper.printed_tables()):
        known = ", ".join(paper.printed_tables())
        raise DataError(f"{path}: printed={content['printed']!r} must be one of {known}, or empty. {AGAIN}")
    needs = content.pop("needs", {})
    rows = tuple(row for given in content.pop("rows") for row in _rows(given))
    _check_fewer(content, rows, path)
    return Preset(path.stem, rows=rows, **{**needs, "hosts": tuple(needs.get("hosts", ()))}, **content)


def with_benchmarks(preset: Preset, names: str | None) -> Preset:
    """A preset with some of its benchmarks. OptionError for one that it does not have."""
    if names is None:
        return preset
    absent = [name for name in names.split() if name not in preset.benchmarks]
    if absent or not names.split():
        raise OptionError(f"--bench {names!r}: must be of {', '.join(preset.benchmarks)}, which {preset.name} asks")
    return replace(preset, benchmarks={name: preset.benchmarks[name] for name in names.split()})


def at_budgets(preset: Preset, text: str | None) -> Preset:
    """A preset with some of its budgets. OptionError for one that it does not have."""
    if text is None:
        return preset
    known = {f"{row.tokens:g}" for row in preset.rows}
    if not text.split() or not set(text.split()) <= known:
        raise OptionError(
            f"--tokens {text!r}: must be of {', '.join(sorted(known, key=float))}, which {preset.name} asks"
        )
    return replace(preset, rows=tuple(row for row in preset.rows if f"{row.tokens:g}" in text.split()))


def keeping_positions(preset: Preset) -> Preset:
    """A preset with positions kept in every row, and a name of its own for its tables."""

    def kept(method: str) -> str:
        return method and f"{method}{',' if ':' in method else ':'}positions=keep"

    rows = tuple(replace(row, method=kept(row.method), against=kept(row.against)) for row in preset.rows)
    return replace(preset, name=f"{preset.name}-keep", reference=kept(preset.reference), rows=rows)


def _check_fewer(content: Mapping[str, Any], rows: Sequence[PresetRow], path: Path) -> None:
    """Raises DataError unless `fewer` is about budgets and benchmarks of the preset."""
    budgets = {f"{row.tokens:g}" for row in rows}
    for tokens, names in content.get("fewer", {}).items():
        if tokens not in budgets or not isinstance(names, list) or not set(names) <= content["benchmarks"].keys():
            given = f"fewer={{{tokens!r}: {names!r}}}"
            raise DataError(f"{path}: {given} must be a budget of its rows and a list of its benchmarks. {AGAIN}")


def _rows(given: Mapping[str, Any]) -> list[PresetRow]:
    """The rows of a line of a preset: one for each of its budgets."""
    budgets = given["tokens"] if isinstance(given["tokens"], list) else [given["tokens"]]
    return [PresetRow(**{**given, "tokens": tokens}) for tokens in budgets]


# ---- its runs in a folder of results


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


def holds(row: Row, limit: int | None, sample: int | None = None) -> bool:
    """True if a run asked the first `limit` questions, or `sample` drawn ones, all of them for None. A run that came to
    the end of the questions before its own number asked all there are.
    """
    own = (row.config["limit"], row.config.get("sample"))
    if own == (limit, sample) or row.metrics is None:
        return own == (limit, sample)
    asked = row.metrics["questions"]
    return bool(asked < (own[0] or own[1] or inf) and asked <= (limit or sample or inf))


def _grouped(rows: Iterable[Row], preset: Preset) -> list[list[Row]]:
    """Runs that ask what the preset asks, by model, data and device; of each benchmark the version that most have,
    where a judge may have graded some of them.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        plain = not row.config.get("match") and not row.config.get("choices")
        if plain and row.benchmark in preset.benchmarks and holds(row, preset.limit, preset.samples.get(row.benchmark)):
            groups.setdefault(str([row.config.get(key) for key in SAME_IN_SECTION]), []).append(row)
    found = []
    for group in groups.values():
        counts: dict[str, Counter[str]] = {}
        for row in group:
            counts.setdefault(row.benchmark, Counter())[version(row, "judge")] += 1
        usual = {name: count.most_common(1)[0][0] for name, count in counts.items()}
        found.append([row for row in group if version(row, "judge") == usual[row.benchmark]])
    return found


def _budgets(preset: Preset) -> list[list[float]]:
    """Budgets that are asked on the same benchmarks together, those with most benchmarks first."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for tokens in dict.fromkeys(row.tokens for row in preset.rows):
        groups.setdefault(tuple(preset.asked_at(tokens)), []).append(tokens)
    return [groups[names] for names in sorted(groups, key=len, reverse=True)]


def _run(rows: Iterable[Row], reduction: Reduction, benchmark: str) -> Row | None:
    """The run of a benchmark with a reduction; of several a complete one, then the one with most answers."""
    keys = ("method",) if reduction["method"] == FULL else CHOSEN
    found = [
        row for row in rows if row.benchmark == benchmark and all(row.config[key] == reduction[key] for key in keys)
    ]
    return max(found, key=lambda row: (row.complete, row.answered, row.folder.name), default=None)
