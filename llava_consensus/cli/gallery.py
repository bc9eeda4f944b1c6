"""The command `gallery`: what methods keep of a folder of photographs, a sheet for each.

llava-consensus gallery ~/photographs --tokens 64 --question "What is in the picture?"
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.cli.ask import PICTURES
from llava_consensus.cli.examples import selection, tokens_of
from llava_consensus.cli.figures import made
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.runs import MODEL

if TYPE_CHECKING:
    from PIL.Image import Image

    from llava_consensus.hosts import Host
    from llava_consensus.paper.examples import Selection
    from llava_consensus.reduction.method import Method

GALLERY = "consensusdrop consensusdrop:alpha=1.0 consensusdrop:alpha=0.0 visionzip vispruner divprune random"
CAUTION = (
    "The embedded llava-mini looked: its tower was trained on drawn scenes of emoji and signs alone and has never "
    "seen a photograph, so this shows where methods look through its eyes, not what a real model would keep."
)


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("gallery", gallery, "what methods keep of a folder of photographs")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of photographs")
    parser.add_argument("--question", default="What is in the picture?", help="asked about each (%(default)s)")
    parser.add_argument("--methods", default=GALLERY, metavar="NAMES", help="NAME or NAME:key=value,... (%(default)s)")
    parser.add_argument("--tokens", default=64, type=int, help="budget of every method (%(default)s)")
    parser.add_argument("--to", type=Path, default=Path("results/gallery"), metavar="FOLDER", help="(%(default)s)")
    arguments.add_model(parser)


def gallery(given: argparse.Namespace) -> Iterator[str]:
    """A sheet for every photograph: what each method keeps of it.

    Raises:
        DataError: no folder, or no picture in it.
    """
    from llava_consensus import hosts
    from llava_consensus.paper import examples as drawings
    from llava_consensus.paper.figures import style

    if not given.folder.is_dir():
        raise DataError(f"{given.folder}: no such folder of photographs")
    paths = [path for path in sorted(given.folder.iterdir()) if path.suffix.lower() in PICTURES]
    if not paths:
        raise DataError(f"{given.folder}: no .png, .jpg or .webp in it")
    tokens_of(given)
    methods = {word: arguments.one_word_method(word) for word in given.methods.split()}
    with style.sheet():
        folder = made(given.to)
    loading, options = arguments.loading(given), arguments.host_options(given)
    hosts.check(given.model, None, loading, host_options=options)
    host = hosts.load(given.model, loading, options)
    caution = CAUTION if Path(given.model).resolve() == Path(MODEL).resolve() else f"Looked at by {given.model}."
    words = f"Asked: {given.question} {caution}"
    for path in paths:
        image, chosen = _look(host, path, methods, given)
        with style.sheet():
            figure = drawings.methods(image, round(host.visual_tokens**0.5), chosen, words)
            style.save_all(figure, folder, path.stem)
        yield f"{path.name}: {folder / path.stem}.png"


def _look(
    host: "Host", path: Path, methods: "dict[str, Method]", given: argparse.Namespace
) -> "tuple[Image, dict[str, Selection]]":
    """One photograph, and what each method keeps of it."""
    from llava_consensus.evaluation.runs.pictures import open_image
    from llava_consensus.hosts import Prompt
    from llava_consensus.reduction.budget import Budget

    image = open_image(path, upright=True)
    if host.grid_columns(image.size):
        raise OptionError("gallery: a picture in tiles is drawn by `llava-consensus ask --overlay`")
    prompt = replace(Prompt(given.question), max_new_tokens=1)
    chosen = {}
    for word, method in methods.items():
        with host.attach(method, Budget(given.tokens)):
            (answer,) = host.answer([host.encode([image])], [prompt])
        chosen[_title(word, method)] = replace(selection(host, answer, given.tokens), answer="")
    return image, chosen


def _title(word: str, method: "Method") -> str:
    """What a method of one word is called in pictures."""
    from llava_consensus.evaluation.report.rows import LINEUP

    name, _, rest = word.partition(":")
    options = arguments.options(filter(None, rest.split(",")))
    known = {(one.method, tuple(one.options.items())): one.label for one in LINEUP}
    label = known.get((name, tuple(options.items())))
    title = getattr(type(method), "title", None) or name
    return (label or ", ".join([title, *filter(None, [rest])])).split(" (alpha")[0]
