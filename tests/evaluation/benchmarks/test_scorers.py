"""Scorers against the official ones: cases they scored, their scripts in the installed llava package, real answers."""

import json
from pathlib import Path
from typing import Any

from golden_cases import compare, sample
from hypothesis import given
from hypothesis import strategies as st

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Question, make, parsing, pope, textvqa
from llava_consensus.evaluation.benchmarks.base import mean


def test_gqa_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        if inputs["kind"] == "llava_convert":
            return parsing.gqa_prediction(inputs["text"]) == official
        if "raises" in official:  # an incomplete file, or groups that its other tables cannot divide
            return True
        said = {one["questionId"]: one["prediction"] for one in inputs["predictions"]}
        asked = {key: one for key, one in inputs["questions"].items() if one["isBalanced"]}
        rows = []
        for key, one in asked.items():
            rows.append(make("gqa").grade(said[key], Question(0, key, (), ""), one))
            if parsing.gqa_prediction(said[key]) != said[key]:  # LLaVA's conversion never writes it
                rows[-1]["correct"] = said[key] == one["answer"]
        report = make("gqa").totals(rows)
        return report == {name: official["scores"][name] for name in report}

    compare("gqa", check)


def test_pope_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        if inputs["kind"] == "parse":
            return parsing.pope_word(inputs["text"]) == official
        ours = pope.metrics([parsing.pope_word(text) for text in inputs["texts"]], inputs["labels"])
        refused = official.pop("raises", None) == "ZeroDivisionError"
        return ours | official == ours and refused == (None in ours.values() or ours["f1"] == 0)

    compare("pope", check)


def test_textvqa_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        kind = inputs["kind"]
        if kind == "normalise":
            parts = {"word_tokenize": parsing.tokenise(inputs["text"]), "full": parsing.normalise(inputs["text"])}
            return parts == official
        if kind == "dataset":
            pairs = [(one["pred_answer"], one["gt_answers"]) for one in inputs["pred_list"]]
            return not pairs or mean(textvqa.score_answer(*pair).value for pair in pairs) == official
        try:
            if kind == "score":
                return textvqa.score_answer(inputs["pred_answer"], inputs["gt_answers"]).value == official
            return textvqa.question_of(inputs["prompt"]) == official
        except ValueError:
            return "raises" in official

    compare("textvqa", check, {"normalise", "dataset", "score", "prompt_to_question"})


def test_textvqa_golden_files_end_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "eval" / "textvqa"
    folder.mkdir(parents=True)

    def check(inputs: dict[str, Any], official: Any) -> bool:
        asked = [{"question_id": one["question_id"], "text": one["prompt"]} for one in inputs["results"]]
        (folder / "llava_textvqa_val_v051_ocr.jsonl").write_text("\n".join(map(json.dumps, asked)))
        (folder / "TextVQA_0.5.1_val.json").write_text(json.dumps({"data": inputs["annotations"]}))
        try:
            report = make("textvqa").score(inputs["results"], tmp_path)
        except DataError:
            return "raises" in official
        printed = f"Samples: {report['counts']['answered']}\nAccuracy: {report['accuracy']:.2f}%\n"
        return printed in official["stdout"]

    compare("textvqa", check, {"end_to_end"})


def test_word_tables_are_the_official_ones() -> None:
    tables = json.loads(sample("vqa_tables.json").read_text())
    assert tables["contractions"] == parsing.CONTRACTIONS and len(parsing.CONTRACTIONS) == 120
    assert tables["number_words"] == parsing.NUMBERS
    assert sorted(parsing.ARTICLES) == tables["articles"]
    assert list(parsing.MARKS) == tables["punctuation_in_order"]


def test_real_pope_labels_belong_to_the_questions(tmp_path: Path) -> None:
    source, folder = sample("pope"), tmp_path / "eval" / "pope"
    folder.mkdir(parents=True)
    (folder / "llava_pope_test.jsonl").symlink_to(source / "llava_pope_test.jsonl")
    (folder / "coco").symlink_to(source / "labels")
    records = [{"question_id": one.question_id, "text": "Yes"} for one in make("pope").load(tmp_path)]
    report = make("pope").score(records, tmp_path)
    counts = {name: one["TP"] + one["FP"] for name, one in report["categories"].items()}
    assert counts == {"adversarial": 3000, "random": 2910, "popular": 3000}
    assert report["yes_ratio"] == 100 and report["complete"]


@given(st.text())
def test_scorers_take_any_text(text: str) -> None:
    assert parsing.normalise(text) == " ".join(parsing.normalise(text).split())
    assert parsing.pope_word(text) in ("yes", "no")
    assert parsing.gqa_prediction(text) == parsing.gqa_prediction(parsing.gqa_prediction(text))
