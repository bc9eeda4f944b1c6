"""The commands `ask`, one question about one image or video, and `demo`, a page to play with in the browser."""

import argparse
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.errors import DataError, OptionError, missing_extra
from llava_consensus.evaluation.benchmarks.base import SHORT
from llava_consensus.evaluation.runs import DATA, DRAWINGS, knows_drawings_alone
from llava_consensus.reduction.budget import amount
from llava_consensus.reduction.options import at_least

URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VIDEOS = (".mp4", ".webm", ".mkv", ".avi", ".mov", ".gif")
LOCAL = "127.0.0.1"
PORTS = 65535


@command(
    "ask",
    arg("image", metavar="IMAGE", help=f"a file; a video ends with {', '.join(VIDEOS)}"),
    arg("question", metavar="QUESTION", help="in quotes"),
    *arguments.REDUCED,
    arg("--short", action="store_true", help="ask for a single word or phrase, as the benchmarks do"),
    arg("--frames", default=8, type=int, help="how many frames of a video are shown (%(default)s)"),
    arg("--overlay", type=Path, metavar="FILE", help="draw original, kept and merged patches side by side"),
    examples=('ask photo.jpg "What is on the table?" --tokens 64 --overlay kept.png',),
)
def ask(given: argparse.Namespace) -> Iterator[str]:
    """Ask one question about one image or video."""
    _check(given)
    method, budget = arguments.method(given), arguments.budget(given)

    from llava_consensus.evaluation import models  # a wrong name is refused before anything heavy is imported
    from llava_consensus.evaluation.media import open_image, read_clip

    loading, host_options = arguments.loading(given), arguments.host_options(given)
    loading.check_method(method)
    video = Path(given.image).suffix.lower() in VIDEOS
    known = models.check(given.model, given.conversation, loading, videos=video, host_options=host_options)
    if video:
        clip = read_clip(given.image, given.frames)
        visuals: list[Any] = [clip] if "videos" in known else list(clip.frames)
    else:
        visuals = [open_image(given.image, upright=True)]
    conversation = known.get("conversation", given.conversation) if video else given.conversation
    prompt = models.Prompt(given.question + (SHORT if given.short else ""), conversation)
    if given.max_new_tokens:
        prompt = replace(prompt, max_new_tokens=given.max_new_tokens)
    runner = models.load(given.model, loading, host_options)
    with runner.attach(method, budget):
        encoded, answer = runner.ask(visuals, prompt)
    yield answer.text
    structural = f" (and {answer.structural} structural ones)" if answer.structural else ""
    yield f"visual tokens the language model saw: {answer.after} of {answer.before}{structural}"
    notes = list(answer.notes)
    if knows_drawings_alone(given.model) and not Path(given.image).resolve().is_relative_to(Path(DATA).resolve()):
        notes.append(DRAWINGS)
    yield from (f"note: {note}" for note in notes)
    if given.overlay:
        from llava_consensus.demo.seen import card, counted, seen_by

        seen = seen_by(runner, visuals, encoded, answer)
        tokens = "" if given.method == "full" else f" at {amount(budget)} tokens"
        lines = f"answer: {answer.text}", f"{given.method}{tokens}; {counted(seen)}"
        card(seen, given.question, lines).save(given.overlay)
        yield f"kept, merged and dropped: {given.overlay}"


def _check(given: argparse.Namespace) -> None:
    for name in ("frames", "max_new_tokens"):
        if getattr(given, name) is not None:
            at_least(name, getattr(given, name), 1)
    if URL.match(given.image):
        raise OptionError(f"IMAGE {given.image}: addresses are not fetched. Save the image and give its file")
    file = given.overlay
    if file and file.suffix.lower() not in SUFFIXES:
        raise OptionError(f"--overlay {file}: must end with .png, .jpg or .webp")
    if file and file.is_dir():
        raise DataError(f"--overlay {file}: is a folder. Give the name of a file")
    if file and not file.parent.is_dir():
        raise DataError(f"--overlay {file}: no folder {file.parent}")


@command(
    "demo",
    *arguments.LOADED,
    arguments.DATA_DIR,
    arg("--port", type=int, help="port of the page (the first free one from 7860 on)"),
    arg("--address", default=LOCAL, help="who may open it: 127.0.0.1 is this machine, 0.0.0.0 everybody (%(default)s)"),
    arg("--max-upload", default=20.0, type=float, metavar="MB", help="largest image that is taken (%(default)s)"),
    examples=("demo", "demo --model llava-hf/llava-1.5-7b-hf --port 8000"),
)
def demo(given: argparse.Namespace) -> Iterator[str]:
    """A page in the browser: two methods side by side."""
    if given.port is not None and not 1 <= given.port <= PORTS:
        raise OptionError(f"port={given.port} must be in 1..{PORTS}")
    if not given.max_upload > 0:
        raise OptionError(f"max-upload={given.max_upload} must be above 0")
    if find_spec("gradio") is None:
        raise missing_extra("the page (gradio)", "demo")
    runner = arguments.load(given)
    from llava_consensus.demo import app

    blocks = app.build(runner, given.model, given.data)
    try:
        yield f"open {app.launch(blocks, given.address, given.port, given.max_upload)} (Ctrl-C ends it)"
        if given.address != LOCAL:
            yield f"everybody who reaches {given.address} may use it: there is no password"
        threading.Event().wait()
    finally:
        blocks.close()
