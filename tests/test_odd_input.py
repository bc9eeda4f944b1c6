"""Odd files and options end in a message, at once. Run: `pytest tests/test_odd_input.py`."""

import os
from pathlib import Path

import pytest

from llava_consensus import cli
from llava_consensus.cli.arguments import options
from llava_consensus.errors import DataError, OptionError
from llava_consensus.files import read_json, read_text
from llava_consensus.methods import make


def test_a_pipe_as_a_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_json, read_text):
        with pytest.raises(DataError, match="is a pipe"):
            read(tmp_path / "pipe")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "[" * 100_000])
def test_an_option_that_is_no_number_is_told(value: str) -> None:
    with pytest.raises(OptionError, match="alpha="):
        make("consensusdrop", **options([f"alpha={value}"]))


def test_a_report_of_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--out", str(tmp_path / "nothing")]) == 3
    assert "no such folder of results" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\udcff"])
def test_an_impossible_name_is_a_message(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["score", "gqa", "--answers", name]) in (2, 3)
    assert "Traceback" not in capsys.readouterr().err
