"""Any question file in LLaVA's format is answered as LLaVA's scripts do: in parts, into one file."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeHost, make_place
from PIL import Image

from llava_consensus import cli
from llava_consensus.evaluation import models


def test_a_question_file_is_answered_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_place(tmp_path / "place")
    (tmp_path / "pictures").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / "pictures" / name)
    rows: list[dict[str, Any]] = [{"question_id": f"q{n}", "image": "a.png", "text": "what?"} for n in (3, 1, 2, 5)]
    rows.append({"question_id": "q4", "images": ["a.png", "b.png"], "text": "what?"})
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(models, "load", lambda *_, **__: FakeHost())
    answers = tmp_path / "answers.jsonl"
    words = f"eval custom --question-file {tmp_path}/q.jsonl --image-folder {tmp_path}/pictures"
    words += f" --answers-file {answers} --model {tmp_path}/place/model --device cpu --no-progress --out {tmp_path}/out"
    assert cli.main(words.split()) == 0
    assert capsys.readouterr().out == f"5 of 5 questions answered\n{answers}\n"
    whole = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["question_id"] for row in whole] == [row["question_id"] for row in rows]
    assert [row["metadata"]["before"] for row in whole] == [576] * 4 + [2 * 576]
    assert {"question_id", "prompt", "text", "answer_id", "model_id", "metadata"} == set(whole[0])
