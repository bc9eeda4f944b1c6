"""Results of lmms-eval and answers of LLaVA's as runs, and two of them against each other."""

import json
from pathlib import Path

import pytest
import tiny_data

from llava_consensus import cli
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.report.rows import read_row

RIGHT = [1] * 30 + [0] * 10, [1] * 20 + [0] * 18 + [1] * 2


def lmms_eval(path: Path, right: list[int]) -> Path:
    """Lines of `--log_samples`, as lmms-eval 0.7.3 writes them; four questions about each image."""
    rows = []
    for k, value in enumerate(right):
        logged = {"target": "yes", "resps": [["yes"]], "filtered_resps": ["yes"], "exact_match": float(value)}
        rows.append({"doc_id": k, "doc": {"image_source": f"{k // 4}.jpg", "question": "?"}, **logged})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(path: Path, out: Path, *more: str) -> tuple[int, list[str]]:
    command = ["report", "import", str(path), "--benchmark", "pope", "--method", "stride", "--model", "gemma-4-e4b"]
    return cli.main([*command, "--out", str(out), *more]), sorted(one.name for one in out.glob("*"))


def test_two_imports_are_paired_by_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    assert run(lmms_eval(tmp_path / "a.jsonl", RIGHT[0]), out, "--tokens", "64")[0] == 0
    code, names = run(lmms_eval(tmp_path / "b.jsonl", RIGHT[1]), out, "--tokens", "32")
    assert code == 0 and len(names) == 2
    rows = [read_row(out / name) for name in names]
    assert [row.score for row in rows] == [55.0, 75.0] and rows[0].images == 10
    capsys.readouterr()
    assert cli.main(["report", "compare", names[1], names[0], "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "+20.00" in shown and "exact sign flips of images" in shown
    assert cli.main(["report", "--out", str(out)]) == 0 and "stride" in capsys.readouterr().out


def test_the_score_of_a_metric_is_read_never_an_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an object as MMStar's and POPE's tasks log it; one without a score is refused."""
    path = tmp_path / "x_samples_pope.jsonl"

    def log(key: str, **more: object) -> None:
        scores = ({"question_id": k % 2, key: 1.0, "prediction": "no"} for k in range(4))
        rows = [{"doc_id": k, "target": "a", "pope_accuracy": one, **more} for k, one in enumerate(scores)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    log("score")
    _, names = run(path, tmp_path / "out")
    assert read_row(tmp_path / "out" / names[0]).score == 100
    for key, more, said in (("length", {}, "Name another"), ("score", {"acc": 7}, "Name it: --metric")):
        log(key, **more)
        assert run(path, tmp_path / "other") == (3, []) and said in capsys.readouterr().err
    assert run(path, tmp_path / "other", "--metric", "acc")[0] == 3 and "is 7" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["list", "csv", "tsv", "UTF-16"])
def test_a_table_of_scores_is_read_in_every_form(tmp_path: Path, form: str) -> None:
    rows = [{"question_id": k, "correct": k % 2} for k in range(4)]
    content = "".join(json.dumps(row) + "\n" for row in rows) if form == "UTF-16" else json.dumps(rows)
    if form in ("csv", "tsv"):
        table = ["question_id,correct", *(f"{row['question_id']},{row['correct']}" for row in rows), ""]
        content = "\r\n".join(table).replace(",", "\t" if form == "tsv" else ",")
    (tmp_path / "a").write_text(content, encoding="utf-16" if form == "UTF-16" else "utf-8")
    code, (name,) = run(tmp_path / "a", tmp_path / "out")
    assert code == 0 and read_row(tmp_path / "out" / name).score == 50


def test_answers_of_llavas_are_scored_by_the_benchmark(tmp_path: Path) -> None:
    data = tiny_data.make_gqa(tmp_path)
    questions = benchmarks.make("gqa").load(data)
    answers = tmp_path / "answers.jsonl"
    tiny_data.write_lines(answers, [{"question_id": one.question_id, "text": "yes"} for one in reversed(questions)])
    expected = benchmarks.make("gqa").score_file(answers, data)
    code, (name,) = run(answers, tmp_path / "out", "--data", str(data), "--benchmark", "gqa")
    row = read_row(tmp_path / "out" / name)
    assert code == 0 and row.score == expected["accuracy"] and row.sample is not None
    assert row.images == len({one.images for one in questions})
