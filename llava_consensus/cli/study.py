"""The command `study`: the paper's controlled study, on any model whose decoder can be cut between layers.

`llava-consensus study --model MODEL --limit 40` leaves `study.json` and `scap.json` in the folder of results
(`study/format.py` says what is in them), and tables as Markdown, LaTeX and CSV. Stopped, the same command goes on.
"""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.cli.grids import carry_out, folders, loaded_once
from llava_consensus.errors import OptionError

if TYPE_CHECKING:
    from llava_consensus.reduction.budget import Share

BENCHMARKS = "pope mme mmbench mmbench_cn textvqa gqa"  # of the paper's study
DEFAULTS = {"retention": "0.25 0.5", "rates": "0.1 0.3 0.5", "layer": None, "scap_bench": "gqa"}


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("study", study, "selection inside the language model by vision, by the question, by both")
    parser.add_argument("--bench", default=BENCHMARKS, metavar="NAMES", help="benchmarks (%(default)s)")
    parser.add_argument("--retention", metavar="SHARES", help="of the tokens (%(default)s)")
    parser.add_argument("--rates", metavar="RATES", help="of recovery (%(default)s)")
    parser.add_argument("--layer", type=int, help="decoder layers that see everything (2, less in shallow models)")
    line = "benchmark on which SCAP is compared with every layer; none leaves that out (%(default)s)"
    parser.set_defaults(**DEFAULTS)
    parser.add_argument("--scap-bench", metavar="NAME", help=line)
    arguments.add_model(parser)
    arguments.add_run(parser)


def study(given: argparse.Namespace) -> Iterator[str]:
    """A line for every run, then the tables."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.files import write_json
    from llava_consensus.evaluation.report.table import markdown, write
    from llava_consensus.methods import make
    from llava_consensus.paper import study_tables as report
    from llava_consensus.paper.study import format, grid, results

    retentions, rates = _shares(given.retention), _rates(given.rates)
    full = [arguments.config(given, benchmarks.make(name), make("full")) for name in given.bench.split()]
    cells, probed = grid.grid(full, retentions, rates, given.layer), []
    if given.scap_bench != "none":
        config = arguments.config(given, benchmarks.make(given.scap_bench), make("full"))
        probed = [grid.probing(config, retentions[0])]
    reduced = [cell for cell in cells if cell.plan.method.reduces]
    loader, done = loaded_once(given), []
    groups = ([cell for cell in cells if cell not in reduced], given.out), (reduced + probed, given.out / format.RUNS)
    for group, out in groups:
        for line, cell in carry_out(group, given, out, loader):
            yield line
            done.append(cell)
    found = folders(done)
    content = results.study(found[: len(cells)])
    write_json(given.out / format.STUDY, content)
    tables = report.tables(content)
    write(given.out, "study", tables, report.csv_rows(content))
    if probed:
        scap = results.scap(found[-1])
        write_json(given.out / format.SCAP, scap)
        write(given.out, "scap", report.scap_tables(scap), scap["layers"])
        tables = [*tables, *report.scap_tables(scap)]
    yield from (markdown(table) + "\n" for table in tables)
    yield f"written: {given.out / format.STUDY}" + (f", {given.out / format.SCAP}" if probed else "")


def _shares(text: str) -> "list[Share]":
    from llava_consensus.reduction.budget import Share

    shares = [budget for budget in arguments.budgets(text) if isinstance(budget, Share)]
    if not shares or len(shares) < len(text.split()):
        raise OptionError(f"--retention {text!r}: must be shares of the tokens, such as '0.25 0.5'")
    return shares


def _rates(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split()]
    except ValueError:
        raise OptionError(f"--rates {text!r}: must be numbers from 0 to 1, such as '0.1 0.3 0.5'") from None
