"""The commands that run something or read runs: numbers on standard output, `error: ...` and an exit code for what a
user can mend, no traceback.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from fakes import Fake, FakeHost, make_place

from llava_consensus import cli
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.evaluation.runs.store import full_score


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(BENCHMARKS, "fake", Fake)
    monkeypatch.setattr(models, "load", lambda *_: FakeHost())
    model = str(make_place(tmp_path) / "model")
    rest = ["--model", model, "--data", str(tmp_path), "--device", "cpu", "--no-progress"]
    return [*rest, "--out", str(tmp_path / "out")]


@pytest.fixture
def asked(place: list[str]) -> list[str]:
    return ["eval", "fake", *place]


def test_eval_tells_score_tokens_and_speed(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*asked, "--tokens", "64"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("fake: accuracy ") and "on 20 of 20 questions" in first
    assert "all tokens: not measured yet" in first
    assert "visual tokens per question: 576 before, 64 after" in first and "questions/s" in first
    assert cli.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["score"] is not None and found["all_tokens"] is None and Path(found["run"]).is_dir()
    assert cli.main([*asked, "--method", "full"]) == 0
    assert "this run is the full model" in capsys.readouterr().out
    assert cli.main([*asked, "--tokens", "64", "--option", "alpha=1"]) == 0
    assert "% of it kept)" in capsys.readouterr().out


def test_the_embedded_model_has_its_scores_with_all_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are those of docs/results.csv, and are not printed for other weights or a part of the questions."""
    config = {"data": "playground/mini", "benchmark": "gqa", "conversation": "vicuna_v1", "decoding": "greedy"}
    content = json.loads(Path("playground/mini/scores.json").read_text())
    config |= content["setting"] | {"questions": content["benchmarks"]["gqa"]["questions"]}
    assert full_score(tmp_path, config) == 83.2863
    for change in ({"weights": "0"}, {"limit": 30}, {"sample": 30}, {"questions": "0"}, {"benchmark": "mme"}):
        assert full_score(tmp_path, config | change) is None
    with open("docs/results.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["set"] == "." and row["method"] == "full"]
    for name, entry in content["benchmarks"].items():
        found = [row["score"] for row in rows if row["benchmark"] == name and row["model"] == "llava-mini"]
        assert {*map(float, found)} == {entry["score"]}
    argv = ["eval", "gqa", "--limit", "1", "--method", "full", "--out", str(tmp_path)]
    assert cli.main([*argv, "--data", "playground/mini", "--no-progress", "--device", "cpu"]) == 0
    run = json.loads(next(tmp_path.glob("*/config.json")).read_text())
    assert run["questions"] == config["questions"] and run["weights"] == config["weights"]


def test_missing_pictures_are_said_before_the_model_is_loaded(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval" / "fake" / "images" / "2.png").unlink()
    said: list[str] = []

    def load(*_: Any) -> FakeHost:
        said.append(capsys.readouterr().err)
        return FakeHost()

    monkeypatch.setattr(models, "load", load)
    assert cli.main(asked) == 6
    assert "1 of 4 images or videos are not there, 2.png first" in said[0]


def test_unreadable_pictures_are_counted(asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "eval" / "fake" / "images" / "2.png").write_bytes(b"")
    assert cli.main(asked) == 6
    out, err = capsys.readouterr()
    assert "on 15 of 20 questions, 5 without an answer (errors.jsonl)" in out
    assert "5 questions without an answer" in err
    last = err.splitlines()[-1]
    assert "questions have no answer" in last and "errors.jsonl" in last


def test_score_prints_json(asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(asked) == 0
    answers = next((tmp_path / "out").glob("*/answers.jsonl"))
    capsys.readouterr()
    assert cli.main(["score", "fake", "--answers", str(answers), "--data", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    metrics = json.loads(answers.with_name("metrics.json").read_text())
    rows = [json.loads(line) for line in answers.with_name("scores.jsonl").read_text().splitlines()]
    assert all(row.pop("picture") for row in rows)  # what a run adds
    assert report == metrics["report"] | {"extracted": rows}


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert {"consensusdrop", "random", "full", "llava", "gqa", "pope", "textvqa"} <= {words[0] for words in lines}
    assert all(len(words) > 3 for words in lines)


def test_ask_tells_answer_and_tokens_and_draws_what_was_kept(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, kept = str(tmp_path / "eval" / "fake" / "images" / "3.png"), tmp_path / "kept.png"
    assert cli.main(["ask", picture, "what?", "--overlay", str(kept), "--model", str(tmp_path / "model")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("what? [3]") and lines[1] == "visual tokens the language model saw: 64 of 576"
    assert kept.stat().st_size > 0


def test_sweep_tells_every_run_and_ends_with_a_table(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "--bench", "fake", "--methods", "consensusdrop:alpha=1.0 random", *place]
    assert cli.main([*command, "--tokens", "32 64"]) == 0
    out = capsys.readouterr().out
    names = ["full all", *(f"{name} {count}" for count in (64, 32) for name in ("consensusdrop:alpha=1.0", "random"))]
    lines = out.splitlines()
    told = [line.split(":  ")[0].rpartition(": ")[0] for line in lines if line.startswith("[")]
    assert told == [f"[{number}/5] fake {name}" for number, name in enumerate(names, 1)]
    assert "64 tokens" in out and len([line for line in lines if line.startswith("| random")]) == 2
    assert lines[-1].startswith("5 of 5 runs are complete: ")
