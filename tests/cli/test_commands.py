"""`score` and `data`: answer files, real ones and ways to be wrong; what is missing, what is fetched after its licence
is shown, and the embedded model, which works wherever it is put.
"""

import io
import json
import zipfile
from pathlib import Path

import pandas
import pytest
from golden_cases import sample
from judged_data import make_mmvet
from tiny_data import MADE, said, write_lines

from llava_consensus import cli
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import BENCHMARKS, make
from llava_consensus.evaluation.data import mini
from llava_consensus.evaluation.models.hf import CHAT_TEMPLATE

ROOT = Path(__file__).parents[2]


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


def score(name: str, answers: Path, data: Path, *more: str) -> int:
    return cli.main(["score", name, "--answers", str(answers), "--data", str(data), *more])


def test_score_for_people(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = answer_file(tmp_path / "a.jsonl", "vqav2", data, "yes")
    assert score("vqav2", answers, data) == 0
    out = capsys.readouterr().out
    assert out.startswith("vqav2: accuracy 33.33 (LLaVA-1.5-7B as published: 78.5)\nquestions: asked 3, answered 3,")
    assert "split: test-dev\n" in out and "extracted" not in out
    assert score("vqav2", answers, data, "--json") == 0
    assert json.loads(capsys.readouterr().out)["split"] == "test-dev"


def test_score_of_llava_13b_on_textvqa(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder = sample("textvqa"), tmp_path / "eval" / "textvqa"
    folder.mkdir(parents=True)
    (folder / "llava_textvqa_val_v051_ocr.jsonl").symlink_to(source / "llava_textvqa_val_v051_ocr.jsonl")
    (folder / "TextVQA_0.5.1_val.json").symlink_to(source / "textvqa_val_v051_answers.json")
    assert score("textvqa", source / "llava-v1.5-13b_answers.jsonl", tmp_path) == 0
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
    export = ("--export", str(tmp_path / target))
    assert score(name, answers, data, *export) == 0
    assert (tmp_path / target).read_bytes().startswith(content)
    assert "missing: 0\nduplicate: 0\nunknown: 0\n" in capsys.readouterr().out
    assert score(name, answers, data, *export) == 3 and "is there already" in capsys.readouterr().err
    assert score(name, answers, data, *export, "--force") == 0


@pytest.mark.parametrize("name", ["gqa", "vqav2", "mmbench", "mmvet"])
def test_answers_with_holes_are_not_exported_and_no_answers_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    make_mmvet(data)
    answers = answer_file(tmp_path / "a.jsonl", name, data)
    exports = [] if name == "gqa" else [("--export", str(tmp_path / "o"))]  # GQA takes no submissions
    answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:-1]))
    for export in exports:
        assert score(name, answers, data, *export) == 3
        assert "1 question without an answer, and" in capsys.readouterr().err
    answers.write_text("")
    for more in [(), *exports]:
        assert score(name, answers, data, *more) == 3 and "no answers in it" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_export_lists_what_is_twice_or_unknown(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = (5, 5, 6, 77, 1000005, 2000005, 1000006)
    write_lines(tmp_path / "a.jsonl", [{"question_id": key, "prompt": "", "text": "x"} for key in ids])
    assert score("mmbench", tmp_path / "a.jsonl", data, "--export", str(tmp_path / "o.xlsx")) == 0
    out = capsys.readouterr().out
    assert "answers: 7\nmissing: 0\nduplicate: 1: 5\nunknown: 1: 77\nwritten: 5\n" in out
    assert len(pandas.read_excel(tmp_path / "o.xlsx")) == 5
    assert score("mmbench", tmp_path / "a.jsonl", data, "--export", str(tmp_path / "no" / "o.xlsx")) == 3
    assert "no folder" in capsys.readouterr().err


def test_check_data_says_what_is_missing_and_its_source(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "check", "--data", str(data)]) == 0
    assert capsys.readouterr().out.count("ready\n") == len(BENCHMARKS)
    assert cli.main(["data", "check", "mmbench", "--data", str(data)]) == 0
    assert "5 questions, but the official set has 4,377" in capsys.readouterr().out
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


def test_licences_come_first_and_nobody_is_taken_to_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "download", "pope", "--data", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "MIT; COCO images" in shown.out and "6 GB" in shown.out and "--yes" in shown.err
    assert not any(tmp_path.iterdir())


def test_data_are_fetched_unpacked_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("mm-vet/mm-vet.json", "{}")
        archive.writestr("mm-vet/images/1.png", "no image")
    asked = []

    def fetch(url: str, target: Path, md5: str = "") -> None:
        asked.append(target.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.getvalue())

    monkeypatch.setattr("llava_consensus.cli.models.fetch", fetch)
    command = ["data", "download", "mmvet", "--data", str(tmp_path), "--yes"]
    assert cli.main(command) == 3  # the question file was in none of them
    shown = capsys.readouterr()
    assert "llava-mm-vet.jsonl" in shown.out and "not ready: mmvet" in shown.err
    assert (tmp_path / "eval" / "mm-vet" / "mm-vet.json").is_file()
    assert sorted(path.name for path in (tmp_path / "downloads").iterdir()) == ["eval.zip.done", "mm-vet.zip.done"]
    cli.main(command)
    assert asked == ["eval.zip", "mm-vet.zip"] and "here already" in capsys.readouterr().out


def test_the_embedded_model_is_put_where_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generated: list[Path] = []
    monkeypatch.setattr(mini, "generate", generated.append)
    assert cli.main(["data", "mini", "--to", str(tmp_path)]) == 0
    assert "llava-consensus eval gqa" in capsys.readouterr().out and generated == [tmp_path]
    checkpoint, generator = (tmp_path / part for part in mini.PARTS)
    assert models.check(str(checkpoint)) == {"conversation": CHAT_TEMPLATE}, "a model of transformers, without LLaVA"
    there = {path.relative_to(ROOT / mini.PARTS[1]) for path in (ROOT / mini.PARTS[1]).rglob("*") if path.is_file()}
    copied = {path.relative_to(generator) for path in generator.rglob("*") if path.is_file()}
    assert copied and copied <= there and not any("eval" in path.parts for path in copied)
    monkeypatch.setattr(mini, "HERE", tmp_path / "nowhere" / "a" / "b" / "c")
    assert cli.main(["data", "mini", "--to", str(tmp_path / "other")]) == 3
    assert "Install a release" in capsys.readouterr().err
