"""The commands `ablation` and `table`: a preset's grid is run, its table printed with the paper's numbers beside.

`llava-consensus ablation alpha`, `llava-consensus table t1`, or the name of a file like those in
`llava_consensus/paper/presets`. Markdown, LaTeX and CSV are left in `DIR/tables`. Stopped, the same command goes on.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.cli.grids import carry_out
from llava_consensus.errors import ConsensusError, DataError, OptionError

if TYPE_CHECKING:
    from llava_consensus.evaluation.runs.batches import HostLoader
    from llava_consensus.evaluation.runs.sweep import Cell
    from llava_consensus.paper.preset import Preset

TABLES = "tables"  # folder in that of results
FORMATS = ("markdown", "latex", "csv")


def add(command: Command) -> None:
    """Adds both commands."""
    parser = command("ablation", ablation, "an ablation of the paper (T5 to T9), ours and the paper's side by side")
    add_preset(parser, "alpha, temperature, recovery, anchors, score")
    parser = command("table", ablation, "a main table of the paper (T1 to T4), ours and the paper's side by side")
    add_preset(parser, "results, t1, t2, t3, t4-qwen-vl, t4-internvl-chat, t4-cogvlm, positions")


def add_preset(parser: argparse.ArgumentParser, names: str) -> None:
    """The arguments of a command about one preset."""
    parser.add_argument("name", metavar="NAME", help=f"{names}, or a file like theirs")
    parser.add_argument("--bench", metavar="NAMES", help="only these of its benchmarks")
    parser.add_argument("--format", default="markdown", choices=FORMATS, help="of what is printed (%(default)s)")
    arguments.add_model(parser)
    arguments.add_run(parser)


def ablation(given: argparse.Namespace) -> Iterator[str]:
    """A line for every run, then the tables."""
    from llava_consensus.paper.preset import read

    preset = read(given.name)
    why = unfit(preset, given)
    if why:
        raise OptionError(f"{preset.name}: {why}")
    yield from measured(preset, given)


def unfit(preset: "Preset", given: argparse.Namespace) -> str:
    """Why a preset cannot be run on the model; nothing where it can."""
    from llava_consensus import hosts

    needs = f"needs weights of {preset.weights}" if preset.weights else "cannot be run on this model"
    try:
        name = hosts.name_of(given.model, arguments.loading(given))
        options = {**preset.host_options, **arguments.host_options(given)}
        hosts.check(given.model, loading=arguments.loading(given), host_options=options)
    except ConsensusError as error:
        return f"{needs} ({error})"
    return f"{needs} (--model {given.model} is of host {name})" if preset.hosts and name not in preset.hosts else ""


def measured(preset: "Preset", given: argparse.Namespace, load: "HostLoader | None" = None) -> Iterator[str]:
    """Runs a preset and writes its tables; runs that fail are blank there, and the first error is raised at the end."""
    from llava_consensus.evaluation.report.rows import read_row
    from llava_consensus.evaluation.report.table import rendered, write
    from llava_consensus.paper import ablation as report

    preset, left_out = available(chosen(preset, given.bench), given)
    yield from (f"{name} is left out: {error}" for name, error in left_out.items())
    places, errors, runs = plan(preset, given), [], {}
    for place, (line, cell) in zip(places, carry_out(list(places.values()), given, load=load), strict=True):
        yield line
        if cell.result:
            runs[place] = read_row(cell.result.path)
        elif cell.error:
            errors.append(cell.error)
    results = report.Results(preset, runs)
    tables, rows = report.tables(results), report.csv_rows(results)
    files = write(given.out / TABLES, preset.name, tables, rows)
    yield from (text if given.format == "csv" else text + "\n" for text in rendered(tables, rows, given.format))
    yield f"written: {', '.join(map(str, files))}"
    if errors:
        raise errors[0]


def chosen(preset: "Preset", names: str | None) -> "Preset":
    """A preset with some of its benchmarks. OptionError for one that it does not have."""
    if names is None:
        return preset
    absent = [name for name in names.split() if name not in preset.benchmarks]
    if absent or not names.split():
        raise OptionError(f"--bench {names!r}: must be of {', '.join(preset.benchmarks)}, which {preset.name} asks")
    return replace(preset, benchmarks={name: preset.benchmarks[name] for name in names.split()})


def available(preset: "Preset", given: argparse.Namespace) -> "tuple[Preset, dict[str, DataError]]":
    """A preset with the benchmarks whose files are there, and what is missing of the others. Raises the first error
    where there are none.
    """
    from llava_consensus.evaluation import benchmarks

    missing: dict[str, DataError] = {}
    for name in preset.benchmarks:
        try:
            benchmarks.make(name).load(given.data)
        except DataError as error:
            missing[name] = error
    there = {name: column for name, column in preset.benchmarks.items() if name not in missing}
    if not there:
        raise next(iter(missing.values()))
    return replace(preset, benchmarks=there), missing


def plan(preset: "Preset", given: argparse.Namespace) -> "dict[tuple[str, str], Cell]":
    """Every run of a preset by its place in the tables, each checked: all tokens, then its rows, on each benchmark."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.runs.configuration import prepare
    from llava_consensus.evaluation.runs.sweep import Cell
    from llava_consensus.methods import make
    from llava_consensus.paper.ablation import key
    from llava_consensus.reduction.budget import budget

    made = {row: (arguments.one_word_method(row.method), budget(row.tokens, row.merged)) for row in preset.rows}
    cells = {}
    for name in preset.benchmarks:
        config = arguments.config(given, benchmarks.make(name), make("full"))
        limit = preset.limits.get(name) if config.limit is None else config.limit
        full = prepare(replace(config, limit=limit, host_options={**preset.host_options, **config.host_options}))
        cells[key(None, name)] = Cell(full)
        for row, (method, tokens) in made.items():
            if name not in preset.asked_at(row.tokens):
                continue
            cells[key(row, name)] = Cell(full.reduced_by(method, tokens, given.match))
    return cells
