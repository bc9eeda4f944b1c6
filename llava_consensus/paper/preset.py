"""Presets: grids of runs as files that anyone can read and copy, one for each table of the paper (`presets/*.json`).

    {"title": "T5: weight of the vision side", "about": "alpha of the convex fuser at 128 tokens",
     "printed": "ablation_alpha",                     the table of paper.json whose numbers are listed beside ours
     "reference": "consensusdrop",                    the method that every row is compared with, at the same tokens
     "benchmarks": {"pope": "pope_f1", ...},          benchmark -> its column in that table
     "rows": [{"label": "alpha 0.3", "method": "consensusdrop:alpha=0.3", "tokens": 128,
               "printed": {"alpha": 0.3}}, ...]}      the printed row: the one with these values; left out if none is

A row may have `merged` (how many of its tokens are merged ones) and `against` (the method it is compared with instead
of the reference). `tokens` may be a list, which means one row each. A preset may have `full` (the printed row of all
tokens), `samples` (benchmark -> number of questions, drawn at random), `fewer` (budget -> the only benchmarks asked at
it), `host_options`, `models` (that `sweep --preset` runs), and `needs`: `weights`, `model` (a checkpoint),
`remote_code`, `hosts` (names of `llava-consensus list`). A preset of which the paper prints nothing has an empty
`printed` and empty columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.files import misread, read_json
from llava_consensus.evaluation.report import paper
from llava_consensus.methods import PLUS, make
from llava_consensus.reduction.budget import Budget, Share, budget
from llava_consensus.reduction.options import options

if TYPE_CHECKING:
    from llava_consensus.reduction.method import Method

FOLDER = resources.files("llava_consensus.paper") / "presets"
AGAIN = "Mend it; llava_consensus/paper/preset.py says what is in it"


@dataclass(frozen=True, eq=False)
class PresetRow:
    """One line of a preset: a method as on the command line, and its budget."""

    label: str
    method: str
    tokens: int | float
    merged: int | None = None
    against: str = ""
    printed: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def reduction(self) -> "tuple[Method, Budget | Share]":
        name, _, rest = self.method.partition(":")
        composed = PLUS.search(self.method)
        method = make(self.method) if composed else make(name, **options(filter(None, rest.split(","))))
        return method, budget(self.tokens, self.merged)


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
    fewer: Mapping[str, Sequence[str]] = field(default_factory=dict)
    host_options: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""
    model: str = "liuhaotian/llava-v1.5-7b"  # a checkpoint with these weights
    remote_code: bool = False
    hosts: tuple[str, ...] = ()
    models: Sequence[str] = ()  # of `sweep --preset`

    def asked_at(self, tokens: int | float) -> list[str]:
        chosen = self.fewer.get(f"{tokens:g}", self.benchmarks)
        return [name for name in self.benchmarks if name in chosen]

    def reference_of(self, row: PresetRow) -> PresetRow | None:
        """The row with the same number of tokens that another is compared with."""
        method = row.against or self.reference
        same = (other for other in self.rows if other.method == method and other.tokens == row.tokens)
        return next((other for other in same if other.merged is None), None)

    def printed_row(self, row: PresetRow | None) -> Mapping[str, Any]:
        """The paper's row beside a row, None is all tokens; empty if the paper prints none."""
        values = self.full if row is None else row.printed
        rows = paper.printed_tables()[self.printed] if values else ()
        return next((printed for printed in rows if values.items() <= printed.items()), {})

    def narrowed(self, benchmarks: str | None = None, tokens: str | None = None) -> "Preset":
        """A copy with some of its benchmarks and budgets. OptionError for one that it does not have."""
        budgets = {f"{row.tokens:g}": None for row in sorted(self.rows, key=lambda row: row.tokens)}
        for argument, text, known in (("--bench", benchmarks, self.benchmarks), ("--tokens", tokens, budgets)):
            if text is not None and (not text.split() or not set(text.split()) <= set(known)):
                raise OptionError(f"{argument} {text!r}: must be of {', '.join(known)}, which {self.name} asks")
        names = self.benchmarks if benchmarks is None else benchmarks.split()
        rows = [row for row in self.rows if tokens is None or f"{row.tokens:g}" in tokens.split()]
        return replace(self, benchmarks={name: self.benchmarks[name] for name in names}, rows=tuple(rows))

    def keeping_positions(self) -> "Preset":
        """A copy with positions kept in every row, and a separate name."""

        def kept(method: str) -> str:
            return method and f"{method}{',' if ':' in method else ':'}positions=keep"

        rows = tuple(replace(row, method=kept(row.method), against=kept(row.against)) for row in self.rows)
        return replace(self, name=f"{self.name}-keep", reference=kept(self.reference), rows=rows)


def names() -> list[str]:
    return sorted(file.name.removesuffix(".json") for file in FOLDER.iterdir() if file.name.endswith(".json"))


def read(name: str) -> Preset:
    """The preset called `name`, or that in a file. OptionError for neither, DataError for a file that is no preset."""
    shipped = Path(str(FOLDER / f"{name}.json"))
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        raise OptionError(f"preset {name!r}: must be one of {', '.join(names())}, or a file like theirs")
    with misread(str(path), AGAIN):
        return _preset(read_json(path, AGAIN, dict), path)


def _preset(content: dict[str, Any], path: Path) -> Preset:
    if content["printed"] not in ("", *paper.printed_tables()):
        known = ", ".join(paper.printed_tables())
        raise DataError(f"{path}: printed={content['printed']!r} must be one of {known}, or empty. {AGAIN}")
    needs, rows = content.pop("needs", {}), []
    for given in content.pop("rows"):
        tokens = given["tokens"] if isinstance(given["tokens"], list) else [given["tokens"]]
        rows += [PresetRow(**{**given, "tokens": number}) for number in tokens]
    budgets = {f"{row.tokens:g}" for row in rows}
    for number, chosen in content.get("fewer", {}).items():
        if number not in budgets or not isinstance(chosen, list) or not set(chosen) <= content["benchmarks"].keys():
            given = f"fewer={{{number!r}: {chosen!r}}}"
            raise DataError(f"{path}: {given} must be a budget of its rows and a list of its benchmarks. {AGAIN}")
    return Preset(path.stem, rows=tuple(rows), **{**needs, "hosts": tuple(needs.get("hosts", ()))}, **content)
