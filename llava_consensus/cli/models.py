"""The command `convert`: a checkpoint in another layout."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from llava_consensus.cli.arguments import Command


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("convert", convert, "a LLaVA-1.5 checkpoint in Hugging Face's layout, and back")
    parser.add_argument("source", type=Path, metavar="CHECKPOINT", help="folder, in either layout")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that is not there yet")


def convert(given: argparse.Namespace) -> Iterator[str]:
    """Says how many tensors were written and read back."""
    from llava_consensus.hosts.convert import convert as write

    yield write(given.source.expanduser(), given.out.expanduser())
