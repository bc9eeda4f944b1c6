"""The command line: numbers on standard output, `error: ...` and an exit code for what a user can mend, no traceback.

Run: `pytest tests/cli/test_cli.py`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import Fake, FakeHost, make_data, make_model

from llava_consensus import cli, make
from llava_consensus.cli import arguments
from llava_consensus.errors import OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.evaluation.report.table import BEGIN, END


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of an evaluation of the fake benchmark on a fake host."""
    monkeypatch.setitem(BENCHMARKS, "fake", Fake)
    monkeypatch.setattr(models, "load", lambda *_: FakeHost())
    make_model(tmp_path / "model")
    data = make_data(tmp_path / "data")
    rest = ["--model", str(tmp_path / "model"), "--data", str(data), "--device", "cpu", "--no-progress"]
    return ["eval", "fake", *rest, "--out", str(tmp_path / "out")]


def test_eval_tells_score_tokens_and_speed(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*place, "--tokens", "64"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("fake: accuracy ") and "on 20 of 20 questions" in first
    assert "all tokens: not measured yet" in first
    assert "visual tokens per question: 576 before, 64 after" in first and "questions/s" in first


def test_eval_compares_with_all_tokens(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*place, "--method", "full"]) == 0
    assert "this run is the full model" in capsys.readouterr().out
    assert cli.main([*place, "--tokens", "64", "--option", "alpha=1"]) == 0
    assert "% of it kept)" in capsys.readouterr().out


def test_eval_of_a_complete_run_reads_it(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(place) == cli.main(place) == 0
    output = capsys.readouterr()
    assert output.out.count("fake: accuracy") == 2 and "complete already" in output.err


def test_unreadable_pictures_are_counted(place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data" / "eval" / "fake" / "images" / "2.png").write_bytes(b"")
    assert cli.main(place) == 0
    output = capsys.readouterr()
    assert "on 15 of 20 questions, 5 without an answer (errors.jsonl)" in output.out
    assert "5 questions have no answer" in output.err


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["--tokens", "0"], 2, "tokens=0"),
        (["--tokens", "-3"], 2, "tokens=-3"),
        (["--merged", "99"], 2, "merged=99"),
        (["--method", "randon"], 2, "Did you mean 'random'"),
        (["--option", "alpha"], 2, "KEY=VALUE"),
        (["--option", "alpha=3"], 2, "alpha=3"),
        (["--option", "alhpa=0.5"], 2, "Did you mean 'alpha'"),
        (["--limit", "0"], 2, "limit=0"),
        (["--batch", "0"], 2, "batch=0"),
        (["--device", "tpu"], 2, "device"),
        (["--model", "./nowhere"], 3, "no such folder"),
        (["--data", "nowhere"], 3, "questions.jsonl"),
    ],
)
def test_eval_with_bad_arguments(
    place: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, why: str
) -> None:
    assert cli.main([*place, *arguments]) == code
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and why in output.err and not output.out


def test_unknown_benchmark_teaches(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["eval", "gqaa"], ["score", "gqaa", "--answers", "x"]):
        assert cli.main(command) == 2
        assert "Did you mean 'gqa'" in capsys.readouterr().err


def test_tokens_must_be_a_number(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*place, "--tokens", "many"])
    assert caught.value.code == 2


def test_an_interrupted_run_says_how_far_it_came(
    place: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = FakeHost()
    host.interrupt_after = 16
    monkeypatch.setattr(models, "load", lambda *_: host)
    assert cli.main(place) == 130
    output = capsys.readouterr().err
    assert "stopped after 16 of 20 questions" in output and "error:" not in output


def test_options_are_read_as_json_or_text() -> None:
    pairs = ["alpha=0.5", "scap_rope=false", "fuser=recovery", "vision_layer=null", "x=a=b", "n=3"]
    expected: dict[str, Any] = {"alpha": 0.5, "scap_rope": False, "fuser": "recovery", "vision_layer": None}
    assert arguments.options(pairs) == {**expected, "x": "a=b", "n": 3}


def test_a_method_and_its_options_in_one_word() -> None:
    assert arguments.one_word_method("random") == make("random")
    found = arguments.one_word_method("consensusdrop:alpha=0.5,scap_rope=false,fuser=recovery")
    assert found == make("consensusdrop", alpha=0.5, scap_rope=False, fuser="recovery")
    with pytest.raises(OptionError, match="must be KEY=VALUE"):
        arguments.one_word_method("random:seed")


def test_sweep_tells_every_run(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "--bench", "fake", "--methods", "consensusdrop:alpha=1.0 random", *place[2:]]
    assert cli.main([*command, "--tokens", "32 64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["full all", *(f"{name} {count}" for count in (64, 32) for name in ("consensusdrop:alpha=1.0", "random"))]
    told = [line for line in lines if line.startswith("[")]
    assert [line.split(":  ")[0].rpartition(": ")[0] for line in told] == [
        f"[{number}/5] fake {name}" for number, name in enumerate(names, 1)
    ]
    assert lines[-1].startswith("5 of 5 runs are complete: ")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--methods", "randon"], "unknown method 'randon'"),
        (["--methods", "random:sead=1"], "Did you mean 'seed'"),
        (["--tokens", "64 many"], "must be whole numbers"),
        (["--tokens", "64 0"], "tokens=0"),
        (["--bench", "fake gqaa"], "Did you mean 'gqa'"),
    ],
)
def test_a_wrong_sweep_stops_before_anything_is_loaded(
    place: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    why: str,
) -> None:
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("weights were loaded"))
    assert cli.main(["sweep", "--bench", "fake", *place[2:], *arguments]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [[], ["--tokens", "64"], ["--tokens", "576"]])
def test_the_full_model_has_no_budget(place: list[str], tmp_path: Path, tokens: list[str]) -> None:
    assert cli.main([*place, "--method", "full", *tokens]) == 0
    (run,) = (tmp_path / "out").iterdir()
    config = json.loads((run / "config.json").read_text())
    assert run.name.startswith("fake-full-all-") and (config["tokens"], config["merged"]) == (None, None)


def test_score_prints_json(place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(place) == 0
    answers = next((tmp_path / "out").glob("*/answers.jsonl"))
    capsys.readouterr()
    command = ["score", "fake", "--answers", str(answers), "--data", str(tmp_path / "data")]
    assert cli.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    metrics = json.loads(answers.with_name("metrics.json").read_text())
    scores = answers.with_name("scores.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in scores]
    assert all(row.pop("picture") for row in rows)  # what a run adds
    assert report == metrics["report"] | {"extracted": rows}
    assert cli.main(["score", "fake", "--answers", "nowhere", "--data", str(tmp_path / "data")]) == 3


def test_report_writes_between_markers(place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, out = tmp_path / "page.md", str(tmp_path / "out")
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    assert cli.main(place) == 0
    assert cli.main(["report", "--out", out, "--write", str(page)]) == 0
    assert "| ConsensusDrop |" in page.read_text() and page.read_text().startswith("before\n")
    assert "Retain 64 tokens" in capsys.readouterr().out
    assert cli.main(["report", "--out", out, "--write", str(tmp_path / "none.md")]) == 3
    page.write_text("nothing")
    assert cli.main(["report", "--out", out, "--write", str(page)]) == 3


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {"consensusdrop", "random", "full", "llava", "gqa", "pope", "textvqa"} <= names
    assert all(len(line.split()) > 3 for line in lines if line.startswith("  "))


def test_ask_tells_answer_tokens_and_time_and_draws_what_was_kept(
    place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = str(tmp_path / "data" / "eval" / "fake" / "images" / "3.png")
    model = ["--model", str(tmp_path / "model"), "--repeats", "2"]
    kept = tmp_path / "kept.png"
    assert cli.main(["ask", picture, "what?", "--overlay", str(kept), *model]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("what? [3]") and lines[1] == "visual tokens the language model saw: 64 of 576"
    assert lines[2].startswith("time to first token: ") and kept.stat().st_size > 0


@pytest.mark.parametrize(
    ("picture", "extra", "code", "why"),
    [
        ("nowhere.png", [], 3, "no such picture"),
        ("https://example.org/a.png", [], 2, "addresses are not fetched"),
        (None, ["--repeats", "0"], 2, "repeats=0"),
        (None, ["--overlay", "a.txt"], 2, "must end with"),
        (None, ["--overlay", "nowhere/a.png"], 3, "no folder"),
        (None, ["--tokens", "0"], 2, "tokens=0"),
        (None, ["--model", "./nowhere"], 3, "no such folder"),
    ],
)
def test_ask_with_bad_arguments(
    place: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    picture: str | None,
    extra: list[str],
    code: int,
    why: str,
) -> None:
    file = picture or str(tmp_path / "data" / "eval" / "fake" / "images" / "3.png")
    assert cli.main(["ask", file, "what?", "--model", str(tmp_path / "model"), *extra]) == code
    assert why in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from llava_consensus import cli\ntry: cli.main(['list', '--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'llava', 'PIL', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
