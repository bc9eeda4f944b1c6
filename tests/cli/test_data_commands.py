"""What brings data here: a cut connection is gone on with, what is damaged or leads elsewhere is refused, licences are
shown first, and the embedded model works wherever it is put.
"""

import io
import zipfile
from pathlib import Path

import pytest

from llava_consensus import cli
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models.hf import CHAT_TEMPLATE

ROOT = Path(__file__).parents[2]


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
    served, asked = {"eval.zip": content.getvalue(), "mm-vet.zip": content.getvalue()}, []

    def fetch(url: str, target: Path, md5: str = "") -> None:
        asked.append(target.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(served[target.name])

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
    from llava_consensus.evaluation.data import mini

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
