"""Every figure of the paper from result files: `llava-consensus paper figures --out results --to FOLDER`.

`FIGURES` is the only list. A figure is a function of what was found in the folder of results (`material.py`); one whose
results are not there is named with the command that makes them, and nothing is drawn. Needs the extra `plots`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.evaluation.report.rows import Row
from llava_consensus.paper.ablations import settings
from llava_consensus.paper.figures import ablations, costs, study, style
from llava_consensus.paper.material import Material, NotMeasured, read

__all__ = ["FIGURES", "Drawn", "Material", "draw", "read"]

STUDY = "llava-consensus paper study"
METHODS = '--methods "consensusdrop vispruner sparsevlm" --tokens "192 128 64 32"'
SWEEP = f'llava-consensus sweep --bench "vqav2 gqa sqa textvqa pope mme mmbench mmbench_cn mmvet" {METHODS}'
ABLATION = "llava-consensus paper ablation"
TIMED = f"{SWEEP} && llava-consensus bench --out results/bench-tradeoff.json {METHODS}"
BENCH = 'llava-consensus bench --out results/bench.json --tokens "432 288 144 57 28"'


class Figure(NamedTuple):
    """One figure: name of its files, what it shows, what draws it, the command that makes its results, and what says of
    them how many questions, which model and which device.
    """

    name: str
    title: str
    draw: Callable[[Material], Any]
    makes: str = ""
    about: Callable[[Material], str] = lambda _: ""


class Drawn(NamedTuple):
    """Result of one figure: its files, or the reason why there are none."""

    figure: Figure
    files: Sequence[Path]
    missing: str = ""


def of_study(material: Material, drawn: Callable[[Sequence[Any]], Sequence[str]] | None = None) -> str:
    """Model, data and questions of the study's benchmarks, or of those that `drawn` picks of its rows."""
    if material.study is None:
        return ""
    rows = material.study["rows"]
    names = None if drawn is None else drawn(rows)
    full = {
        row["title"]: row for row in rows if row["scores"] == "full" and (names is None or row["benchmark"] in names)
    }
    return f"{_setting(material.study['description'])}: {_counts(full)}; positions kept"


def of_scap(material: Material) -> str:
    """Model, data and questions of the probe."""
    found = material.scap or {"description": {}, "benchmark": ""}
    return f"{_setting(found['description'])}: {_counts({found['benchmark']: found})}"


def of_runs(material: Material) -> str:
    """Model, data and questions of the benchmarks whose mean is drawn."""
    section, _ = costs.drawn(material)
    assert section.full is not None
    return _asked([section.full.runs[name] for name in section.averaged])


def of_ablation(ablation: str) -> Callable[[Material], str]:
    """Model, data and questions of the benchmarks that every setting of an ablation has, which alone are drawn."""

    def about(material: Material) -> str:
        found = settings(material, ablation)
        return _asked([cells[name].row for cells in found.cells.values() for name in found.names])

    return about


def of_bench(material: Material) -> str:
    """Model, device and number of timed answers; whiskers are quartiles."""
    found = [
        f"{one['model']} on {one['machine']['device']} ({one['machine'].get('processor', '')}), medians of "
        f"{len(one['rows'][0].get('samples', ()))} answers, whiskers: quartiles"
        for one in material.measured
    ]
    return "; ".join(found)


def of_both(material: Material) -> str:
    """Questions asked, and answers timed."""
    return f"{of_runs(material)}; {of_bench(material)}"


def _setting(config: Mapping[str, Any]) -> str:
    return f"{config.get('model')} on {config.get('data')}, {config.get('device')}"


def _asked(rows: Sequence[Row]) -> str:
    runs = {row.facts.title: row for row in rows if row.metrics}
    counts = {name: {"questions": row.metrics["questions"], "pictures": row.pictures} for name, row in runs.items()}  # type: ignore[index]
    return f"{_setting(rows[0].config)}: {_counts(counts)}"


def _counts(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Numbers of questions and pictures, by the benchmark's title."""
    return ", ".join(
        f"{name} {one['questions']} questions / {one.get('pictures')} pictures" for name, one in found.items()
    )


def _ablation(file: str, title: str, draw: Callable[[Material], Any], name: str) -> Figure:
    """The figure of one ablation, by the name of its preset."""
    return Figure(file, title, draw, f"{ABLATION} {name}", of_ablation(name))


FIGURES = (
    Figure("f02-recovery-helps", "both signals alone and together", study.recovery_helps, STUDY, of_study),
    Figure("f03-three-way", "disagreement, correction and gain", study.three_way, STUDY, of_study),
    Figure(
        "f04-decay", "correction over the recovery rate", study.decay, STUDY, partial(of_study, drawn=study.in_decay)
    ),
    Figure("f06-pareto", "accuracy over time and cache", costs.pareto, TIMED, of_both),
    _ablation("f09-alpha", "weight of the vision side", ablations.alpha, "alpha"),
    _ablation("f10-temperature", "temperatures of both sides", ablations.temperature, "temperature"),
    _ablation("f11-recovery", "student and rate of recovery", ablations.recovery, "recovery"),
    _ablation("f12-anchors", "how many tokens are merged ones", ablations.anchors, "anchors"),
    _ablation("f13-score", "how saliencies are scored", ablations.score, "score"),
    Figure("f16-efficiency", "six costs over the share taken away", costs.over_ratio, BENCH, of_bench),
    Figure("claim-11-scap", "where the probe looks whatever the picture shows", study.scap_by_place, STUDY, of_scap),
)


def draw(material: Material, folder: Path) -> Iterator[Drawn]:
    """Every figure as PNG and SVG in a folder, one after the other.

    Raises:
        DataError: a file cannot be written.
        MissingDependency: without matplotlib.
    """
    for figure in FIGURES:
        with style.sheet():
            try:
                drawing = figure.draw(material)
                style.caption(drawing, figure.about(material))
                files = style.save_all(drawing, folder, figure.name)
            except NotMeasured as error:
                yield Drawn(figure, (), str(error))
                continue
        yield Drawn(figure, files)
