"""A zip into a folder: gone on with, and refused in one line where it is damaged or leads elsewhere."""

import os
import zipfile
from pathlib import Path

import pytest

from llava_consensus.errors import DataError
from llava_consensus.evaluation.data.mini import remove_leftovers
from llava_consensus.evaluation.data.unpack import unpack


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
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


@pytest.mark.parametrize("name", ["../a", "{}/a"])
def test_nothing_is_written_outside(tmp_path: Path, name: str) -> None:
    archive = zipped(tmp_path / "a.zip", {name.format(tmp_path): b"a"})
    unpack(archive, tmp_path / "in" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["out"]


def test_damage_and_what_is_no_zip_is_a_line(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "a.zip", {"a.txt": b"a text " * 50})
    whole = archive.read_bytes()
    for content in (b"no zip", b"", whole[:40] + b"X" + whole[41:]):
        archive.write_bytes(content)
        with pytest.raises(DataError, match="remove it and give the same command"):
            unpack(archive, tmp_path / "out")
        assert not list((tmp_path / "out").glob("*"))


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    for number in (os.getpid(), 2**22 + 1, "x"):
        (tmp_path / f".eval-{number}").mkdir()
    remove_leftovers(tmp_path / ".eval-")
    assert {path.name for path in tmp_path.iterdir()} == {f".eval-{os.getpid()}", ".eval-x"}
