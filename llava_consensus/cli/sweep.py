"""The command `sweep`: a grid of runs, of its arguments or of a preset."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import make_archive
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.cli.evaluate import carry_out, folders, loaded_once, score_of
from llava_consensus.cli.paper import measured, plan_of, verify
from llava_consensus.errors import plural
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.files import METRICS, read_json
from llava_consensus.evaluation.report.table import Table, markdown, pivoted
from llava_consensus.evaluation.runs import MODEL
from llava_consensus.evaluation.runs.execution import Unanswered
from llava_consensus.methods import known_methods, make

if TYPE_CHECKING:
    from llava_consensus.evaluation.runs.sweep import Cell
    from llava_consensus.paper.preset import Preset

LINEUP = "consensusdrop consensusdrop:alpha=1.0 consensusdrop:alpha=0.0 consensusdrop:fuser=recovery random"
PROBED = 8  # questions that a forecast rests on


@command(
    "sweep",
    arg("--bench", default="gqa pope textvqa", metavar="NAMES", help="benchmarks, or all (%(default)s)"),
    arg("--methods", default=LINEUP, metavar="NAMES", help="each NAME or NAME:key=value,...; or all"),
    arg("--tokens", default="192 128 64 32", metavar="NUMBERS", help="budgets, or shares such as 0.1 (%(default)s)"),
    *arguments.LOADED,
    *arguments.RUN,
    *arguments.SHARDED,
    arg("--preset", metavar="NAME", help="instead, a grid with a forecast, checks and an archive: gpu-hour"),
    arg("--published", type=Path, metavar="FILE", help="of --preset: scores to check all tokens by (LLaVA-1.5-7B's)"),
    examples=(
        'sweep --bench "gqa pope" --methods "consensusdrop random" --tokens "192 64"',
        "sweep --preset gpu-hour --data playground/data",
    ),
)
def sweep(given: argparse.Namespace) -> Iterator[Any]:
    """A grid of benchmarks, methods and budgets, and each benchmark with all tokens."""
    from llava_consensus.evaluation.runs import sweep as grids

    if given.preset:
        yield from _preset(given)
        return
    names = benchmarks.known_benchmarks() if given.bench == "all" else given.bench.split()
    words = known_methods() if given.methods == "all" else given.methods.split()
    methods, budgets = [arguments.one_word_method(word) for word in words], arguments.budgets(given.tokens)
    full = [arguments.config(given, benchmarks.make(name), make("full")) for name in names]
    grid = grids.cells(full, methods, budgets)
    done: list[Cell] = []
    for line, cell in carry_out(grid, given):
        yield line
        done.append(cell)
    yield markdown(_table(done)) + "\n"
    missing = sum(cell.result.metrics.get("errors", 0) for cell in done if cell.result)
    more = f", with {plural(missing, 'question')} without an answer in them (errors.jsonl)" if missing else ""
    yield f"{sum(cell.error is None for cell in done)} of {len(grid)} runs are complete{more}: {given.out}"
    folders(done)
    if missing:
        raise Unanswered(f"{plural(missing, 'question')} without an answer: --retry-errors asks them again")


def _table(done: "list[Cell]") -> Table:
    """The scores of a grid: a line for each method, a group for each budget, a column for each benchmark."""
    cells = []
    for cell in done:
        benchmark, method, budget = cell.name.split(" ", 2)
        became = "failed" if cell.error or cell.result is None else score_of(cell.result.metrics)
        cells.append((f"{budget} tokens", method, benchmark, became))
    return pivoted("scores", "method", {benchmark: benchmark for _, _, benchmark, _ in cells}, cells)


def _preset(given: argparse.Namespace) -> Iterator[Any]:
    """`sweep --preset`: a forecast for each model; then prompts, full scores and the runs of each; one archive."""
    from llava_consensus.paper import preset as presets

    whole = presets.read(given.preset)
    each = [_for_model(whole, given, name) for name in (whole.models if given.model == MODEL else [given.model])]
    for preset, own in each:
        yield _forecast(list(plan_of(preset, own).values()), own)
    for preset, own in each:
        yield from verify(own)
        yield from measured(preset, own, loaded_once(own))
    yield f"archive, for `report import`: {make_archive(str(given.out), 'xztar', given.out)}"


def _for_model(whole: "Preset", given: argparse.Namespace, model: str) -> "tuple[Preset, argparse.Namespace]":
    """The preset and the arguments for one of its models."""
    from llava_consensus.evidence import FAMILIES, family_of

    family = FAMILIES.get(family_of(model) or "")
    several = family is not None and family.keeps  # axes of positions: there is one policy
    rows = tuple(row for row in whole.rows if not several or "positions=" not in row.method)
    sample = given.sample or (None if given.limit else min(whole.samples.values(), default=None))
    asked = {"bench": " ".join(whole.benchmarks), "tokens": None, "positions": None, "format": None}
    own = argparse.Namespace(**{**vars(given), **asked, "model": model, "sample": sample})
    return replace(whole, name=f"{whole.name}-{Path(model).name}", rows=rows), own


def _forecast(cells: "Sequence[Cell]", given: argparse.Namespace) -> str:
    """Time of all cells by that of some questions with all tokens, which is the most that a reduced run takes."""
    few = replace(cells[0], plan=replace(cells[0].plan, questions=cells[0].plan.questions[:PROBED]))
    with TemporaryDirectory() as scratch:
        (folder,) = folders([cell for _, cell in carry_out([few], given, Path(scratch))])
        timing = read_json(folder / METRICS)["timing"]
    asked = sum(len(cell.plan.questions) for cell in cells)
    hours = asked * timing["seconds"] / timing["asked"] / 3600
    return f"{given.model}: {len(cells)} runs, {asked:,} questions, at most {hours:.2g} hours"
