"""Files are written where the user says: devices stay devices, links are not followed, texts stay texts."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import FRESH, remove_leftovers, write_json, write_out


def test_a_device_is_written_to_and_stays_a_device(tmp_path: Path) -> None:
    write_out(Path("/dev/null"), b"gone")
    assert Path("/dev/null").is_char_device()
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    write_out(link, b"gone")
    assert link.is_symlink() and Path("/dev/null").is_char_device()


def test_a_dash_is_the_standard_output() -> None:
    code = "from llava_consensus.evaluation.files import Path, write_out; write_out(Path('-'), b'a' * 9)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"a" * 9


def test_a_link_a_user_names_leads_to_its_target_and_what_cannot_be_written_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_out(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").read_text() == "new"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="loop: cannot be written"):
        write_out(tmp_path / "loop", b"x")
    for name in ("x" * 300, "absent/x"):
        with pytest.raises(DataError, match=r"cannot be written"):
            write_out(tmp_path / name, b"x")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "a.json", {"old": 1})
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(DataError, match="No space left on device"):
        write_json(tmp_path / "a.json", {"new": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1} and len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / f".a.json.0123{FRESH}").write_text("{")
    (tmp_path / "a.new").write_text("mine")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.new"]


def test_control_characters_are_printed_as_escapes() -> None:
    assert cli.printable("a\x1b[2Jb\x9b\r\té\n") == "a\\x1b[2Jb\\x9b\\r\té\n"
