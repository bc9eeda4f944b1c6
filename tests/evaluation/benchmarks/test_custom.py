"""Any question file in LLaVA's format is answered as LLaVA's scripts do: in parts, into one file.

Run: `pytest tests/evaluation/benchmarks/test_custom.py`.
"""

import json
from pathlib import Path

import pytest
from fakes import FakeHost, make_place
from PIL import Image

from llava_consensus import cli
from llava_consensus.evaluation import models


def test_the_parts_of_a_question_file_are_answered_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_place(tmp_path / "place")
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "pictures" / "a.png")
    rows = [{"question_id": f"q{n}", "image": "a.png", "text": f"what {n}?"} for n in (3, 1, 2, 5, 4)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(models, "load", lambda *_, **__: FakeHost())
    whole = []
    for chunk in range(2):
        answers = tmp_path / f"{chunk}.jsonl"
        words = f"eval custom --question-file {tmp_path}/q.jsonl --image-folder {tmp_path}/pictures --num-chunks 2"
        words += f" --chunk-idx {chunk} --answers-file {answers} --model-path {tmp_path}/place/model --temperature 0"
        words += f" --device cpu --no-progress --out {tmp_path}/out"
        assert cli.main(words.split()) == 0
        assert capsys.readouterr().out == f"{3 - chunk} of {3 - chunk} questions answered\n{answers}\n"
        whole.append([json.loads(line) for line in answers.read_text().splitlines()])
    assert [row["question_id"] for part in whole for row in part] == [row["question_id"] for row in rows]
    assert [len(part) for part in whole] == [3, 2], "LLaVA's parts have ceil(questions / parts) each"
    assert {"question_id", "prompt", "text", "answer_id", "model_id", "metadata"} == set(whole[0][0])
    assert len(list((tmp_path / "out").iterdir())) == 2, "each part is a run of its own"
