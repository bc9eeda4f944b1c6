"""Presets: a grid of runs as a file anyone can read and copy, one for each table of the paper (`presets/*.json`).

    {"title": "T5: weight of the vision side", "about": "alpha of the convex fuser at 128 tokens",
     "printed": "ablation_alpha",                     the table of paper.json whose numbers stand beside
     "reference": "consensusdrop",                    the method that every row is compared with, at the same tokens
     "benchmarks": {"pope": "pope_f1", ...},          benchmark -> its column in that table
     "rows": [{"label": "alpha 0.3", "method": "consensusdrop:alpha=0.3", "tokens": 128,
               "printed": {"alpha": 0.3}}, ...]}      the printed row: the one with these values; left out if none is

A row may have `merged`, how many of its tokens are merged ones, and `against`, the method it is compared with in place
of the reference; `tokens` may be a list, which stands for a row each. A preset may have `full` (the printed row of all
tokens), `limits` (benchmark -> only its first questions), `fewer` (budget -> the benchmarks that alone are asked at it,
where not all are), `host_options` (of the model's host), and `needs`, where not
any model will do: `weights` says which, `hosts` whose hosts (names of `llava-consensus list`). A preset of which the
paper prints nothing has an empty `printed` and empty columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.shapes import COUNT_OR_NONE, NUMBER, check_shape

FOLDER = "presets"
AGAIN = "Mend it; llava_consensus/paper/preset.py says what is in it"
SHAPE = {**dict.fromkeys(("title", "about", "printed", "reference"), str), "benchmarks": dict, "rows": list}
ROW_SHAPE = {"label": str, "method": str, "tokens": NUMBER}


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
    limits: Mapping[str, int] = field(default_factory=dict)
    fewer: Mapping[str, Sequence[str]] = field(default_factory=dict)
    host_options: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def is_ablation(self) -> bool:
        """Whether it varies the paper's default configuration."""
        return self.printed.startswith("ablation_")

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
        rows = paper.tables()[self.printed] if values else ()
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
    content = read_json(path, AGAIN, dict)
    check_shape(content, SHAPE, path, AGAIN)
    if content["printed"] not in ("", *paper.tables()):
        raise DataError(
            f"{path}: printed={content['printed']!r} must be one of {', '.join(paper.tables())}, or empty. {AGAIN}"
        )
    needs = content.pop("needs", {})
    rows = tuple(row for given in content.pop("rows") for row in _rows(given, path))
    _check_fewer(content, rows, path)
    return Preset(
        path.stem, rows=rows, weights=needs.get("weights", ""), hosts=tuple(needs.get("hosts", ())), **content
    )


def _check_fewer(content: Mapping[str, Any], rows: Sequence[PresetRow], path: Path) -> None:
    """Raises DataError unless `fewer` is about budgets and benchmarks of the preset."""
    budgets = {f"{row.tokens:g}" for row in rows}
    for tokens, names in content.get("fewer", {}).items():
        if tokens not in budgets or not isinstance(names, list) or not set(names) <= content["benchmarks"].keys():
            given = f"fewer={{{tokens!r}: {names!r}}}"
            raise DataError(f"{path}: {given} must be a budget of its rows and a list of its benchmarks. {AGAIN}")


def _rows(given: Mapping[str, Any], path: Path) -> list[PresetRow]:
    """The rows that a line of a preset stands for: one for each of its budgets."""
    check_shape(given, {**ROW_SHAPE, "tokens": (*NUMBER, list)}, path, AGAIN)
    budgets = given["tokens"] if isinstance(given["tokens"], list) else [given["tokens"]]
    for tokens in budgets:
        check_shape({**given, "tokens": tokens}, ROW_SHAPE, path, AGAIN)
    check_shape({"merged": given.get("merged")}, {"merged": COUNT_OR_NONE}, path, AGAIN)
    return [PresetRow(**{**given, "tokens": tokens}) for tokens in budgets]
