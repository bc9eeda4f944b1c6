"""ScienceQA: asked with and without an image, scored over both, and LLaVA's own script on the same answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from golden_cases import sample
from tiny_data import make_sqa, said

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import make

SUFFIX = "\nAnswer with the option's letter from the given choices directly."


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_sqa(tmp_path / "data")


def answers(data: Path, texts: str) -> list[dict[str, Any]]:
    return said(make("sqa").load(data)[: len(texts)], lambda one: texts[one.index])


def test_asked_as_llava_does(data: Path) -> None:
    plain, picture, *_ = make("sqa").load(data)
    assert plain.text == plain.prompt == f"Which is 4?\nA. one\nB. two\nC. three{SUFFIX}" and plain.images == ()
    assert picture.text == f"Context: a hint\nWhich is 5?\nA. one\nB. two\nC. three{SUFFIX}"
    assert picture.prompt == f"<image>\n{picture.text}" and picture.images == ("5/image.png",)


def test_accuracy_over_all_and_over_pictures(data: Path) -> None:
    report = make("sqa").score(answers(data, "ABAA"), data)
    assert (report["accuracy"], report["img_accuracy"], report["complete"]) == (75.0, 50.0, True)
    assert report["extracted"][2] == {"index": 2, "extracted": "A", "correct": False, "group": "image"}
    assert json.loads(json.dumps(report)) == report
    part = make("sqa").score(answers(data, "AB"), data)
    assert (part["accuracy"], part["img_accuracy"], part["complete"]) == (100.0, 100.0, False)
    assert make("sqa").score([], data)["img_accuracy"] is None


def test_only_the_questions_about_a_picture(data: Path) -> None:
    only = make("sqa", questions="image")
    asked = only.load(data)
    assert [(one.index, one.question_id) for one in asked] == [(0, "5"), (1, "11")] and only.asking
    report = only.score([{"question_id": "5", "text": "B"}, {"question_id": "11", "text": "C"}], data)
    assert report["img_accuracy"] == report["accuracy"] == 100.0 and report["complete"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("llava_test_CQM-A.json", [{"id": "4"}], "entry 1: no id and conversations"),
        ("llava_test_CQM-A.json", [{"id": 4, "conversations": [{"value": "q"}]}], "entry 1: id or image"),
        ("problems.json", {"4": {}}, "does not know question '5'"),
        ("problems.json", {key: {"answer": 0} for key in ("4", "5", "11", "15")}, "no choices and answer for '4'"),
        ("pid_splits.json", {"test": ["5"]}, "does not know question '4'"),
        ("pid_splits.json", {}, "no list 'test'"),
    ],
)
def test_files_of_another_kind_are_named(data: Path, name: str, content: Any, words: str) -> None:
    path = data / "eval/scienceqa" / name
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=words) as caught:
        make("sqa").score([], data)
    assert name in str(caught.value)


def test_real_questions_and_problems(tmp_path: Path) -> None:
    source, folder = sample("scienceqa"), tmp_path / "eval/scienceqa"
    folder.mkdir(parents=True)
    problems = json.loads((source / "problems_test_subset200.json").read_text())
    first = json.loads((source / "llava_test_CQM-A_first100.json").read_text())
    asked = [one for one in first if one["id"] in problems]
    (folder / "llava_test_CQM-A.json").write_text(json.dumps(asked))
    (folder / "problems.json").symlink_to(source / "problems_test_subset200.json")
    (folder / "pid_splits.json").symlink_to(source / "pid_splits_subset200.json")
    right = [{"question_id": one["id"], "prompt": "", "text": "ABCDE"[problems[one["id"]]["answer"]]} for one in asked]
    report = make("sqa").score(right, tmp_path)
    assert report["accuracy"] == report["img_accuracy"] == 100.0 and report["complete"] and len(asked) > 50
    for question, one in zip(make("sqa").load(tmp_path), asked, strict=True):
        assert question.prompt == problems[one["id"]]["llava_prompt"] + SUFFIX
