"""The command `ask`: one question about one picture."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.errors import DataError, OptionError

SHORT = "\nAnswer the question using a single word or phrase."  # LLaVA's own suffix


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("ask", ask, "ask one question about one picture")
    parser.add_argument("picture", metavar="PICTURE")
    parser.add_argument("question", metavar="QUESTION")
    arguments.method(parser)
    parser.add_argument("--short", action="store_true", help="ask for a single word or phrase, as the benchmarks do")
    parser.add_argument("--repeats", default=5, type=int, help="timings of the first token (%(default)s)")
    parser.add_argument("--overlay", type=Path, metavar="FILE", help="write a picture of what was kept")


def ask(given: argparse.Namespace) -> Iterator[str]:
    """The answer, its tokens and times."""
    from llava_consensus import hosts
    from llava_consensus.cli import answer as asked
    from llava_consensus.hosts.checkpoints import check_checkpoint
    from llava_consensus.hosts.llava.checks import check_conversation
    from llava_consensus.methods import make
    from llava_consensus.reduction.budget import Budget
    from llava_consensus.runs.pictures import open_image
    from llava_consensus.runs.sweep import parse_options

    method, budget = make(given.method, **parse_options(given.option)), Budget(given.tokens, given.merged)
    _check(given)
    check_checkpoint(given.model)
    if given.conversation:
        check_conversation(given.conversation)
    image = open_image(given.picture, upright=True)
    text = given.question + (SHORT if given.short else "")
    prompt = hosts.Prompt(text, given.conversation or "vicuna_v1", given.max_new_tokens or 128)
    host = hosts.load(given.model, given.device, given.dtype)
    reply = asked.ask(host, image, prompt, method, budget, given.repeats)
    structural = f" (and {reply.answer.structural} structural ones)" if reply.answer.structural else ""
    yield reply.answer.text
    yield f"visual tokens the language model saw: {reply.answer.after} of {reply.answer.before}{structural}"
    yield f"time to first token: {reply.reduced_ms:.1f} ms, with all tokens {reply.full_ms:.1f} ms"
    yield from (f"note: {note}" for note in reply.answer.notes)
    if given.overlay:
        asked.picture(host, image, reply.answer).save(given.overlay)
        yield f"kept, merged and dropped: {given.overlay}"


def _check(given: argparse.Namespace) -> None:
    """What `ask` alone needs to be right, before weights load."""
    for name in ("repeats", "max_new_tokens"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} must be at least 1")
    file = given.overlay
    if file and file.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise OptionError(f"--overlay {file}: must end with .png, .jpg or .webp")
    if file and not file.parent.is_dir():
        raise DataError(f"--overlay {file}: no folder {file.parent}")
