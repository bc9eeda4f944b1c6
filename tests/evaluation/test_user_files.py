"""Files that people bring: every usual form is read, a key that names an image is used or refused by line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_data import MADE, make_gqa

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import make
from llava_consensus.evaluation.benchmarks.custom import Custom
from llava_consensus.evaluation.benchmarks.parsing import pope_can_use

ROWS = [{"question_id": 7, "image": "a.png", "text": "What?"}, {"question_id": 8, "image": "b.png", "text": "Who, é?"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
MIXED = json.dumps([{**ROWS[0], "image": None, "video": "a.mp4"}, ROWS[1]])
TABLE = 'question_id,image,text\n7,a.png,What?\n8,b.png,"Who, é?"\n'
TURNS = r'"conversations": [{"from": "human", "value": "<image>\\n\1"}, {"from": "gpt", "value": "?"}]'
FORMS = {
    "lines": LINES.encode(),
    "no last line end": LINES.strip().encode(),
    "blank lines": f"\n{LINES}\n\n".replace("}\n{", "}\n\n{").encode(),
    "line ends of Windows": LINES.replace("\n", "\r\n").encode(),
    "byte order mark": LINES.encode("utf-8-sig"),
    "UTF-16": LINES.encode("utf-16"),
    "UTF-16 without a mark": LINES.encode("utf-16-le"),
    "list": json.dumps(ROWS, indent=1).encode(),
    "csv": TABLE.encode(),
    "csv of Excel": TABLE.replace("\n", "\r\n").encode("utf-8-sig"),
    "semicolons": TABLE.replace(",", ";").replace("Who;", "Who,").encode(),
    "csv of lists": re.sub(r"(\w\.png)", r'"[""\1""]"', TABLE).replace("image", "images").encode(),
    "tsv": TABLE.replace(",", "\t").replace("Who\t", "Who,").encode(),
    "question": LINES.replace('"text"', '"question"').encode(),
    "prompt and id": LINES.replace('"text"', '"prompt"').replace("question_id", "id").encode(),
    "training": re.sub(r'"text": "(.*?)"', TURNS, json.dumps(ROWS)).replace("question_id", "id").encode(),
}


def load(folder: Path, content: bytes | dict[str, Any]) -> Any:
    path = folder / "q.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return Custom(questions=path, image_folder=folder).load(folder)


@pytest.mark.parametrize("form", FORMS)
def test_every_usual_form_is_read(tmp_path: Path, form: str) -> None:
    found = [(str(one.question_id), one.images, one.text) for one in load(tmp_path, FORMS[form])]
    assert found == [("7", ("a.png",), "What?"), ("8", ("b.png",), "Who, é?")]


def test_keys_that_are_not_used_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path, {**ROWS[0], "hint": "a", "options": ["b"]})
    assert caplog.messages == [f"{tmp_path / 'q.jsonl'}: keys that are not used: hint, options"]


@pytest.mark.parametrize(
    ("media", "images"),
    [
        ({}, ()),
        ({"image": None, "images": []}, ()),
        ({"images": ["a.png", "b.png"]}, ("a.png", "b.png")),
        ({"image_path": "a.png", "image_width": 30, "image_url": "http://x/a.png?b"}, ("a.png",)),
        ({"image": ["a.png"], "images": ["a.png"]}, ("a.png",)),
        ({"video": "a.mp4"}, ("a.mp4",)),
        ({"videos": ["a.mp4"]}, ("a.mp4",)),
    ],
)
def test_images_and_videos_are_used(tmp_path: Path, media: dict[str, Any], images: tuple[str, ...]) -> None:
    (question,) = load(tmp_path, {"question_id": 1, "text": "What?", **media})
    assert question.images == images
    shown = Custom(questions=tmp_path / "q.jsonl", image_folder=tmp_path)
    assert shown.frames == (8 if images == ("a.mp4",) else 0)


REFUSED: list[tuple[Any, str]] = [
    ({"img": "a.png"}, "the key 'img' seems to name an image"),
    *(({key: "a.png"}, f"the key '{key}' seems") for key in ("picture", "visual", "audio", "file_name", "filename")),
    ({"image": "a.png", "image2": "b.png"}, "the key 'image2' seems"),
    ({"media": ["a.png"]}, "the key 'media' seems"),
    ({"image": "/9j/4AAQSkZJRg"}, "an image in base64"),
    ({"text": " "}, "no question"),
    ({"images": [{"path": "a.png"}]}, "Give the name of a file"),
    ({"text": "<image>\nWhat?"}, "1 markers <image> and 0 images"),
    ({"text": "", "conversations": [{"from": "human", "value": "<video>\nWhat?"}]}, "1 markers <video> and 0 images"),
    ({"text": "<image>\n<image>\nWhat?", "image": "a.png"}, "2 markers <image> and 1 images"),
    ({"text": "Is <image> like it?", "image": "a.png"}, "leave markers inside the question out"),
    ({"image": {"bytes": "AAAA"}}, "Give the name of a file"),
    ({"image": 12}, "image is '12'"),
    ({"image": "data:image/png;base64,AAAA"}, "a data URL. Write its content to a file"),
    ({"image": "https://x/a.png"}, "Fetch it"),
    ({"image": "a.png", "images": ["b.png"]}, "name different files"),
    ({"videos": ["a.mp4", "b.mp4"]}, "several videos"),
    ({"text": None}, "no question. Name it text, question"),
    ({"text": 3}, "text is no text but '3'"),
    ({"question": "Who?"}, "text and question differ"),
    ({"question_id": [1]}, "neither a number nor a text"),
    ({"text": "", "conversations": [{"from": "human", "value": "a"}] * 2}, "2 turns of the user"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_is_not_understood_is_refused_by_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    second = {"question_id": 1, "text": "What?", **change}
    with pytest.raises(DataError, match="line 2: ") as caught:
        load(tmp_path, f"{LINES.splitlines()[0]}\n{json.dumps(second)}\n".encode())
    assert words in str(caught.value) and "fetch it again" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LINES.encode() + b'{"question_id": 9, "te', "line 3: damaged, not JSON"),
        (b"[1, 2]", "entry 1: expected an object"),
        (json.dumps(ROWS).encode()[:-9], "line 1: damaged, not JSON"),
        (b"just words\n", "neither JSON nor a table"),
        (b"question_id,text\n1,a,b\n", "line 2: more cells than the 2 columns"),
        (b"text,image,image\nWhat?,a.png,b.png\n", "line 1: 'image' is there twice"),
        (b'{"text": "What?", "image": "a.png", "image": "b.png"}', "line 1: 'image' is there twice"),
        (b"\xff\xd8\xff\xe0 no text", "no UTF-8 text"),
        *((MIXED.encode(), words) for words in ("entry 1: shows a video, and", "entry 2 an image")),
    ],
)
def test_a_file_of_ones_own_is_never_to_be_fetched_again(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, content)
    assert words in str(caught.value) and "fetch it again" not in str(caught.value)


@pytest.mark.parametrize("form", ["csv", "tsv", "list", "UTF-16"])
@pytest.mark.parametrize("name", ["gqa", "pope", "vqav2", "seed"])
def test_answers_are_scored_in_every_form(tmp_path: Path, name: str, form: str) -> None:
    data, benchmark = MADE[name](tmp_path / "data"), make(name)
    rows = [{"question_id": one.question_id, "text": "yes, a" if one.index else ""} for one in benchmark.load(data)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    separator = "\t" if form == "tsv" else ","
    table = "".join(separator.join((str(row["question_id"]), f'"{row["text"]}"')) + "\n" for row in rows)
    content = {"list": json.dumps(rows), "UTF-16": lines}.get(form, f"question_id{separator}text\n{table}")
    (tmp_path / "a").write_text(content, encoding="utf-16" if form == "UTF-16" else "utf-8")
    (tmp_path / "a.jsonl").write_text(lines)
    assert benchmark.score_file(tmp_path / "a", data) == benchmark.score_file(tmp_path / "a.jsonl", data)


def test_an_answer_that_the_scorer_of_pope_cannot_use() -> None:
    usable = ("Yes", "no.", "Yes, there is.", "There is no dog")
    for text in (*usable, "I am not sure", "", "(?)", "NO", "Perhaps. Yes"):
        assert pope_can_use(text) == (text in usable), text


def test_a_score_of_fewer_questions_than_asked_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_gqa(tmp_path / "data")
    rows = [{"question_id": one.question_id, "text": "yes"} for one in make("gqa").load(data)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    given = ["score", "gqa", "--answers", str(tmp_path / "a.jsonl"), "--data", str(data)]
    for more in ([], ["--json"]):
        assert cli.main([*given, *more]) == 6
        said = capsys.readouterr()
        assert "accuracy" in said.out and f"1 of {len(rows)} questions have no answer" in said.err
