"""Every figure of the paper from result files: `llava-consensus paper figures --out results --to FOLDER`.

`FIGURES` is the only list. A figure is a function of what was found in the folder of results (`material.py`); one whose
results are not there is named with the command that makes them, and nothing is drawn. Needs the extra `plots`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.paper.figures import ablations, costs, diagrams, study, style
from llava_consensus.paper.material import Material, NotMeasured, read

__all__ = ["FIGURES", "Drawn", "Material", "draw", "read"]

STUDY = "llava-consensus paper study"
METHODS = '--methods "consensusdrop vispruner sparsevlm" --tokens "192 128 64 32"'
SWEEP = f'llava-consensus sweep --bench "vqav2 gqa sqa textvqa pope mme mmbench mmbench_cn mmvet" {METHODS}'
ABLATION = "llava-consensus paper ablation"
FIVE = "for name in alpha temperature recovery anchors score; do llava-consensus paper ablation $name; done"
TIMED = f"{SWEEP} && llava-consensus bench --out results/bench-tradeoff.json {METHODS}"
BENCH = 'llava-consensus bench --out results/bench.json --tokens "432 288 144 57 28"'
GROWTH = "llava-consensus bench --growth --methods all"


class Figure(NamedTuple):
    """One figure: name of its files, what it shows, what draws it, and the command that makes its results."""

    name: str
    title: str
    draw: Callable[[Material], Any]
    makes: str = ""


class Drawn(NamedTuple):
    """What became of one figure: the files it was written to, or why there are none."""

    figure: Figure
    files: Sequence[Path]
    missing: str = ""


FIGURES = (
    Figure("f02-recovery-helps", "both signals alone and together", study.recovery_helps, STUDY),
    Figure("f03-three-way", "disagreement, correction and gain", study.three_way, STUDY),
    Figure("f04-decay", "correction over the recovery rate", study.decay, STUDY),
    Figure("f05-pipeline", "the method", diagrams.pipeline),
    Figure("f06-pareto", "accuracy over time and cache", costs.pareto, TIMED),
    Figure("f07-per-dataset", "the same for each benchmark", costs.per_dataset, TIMED),
    Figure("f08-fusers", "the two fusers", diagrams.fusers),
    Figure("f09-alpha", "weight of the vision side", ablations.alpha, f"{ABLATION} alpha"),
    Figure("f10-temperature", "temperatures of both sides", ablations.temperature, f"{ABLATION} temperature"),
    Figure("f11-recovery", "student and rate of recovery", ablations.recovery, f"{ABLATION} recovery"),
    Figure("f12-anchors", "how many tokens are merged ones", ablations.anchors, f"{ABLATION} anchors"),
    Figure("f13-score", "how saliencies are scored", ablations.score, f"{ABLATION} score"),
    Figure("f14-summary", "the best of every ablation", ablations.bars, FIVE),
    Figure("f15-summary-radar", "the same as a radar", ablations.circle, FIVE),
    Figure("f16-efficiency", "six costs over the share taken away", costs.over_ratio, BENCH),
    Figure("f17-time-and-cache", "time and cache over the same", costs.time_and_cache, BENCH),
    Figure("f18-speedup", "speed-ups by budget", costs.speedups, BENCH),
    Figure("f19-growth", "how the methods' own work grows", costs.growth, GROWTH),
    Figure("claim-11-scap", "where the probe looks whatever the picture shows", study.scap_by_place, STUDY),
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
                files = style.save_all(figure.draw(material), folder, figure.name)
            except NotMeasured as error:
                yield Drawn(figure, (), str(error))
                continue
        yield Drawn(figure, files)
