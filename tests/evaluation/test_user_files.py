"""Files that people bring: every usual form is read, a key that names an image is used or refused by line.

Run: `pytest tests/evaluation/test_user_files.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_data import make_gqa

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import make
from llava_consensus.evaluation.benchmarks.custom import Custom

ROWS = [{"question_id": 7, "image": "a.png", "text": "What?"}, {"question_id": 8, "image": "b.png", "text": "Who, é?"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
FORMS = {
    "lines": LINES.encode(),
    "blank lines": f"\n{LINES}\n\n".replace("}\n{", "}\n\n{").encode(),
    "line ends of Windows": LINES.replace("\n", "\r\n").encode(),
    "byte order mark": LINES.encode("utf-8-sig"),
    "list": json.dumps(ROWS, indent=1).encode(),
    "question": LINES.replace('"text"', '"question"').encode(),
    "prompt and id": LINES.replace('"text"', '"prompt"').replace("question_id", "id").encode(),
    "training": json.dumps(
        [
            {"id": row["question_id"], "image": row["image"],
             "conversations": [{"from": "human", "value": f"<image>\n{row['text']}"}, {"from": "gpt", "value": "?"}]}
            for row in ROWS
        ]
    ).encode(),
}  # fmt: skip


def load(folder: Path, content: bytes | dict[str, Any]) -> Any:
    path = folder / "q.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return Custom(questions=path, pictures=folder).load(folder)


@pytest.mark.parametrize("form", FORMS)
def test_every_usual_form_is_read(tmp_path: Path, form: str) -> None:
    found = [(str(one.question_id), one.images, one.text) for one in load(tmp_path, FORMS[form])]
    assert found == [("7", ("a.png",), "What?"), ("8", ("b.png",), "Who, é?")]


def test_several_images_and_videos(tmp_path: Path) -> None:
    (question,) = load(tmp_path, {"id": 1, "images": ["a.png", "b.png"], "question": "What?"})
    assert question.images == ("a.png", "b.png")
    (question,) = load(tmp_path, {"video": "a.mp4", "text": "What?"})
    assert question.images == ("a.mp4",) and Custom(questions=tmp_path / "q.jsonl", pictures=tmp_path).frames == 8


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LINES.encode() + b'{"question_id": 9, "te', "line 3: damaged, not JSON"),
        (b"[1, 2]", "entry 1: expected an object"),
        (b"just words\n", "line 1: damaged, not JSON"),
        (b"\xff\xd8\xff\xe0 no text", "not UTF-8 text"),
        ({"image": "https://x/a.png", "text": "What?"}, "no names of files"),
        ({"image": "a.png", "video": "a.mp4", "text": "What?"}, "shows a video, and images"),
        ({"videos": ["a.mp4", "b.mp4"], "text": "What?"}, "several videos"),
        ({"image": "a.png"}, "no question. Name it text"),
        ({"question_id": [1], "text": "What?"}, "neither a number nor a text"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, content: bytes | dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, content)
    assert words in str(caught.value)


def test_a_score_of_fewer_questions_than_asked_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_gqa(tmp_path / "data")
    rows = [{"question_id": one.question_id, "text": "yes"} for one in make("gqa").load(data)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    given = ["score", "gqa", "--answers", str(tmp_path / "a.jsonl"), "--data", str(data)]
    for more in ([], ["--json"]):
        assert cli.main([*given, *more]) == 6
        said = capsys.readouterr()
        assert "accuracy" in said.out and f"1 of {len(rows)} questions have no answer" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("eval gqa --option alpha=1 --option alpha=0", "option alpha is given twice"),
        ("eval gqa --benchmark-option a=1 --benchmark-option a=2", "a is given twice"),
    ],
)
def test_an_argument_that_is_given_twice_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(words.split())
    except SystemExit as usage:
        code = int(usage.code or 0)
    assert code == 2 and said in capsys.readouterr().err
