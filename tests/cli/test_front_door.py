"""The habits of the command line: what needs no torch does not import it, help has examples that work, a method tells
about itself, tables are for people.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from llava_consensus import cli
from llava_consensus.cli import arguments
from llava_consensus.errors import OptionError
from llava_consensus.methods import METHODS, about, known_methods, make

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "llava", "numpy", "pandas", "PIL", "matplotlib", "rich", "vllm")
LIGHT = dict.fromkeys(("list", "--help", "eval --help", "list --help", "--version", "list fastv", "list methods"), 0)
WRONG = ("lst", "eval gqaa", "score gqaa --answers x", "eval gqa --method randon", "list randon")
LIGHT |= dict.fromkeys(WRONG, 2)


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


def test_the_line_of_a_method_is_its_docstring() -> None:
    for name in METHODS:
        written = (METHODS[name].__doc__ or "").split("\n\n")[0]
        assert known_methods()[name] == " ".join(written.split())
        assert METHODS.title(name) == (METHODS[name].title or name)


def test_every_option_says_what_it_means_and_its_default_works() -> None:
    for name in METHODS:
        found = about(name).options
        assert [one.name for one in found] == [field.name for field in fields(METHODS[name])]
        assert all(one.text for one in found), [one.name for one in found if not one.text]
        given = arguments.options([f"{one.name}={one.default}" for one in found])
        assert make(name, **given) == make(name)


def test_a_method_tells_about_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in METHODS:
        assert cli.main(["list", name]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"{name}, acts here: ")
        assert "flops: " in shown and "on llava-1.5-7b at 64 tokens: " in shown


def test_options_are_read_as_json_or_text_and_a_method_with_them_in_one_word() -> None:
    pairs = ["alpha=0.5", "scap_rope=false", "fuser=recovery", "vision_layer=null"]
    expected = {"alpha": 0.5, "scap_rope": False, "fuser": "recovery", "vision_layer": None}
    assert arguments.options([*pairs, "x=a=b", "n=3"]) == {**expected, "x": "a=b", "n": 3}
    assert arguments.one_word_method("consensusdrop:" + ",".join(pairs)) == make("consensusdrop", **expected)
    assert arguments.one_word_method("random") == make("random")
    with pytest.raises(OptionError, match="must be KEY=VALUE"):
        arguments.one_word_method("random:seed")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and re.match(r"llava-consensus \d+\.\d+\.\d+", capsys.readouterr().out)


def test_every_command_is_in_the_file_that_is_imported_for_it() -> None:
    cli.parser()
    found: dict[str, set[str]] = {}
    for name, one in arguments.COMMANDS.items():
        found.setdefault(one.lines.__module__.rpartition(".")[2], set()).add(name.split()[0])
    assert found == {file: set(words) for file, words in cli.FILES.items()}


def test_the_examples_of_every_command_are_read_by_its_parser() -> None:
    cli.parser()
    assert all(one.examples for one in arguments.COMMANDS.values())
    for line in (line for one in arguments.COMMANDS.values() for line in one.examples):
        words = shlex.split(line)
        name = " ".join(words[:2]) if " ".join(words[:2]) in arguments.COMMANDS else words[0]
        assert cli.parser(words[0]).parse_args(words).lines is arguments.COMMANDS[name].lines


def test_windows_is_told_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(["list"]) == 2
    assert "use WSL" in capsys.readouterr().err


def test_a_closed_output_gives_no_traceback() -> None:
    command = f"{sys.executable} -m llava_consensus.cli list >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
