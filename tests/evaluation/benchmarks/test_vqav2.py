"""VQA v2: the scorer against the official one, a submission against the bytes of LLaVA's converter, and the files."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes import config, make_model
from golden_cases import compare, golden
from tiny_data import make_vqav2, write_lines

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.benchmarks import make, parsing, vqav2
from llava_consensus.evaluation.runs.configuration import prepare


def expand(inputs: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Annotations and answers of a dataset case."""
    if "compact" not in inputs:
        return inputs["annotations"], {one["question_id"]: one["answer"] for one in inputs["results"]}
    one = inputs["compact"]
    people = [{"answer": one["gt"], "answer_id": number} for number in range(10)]
    kinds = {"question_type": one.get("question_type", "what"), "answer_type": one.get("answer_type", "other")}
    annotations = [{"question_id": number, "answers": people, **kinds} for number in range(one["n"])]
    return annotations, {number: one["gt"] if number < one["right"] else one["wrong"] for number in range(one["n"])}


def check(case: dict[str, Any], official: Any, per_question: Any = None) -> bool:
    kind = case["kind"]
    if kind == "normalise":
        text = case["text"]
        first = parsing.vqav2_strip_marks(text)
        ours = (first, parsing.vqav2_unify_words(text), parsing.vqav2_unify_words(first))
        return dict(zip(("process_punctuation", "process_digit_article", "full"), ours, strict=True)) == official
    if kind == "score":
        scored = vqav2.score_answer(case["prediction"], case["annotation"]["answers"])
        return vqav2.half_up(100 * scored.value) == official
    if kind == "dataset":
        annotations, answers = expand(case)
    else:
        annotations = case["annotations"]["annotations"]
        answers = {one["question_id"]: one["answer"] for one in case["results"]}
        if answers.keys() != {one["question_id"] for one in annotations}:
            return official == {"raises": "AssertionError"}
    known = {one["question_id"]: one["answers"] for one in annotations}
    scores = {key: vqav2.score_answer(answers[key], known[key]).value for key in known if key in answers}
    ours = {str(key): vqav2.half_up(100 * value) for key, value in scores.items()}
    if kind == "dataset":
        return vqav2.accuracy([*scores.values()]) == official["overall"] and per_question in (None, ours)
    return (vqav2.accuracy([*scores.values()]), ours) == (official["accuracy"]["overall"], official["evalQA"])


def test_golden_cases() -> None:
    per_question = {json.dumps(one["inputs"]): one.get("official_per_question") for one in golden("vqav2")}
    kinds = {"normalise", "score", "dataset", "result_file"}
    compare("vqav2", lambda case, score: check(case, score, per_question[json.dumps(case)]), kinds)


def test_submission_has_the_bytes_of_llavas_converter(tmp_path: Path) -> None:
    case = next(one for one in golden("vqav2") if one["inputs"]["kind"] == "submission")
    ids = case["inputs"]["test_split_question_ids"]
    for split in ("test2015", "test-dev2015"):
        rows = [{"question_id": key, "image": "i.jpg", "text": "q"} for key in ids]
        write_lines(tmp_path / f"eval/vqav2/llava_vqav2_mscoco_{split}.jsonl", rows)
    lines, records = case["inputs"]["answers_jsonl_lines"], []
    for line in lines:
        with suppress(ValueError):  # the converter counts broken lines and goes on; an answers file here stops at one
            records.append(json.loads(line))
    assert len(lines) - len(records) == 3
    export = make("vqav2").export
    assert export
    found = export(records, tmp_path, tmp_path / "out.json")
    assert hashlib.sha256((tmp_path / "out.json").read_bytes()).hexdigest() == case["official_bytes_sha256"]
    assert found["unknown"] == [999999] and found["duplicate"] == [10] and found["written"] == len(ids)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_vqav2(tmp_path / "data")


def answers(texts: dict[int, str]) -> list[dict[str, Any]]:
    return [{"question_id": key, "prompt": "", "text": text} for key, text in texts.items()]


def test_scored_where_annotations_are(data: Path) -> None:
    report = make("vqav2").score(answers({10: "Yes", 11: "two", 12: "Cat"}), data)
    assert report["accuracy"] == 86.67 and report["complete"]
    assert report["extracted"][1] == {"index": 1, "extracted": "2", "correct": 1.0}


def test_damaged_annotations_are_named(data: Path) -> None:
    path = data / "eval/vqav2/v2_mscoco_test-dev2015_annotations.json"
    content = json.loads(path.read_text())
    for damage in ({"question_id": 10}, {**content["annotations"][0], "answers": []}):
        path.write_text(json.dumps({"annotations": [damage]}))
        with pytest.raises(DataError, match="entry 1 of annotations"):
            make("vqav2").score([], data)
    path.write_text(json.dumps({"annotations": content["annotations"][:1]}))
    with pytest.raises(DataError, match="does not know question 11"):
        make("vqav2").score([], data)


def test_split_changes_the_questions(data: Path) -> None:
    whole = make("vqav2", split="test")
    assert [len(make("vqav2", split=split).files) for split in ("test-dev", "test", "val")] == [3, 2, 2]
    export, out = make("vqav2").export, data / "out.json"
    assert export and export(answers({10: "Yes"}), data, out)["written"] == 4, "EvalAI takes all of test2015"
    assert len(whole.load(data)) == 4 and whole.asking == {"split": "test"} and whole.count == 447793
    (data / "eval/vqav2/test2015").mkdir()
    described = prepare(config(data, make_model(data / "model"), benchmark=whole)).description
    assert described["choices"] == {"split": "test"}
    assert whole.score(answers({10: "Yes"}), data)["accuracy"] is None
    for name, options, words in (
        ("vqav2", {"split": "train"}, "must be one of test-dev, test, val"),
        ("vqav2", {"spilt": "val"}, "Did you mean 'split'"),
        ("pope", {"split": "val"}, "has no options"),
        ("vqav2", {"name": "val"}, "unknown option of vqav2"),
    ):
        with pytest.raises(OptionError, match=words):
            make(name, **options)
