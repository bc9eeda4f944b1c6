"""A flipped bit in the answers and a score changed by hand are told; runs without checksums are read as before.

Run: `pytest tests/test_checksums.py`.
"""

import json
import math
import random
from pathlib import Path
from zlib import crc32

import pytest
from fakes import FakeHost, config, make_place

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import canonical, read_json, write_json
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.checksums import DIGESTS, SUM, intact, problems
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.loop import RunResult


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_place(tmp_path / "data")


def go(data: Path, out: Path) -> RunResult:
    return loop.run(config(data, data / "model"), out, Execution(3, progress=False), lambda *_: FakeHost())


def test_every_bit_flip_in_the_answers_is_told(data: Path, tmp_path: Path) -> None:
    result = go(data, tmp_path)
    assert problems(result.path) == []
    path = result.path / "answers.jsonl"
    whole, chance = path.read_bytes(), random.Random(0)
    for _ in range(400):
        place, bit = chance.randrange(len(whole)), chance.randrange(8)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        assert problems(result.path), f"bit {bit} of byte {place}"
        path.write_bytes(whole)


def test_a_flipped_letter_of_an_answer_stops_a_run_that_goes_on(data: Path, tmp_path: Path) -> None:
    result = go(data, tmp_path)
    path = result.path / "answers.jsonl"
    path.write_text(path.read_text().replace('"text": "what 1 2', '"text": "whbt 1 2'))
    (result.path / "metrics.json").unlink()
    with pytest.raises(DataError, match=r"line 8: damaged, its checksum"):
        go(data, tmp_path)


@pytest.mark.parametrize("name", ["score", "answered"])
def test_a_number_changed_by_hand_is_told(
    data: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = go(data, tmp_path)
    path = result.path / "metrics.json"
    assert cli.main(["report", "verify", str(result.path)]) == 0
    write_json(path, {**read_json(path), name: 99.9})
    with pytest.raises(DataError, match=r"metrics\.json: changed since"):
        go(data, tmp_path)
    assert cli.main(["report", "verify", str(result.path)]) == 3
    assert "metrics.json: changed since" in capsys.readouterr().out
    path.unlink()
    assert go(data, tmp_path).metrics["score"] == result.metrics["score"]


def test_changed_scores_are_told_and_timing_is_nobodys_business(data: Path, tmp_path: Path) -> None:
    result = go(data, tmp_path)
    path = result.path / "metrics.json"
    write_json(path, {**read_json(path), "timing": {}, "environment": {}})
    assert problems(result.path) == []
    scores = result.path / "scores.jsonl"
    scores.write_text(scores.read_text().replace("0.0", "1.0"))
    assert "scores.jsonl: changed since" in problems(result.path)[0]


def test_a_run_from_before_there_were_checksums_is_read_and_goes_on(data: Path, tmp_path: Path) -> None:
    result = go(data, tmp_path)
    path = result.path / "answers.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["metadata"][SUM]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:12]))
    again = go(data, tmp_path)
    assert again.asked == 8 and again.metrics["score"] == result.metrics["score"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = {name: value for name, value in result.metrics.items() if name != DIGESTS}
    write_json(result.path / "metrics.json", metrics)
    assert go(data, tmp_path).metrics == metrics
    assert "20 of 20 lines have no checksum" in problems(result.path)[0]


def test_lines_are_checked_as_they_stand_and_spelled_anew_only_where_they_were_written_otherwise(
    data: Path, tmp_path: Path
) -> None:
    path = go(data, tmp_path).path / "answers.jsonl"
    lines = path.read_bytes().splitlines()
    assert len(lines) == 20 and all(map(intact, lines))
    records = [json.loads(line) for line in lines]
    compact = [json.dumps(record, separators=(",", ":")) for record in records]
    for record in records:  # as version 0.2 wrote them
        del record["metadata"][SUM]
        record["metadata"][SUM] = f"{crc32(canonical(record).encode()):08x}"
    for others in (compact, [json.dumps(record) for record in records]):
        assert not any(intact(line.encode()) for line in others)
        path.write_text("".join(line + "\n" for line in others))
        assert all("answers.jsonl: changed since" in problem for problem in problems(path.parent))
        (path.parent / "metrics.json").unlink(missing_ok=True)
        assert go(data, tmp_path).asked == 0


def test_no_nan_is_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [math.nan, {"b": math.inf}], "c": 1.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [None, {"b": None}], "c": 1.5}


def test_what_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "verify", str(tmp_path)]) == 3 and "no folder of a run" in capsys.readouterr().err
