"""Question files and videos of strangers lead nowhere else."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeHost, config, make_place
from PIL import Image
from tiny_data import write_mp4

from llava_consensus.errors import DataError, ImageError
from llava_consensus.evaluation.media import read_frames
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution, RunResult


@pytest.fixture
def data(tmp_path: Path) -> Path:
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    return make_place(tmp_path / "data")


def name_pictures(data: Path, name: str) -> None:
    path = data / "eval" / "fake" / "questions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[7]["image"] = name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def go(data: Path, out: Path, loaded: list[str], **changes: Any) -> RunResult:
    def load(*_: str) -> FakeHost:
        loaded.append("host")
        return FakeHost()

    return loop.run(config(data, data / "model"), out, Execution(2, progress=False, **changes), load)


@pytest.mark.parametrize("kind", ["absolute", "climbing", "hidden climb", "link", "link to a folder", "parent"])
def test_a_name_that_leads_outside_is_refused_before_anything_is_loaded(data: Path, tmp_path: Path, kind: str) -> None:
    images = data / "eval" / "fake" / "images"
    (images / "link.png").symlink_to(tmp_path / "secret.png")
    (images / "folder").symlink_to(tmp_path)
    names = {
        "absolute": str(tmp_path / "secret.png"),
        "climbing": "../../../../secret.png",
        "hidden climb": f"folder/../{tmp_path.name}/./secret.png",
        "link": "link.png",
        "link to a folder": "folder/secret.png",
        "parent": "..",
    }
    name_pictures(data, names[kind])
    loaded: list[str] = []
    with pytest.raises(DataError, match=r"leads out of .*--allow-outside"):
        go(data, tmp_path / "out", loaded)
    assert not loaded and not (tmp_path / "out").exists()
    if kind != "parent":
        assert go(data, tmp_path / "out", loaded, allow_outside=True).metrics["answered"] == 20


@pytest.mark.parametrize(
    ("name", "errors"),
    [*((name, 0) for name in ("sub/../1.png", "./1.png", "1.png", "inner.png")), ("", 1), ("a\0b", 1), ("x" * 300, 1)],
)
def test_a_name_that_stays_inside_is_none_of_it(data: Path, tmp_path: Path, name: str, errors: int) -> None:
    """An impossible one is an error of its question."""
    images = data / "eval" / "fake" / "images"
    (images / "sub").mkdir()
    (images / "inner.png").symlink_to("1.png")
    name_pictures(data, name)
    images.rename(tmp_path / "elsewhere")
    images.symlink_to(tmp_path / "elsewhere")  # the folder itself may be anywhere
    metrics = go(data, tmp_path / "out", []).metrics
    assert (metrics["answered"], metrics["errors"]) == (20 - errors, errors)


def test_a_list_of_other_files_is_no_video(tmp_path: Path) -> None:
    pytest.importorskip("av")
    write_mp4(tmp_path / "real.mp4", 4)
    assert len(read_frames(tmp_path / "real.mp4", 8)) == 8
    playlist = "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:9,\nreal.ts\n#EXT-X-ENDLIST\n"
    for text in ("ffconcat version 1.0\nfile real.mp4\n", playlist):
        (tmp_path / "list.mp4").write_text(text)
        with pytest.raises(ImageError, match="not a video"):
            read_frames(tmp_path / "list.mp4", 8)
