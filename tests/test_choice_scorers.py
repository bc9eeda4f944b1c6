"""Scorers of questions with options, and of yes and no: ScienceQA, MME, MMBench, SEED-Bench against the official ones.

Golden cases lie in ../shared/data/scorers (not part of the repository); without them those tests are skipped and the
small cases here still run. `pytest tests/test_choice_scorers.py -rP` prints how many cases were compared.
"""

import json
from typing import Any

import pytest
from golden_cases import compare

from llava_consensus.scorers import sqa


def test_sqa_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        if inputs["kind"] == "parse":
            letter = sqa.parse(inputs["text"])
            index = sqa.index_of(letter, inputs["n_choices"])
            return {"parsed": letter, "pred_idx": index, "correct": index == inputs["answer"]} == official
        try:
            rows = inputs.get("predictions") or list(map(json.loads, inputs.get("prediction_lines", "").splitlines()))
            said = {one["question_id"]: sqa.Said(one["text"] + "", "<image>" in one["prompt"]) for one in rows}
            ours = sqa.evaluate(inputs["problems"], inputs["pid_splits"][inputs["split"]], said)
        except (ValueError, KeyError, TypeError):
            return "raises" in official
        if ours["img_accuracy"] is None:
            return official == {"raises": "ZeroDivisionError"}
        ours |= {"acc": ours["accuracy"], "img_acc": ours["img_accuracy"]}
        official.pop("stdout")
        return ours | official == ours

    compare("scienceqa", check)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A", "A"),
        ("B. dog", "B"),
        ("The answer is C.", "C"),
        ("The answer is C", "FAILED"),
        ("a", "FAILED"),
        ("A.", "FAILED"),
        ("", "FAILED"),
    ],
)
def test_sqa_letters(text: str, letter: str) -> None:
    assert sqa.parse(text) == letter
