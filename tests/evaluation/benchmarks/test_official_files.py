"""`score` takes the published forms of answers that `paper verify` scores, told by their content."""

import json
from pathlib import Path

import pytest
import tiny_data
from judged_data import make_mmvet

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import make


def test_seed_uploads(tmp_path: Path) -> None:
    data, seed = tiny_data.make_seed(tmp_path), make("seed")
    for name, field in (("a", "text"), ("upload", "prediction")):
        rows = [{"question_id": key, field: letter} for key, letter in (("101", "A"), ("102", "C"), ("v0", "C"))]
        tiny_data.write_lines(tmp_path / f"{name}.jsonl", rows)
    expected = seed.score_file(tmp_path / "a.jsonl", data)
    assert expected["accuracy"] is not None and seed.score_file(tmp_path / "upload.jsonl", data) == expected


def test_finished_grades_of_mmvet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, mmvet = make_mmvet(tmp_path), make("mmvet")
    marks = {f"v1_{number}": mark for number, mark in enumerate((1.0, 0.5, 0.0, 1.0, 0.3))}
    grades = {key: {"model": ["gpt-4-0613"], "content": [str(mark)], "score": [mark]} for key, mark in marks.items()}
    (tmp_path / "grades.json").write_text(json.dumps(grades))
    assert cli.main(["score", "mmvet", "--answers", str(tmp_path / "grades.json"), "--data", str(data)]) == 0
    said = capsys.readouterr().out
    assert "mmvet: total 56.00" in said and "graded 5" in said and "ocr: 100.00" in said
    (tmp_path / "grades.json").write_text(json.dumps({"other": grades["v1_0"]}))
    with pytest.raises(DataError, match="grades of other samples"):
        mmvet.score_file(tmp_path / "grades.json", data)


def test_an_mmbench_sheet(tmp_path: Path) -> None:
    data, mmbench = tiny_data.make_mmbench(tmp_path), make("mmbench")
    rows = [{"question_id": one.question_id, "text": "A"} for one in mmbench.load(data)]
    tiny_data.write_lines(tmp_path / "a.jsonl", rows)
    expected = mmbench.score_file(tmp_path / "a.jsonl", data)
    assert expected["accuracy"] is not None and mmbench.export is not None
    mmbench.export(rows, data, tmp_path / "sheet.xlsx")
    assert mmbench.score_file(tmp_path / "sheet.xlsx", data) == expected
    (tmp_path / "broken.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match="not a sheet"):
        mmbench.score_file(tmp_path / "broken.xlsx", data)


@pytest.mark.parametrize("name", ["sqa", "pope", "gqa", "mme", "seed", "mmbench"])
def test_answers_that_no_scorer_reads_are_counted(tmp_path: Path, name: str) -> None:
    data, benchmark = tiny_data.MADE[name](tmp_path), make(name)
    report = benchmark.score(tiny_data.said(benchmark.load(data), lambda _: " " if name == "gqa" else "(?)"), data)
    assert report["unreadable_answers"] == report["counts"]["answered"] > 0 and report["complete"]
