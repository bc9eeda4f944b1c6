"""Frames of videos: which ones, and what is said about files that are none. Files are written here."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes import Fake, FakeHost, config, make_place
from PIL import ImageOps
from tiny_data import write_mp4

from llava_consensus.errors import ImageError, MissingDependency
from llava_consensus.evaluation.media import read_frames, sample_places
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.configuration import prepare
from llava_consensus.evaluation.runs.execution import Execution

av = pytest.importorskip("av")


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [
        (8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (20, 8, [0, 2, 5, 8, 10, 13, 16, 19]),
        (3, 8, [0, 0, 0, 0, 1, 1, 1, 2]),
        (1, 8, [0] * 8),
        (300, 1, [0]),
    ],
)
def test_frames_are_sampled_as_video_llava_does(length: int, count: int, expected: list[int]) -> None:
    assert sample_places(length, count) == expected


@pytest.mark.parametrize("suffix", ["mp4", "avi", "mov", "mkv"])
@pytest.mark.parametrize("length", [1, 8, 20])
def test_every_container_gives_the_sampled_frames(tmp_path: Path, suffix: str, length: int) -> None:
    path = write_mp4(tmp_path / f"clip.{suffix}", length)
    frames = read_frames(path, 8)
    assert {(frame.mode, frame.size) for frame in frames} == {("RGB", (64, 48))}
    assert [round(float(np.asarray(frame).mean()) / 10) for frame in frames] == sample_places(length, 8)


def test_frames_are_turned_as_the_display_matrix_says(tmp_path: Path) -> None:
    """The quarter turns, against Pillow's by EXIF on a frame with four different corners."""
    with av.open(str(tmp_path / "stored.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        corners = np.array([[0, 80], [160, 240]], np.uint8).repeat(16, 0).repeat(32, 1)[..., None].repeat(3, 2)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(corners, format="rgb24")))
        container.mux(stream.encode())
    content = (tmp_path / "stored.mp4").read_bytes()
    (stored,) = read_frames(tmp_path / "stored.mp4", 1)
    place = content.index(b"tkhd") + 44  # of the 9 numbers in version 0 of this box
    for orientation, (a, b, c, d) in {1: (1, 0, 0, 1), 3: (-1, 0, 0, -1), 6: (0, 1, -1, 0), 8: (0, -1, 1, 0)}.items():
        one = 1 << 16
        matrix = struct.pack(">9i", a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30)
        (tmp_path / "turned.mp4").write_bytes(content[:place] + matrix + content[place + len(matrix) :])
        stored.getexif()[0x0112] = orientation
        (shown,) = read_frames(tmp_path / "turned.mp4", 1)
        assert np.array_equal(shown, ImageOps.exif_transpose(stored)), orientation


def test_files_that_are_no_videos(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_bytes(b"no video at all\n" * 20)
    for name, words in (("text.mp4", "not a video"), ("absent.mp4", "no such video")):
        with pytest.raises(ImageError, match=words):
            read_frames(tmp_path / name, 8)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_cut_off(tmp_path: Path, part: float) -> None:
    path = write_mp4(tmp_path / "cut.mp4", 20)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(ImageError, match=r"cut\.mp4"):
        read_frames(path, 8)


def test_a_huge_frame_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_mp4(tmp_path / "large.mp4", 2)
    monkeypatch.setattr("llava_consensus.evaluation.media.MAX_PIXELS", 60)
    with pytest.raises(ImageError, match="64 x 48 pixels"):
        read_frames(path, 8)


def test_without_pyav_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_mp4(tmp_path / "clip.mp4", 2)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingDependency, match=r"PyAV.*pip install .*\[video\]"):
        read_frames(path, 8)


class FakeVideos(Fake):
    frames = 8


def test_a_run_shows_eight_frames_a_question_and_encodes_them_once(tmp_path: Path) -> None:
    data, host = make_place(tmp_path / "data"), FakeHost()
    for path in (data / "eval" / "fake" / "images").iterdir():
        path.write_bytes(write_mp4(tmp_path / f"{path.stem}.mp4", 9 + int(path.stem)).read_bytes())
    asked = config(data, data / "model", benchmark=FakeVideos())
    result = loop.run(asked, tmp_path / "out", Execution(3, progress=False), lambda *_: host)
    assert len(host.encoded) == 4 * 8 and result.metrics["answered"] == 20
    assert result.metrics["tokens"]["before"] == 8 * 576
    assert "av" in prepare(asked).description["versions"]
