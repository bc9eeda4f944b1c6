"""The command `positions`: what closing up the positions of reduced tokens does, layer by layer and place by place.

`llava-consensus positions --bench textvqa --tokens 64` leaves `positions.json` in the folder of results
(`study/format.py` says what is in it), and tables as Markdown, LaTeX and CSV. Stopped, the same command goes on. The
grid of policies, orders and methods is `llava-consensus table positions`.
"""

import argparse
from collections.abc import Iterator

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.cli.grids import carry_out, folders, loaded_once
from llava_consensus.errors import OptionError


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("positions", positions, "what kept and closed-up positions do to attention, layer by layer")
    parser.add_argument("--bench", default="textvqa", metavar="NAME", help="benchmark (%(default)s)")
    parser.add_argument("--tokens", default=64, type=int, help="budget (%(default)s)")
    parser.add_argument("--look", default=100, type=int, metavar="N", help="questions whose attention is read (100)")
    arguments.add_model(parser)
    arguments.add_run(parser)


def positions(given: argparse.Namespace) -> Iterator[str]:
    """A line for every run, then the tables."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.files import write_json
    from llava_consensus.evaluation.report.table import markdown, write
    from llava_consensus.methods import make
    from llava_consensus.paper import positions as report
    from llava_consensus.paper.study import closing, format
    from llava_consensus.reduction.budget import budget

    if given.workers > 1:
        raise OptionError(f"--workers {given.workers}: attention is read in one process. Take 1")
    config = arguments.config(given, benchmarks.make(given.bench), make("full"))
    tokens, loader = budget(given.tokens), loaded_once(given)
    full = closing.grid(config, tokens, 0)[0]
    assert loader is not None
    host = loader(full.plan.model, full.plan.loading, full.plan.host_options)
    cells = closing.grid(config, tokens, host.shape().layers)
    done = []
    for group, out in ((cells[:1], given.out), (cells[1:], given.out / format.RUNS)):
        for line, cell in carry_out(group, given, out, loader):
            yield line
            done.append(cell)
    found = folders(done)
    count = min(given.look, len(full.plan.questions))
    content = closing.content(found, given.tokens, closing.attention(host, full.plan, given.tokens, count), count)
    write_json(given.out / format.POSITIONS, content)
    tables = report.tables(content)
    write(given.out, "positions", tables, report.csv_rows(content))
    yield from (markdown(table) + "\n" for table in tables)
    yield f"written: {given.out / format.POSITIONS}"
