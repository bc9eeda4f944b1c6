"""A zip into a folder: gone on with, and refused in one line where it is damaged or leads elsewhere.

Run: `pytest tests/evaluation/data/test_unpack.py`.
"""

import os
import zipfile
from pathlib import Path

import pytest

from llava_consensus.errors import DataError
from llava_consensus.evaluation.data.mini import remove_leftovers
from llava_consensus.evaluation.data.unpack import unpack

TEXT = b"a text that is long enough to be compressed, " * 50


def zipped(path: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    """A zip with these members."""
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def changed(path: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert old in content and len(old) == len(new)
    path.write_bytes(content.replace(old, new))
    return path


def test_a_zip_is_unpacked_in_part_and_gone_on_with(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "a.zip", {"top/a.txt": b"a", "top/deep/b.txt": b"bb", "other/c.txt": b"c"})
    folder = tmp_path / "out"
    assert unpack(archive, folder, only="top/*", without="top/") == 2
    assert sorted(path.name for path in folder.rglob("*.txt")) == ["a.txt", "b.txt"]
    before = (folder / "a.txt").stat().st_mtime_ns
    (folder / "deep" / "b.txt").unlink()
    assert unpack(archive, folder, only="top/*", without="top/") == 2
    assert (folder / "deep" / "b.txt").read_bytes() == b"bb" and (folder / "a.txt").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"nothing in it matches none\*"):
        unpack(archive, folder, only="none*")


@pytest.mark.parametrize("name", ["../a", "/a", "top/../../a", "{}/a"])
def test_nothing_is_written_outside(tmp_path: Path, name: str) -> None:
    archive = zipped(tmp_path / "a.zip", {name.format(tmp_path): b"a"})
    unpack(archive, tmp_path / "in" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["out"]


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_in_any_kind_of_compression_is_a_line(tmp_path: Path, kind: int) -> None:
    archive = zipped(tmp_path / "a.zip", {"a.txt": TEXT}, kind)
    whole, begin = archive.read_bytes(), 30 + len("a.txt")
    with zipfile.ZipFile(archive) as content:
        length = content.infolist()[0].compress_size
    for place in range(begin, begin + min(length, 60)):
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            unpack(archive, tmp_path / "out")
        except DataError as error:
            assert "remove it and give the same command" in str(error)
            assert list((tmp_path / "out").iterdir()) == []
        else:  # some bits of a compressed text mean nothing
            assert (tmp_path / "out" / "a.txt").read_bytes() == TEXT
            (tmp_path / "out" / "a.txt").unlink()


def test_what_is_no_zip_or_encrypted_is_a_line(tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    for content in (b"no zip", b"", b"PK\x05\x06" + b"\xff" * 18, b"PK\x05\x06" + b"\0" * 10 + b"\xff" * 8):
        archive.write_bytes(content)
        with pytest.raises(DataError, match="no zip"):
            unpack(archive, tmp_path / "out")
    zipped(archive, {"a.txt": b"secret"})
    for mark in (b"PK\x03\x04\x14\0", b"PK\x01\x02\x14\x03\x14\0"):
        changed(archive, mark + b"\0\0", mark + b"\1\0")
    with pytest.raises(DataError, match="encrypted"):
        unpack(archive, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    for number in (os.getpid(), 2**22 + 1, "x"):
        (tmp_path / f".eval-{number}").mkdir()
    remove_leftovers(tmp_path / ".eval-")
    assert {path.name for path in tmp_path.iterdir()} == {f".eval-{os.getpid()}", ".eval-x"}
