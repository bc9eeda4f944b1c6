"""The paper's ablations (its tables 5 to 9) in a folder of results, by the settings that their presets vary.

The runs are ordinary ones of ConsensusDrop with one budget, which differ in a few options. Which options those are, and
which setting a printed row is about, is read off the preset of the table (`presets/alpha.json`, ...).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import floor
from typing import Any

from llava_consensus.evaluation.report.rows import Row
from llava_consensus.evaluation.report.section import ScoreCell, Section
from llava_consensus.methods import make
from llava_consensus.paper import preset
from llava_consensus.paper.material import Material, NotMeasured
from llava_consensus.paper.preset_tables import scale

METHOD = "consensusdrop"
MERGED = 20  # of 128 tokens, which the paper merges
Setting = tuple[Any, ...]  # values of an ablation's options, in their order


@dataclass(frozen=True)
class Ablation:
    """One of the paper's ablations."""

    options: tuple[str, ...]  # of the method, in which its runs differ; a setting holds their values in this order
    # the paper's scores in percent, by setting and our name of the benchmark
    printed: Mapping[Setting, Mapping[str, float]]
    fuser: str  # of all its runs

    def setting(self, row: Row) -> Setting | None:
        """The values of a run's options; None for a run of another experiment."""
        config = row.config
        merged = config["merged"]  # where a run was given none it is the paper's share of its budget
        options = {**config["options"], "merged": floor(MERGED * row.tokens / 128 + 0.5) if merged is None else merged}
        others = merged is not None and "merged" not in self.options
        changed = (
            not set(config["changed"]) <= {*self.options, "fuser", "positions"} or options.get("fuser") != self.fuser
        )
        if config["method"] != METHOD or row.full or changed or others:
            return None
        return tuple(options[name] for name in self.options)


@cache
def ablation(name: str) -> Ablation:
    """The ablation of a preset: its options are those in which the rows that the paper prints differ."""
    found, default = preset.read(name), make(METHOD)
    printed = [row for row in found.rows if row.printed]
    values = []
    for row in printed:
        words = dict(word.split("=") for word in row.method.partition(":")[2].split(",") if word)
        own = {key: type(getattr(default, key))(value) for key, value in words.items()}
        values.append({"merged": MERGED if row.merged is None else row.merged, **own})
    known = dict.fromkeys([*(key for own in values for key in own), "fuser"])
    whole = [{key: own.get(key, getattr(default, key, None)) for key in known} for own in values]
    options = tuple(key for key in known if len({own[key] for own in whole}) > 1)
    scores: dict[Setting, Mapping[str, float]] = {}
    for own, row in zip(whole, printed, strict=True):
        beside = found.printed_row(row.printed) or {}
        percent = {name: beside[column] / scale(column) for name, column in found.benchmarks.items()}
        scores[tuple(own[key] for key in options)] = percent
    return Ablation(options, scores, str(whole[0]["fuser"]))


@dataclass(frozen=True)
class Settings:
    """The runs of one ablation with one budget."""

    ablation: Ablation
    section: Section
    tokens: float
    cells: Mapping[Setting, Mapping[str, ScoreCell]]  # by setting and benchmark, complete runs alone

    @cached_property
    def names(self) -> list[str]:
        """Benchmarks that every setting has, the paper's first."""
        common = set.intersection(*(set(cells) for cells in self.cells.values()))
        ordered = [name for name in next(iter(self.printed.values())) if name in common]
        return ordered + sorted(common - set(ordered))

    @property
    def averaged(self) -> list[str]:
        """Benchmarks in the means: those in which the full model is above guessing, or all if there is none."""
        return [name for name in self.names if name not in self.section.near_chance] or self.names

    @property
    def titles(self) -> list[str]:
        """The names of these benchmarks as papers write them."""
        return [self.section.title(name) for name in self.names]

    @property
    def printed(self) -> Mapping[Setting, Mapping[str, float]]:
        """The paper's scores."""
        return self.ablation.printed

    def percent(self, setting: Setting, name: str) -> float:
        """A score in percent."""
        return self.cells[setting][name].percent


def settings(material: Material, name: str, policy: str = "renumber") -> Settings:
    """The runs of an ablation under a position policy: of the section and budget with most of the paper's settings,
    then with most runs. Another setting counts only where it has every benchmark that the paper's settings here have.

    Raises:
        NotMeasured: when fewer than two settings have a benchmark in common.
    """
    wanted = ablation(name)
    found = [
        _settings(section, wanted, tokens, policy)
        for section in material.sections
        for tokens in sorted({line.tokens for line in section.reduced})
    ]
    whole = [one for one in found if len(one.cells) > 1 and one.names]
    if not whole:
        raise NotMeasured(f"no two complete settings of {', '.join(wanted.options)} with one budget")
    return max(whole, key=lambda one: (len(one.cells.keys() & one.printed.keys()), len(one.cells) * len(one.names)))


def _settings(section: Section, ablation: Ablation, tokens: float, policy: str) -> Settings:
    cells: dict[Setting, dict[str, ScoreCell]] = {}
    for line in section.reduced:
        for name, run in line.runs.items() if line.tokens == tokens else ():
            setting, cell = ablation.setting(run), section.cell(line, name)
            same = run.config["options"].get("positions", "renumber") == policy
            if same and setting is not None and cell is not None and run.complete:
                cells.setdefault(setting, {})[name] = cell
    found = Settings(ablation, section, tokens, dict(sorted(cells.items())))
    ours = [set(found.cells[setting]) for setting in found.printed if setting in found.cells]
    needed = set.intersection(*ours) if ours else set()
    return replace(found, cells={setting: row for setting, row in found.cells.items() if needed <= set(row)})
