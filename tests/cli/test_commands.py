"""`score`, `export` and `check-data` on answer files: real ones, and ways to be wrong."""

import json
from pathlib import Path

import pandas
import pytest
from golden_cases import sample
from judged_data import make_mmvet
from tiny_data import MADE, said, write_lines

from llava_consensus import cli
from llava_consensus.evaluation.benchmarks import BENCHMARKS, make


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The benchmarks without a judge, tiny, in one folder."""
    folder = tmp_path / "data"
    for name in MADE.keys() - {"textvqa"}:
        MADE[name](folder)
    return folder


def answer_file(path: Path, name: str, data: Path, text: str = "A") -> Path:
    write_lines(path, said(make(name).load(data), lambda _: text))
    return path


def test_score_for_people(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = answer_file(tmp_path / "a.jsonl", "vqav2", data, "yes")
    assert cli.main(["score", "vqav2", "--answers", str(answers), "--data", str(data)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("vqav2: accuracy 33.33 (LLaVA-1.5-7B as published: 78.5)\nquestions: asked 3, answered 3,")
    assert "split: test-dev\n" in out and "extracted" not in out
    assert cli.main(["score", "vqav2", "--answers", str(answers), "--data", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["split"] == "test-dev"


def test_score_of_llava_13b_on_textvqa(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder = sample("textvqa"), tmp_path / "eval" / "textvqa"
    folder.mkdir(parents=True)
    (folder / "llava_textvqa_val_v051_ocr.jsonl").symlink_to(source / "llava_textvqa_val_v051_ocr.jsonl")
    (folder / "TextVQA_0.5.1_val.json").symlink_to(source / "textvqa_val_v051_answers.json")
    answers = str(source / "llava-v1.5-13b_answers.jsonl")
    assert cli.main(["score", "textvqa", "--answers", answers, "--data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("textvqa: accuracy 61.25 ") and "asked 5000, answered 5000, missing 0" in out


@pytest.mark.parametrize(
    ("name", "target", "content"),
    [("vqav2", "u.json", b'[{"question_id": 10, "answer": ""}, '), ("mmbench", "u.xlsx", b"PK")],
)
def test_export_writes_what_the_official_side_takes(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, target: str, content: bytes
) -> None:
    answers = answer_file(tmp_path / "a.jsonl", name, data)
    out = tmp_path / target
    command = ["score", name, "--answers", str(answers), "--export", str(out), "--data", str(data)]
    assert cli.main(command) == 0
    assert out.read_bytes().startswith(content)
    assert "missing: 0\nduplicate: 0\nunknown: 0\n" in capsys.readouterr().out
    assert cli.main(command) == 3 and "is there already" in capsys.readouterr().err
    assert cli.main([*command, "--force"]) == 0


@pytest.mark.parametrize("name", ["vqav2", "mmbench", "mmvet"])
def test_a_submission_with_holes(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    make_mmvet(data)
    answers = answer_file(tmp_path / "a.jsonl", name, data)
    answers.write_text("".join(f"{line}\n" for line in answers.read_text().splitlines()[:-1]))
    command = ["score", name, "--answers", str(answers), "--data", str(data), "--export", str(tmp_path / "o")]
    assert cli.main(command) == 3 and "1 question without an answer, and" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("export", [[], ["--export", "o"]])
def test_an_answer_file_without_answers_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, export: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_mmvet(data)
    (tmp_path / "a.jsonl").touch()
    for name in ("gqa", "vqav2", "mmbench", "mmvet")[(1 if export else 0) :]:
        command = ["score", name, "--answers", str(tmp_path / "a.jsonl"), "--data", str(data), *export]
        assert cli.main(command) == 3 and "no answers in it" in capsys.readouterr().err, name
    assert not (tmp_path / "o").exists()


def test_export_lists_what_is_twice_or_unknown(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = (5, 5, 6, 77, 1000005, 2000005, 1000006)
    write_lines(tmp_path / "a.jsonl", [{"question_id": key, "prompt": "", "text": "x"} for key in ids])
    command = ["score", "mmbench", "--answers", str(tmp_path / "a.jsonl"), "--data", str(data)]
    assert cli.main([*command, "--export", str(tmp_path / "o.xlsx")]) == 0
    out = capsys.readouterr().out
    assert "answers: 7\nmissing: 0\nduplicate: 1: 5\nunknown: 1: 77\nwritten: 5\n" in out
    assert len(pandas.read_excel(tmp_path / "o.xlsx")) == 5
    assert cli.main([*command, "--export", str(tmp_path / "no" / "o.xlsx")]) == 3
    assert "no folder" in capsys.readouterr().err


def test_check_data_says_what_is_missing_and_its_source(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "check", "--data", str(data)]) == 0
    blocks = capsys.readouterr().out.split("ready\n")
    assert len(blocks) == len(BENCHMARKS) + 1
    assert cli.main(["data", "check", "mmbench", "--data", str(data)]) == 0
    out = capsys.readouterr().out
    assert "5 questions, but the official set has 4,377" in out
    (data / "eval/seed_bench/SEED-Bench.json").unlink()
    assert cli.main(["data", "check", "seed", "mmbench", "--data", str(data)]) == 3
    output = capsys.readouterr()
    assert "missing  " in output.out and "AILab-CVC/SEED-Bench" in output.out
    assert output.err == "error: not ready: seed. What is missing and where it comes from is said above\n"


def test_check_data_finds_missing_pictures_and_foreign_labels(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "check", "pope", "--data", str(data)]) == 3
    out = capsys.readouterr().out
    assert "2 of 2 images in" in out and "its content is not that of the known version" in out
    for number in (0, 1):
        path = data / "eval/pope/val2014" / f"COCO_val2014_{number:012}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert cli.main(["data", "check", "pope", "--data", str(data)]) == 0
    labels = data / "eval/pope/coco/coco_pope_random.json"
    labels.write_text(labels.read_text().replace("number 3 ", "number 4 "))
    assert cli.main(["data", "check", "pope", "--data", str(data)]) == 3
    assert "another label version" in capsys.readouterr().out.lower()


def test_check_data_tells_the_uses_apart(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def last(name: str) -> str:
        cli.main(["data", "check", name, "--data", str(data)])
        return next(line for line in capsys.readouterr().out.splitlines() if "; answering: " in line).strip()

    assert last("pope") == "scoring: ready; answering: not ready", "its images are not there"
    assert last("mmbench") == "scoring: ready; export: ready; answering: ready"
    make_mmvet(data)
    assert last("mmvet") == "scoring: by a judge; export: ready; answering: not ready"
    (data / "eval/vqav2/llava_vqav2_mscoco_test2015.jsonl").unlink()
    assert last("vqav2") == "scoring: ready; export: not ready; answering: not ready"
    (data / "eval/vqav2/v2_mscoco_test-dev2015_annotations.json").unlink()
    assert last("vqav2").startswith("scoring: by EvalAI; ")
    (data / "eval/scienceqa/llava_test_CQM-A.json").unlink()
    assert last("sqa") == "scoring: not ready; answering: not ready"
