"""`score` takes what users have: official uploads, sheets, folders and finished grades, told by their content.

Run: `pytest tests/evaluation/benchmarks/test_official_files.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_data
from judged_data import make_mmvet, make_msvd

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import make


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    tiny_data.write_lines(path, rows)
    return path


def test_seed_uploads_as_lines_and_as_a_list(tmp_path: Path) -> None:
    data, seed = tiny_data.make_seed(tmp_path), make("seed")
    letters = {"101": "A", "102": "C", "v0": "C"}
    plain = lines(tmp_path / "plain.jsonl", [{"question_id": key, "text": text} for key, text in letters.items()])
    upload = [{"question_id": key, "prediction": text} for key, text in letters.items()]
    (tmp_path / "list.json").write_text(json.dumps(upload))
    expected = seed.score_file(plain, data)
    assert expected["accuracy"] is not None
    for path in (lines(tmp_path / "upload.jsonl", upload), tmp_path / "list.json"):
        assert seed.score_file(path, data) == expected


@pytest.mark.parametrize("kind", [int, str])
def test_seed_ids_are_texts_or_numbers_anywhere(tmp_path: Path, kind: type) -> None:
    data, seed = tiny_data.make_seed(tmp_path), make("seed")
    annotations = data / "eval/seed_bench/SEED-Bench.json"
    content = json.loads(annotations.read_text())
    for row in content["questions"]:
        row["question_id"] = row["question_id"] if row["question_id"] == "v0" else int(row["question_id"])
    annotations.write_text(json.dumps(content))
    questions = data / "eval/seed_bench/llava-seed-bench.jsonl"
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    lines(questions, [{**row, "question_id": str(row["question_id"])} for row in rows])
    keys = [kind(101), kind(102), "v0"]
    answers = lines(tmp_path / "a.jsonl", [{"question_id": key, "text": "A"} for key in keys])
    assert seed.score_file(answers, data)["image"] == pytest.approx(100 / 3)
    seed.export(seed.read(answers, data), data, tmp_path / "upload.jsonl")
    uploaded = [json.loads(line)["question_id"] for line in (tmp_path / "upload.jsonl").read_text().splitlines()]
    assert uploaded == [row["question_id"] for row in content["questions"]], "as the annotation has them"


def test_mmvet_results_and_finished_grades(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, mmvet = make_mmvet(tmp_path), make("mmvet")
    (tmp_path / "result.json").write_text(json.dumps({f"v1_{number}": "stop" for number in range(5)}))
    assert mmvet.score_file(tmp_path / "result.json", data)["exact"] == 20.0
    marks = {f"v1_{number}": mark for number, mark in enumerate((1.0, 0.5, 0.0, 1.0, 0.3))}
    grades = {key: {"model": ["gpt-4-0613"], "content": [str(mark)], "score": [mark]} for key, mark in marks.items()}
    (tmp_path / "grades.json").write_text(json.dumps(grades))
    assert cli.main(["score", "mmvet", "--answers", str(tmp_path / "grades.json"), "--data", str(data)]) == 0
    said = capsys.readouterr().out
    assert "mmvet: total 56.00" in said and "graded 5" in said and "ocr: 100.00" in said
    (tmp_path / "grades.json").write_text(json.dumps({"other": grades["v1_0"]}))
    with pytest.raises(DataError, match="grades of other samples"):
        mmvet.score_file(tmp_path / "grades.json", data)


def test_finished_grades_of_a_video_set(tmp_path: Path) -> None:
    data, msvd = make_msvd(tmp_path), make("msvd")
    keys = [question.question_id for question in msvd.load(data)]
    said = [("yes", 5), ("no", 2), ("yes", 4.8), ("no", 0), ("yes", 3), ("maybe", 1)]
    whole = {
        key: [{"pred": word, "score": score}, {"q": "", "a": "", "pred": ""}]
        for key, (word, score) in zip(keys, said, strict=True)
    }
    (tmp_path / "combined.json").write_text(json.dumps(whole))
    report = msvd.score_file(tmp_path / "combined.json", data)
    assert report["accuracy"] == 60.0 and report["average_score"] == 2.5
    assert report["counts"] == {"asked": 6, "graded": 6, "missing": 0, "unknown": 0}
    (tmp_path / "combined.json").write_text(json.dumps({**whole, "another": whole[keys[0]]}))
    assert msvd.score_file(tmp_path / "combined.json", data)["counts"]["unknown"] == 1
    rows = [{"id": key, "question": "", "answer": f"act {number}", "pred": "act 1"} for number, key in enumerate(keys)]
    for text in (
        "\n".join(map(str, rows)),
        "\n".join(map(json.dumps, rows)),
    ):  # as Video-LLaVA writes them, and as JSON
        (tmp_path / "p.json").write_text(text)
        assert msvd.score_file(tmp_path / "p.json", data)["counts"]["answered"] == 6
    rows = [{"question_id": keys[0], "text": "act 0"}]
    assert msvd.score_file(lines(tmp_path / "own.jsonl", rows), data)["counts"]["answered"] == 1


def test_an_mmbench_sheet_and_a_table_of_only_what_is_scored(tmp_path: Path) -> None:
    data, mmbench = tiny_data.make_mmbench(tmp_path), make("mmbench")
    questions = mmbench.load(data)
    rows = [{"question_id": one.question_id, "text": "A"} for one in questions]
    answers = lines(tmp_path / "a.jsonl", rows)
    expected = mmbench.score_file(answers, data)
    assert expected["accuracy"] is not None
    mmbench.export(rows, data, tmp_path / "sheet.xlsx")
    assert mmbench.score_file(tmp_path / "sheet.xlsx", data) == expected
    table = data / "eval/mmbench/mmbench_dev_20230712.tsv"
    cells = [line.split("\t") for line in table.read_text().splitlines()]
    kept = [cells[0].index(name) for name in ("index", "A", "B", "C", "D", "answer")]
    table.write_text("".join("\t".join(line[place] for place in kept) + "\n" for line in cells))
    few = mmbench.score_file(answers, data)
    assert {name: few[name] for name in ("accuracy", "single")} == {
        name: expected[name] for name in ("accuracy", "single")
    }
    with pytest.raises(DataError, match="no column question"):
        mmbench.load(data)
    (tmp_path / "broken.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match="not a sheet"):
        mmbench.score_file(tmp_path / "broken.xlsx", data)


def test_an_mme_results_folder(tmp_path: Path) -> None:
    data, mme = tiny_data.make_mme(tmp_path), make("mme")
    asked = mme.load(data)
    rows = [
        {"question_id": one.question_id, "prompt": one.text, "text": ("Yes", "No", "no", "no")[one.index % 4]}
        for one in asked
    ]
    expected = mme.score(rows, data)
    mme.export(rows, data, tmp_path / "results")
    assert mme.score_file(tmp_path / "results", data) == expected and expected["perception"] > 0
    (tmp_path / "results" / "color.txt").write_text("0001.jpg\tIs it?\n")
    with pytest.raises(DataError, match=r"color\.txt, line 1: 2 fields"):
        mme.score_file(tmp_path / "results", data)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="not the official results folder"):
        mme.score_file(tmp_path / "empty", data)


def test_sqa_is_scored_without_its_question_file(tmp_path: Path) -> None:
    data, sqa = tiny_data.make_sqa(tmp_path), make("sqa")
    rows = [{"question_id": one.question_id, "prompt": one.prompt or one.text, "text": "B"} for one in sqa.load(data)]
    answers = lines(tmp_path / "a.jsonl", rows)
    expected = sqa.score_file(answers, data)
    (data / "eval/scienceqa/llava_test_CQM-A.json").unlink()
    assert sqa.score_file(answers, data) == expected and expected["img_accuracy"] == 50.0
    with pytest.raises(DataError, match="missing file"):
        sqa.load(data)


def said(name: str, data: Path, text: str) -> list[dict[str, Any]]:
    return [
        {"question_id": one.question_id, "prompt": one.prompt or one.text, "text": text}
        for one in make(name).load(data)
    ]


@pytest.mark.parametrize("name", ["gqa", "vqav2", "pope", "sqa"])
def test_the_official_form_scores_as_llavas_lines(tmp_path: Path, name: str) -> None:
    data, benchmark = tiny_data.MADE[name](tmp_path / "data"), make(name)
    rows = said(name, data, "A" if name == "sqa" else "yes")
    path = tmp_path / "official.json"
    if name == "gqa":
        path.write_text(json.dumps([{"questionId": str(r["question_id"]), "prediction": r["text"]} for r in rows]))
    elif name == "vqav2":
        assert benchmark.export is not None
        benchmark.export(rows, data, path)  # of the whole of test2015
    elif name == "pope":
        lines(path, [{"question": r["prompt"].split("\n")[0], "answer": r["text"]} for r in rows])
    else:
        path.write_text(json.dumps({"acc": 0.0, "outputs": {r["question_id"]: r["text"] for r in rows}}))
    assert benchmark.score_file(path, data) == benchmark.score_file(lines(tmp_path / "lines.jsonl", rows), data)


def test_pope_answers_of_one_category(tmp_path: Path) -> None:
    data, pope = tiny_data.make_pope(tmp_path / "data"), make("pope")
    of_one = [one for one in pope.load(data) if one.category == "popular"]
    rows = [{"question": one.text.split("\n")[0], "answer": "yes"} for one in of_one]
    assert pope.score_file(lines(tmp_path / "a.json", rows), data)["counts"]["answered"] == len(of_one)
    with pytest.raises(DataError, match="neither all"):
        pope.score_file(lines(tmp_path / "b.json", rows[1:]), data)


@pytest.mark.parametrize("name", ["sqa", "pope", "gqa", "mme", "seed", "mmbench"])
def test_answers_that_no_scorer_reads_are_counted(tmp_path: Path, name: str) -> None:
    data, benchmark = tiny_data.MADE[name](tmp_path / "data"), make(name)
    rows = said(name, data, " " if name == "gqa" else "(?)")
    report = benchmark.score(rows, data)
    assert report["unreadable_answers"] == report["counts"]["answered"] > 0 and report["complete"]


def test_byte_order_marks_and_question_files_of_lines(tmp_path: Path) -> None:
    data = tiny_data.make_mme(tmp_path / "mme")
    rows = said("mme", data, "yes")
    before = make("mme").score(rows, data)
    for path in (data / "eval" / "MME").rglob("*.txt"):
        path.write_text("\ufeff" + path.read_text())
    assert make("mme").score(rows, data) == before
    data = tiny_data.make_sqa(tmp_path / "sqa")
    asked, file = make("sqa").load(data), data / "eval/scienceqa/llava_test_CQM-A.json"
    lines(file, json.loads(file.read_text()))
    assert make("sqa").load(data) == asked
