"""The front door: arguments in, one call, numbers out.

    llava-consensus eval gqa --tokens 64                  accuracy on a benchmark; go on, or read what is complete
    llava-consensus score gqa --answers FILE --data DIR   score any LLaVA answer file (--json: everything measured)
    llava-consensus export vqav2 --answers FILE --out FILE   what the official server takes
    llava-consensus verify RUN...                         whether a run is as it was written, its score too
    llava-consensus check-data [NAME...] --data DIR       what is there, what is missing and where it comes from
    llava-consensus ask PICTURE QUESTION --overlay o.png  one answer, its tokens and times, and what was kept
    llava-consensus demo                                  a page to play with, in the browser
    llava-consensus bench --tokens "288 144"              time, memory and FLOPs of methods, side by side
    llava-consensus judge mmvet --answers FILE ...        grades by a judge model; a rerun asks nothing again
    llava-consensus report --write docs/results.md        the tables of all results
    llava-consensus figures --to FOLDER                   every figure of the paper from results, as PNG and SVG
    llava-consensus claims --write docs/paper.md          the paper's claims, judged by results
    llava-consensus examples --by disagreement            pictures on which the two signals disagree, drawn
    llava-consensus gallery FOLDER                        what methods keep of your own photographs
    llava-consensus compare RUN_A RUN_B                   two runs, question by question: difference, interval, p
    llava-consensus ablation alpha --limit 40             an ablation of the paper beside its numbers; table t1 too
    llava-consensus paper --limit 40                      every table of the paper that the model can give
    llava-consensus study --limit 40                      selection by vision, by the question, by both: the study
    llava-consensus train --tokens "64 32" ...             adapt a model to fewer tokens (docs/training.md)
    llava-consensus ledger --sort average                 published results, every budget by one account
    llava-consensus convert CHECKPOINT OUT                a LLaVA checkpoint in Hugging Face's layout, and back
    llava-consensus check-host MODEL                      whether a host fits a model, check by check
    llava-consensus list [--hosts]                        methods, hosts, benchmarks; which method works where
    llava-consensus methods consensusdrop                 a method's options with bounds, its cost, its paper
    llava-consensus fetch-mini                            the embedded model and its benchmarks, wherever one works
    llava-consensus download-data NAME|all                official files, resumed and checked, in LLaVA's layout
    llava-consensus completion bash                       what a shell needs to complete commands and options

Whatever a user can mend ends with `error: ...` and the exit code of its kind (`errors.py`). Nothing heavy is imported
before it is needed.
"""

import argparse
import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from llava_consensus.cli import (
    ablation,
    ask,
    bench,
    data,
    demo,
    evaluate,
    examples,
    figures,
    files,
    gallery,
    helps,
    judge,
    ledger,
    methods,
    models,
    paper,
    positions,
    study,
    tables,
    train,
)
from llava_consensus.cli.arguments import Command, Lines
from llava_consensus.cli.terminal import RED, Rendered, coloured, printable
from llava_consensus.errors import ConsensusError, DataError, MissingDependency

STOPPED = 130  # exit code of a command that was asked to stop
SHOWN = ("ask", "eval", "list", "methods")  # commands whose examples the general help shows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    if sys.platform == "win32":
        print("error: Windows is not supported, its files cannot be locked as runs need it: use WSL", file=sys.stderr)
        return ConsensusError.exit_code
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows no é gets \xe9, not a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    given = _parser().parse_args(argv)
    _tell()
    with _stops() as stop:
        code = _run(given)
    return 128 + stop[0] if stop and code == STOPPED else code


@contextlib.contextmanager
def _stops() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: it says what was done and how to go on. Yields what came."""
    came: list[int] = []

    def stop(number: int, _: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for one in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(one) is not signal.SIG_IGN:  # as nohup has it
                before[one] = signal.signal(one, stop)
    try:
        yield came
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _run(given: argparse.Namespace) -> int:
    try:
        for line in given.lines(given):
            print(line if isinstance(line, Rendered) else printable(line), flush=True)
    except BrokenPipeError:  # whoever read the output has had enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except ConsensusError as error:
        print(_head(error.exit_code) + printable(str(error)), file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder that vanished: wherever it is met first
        place = f"{error.filename}: " if error.filename else ""
        print(_head(DataError.exit_code) + printable(f"{place}{error.strerror or error}"), file=sys.stderr)
        return DataError.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    return 0


def _head(code: int) -> str:
    """What is said before an error; nothing where the user stopped the command."""
    return "" if code == STOPPED else coloured("error:", RED, sys.stderr) + " "


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llava-consensus",
        description="Fewer visual tokens for vision-language models, measured.",
        epilog="examples:\n" + "\n".join(f"  llava-consensus {helps.EXAMPLES[name][0]}" for name in SHOWN),
        formatter_class=helps.Formatter,
    )
    parser.add_argument("--version", action=helps.Version)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, lines: Lines, line: str) -> argparse.ArgumentParser:
        one: argparse.ArgumentParser = commands.add_parser(
            name, help=line, description=line, epilog=helps.epilog(name), formatter_class=helps.Formatter
        )
        one.set_defaults(lines=lines)
        return one

    groups = (
        evaluate,
        files,
        judge,
        ask,
        demo,
        bench,
        tables,
        ablation,
        study,
        positions,
        paper,
        figures,
        examples,
        gallery,
        ledger,
        models,
        methods,
        data,
        train,
    )
    for group in groups:
        group.add(command)
    add_completion(command)
    return parser


def add_completion(command: Command) -> None:
    """Adds the command."""
    parser = command("completion", completion, "a script that lets a shell complete commands and options")
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell")


def completion(given: argparse.Namespace) -> Iterator[str]:
    """The script."""
    try:
        import shtab
    except ImportError as error:
        raise MissingDependency("completion: shtab is not installed. Type: pip install shtab") from error
    yield shtab.complete(_parser(), given.shell)


def _tell() -> None:
    """Messages of the package go to stderr as they are; standard output is for results."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its hints are about packages we do not need
    logger = logging.getLogger("llava_consensus")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
