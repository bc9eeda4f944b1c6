"""The command `ledger`: published results, every budget by one account."""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llava_consensus.cli.arguments import Command

if TYPE_CHECKING:
    from llava_consensus.paper.ledger import Cost

FORMATS = ("markdown", "latex", "csv")


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("ledger", ledger, "published results with their budgets as entering, kept, layer mean and FLOPs")
    parser.add_argument("--sort", default="average", metavar="COLUMN", help="one of the CSV's columns (%(default)s)")
    parser.add_argument("--format", default="markdown", choices=FORMATS, help="of what is printed (%(default)s)")


def ledger(given: argparse.Namespace) -> Iterator[str]:
    """The table of all entries."""
    from llava_consensus.evaluation.report.table import rendered
    from llava_consensus.paper import ledger as published
    from llava_consensus.reduction.costs import SHAPES

    rows = [published.account(entry, SHAPES[entry.model].layers, price) for entry in published.entries()]
    rows = published.ordered(rows, given.sort)
    yield from rendered([published.table(rows)], published.cells(rows), given.format)


def price(model: str, layers: Sequence[int]) -> "Cost":
    """FLOPs and cache of a prompt on a model by our account, with the paper's 66 rows of text."""
    from llava_consensus.paper.ledger import Cost
    from llava_consensus.reduction.costs import SHAPES, kv_bytes, llm_flops

    return Cost(llm_flops(SHAPES[model], layers), kv_bytes(SHAPES[model], layers))
