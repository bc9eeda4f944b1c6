"""A wrong type in a file of a benchmark ends in a message that names the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_data import MADE, write_lines

from llava_consensus import cli

WRONG: list[tuple[str, str, list[Any]]] = [  # a benchmark, its file, and keys and a value to put there
    ("gqa", "eval/gqa/data/testdev_balanced_questions.json", ["0", "types", 3]),
    ("pope", "eval/pope/coco/coco_pope_random.json", [1, "text", 5]),
    ("pope", "eval/pope/llava_pope_test.jsonl", [1, "category", []]),
    ("sqa", "eval/scienceqa/pid_splits.json", ["test", 1, []]),
    ("sqa", "eval/scienceqa/problems.json", ["5", "answer", "B"]),
    ("seed", "eval/seed_bench/SEED-Bench.json", ["questions", 0, "question_type_id", {}]),
]


@pytest.mark.parametrize(("name", "path", "change"), WRONG)
def test_a_wrong_type_in_a_file_is_a_message(
    name: str, path: str, change: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = MADE[name](tmp_path)
    content = [json.loads(line) for line in (data / path).read_text().splitlines()]
    place: Any = content if len(content) > 1 else content[0]
    *keys, last, value = change
    for key in keys:
        place = place[key]
    place[last] = value
    write_lines(data / path, content)
    rows = [{"question_id": key, "prompt": "", "text": "A"} for key in ("0", "4", "5", 1, 101)]
    write_lines(tmp_path / "answers.jsonl", rows)
    assert cli.main(["score", name, "--answers", str(tmp_path / "answers.jsonl"), "--data", str(data)]) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: ") and str(data / "eval") in said
