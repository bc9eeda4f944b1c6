"""A run on disk survives cut files at every byte, damage, two processes, other configurations."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import write_json
from llava_consensus.evaluation.runs.store import ANSWER_KEYS, Run, open_run, run_name

CONFIG: dict[str, Any] = {"benchmark": "gqa", "method": "random", "tokens": 64, "options": {"seed": 0}}
INDEXES = range(6)


def answer(index: int, text: str = "yes \n é \u2028") -> dict[str, Any]:
    values = (index * 7, "is it?", text, f"id{index}", "mini", {"index": index, "before": 576, "after": 64})
    return dict(zip(ANSWER_KEYS, values, strict=True))


def error(index: int) -> dict[str, Any]:
    return {"index": index, "question_id": index * 7, "image": "a.jpg", "error": "cut"}


def begun(out: Path, count: int = 4) -> Path:
    """A run with `count` answers and one error; returns its folder."""
    with open_run(out, CONFIG, INDEXES) as run:
        run.add([answer(0), answer(1)])
        run.add([answer(index) for index in range(2, count)], [error(5)])
        return run.path


def reopen(out: Path) -> Run:
    run = open_run(out, CONFIG, INDEXES)
    run.close()
    return run


def test_a_reopened_run_goes_on_with_what_it_holds_unless_its_configuration_changed(tmp_path: Path) -> None:
    path = begun(tmp_path)
    run = reopen(tmp_path)
    assert run.path == path and not run.repairs
    assert list(run.answers) == [0, 1, 2, 3] and list(run.errors) == [5] and run.done == {0, 1, 2, 3, 5}
    assert [run.answers[index] for index in range(4)] == [answer(index) for index in range(4)]
    assert json.loads((path / "config.json").read_text()) == CONFIG
    (path / "config.json").write_text(json.dumps({**CONFIG, "tokens": 32, "extra": 1}))
    with pytest.raises(DataError, match="made by another configuration"):
        open_run(tmp_path, CONFIG, INDEXES)


def test_cut_at_every_byte_of_the_last_lines(tmp_path: Path) -> None:
    path = begun(tmp_path) / "answers.jsonl"
    whole = path.read_bytes()
    ends = [position + 1 for position, byte in enumerate(whole) if byte == 10]
    for length in range(ends[1] - 1, len(whole)):
        path.write_bytes(whole[:length])
        complete = sum(end <= length for end in ends)
        run = reopen(tmp_path)
        assert list(run.answers) == list(range(complete))
        assert len(run.repairs) == (length not in ends) and all(str(path) in repair for repair in run.repairs)
        assert path.read_bytes() == whole[: ends[complete - 1] if complete else 0]
        with open_run(tmp_path, CONFIG, INDEXES) as again:
            again.add([answer(index) for index in range(complete, 4)])
        assert path.read_bytes() == whole


@pytest.mark.parametrize("tail", [b"\0" * 40, b"\0" * 40 + b"\n", b'{"question_id": 3\n', b"\xff\xfe", b'{"a": "\xc3'])
def test_rubbish_at_the_end_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = begun(tmp_path) / "answers.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert len(reopen(tmp_path).repairs) == 1 and path.read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"question_id": 7, "prompt', "damaged"),
        (b"", "damaged"),
        (b"[1]", "question_id"),
        (b'{"question_id": 7}', "prompt"),
        (json.dumps(answer(0)).encode(), "second time"),
        (json.dumps(answer(5)).encode(), "second time"),
        (json.dumps(answer(99)).encode(), "no question of this run"),
        (json.dumps({**answer(1), "metadata": {}}).encode(), "no index"),
    ],
)
def test_damage_elsewhere_stops_with_file_and_line(tmp_path: Path, line: bytes, why: str) -> None:
    path = begun(tmp_path) / "answers.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = line
    damaged = b"\n".join(lines) + b'{"cut'
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=why) as caught:
        open_run(tmp_path, CONFIG, INDEXES)
    assert f"{path}, line 2" in str(caught.value)
    assert path.read_bytes() == damaged, "nothing is changed when it stops"


def test_a_run_killed_before_its_configuration_was_written_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / run_name(CONFIG)
    path.mkdir()
    (path / "lock").touch()
    (path / ".config.json.new").write_text('{"ben')
    assert not reopen(tmp_path).done


def test_second_process_is_refused(tmp_path: Path) -> None:
    code = f"from {open_run.__module__} import Path, open_run; open_run(Path({str(tmp_path)!r}), {CONFIG!r}, range(6))"
    with open_run(tmp_path, CONFIG, INDEXES):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "BusyError" in done.stderr and f"pid {os.getpid()}" in done.stderr
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_metrics_are_dropped_when_answers_go_missing(tmp_path: Path) -> None:
    path = begun(tmp_path, 5)
    with open_run(tmp_path, CONFIG, INDEXES) as run:
        run.finish({"score": 1.5})
    with open_run(tmp_path, CONFIG, INDEXES) as run:
        assert run.metrics() == {"score": 1.5}
    (path / "errors.jsonl").unlink()
    with open_run(tmp_path, CONFIG, INDEXES) as run:
        assert run.metrics() is None and run.done == set(range(5))


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
CONFIGS = st.dictionaries(st.text(), VALUES | st.dictionaries(st.text(), VALUES, max_size=3), max_size=5)


@given(CONFIGS, CONFIGS)
def test_names_are_equal_exactly_for_equal_configurations(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = {**CONFIG, "more": one}, {**CONFIG, "more": other}
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (run_name(first) == run_name(second)) == same
    assert run_name(dict(reversed(first.items()))) == run_name(first)
    assert run_name(first).startswith("gqa-random-64-")


def test_no_nan_is_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [math.nan, {"b": math.inf}], "c": 1.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [None, {"b": None}], "c": 1.5}
