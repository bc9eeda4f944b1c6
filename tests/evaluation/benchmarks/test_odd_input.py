"""A wrong type in a file of a benchmark ends in a message that names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_data

from llava_consensus import cli


def _set(path: str, *keys: Any) -> Callable[[Path], None]:
    def change(data: Path) -> None:
        file = data / path
        content = [json.loads(line) for line in file.read_text().splitlines()]
        place: Any = content if len(content) > 1 else content[0]
        for key in keys[:-2]:
            place = place[key]
        place[keys[-2]] = keys[-1]
        file.write_text("".join(json.dumps(row) + "\n" for row in content))

    return change


WRONG: list[tuple[str, Callable[[Path], Path], Callable[[Path], None]]] = [
    ("gqa", tiny_data.make_gqa, _set("eval/gqa/data/testdev_balanced_questions.json", "0", "types", 3)),
    ("pope", tiny_data.make_pope, _set("eval/pope/coco/coco_pope_random.json", 1, "text", 5)),
    ("pope", tiny_data.make_pope, _set("eval/pope/llava_pope_test.jsonl", 1, "category", [])),
    ("sqa", tiny_data.make_sqa, _set("eval/scienceqa/pid_splits.json", "test", 1, [])),
    ("sqa", tiny_data.make_sqa, _set("eval/scienceqa/problems.json", "5", "answer", "B")),
    ("seed", tiny_data.make_seed, _set("eval/seed_bench/SEED-Bench.json", "questions", 0, "question_type_id", {})),
]


@pytest.mark.parametrize(("name", "make_data", "change"), WRONG)
def test_a_wrong_type_in_a_file_is_a_message(
    name: str, make_data: Any, change: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(tmp_path)
    (tmp_path / "answers.jsonl").write_text("")
    change(data)
    rows = [{"question_id": key, "prompt": "", "text": "A"} for key in ("0", "4", "5", 1, 101)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = cli.main(["score", name, "--answers", str(tmp_path / "answers.jsonl"), "--data", str(data)])
    output = capsys.readouterr()
    assert code == 3 and output.err.startswith("error: ") and str(data / "eval") in output.err
