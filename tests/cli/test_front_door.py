"""The habits of the command line: what needs no torch does not import it, help has examples that work, a method tells
about itself, tables are for people.

Run: `pytest tests/cli/test_front_door.py`.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from llava_consensus import attach, cli
from llava_consensus.cli import arguments, terminal
from llava_consensus.cli.evaluate import remaining
from llava_consensus.errors import OptionError
from llava_consensus.evaluation.report.table import Group, Table
from llava_consensus.methods import METHODS, about, known_methods, make

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "llava", "numpy", "pandas", "PIL", "matplotlib", "rich", "vllm")
LIGHT = {
    "list": 0,
    "--help": 0,
    "eval --help": 0,
    "list --help": 0,
    "--version": 0,
    "lst": 2,
    "list fastv": 0,
    "eval gqaa": 2,
    "score gqaa --answers x": 2,
    "eval gqa --method randon": 2,
    "list methods": 0,
    "list randon": 2,
    "--print-completion bash": 0,
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
    assert done.stderr.count("Did you mean 'gqa'") == 2


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
        assert (
            shown.startswith(f"{name}, acts here: ")
            and "flops: " in shown
            and "on llava-1.5-7b at 64 tokens: " in shown
        )


def test_options_are_read_as_json_or_text_and_a_method_with_them_in_one_word() -> None:
    pairs = ["alpha=0.5", "scap_rope=false", "fuser=recovery", "vision_layer=null"]
    expected = {"alpha": 0.5, "scap_rope": False, "fuser": "recovery", "vision_layer": None}
    assert arguments.options([*pairs, "x=a=b", "n=3"]) == {**expected, "x": "a=b", "n": 3}
    assert arguments.one_word_method("consensusdrop:" + ",".join(pairs)) == make("consensusdrop", **expected)
    assert arguments.one_word_method("random") == make("random")
    with pytest.raises(OptionError, match="must be KEY=VALUE"):
        arguments.one_word_method("random:seed")


def test_a_wrong_option_names_the_options_of_the_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "gqa", "--option", "alhpa=1"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean 'alpha'" in said and "llava-consensus list consensusdrop" in said


def test_version_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and re.match(r"llava-consensus \d+\.\d+\.\d+", capsys.readouterr().out)
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as end:
        cli.main(["--print-completion", "bash"])
    shown = capsys.readouterr().out
    assert not end.value.code and "download" in shown and "--trust-remote-code" in shown


def test_every_command_is_in_the_file_that_is_imported_for_it() -> None:
    cli.parser()
    found: dict[str, set[str]] = {}
    for name, one in arguments.COMMANDS.items():
        found.setdefault(one.lines.__module__.rpartition(".")[2], set()).add(name.split()[0])
    assert found == {file: set(words) for file, words in cli.FILES.items()}


def examples() -> list[str]:
    cli.parser()
    assert all(one.examples for one in arguments.COMMANDS.values())
    return [line for one in arguments.COMMANDS.values() for line in one.examples]


def test_the_examples_of_every_command_are_read_by_its_parser() -> None:
    for line in examples():
        words = shlex.split(line)
        name = " ".join(words[:2]) if " ".join(words[:2]) in arguments.COMMANDS else words[0]
        assert cli.parser(words[0]).parse_args(words).lines is arguments.COMMANDS[name].lines


def test_results_are_looked_for_where_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["report", "compare", "a", "b", "--out", "there"], ["report", "--out", "there", "compare", "a", "b"]):
        assert cli.parser("report").parse_args(words).out == Path("there")
    assert cli.parser("report").parse_args(["report", "compare", "a", "b"]).out == Path("results")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_tables_are_for_people_and_harmless(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    table = Table("scores", ("method", "gqa"), (Group("64 tokens", (("a\x1b[2J", "61.2"), ("[bold]", "-"))),), "a note")
    text = cli.shown(terminal.drawn(table))
    assert "\x1b" not in text and "a\\x1b[2J" in text and "[bold]" in text and "a note" in text
    assert text.isascii() == (encoding == "ascii")


def test_the_rest_of_a_sweep_is_estimated() -> None:
    assert remaining(120, 2, 8) == "2 of 8 runs, about 6 minutes left"
    assert remaining(5, 1, 2) == "1 of 2 runs, about a minute left"
    assert remaining(3600, 1, 4) == "1 of 4 runs, about 3.0 hours left"


def test_windows_is_told_before_anything_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(["list"]) == 2
    assert "use WSL" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["list", "list consensusdrop", "list --hosts"])
def test_lists_fit_a_narrow_terminal(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(line.split()) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 40 < max(map(len, wide.splitlines()))
    assert {word for word in wide.split() if word.isalpha()} - {"method"} <= set(re.findall(r"[a-zA-Z]+", narrow))


def test_lists_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for line in ("list", "list hosts", "list fastv", "list --hosts"):
        assert cli.main([*line.split(), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    everything, hosts, fastv, matrix = found
    assert list(everything) == ["methods", "hosts", "benchmarks"] and everything["hosts"] == hosts
    assert {one["name"]: one["default"] for one in fastv["options"]}["count"] == "kept" and "GFLOP" in fastv["cost"]
    assert matrix["refused"]["llava"]["fastv"] == "" and matrix["refused"]["gemma-3"]["tome"]


@pytest.mark.parametrize(
    ("line", "near"),
    [("lst", "'list'"), ("evl gqa", "'eval'"), ("paper tabel t1", "'table'"), ("data chek", "'check'")],
)
def test_an_unknown_command_says_the_nearest(line: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert f"Did you mean {near}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("eval gqa --tokens -5", "tokens=-5 must be at least 1"),
        ("eval gqa --tokens x", "must be a whole number, or a share such as 0.1"),
        ("eval GQA --method VisionZip --limit 0", "limit=0 must be at least 1"),
        ("eval gqa --jsn", "Did you mean '--json'"),
        ("eval gqa --num_beams 4", "num_beams=4 must be 1"),
        ("eval gqa --question-file x", "is for `eval custom`"),
        ("eval custom --question-file x --image-folder y --chunk-idx 1", "chunk_idx=1 must be in 0..0"),
    ],
)
def test_a_mistake_is_a_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cli.main(line.split()) == 2
    except SystemExit as end:
        assert end.code == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith("error: ") and said in shown


def test_a_torchvision_for_another_torch_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.29.1"}
    monkeypatch.setattr("llava_consensus.errors.version", versions.get)

    def importing(_: object) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'AutoProcessor'") from error

    monkeypatch.setattr(arguments, "method", importing)
    assert cli.main(["eval", "gqa"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: torchvision 0.29.1 was not built for torch 2.13.0+cpu. Type: pip install")
    assert said.endswith("--index-url https://download.pytorch.org/whl/cpu")


def test_what_is_no_model_is_refused_with_what_to_pass() -> None:
    class ImageTextToTextPipeline(type("Pipeline", (), {})):  # type: ignore[misc]
        pass

    with pytest.raises(OptionError, match=r"pass pipe\.model"):
        attach(ImageTextToTextPipeline())
    with pytest.raises(OptionError, match=r"pass pipe\.model"):
        attach("llava-hf/llava-1.5-7b-hf")
    with pytest.raises(OptionError, match="given as tokens=64"):
        attach(object(), 64)


def test_a_closed_output_gives_no_traceback() -> None:
    command = f"{sys.executable} -m llava_consensus.cli list >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_shell_completes_methods_and_benchmarks() -> None:
    pytest.importorskip("shtab")
    code = (
        "complete() { :; }; compopt() { :; }; source /dev/stdin\n"
        'try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_llava_consensus; echo "${COMPREPLY[@]}"; }\n'
        "try llava-consensus eval gq; try llava-consensus eval gqa --method visp; try llava-consensus list spars"
    )
    script = subprocess.run(
        [sys.executable, "-m", "llava_consensus.cli", "--print-completion", "bash"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
    ).stdout  # fmt: skip
    done = subprocess.run(["bash", "-c", code], input=script, capture_output=True, text=True)
    assert done.stdout.split() == ["gqa", "vispruner", "sparsevlm"], done.stderr
