"""The habits of the command line: what needs no torch does not import it, help has examples that work, a method tells
about itself, tables are for people.

Run: `pytest tests/test_front_door.py`.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from llava_consensus import __version__, cli
from llava_consensus.cli import arguments, helps, terminal
from llava_consensus.cli.evaluate import _remaining
from llava_consensus.evaluation.report.table import Group, Table
from llava_consensus.methods import METHODS, known_methods, make
from llava_consensus.methods.options import options

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "llava", "numpy", "pandas", "PIL", "matplotlib", "rich")
LIGHT = {
    "list": 0,
    "list --hosts": 0,
    "--help": 0,
    "eval --help": 0,
    "--version": 0,
    "lst": 2,
    "eval gqaa": 2,
    "eval gqa --method randon": 2,
    "methods": 0,
    "methods randon": 2,
    "completion bash": 0,
}


def test_what_needs_no_torch_does_not_import_it() -> None:
    """All of them in one process, which ends with what it has imported."""
    code = (
        "import sys\nfrom llava_consensus import cli\ncodes = []\n"
        f"for line in {[shlex.split(line) for line in LIGHT]}:\n"
        "    try: codes.append(cli.main(line))\n"
        "    except SystemExit as end: codes.append(end.code or 0)\n"
        f"print(codes, [name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == f"{list(LIGHT.values())} []", done.stderr[-2000:]


@pytest.mark.parametrize("name", METHODS)
def test_the_line_of_a_method_is_its_docstring(name: str) -> None:
    written = (METHODS[name].__doc__ or "").split("\n\n")[0]
    assert known_methods()[name] == " ".join(written.split())
    assert METHODS.title(name) == (METHODS[name].title or name)


@pytest.mark.parametrize("name", METHODS)
def test_every_option_says_what_it_means_and_its_default_works(name: str) -> None:
    found = options(METHODS[name])
    assert [one.name for one in found] == [field.name for field in fields(METHODS[name])]
    assert all(one.text for one in found), [one.name for one in found if not one.text]
    given = arguments.options([f"{one.name}={one.default}" for one in found])
    assert make(name, **given) == make(name)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_tells_about_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{name}, acts here: ") and "flops: " in shown and "on llava-1.5-7b at 64 tokens: " in shown


def test_a_wrong_option_names_the_options_of_the_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "gqa", "--option", "alhpa=1"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean 'alpha'" in said and "llava-consensus methods consensusdrop" in said


def test_version_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith(f"llava-consensus {__version__}\n")
    pytest.importorskip("shtab")
    assert cli.main(["completion", "bash"]) == 0
    assert "check-data" in capsys.readouterr().out


def commands() -> list[str]:
    """Names of all commands."""
    (group,) = cli._parser()._subparsers._group_actions  # type: ignore[union-attr]
    return list(group.choices)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", commands())
def test_every_command_has_examples_that_its_parser_reads(name: str) -> None:
    assert name in helps.EXAMPLES, f"say in cli/helps.py how {name} is used"
    for line in helps.EXAMPLES[name]:
        words = shlex.split(line.split(" >")[0])
        assert words[0] == name and cli._parser().parse_args(words).lines


def test_examples_are_of_commands() -> None:
    assert set(helps.EXAMPLES) == set(commands())


@pytest.mark.parametrize("unicode", [True, False])
def test_tables_are_for_people_and_harmless(monkeypatch: pytest.MonkeyPatch, unicode: bool) -> None:
    out = SimpleNamespace(encoding="utf-8" if unicode else "ascii", isatty=lambda: False)
    monkeypatch.setattr(terminal, "sys", SimpleNamespace(stdout=out))
    table = Table("scores", ("method", "gqa"), (Group("64 tokens", (("a\x1b[2J", "61.2"), ("[bold]", "-"))),), "a note")
    (text,) = terminal.tables([table])
    assert "\x1b" not in text and "a\\x1b[2J" in text and "[bold]" in text and "a note" in text
    assert text.isascii() != unicode


@pytest.mark.parametrize(
    ("terminal_", "no_color", "wanted"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_colours_only_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, terminal_: bool, no_color: str, wanted: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    stream = SimpleNamespace(isatty=lambda: terminal_)
    assert terminal.colours(stream) == wanted  # type: ignore[arg-type]
    assert terminal.coloured("error:", terminal.RED, stream).endswith("\033[0m") == wanted  # type: ignore[arg-type]


def test_the_rest_of_a_sweep_is_estimated() -> None:
    assert _remaining(120, 2, 8) == "2 of 8 runs, about 6 minutes left"
    assert _remaining(5, 1, 2) == "1 of 2 runs, about a minute left"
    assert _remaining(3600, 1, 4) == "1 of 4 runs, about 3.0 hours left"


def test_windows_is_told_before_anything_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(["list"]) == 2
    assert "use WSL" in capsys.readouterr().err


def test_what_was_tried_is_stored_in_the_package() -> None:
    stored = json.loads((ROOT / "llava_consensus" / "hosts" / "tried.json").read_text())
    assert list(next(iter(stored["cells"].values()))) == list(METHODS)
