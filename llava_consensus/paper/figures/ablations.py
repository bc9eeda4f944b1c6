"""Which runs belong to which ablation of the paper (its tables 5 to 9), and their scores beside the printed ones.

The runs are ordinary ones of ConsensusDrop with one budget, which differ in a few options. Scores are in percent: a
benchmark's own divided by its scale.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import Line, Row
from llava_consensus.evaluation.report.section import Cell, Section
from llava_consensus.paper.figures.material import Material, NotMeasured

METHOD = "consensusdrop"
PRINTED = {
    "mme": "mme",
    "pope": "pope_f1",
    "sqa": "scienceqa",
    "seed": "seed",
    "textvqa": "textvqa",
}  # ours: theirs
SCALES = {"mme": 20.0}  # of the paper's columns
STUDENTS = {"Visual": "vision", "Cross": "cross"}

Setting = tuple[Any, ...]


@dataclass(frozen=True)
class Ablation:
    """One of the paper's ablations.

    Args:
        title: for figures.
        options: of the method, in which its runs differ; a setting holds their values in this order.
        table: of the paper.
        printed: the setting of a printed row.
        only: what a run's options must be beside that.
    """

    title: str
    options: tuple[str, ...]
    table: str
    printed: Callable[[Mapping[str, Any]], Setting]
    only: Mapping[str, Any]

    def setting(self, row: Row) -> Setting | None:
        """The values of a run's options; None for a run of another experiment."""
        config = row.config
        changed, options = set(config["changed"]), {**config["options"], "merged": merged(row)}
        allowed = {*self.options, *self.only}
        others = config["merged"] is not None and "merged" not in self.options
        wrong = any(options.get(key) != value for key, value in self.only.items())
        if config["method"] != METHOD or row.full or not changed <= allowed or others or wrong:
            return None
        return tuple(options[name] for name in self.options)


ALPHA = Ablation("alpha", ("alpha",), "ablation_alpha", lambda row: (row["alpha"],), {"fuser": "convex"})
TEMPERATURE = Ablation(
    "temperature",
    ("tau_vision", "tau_cross"),
    "ablation_temperature",
    lambda row: (row["tau_v"], row["tau_c"]),
    {"fuser": "convex"},
)
RECOVERY = Ablation(
    "recovery",
    ("student", "rate"),
    "ablation_recovery",
    lambda row: (STUDENTS[row["student"]], row["gamma"]),
    {"fuser": "recovery"},
)
ANCHORS = Ablation(
    "merged tokens", ("merged",), "ablation_anchor", lambda row: (int(row["merge"]),), {"fuser": "convex"}
)
SCORE = Ablation(
    "scores",
    ("vision_score", "aggregate"),
    "ablation_score",
    lambda row: (row["vision"], row["cross"]),
    {"fuser": "convex"},
)
ABLATIONS = (ALPHA, TEMPERATURE, RECOVERY, ANCHORS, SCORE)


def merged(row: Row) -> int:
    """Merged tokens of a run: those it was given, or the paper's share of its budget, 20 of 128."""
    given = row.config["merged"]
    return floor(20 * row.tokens / 128 + 0.5) if given is None else int(given)


@dataclass(frozen=True)
class Grid:
    """The runs of one ablation."""

    ablation: Ablation
    section: Section
    tokens: float
    cells: Mapping[Setting, Mapping[str, Cell]]  # by setting and benchmark, complete runs alone

    @property
    def names(self) -> list[str]:
        """Benchmarks that every setting has, the paper's first."""
        common = set.intersection(*(set(cells) for cells in self.cells.values()))
        ordered = [name for name in PRINTED if name in common]
        return ordered + sorted(common - set(ordered))

    @property
    def averaged(self) -> list[str]:
        """Those that means are of: the full model can be told from guessing there. All where it can be nowhere."""
        return [name for name in self.names if name not in self.section.near_chance] or self.names

    @property
    def titles(self) -> list[str]:
        """The names of these benchmarks as papers write them."""
        return [self.section.title(name) for name in self.names]

    def percent(self, setting: Setting, name: str) -> float:
        """A score in percent."""
        row = self.cells[setting][name].row
        return (row.score or 0.0) / row.facts.scale

    def bounds(self, setting: Setting, name: str) -> tuple[float, float]:
        """Its interval in percent; the score itself where it has none."""
        cell = self.cells[setting][name]
        low, high = cell.bounds or (cell.row.score or 0.0,) * 2
        return low / cell.row.facts.scale, high / cell.row.facts.scale

    def half(self, setting: Setting, name: str) -> float:
        """Half of the interval's width."""
        low, high = self.bounds(setting, name)
        return (high - low) / 2

    def mean(self, setting: Setting) -> float:
        """Mean over the averaged benchmarks."""
        return sum(self.percent(setting, name) for name in self.averaged) / len(self.averaged)

    @property
    def best(self) -> Setting:
        """The setting with the highest mean."""
        return max(self.cells, key=self.mean)

    @property
    def printed(self) -> dict[Setting, dict[str, float]]:
        """The paper's scores in percent, by setting and our name of the benchmark."""
        return {
            self.ablation.printed(row): {name: row[key] / SCALES.get(name, 1.0) for name, key in PRINTED.items()}
            for row in paper.tables()[self.ablation.table]
        }


def grid(material: Material, ablation: Ablation) -> Grid:
    """The runs of an ablation: of the section and budget with most of the paper's settings, then with most runs.
    Another setting counts only where it has every benchmark that the paper's settings here have.

    Raises:
        NotMeasured: when fewer than two settings have a benchmark in common.
    """
    grids = [
        _grid(section, ablation, tokens)
        for section in material.sections
        for tokens in sorted({line.tokens for line in section.reduced})
    ]
    whole = [one for one in grids if len(one.cells) > 1 and one.names]
    if not whole:
        raise NotMeasured(f"no two complete settings of {', '.join(ablation.options)} with one budget")
    return max(whole, key=lambda one: (len(one.cells.keys() & one.printed.keys()), len(one.cells) * len(one.names)))


def _grid(section: Section, ablation: Ablation, tokens: float) -> Grid:
    cells: dict[Setting, dict[str, Cell]] = {}
    lines: Sequence[Line] = [line for line in section.reduced if line.tokens == tokens]
    for line in lines:
        for name in line.runs:
            cell = section.cell(line, name)
            setting = ablation.setting(line.runs[name])
            if setting is not None and cell is not None and cell.row.complete:
                cells.setdefault(setting, {})[name] = cell
    found = Grid(ablation, section, tokens, dict(sorted(cells.items())))
    printed = found.printed
    ours = [set(found.cells[setting]) for setting in printed if setting in found.cells]
    needed = set.intersection(*ours) if ours else set()
    return replace(found, cells={setting: row for setting, row in found.cells.items() if needed <= set(row)})
