"""The front door: arguments in, one call, numbers out.

Whatever a user can mend ends with `error: ...` and the exit code of its kind (`errors.py`). Nothing heavy is imported
before it is needed, and of the files of commands only the one that was asked for.
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
from importlib import import_module
from typing import Any, NoReturn
from unicodedata import category

from llava_consensus.cli.arguments import COMMANDS
from llava_consensus.errors import (
    ConsensusError,
    DataError,
    MissingDependency,
    OptionError,
    missing_extra,
    unknown_name,
)

STOPPED = 130  # exit code of a command that was asked to stop
FILES = {  # of this folder, and the first words of their commands in the order of the general help
    "evaluate": ("eval",),
    "sweep": ("sweep",),
    "score": ("score", "judge"),
    "ask": ("ask", "demo"),
    "serve": ("serve",),
    "bench": ("bench",),
    "recommend": ("recommend",),
    "report": ("report",),
    "models": ("list", "data", "model"),
    "train": ("train",),
    "paper": ("paper",),
}
GROUPS = {
    "data": "fetch and check the files of benchmarks",
    "model": "convert or merge a checkpoint, or check that methods work on it",
    "paper": "the paper's tables and figures, made again",
}


def main(argv: Sequence[str] | None = None) -> int:
    if sys.platform == "win32":
        error("Windows is not supported, its files cannot be locked as runs need it: use WSL")
        return ConsensusError.exit_code
    for name in ("stdout", "stderr"):  # closed by the shell, as in `list >&-`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows no é gets \xe9, not a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    given, unread = parser(words[0] if words else "").parse_known_args(words)
    if unread:
        first = next((word for word in unread if word.startswith("-")), unread[0]).partition("=")[0]
        error(str(unknown_name("argument", first, given.options)))
        return OptionError.exit_code
    _log_to_stderr()
    with _stops() as stop:
        code = _run(given)
    return 128 + stop[0] if stop and code == STOPPED else code


class _Parser(argparse.ArgumentParser):
    """Ends with a line, not with all options of a command."""

    def error(self, message: str) -> NoReturn:
        error(f"{message.removeprefix('argument ')}. What it takes: {self.prog} --help")
        self.exit(OptionError.exit_code)


def parser(first: str = "") -> argparse.ArgumentParser:
    """Reads command lines: those of the file that has the command `first`, or of all files where none has it."""
    wanted = [name for name, words in FILES.items() if first in words]
    for name in wanted or FILES:
        import_module(f"{__name__}.{name}")
    top = _Parser(prog="llava-consensus", description="Fewer visual tokens for vision-language models, measured.")
    top.add_argument("--version", action=_Version, nargs=0, help="versions of this and what it runs on")
    parsers, groups = {"": top}, {"": top.add_subparsers(title="commands", required=True, metavar="COMMAND")}

    def add(name: str, **settings: Any) -> argparse.ArgumentParser:
        group, _, last = name.rpartition(" ")
        if group not in parsers:
            add(group, help=GROUPS[group], description=GROUPS[group])
        if group not in groups:
            groups[group] = parsers[group].add_subparsers(title="commands", required=group in GROUPS, metavar="COMMAND")
        formatter = argparse.RawDescriptionHelpFormatter
        parsers[name] = groups[group].add_parser(last, formatter_class=formatter, **settings)
        return parsers[name]

    for name, one in COMMANDS.items():
        own = add(name, help=one.line, description=one.line, epilog=_examples(one.examples))
        flags = [flag for argument in one.arguments for flag in argument.flags if flag.startswith("-")]
        own.set_defaults(lines=one.lines, options=flags)
        for argument in one.arguments:
            own.add_argument(*argument.flags, **argument.settings)
    return top


def _examples(lines: Sequence[str]) -> str:
    return "examples:\n" + "\n".join(f"  llava-consensus {line}" for line in lines)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        for name in ("llava-consensus", "torch", "transformers", "llava-torch"):
            with contextlib.suppress(PackageNotFoundError):
                print(f"{name} {version(name)}")
        parser.exit()


@contextlib.contextmanager
def _stops() -> Iterator[list[int]]:
    """Treats SIGTERM and SIGHUP like Ctrl-C: the command tells how to resume. Yields the signals received."""
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
            print(printable(line), flush=True)
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except ConsensusError as wrong:
        if wrong.exit_code == STOPPED:  # by the user, which is no error
            print(printable(str(wrong)), file=sys.stderr)
        else:
            error(str(wrong))
        return wrong.exit_code
    except ModuleNotFoundError as wrong:
        if (wrong.name or "").startswith("llava_consensus"):
            raise
        error(str(missing_extra(f"this command needs {wrong.name or wrong}", "eval")))
        return MissingDependency.exit_code
    except OSError as wrong:  # a full disk, a folder that vanished: wherever it is met first
        error((f"{wrong.filename}: " if wrong.filename else "") + str(wrong.strerror or wrong))
        return DataError.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    return 0


def _log_to_stderr() -> None:
    """Messages of the package go to stderr as they are; standard output is for results."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its hints are about packages we do not need
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # which in a file are one endless line
    logger = logging.getLogger("llava_consensus")
    handler = logging.StreamHandler(sys.stderr)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def printable(text: str) -> str:
    """A text whose control characters, which could rewrite a terminal, are shown as escapes; lines and tabs stay."""
    return "".join(one if one in "\n\t" or category(one) != "Cc" else repr(one)[1:-1] for one in text)


def error(text: str) -> None:
    print(f"error: {printable(text)}", file=sys.stderr)
