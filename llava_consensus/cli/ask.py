"""The command `ask`: one question about one picture.

`llava-consensus ask photo.jpg "What is on the table?" --overlay kept.png` prints the answer, how many visual tokens the
language model saw and how long the first token took, and draws what was kept. Times are medians of interleaved repeats
after a warm-up of each side, so that neither profits from a warm cache or suffers from a busy moment alone.
"""

import argparse
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.errors import DataError, OptionError
from llava_consensus.files import write_out

if TYPE_CHECKING:
    from PIL.Image import Image

    from llava_consensus.hosts import Answer, Host

URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("ask", ask, "ask one question about one picture")
    parser.add_argument("picture", metavar="PICTURE")
    parser.add_argument("question", metavar="QUESTION")
    arguments.add_method(parser)
    parser.add_argument("--short", action="store_true", help="ask for a single word or phrase, as the benchmarks do")
    parser.add_argument("--repeats", default=5, type=int, help="timings of the first token (%(default)s)")
    parser.add_argument("--overlay", type=Path, metavar="FILE", help="write a picture of what was kept")


def ask(given: argparse.Namespace) -> Iterator[str]:
    """The answer, its tokens and times."""
    _check(given)
    method, budget = arguments.method(given), arguments.budget(given)

    from llava_consensus import hosts  # a wrong name is told before anything heavy is imported
    from llava_consensus.bench.timing import first_token
    from llava_consensus.benchmarks.base import SHORT
    from llava_consensus.methods import make
    from llava_consensus.runs.pictures import open_image

    loading, host_options = arguments.loading(given), arguments.host_options(given)
    loading.check_method(method)
    hosts.check(given.model, given.conversation, loading, host_options=host_options)
    image = open_image(given.picture, upright=True)
    prompt = hosts.Prompt(given.question + (SHORT if given.short else ""), given.conversation)
    if given.max_new_tokens:
        prompt = replace(prompt, max_new_tokens=given.max_new_tokens)
    host = hosts.load(given.model, loading, host_options)
    with host.attach(method, budget):
        (answer,) = host.answer([host.encode([image])], [prompt])
    sides = [(method, budget), (make("full"), budget)]
    reduced, full = first_token(host, image, prompt, sides, given.repeats)
    structural = f" (and {answer.structural} structural ones)" if answer.structural else ""
    yield answer.text
    yield f"visual tokens the language model saw: {answer.after} of {answer.before}{structural}"
    yield f"time to first token: {reduced:.1f} ms, with all tokens {full:.1f} ms"
    yield from (f"note: {note}" for note in answer.notes)
    if given.overlay:
        write_out(given.overlay, _encoded(draw_kept(host, image, answer), given.overlay.suffix))
        yield f"kept, merged and dropped: {given.overlay}"


def draw_kept(host: "Host", image: "Image", answer: "Answer") -> "Image":
    """What was kept, merged and dropped, over the picture; of a tiled one the base view and the grid side by side.

    Raises:
        OptionError: for a model whose tiles are not a base view and a grid.
    """
    from llava_consensus.hosts.sequence.patches import patches
    from llava_consensus.report.overlay import overlay, tiled_overlay
    from llava_consensus.report.sheet import contact_sheet

    (outcome,), side = answer.outcomes, round(host.visual_tokens**0.5)
    columns = host.grid_columns(image.size)
    if not columns and outcome.before != host.visual_tokens:
        raise OptionError("overlay: of tiled pictures, those of LLaVA-NeXT are drawn, a base view and a grid of tiles")
    shown = patches(outcome, side, columns)
    if not columns:
        return overlay(image, *shown, side)
    rows = (len(shown.owner) // side**2 - 1) // columns
    whole, tiles = tiled_overlay(image, *shown, side, (rows, columns))
    titles = f"base view, {side} x {side} patches", f"{rows} x {columns} tiles of {side} x {side} patches"
    return contact_sheet([(titles[0], whole), (titles[1], tiles)], columns=2)


def _encoded(image: "Image", suffix: str) -> bytes:
    """A picture as the content of a file of that kind."""
    from PIL.Image import registered_extensions

    content = io.BytesIO()
    image.save(content, registered_extensions()[suffix.lower()])
    return content.getvalue()


def _check(given: argparse.Namespace) -> None:
    """What `ask` alone needs to be right, before weights load."""
    for name in ("repeats", "max_new_tokens"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} must be at least 1")
    if URL.match(given.picture):
        raise OptionError(f"PICTURE {given.picture}: addresses are not fetched. Save the picture and give its file")
    file = given.overlay
    if file and file.suffix.lower() not in PICTURES:
        raise OptionError(f"--overlay {file}: must end with .png, .jpg or .webp")
    if file and file.is_dir():
        raise DataError(f"--overlay {file}: is a folder. Give the name of a file")
    if file and not file.parent.is_dir():
        raise DataError(f"--overlay {file}: no folder {file.parent}")
