"""Results of other tools as runs, and two of them against each other."""

import json
from pathlib import Path

import pytest
import tiny_data

from llava_consensus import cli
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.report.rows import read_row

RIGHT = [1] * 30 + [0] * 10, [1] * 20 + [0] * 18 + [1] * 2


def lmms_eval(path: Path, right: list[int]) -> Path:
    """Lines of `--log_samples`, as lmms-eval 0.7.3 writes them."""
    rows = [{"doc_id": k, "doc": {"image_source": f"{k}.jpg", "question": "?"}, "target": "yes", "resps": [["yes"]],
             "filtered_resps": ["yes"], "exact_match": float(value)} for k, value in enumerate(right)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def vlmevalkit(path: Path, right: list[int]) -> Path:
    """A table of VLMEvalKit's, in another order."""
    rows = [f"{k}\tq\tA\t{value}" for k, value in reversed(list(enumerate(right)))]
    path.write_text("\n".join(["index\tquestion\tprediction\thit", *rows]) + "\n")
    return path


def run(path: Path, out: Path, *more: str) -> tuple[int, list[str]]:
    command = ["report", "import", str(path), "--benchmark", "pope", "--method", "stride", "--model", "gemma-4-e4b"]
    return cli.main([*command, "--out", str(out), *more]), sorted(one.name for one in out.glob("*"))


def test_two_tools_are_paired_by_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    assert run(lmms_eval(tmp_path / "a.jsonl", RIGHT[0]), out, "--tokens", "64")[0] == 0
    code, names = run(vlmevalkit(tmp_path / "b.tsv", RIGHT[1]), out, "--tokens", "32")
    assert code == 0 and len(names) == 2
    assert [read_row(out / name).score for name in names] == [55.0, 75.0]
    capsys.readouterr()
    assert cli.main(["report", "compare", names[1], names[0], "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "+20.00" in shown and "p = 0.039 (exact McNemar); 10 questions better in A, 2 in B" in shown
    assert cli.main(["report", "--out", str(out)]) == 0 and "stride" in capsys.readouterr().out


def test_the_score_of_a_metric_is_read_never_an_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an object as MMStar's and POPE's tasks log it; one without a score is refused."""
    path = tmp_path / "x_samples_pope.jsonl"

    def log(key: str) -> None:
        rows = [{"doc_id": k, "target": "a", "pope_accuracy": {"question_id": k % 2, key: 1.0, "prediction": "no"}}
                for k in range(4)]  # fmt: skip
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    log("score")
    _, names = run(path, tmp_path / "out")
    assert read_row(tmp_path / "out" / names[0]).score == 100
    log("length")
    assert run(path, tmp_path / "other") == (3, []) and "Name another" in capsys.readouterr().err


def test_pictures_and_columns_by_name(tmp_path: Path) -> None:
    path = tmp_path / "any.csv"
    rows = [f"q{k},{k // 4}.jpg,{k % 2},{share}\n" for share in (0.25, 0.5) for k in range(80)]
    path.write_text("qid,shot,good,ratio\n" + "".join(rows))
    words = "--columns id=qid --columns right=good --columns picture=shot --where ratio=0.25"
    code, names = run(path, tmp_path / "out", *words.split())
    row = read_row(tmp_path / "out" / names[0])
    assert code == 0 and row.pictures == 20 and row.score == 50 and row.full


def test_answers_of_llavas_are_scored_by_the_benchmark(tmp_path: Path) -> None:
    data = tiny_data.make_gqa(tmp_path)
    questions = benchmarks.make("gqa").load(data)
    answers = tmp_path / "answers.jsonl"
    tiny_data.write_lines(answers, [{"question_id": one.question_id, "text": "yes"} for one in reversed(questions)])
    expected = benchmarks.make("gqa").score_file(answers, data)
    code, (name,) = run(answers, tmp_path / "out", "--data", str(data), "--benchmark", "gqa")
    row = read_row(tmp_path / "out" / name)
    assert code == 0 and row.score == expected["accuracy"] and row.sample is not None
    assert row.pictures == len({one.images for one in questions})
    assert run(answers, tmp_path / "other", "--data", str(data), "--where", "a=b")[0] == 2


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("id,hit\n1,1\n1,0\n", (), "occur twice"),
        ("id,hit\n1,7\n", (), "row 1: hit is 7"),
        ("id,good\n1,1\n", (), "no column hit or correct"),
        ("id,hit\n1,1\n", ("--columns", "who=id"), "--columns who"),
        ("id,hit\n", (), "no rows"),
    ],
)
def test_what_is_no_result_is_refused(
    text: str, more: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text(text)
    code, names = run(tmp_path / "a.csv", tmp_path / "out", *more)
    assert code in (2, 3) and not names and words in capsys.readouterr().err
