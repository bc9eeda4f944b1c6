"""Scorers of judged benchmarks against the official ones, and matches that need no judge."""

import csv
import io
import json
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from golden_cases import compare, golden, sample
from judged_data import BROKEN, LIMIT, mm_vet_dialogue

from llava_consensus.evaluation.benchmarks import mmvet as mmvet_benchmark
from llava_consensus.evaluation.benchmarks import parsing, video_qa
from llava_consensus.evaluation.judge import mmvet


def check_judge(inputs: dict[str, Any], official: Any) -> bool:
    texts = json.loads(sample("judge_prompts.json").read_text())["mm_vet"]
    replies = inputs["judge_replies"]
    grade, turns = mm_vet_dialogue(replies if len(replies) > 1 or replies == [BROKEN] else [*replies, "0.0"])
    cells = mmvet.cells(inputs["item"]["question"], inputs["item"]["answer"], inputs["prediction"])
    text = texts["few_shot_table"] + "\n" + " | ".join([*cells.values(), ""])
    calls = []
    for again, options in turns:
        content = text + texts["retry_suffix"] * again
        calls.append({"model": "gpt-4-0613", **options, "messages": [{"role": "user", "content": content}]})
    if calls != official["requests"] or (grade is None) != ("raises" in official):
        return False
    if grade is None:
        return True
    theirs = official["grade"]
    same_score = grade[0] == pytest.approx(theirs["score"][0], rel=0, abs=0, nan_ok=True)
    return [grade[1]] == theirs["content"] and same_score


def check_run(inputs: dict[str, Any], official: Any) -> bool:
    chosen = inputs["sub_set"] or list(inputs["metadata"])
    grades = {key: list(one["score"]) for key, one in (inputs["existing_grades"] or {}).items()}
    replies = iter(inputs["judge_replies"])
    if any(key not in inputs["results"] for key in chosen):
        return official.get("raises") == "KeyError"
    for run in range(inputs["num_run"]):
        for key in chosen:
            if len(grades.get(key, [])) <= run:
                grade, _ = mm_vet_dialogue([next(replies)])
                assert grade is not None
                grades.setdefault(key, []).append(grade[0])
    capabilities = {key: one["capability"] for key, one in inputs["metadata"].items() if key in chosen}
    counts = Counter(name for names in capabilities.values() for name in names)
    decimals = int(inputs["args"][1]) if inputs["args"] else 1
    ours = mmvet_benchmark.tables(capabilities, grades, inputs["num_run"], decimals)
    rest = {"total": ours["total"], "std": ours["std"], "runs": str(ours["runs"])}
    header, row = csv.reader(io.StringIO(official["cap_score_csv"]))
    table = {name: str(value) for name, value in (ours["capability"] | rest).items()}
    return (
        ours["capability"] | rest == official["cap_score"]
        and ours["integration"] | rest == official["cap_int_score"]
        and table == dict(zip(header[1:], row[1:], strict=True))
        and [counts[name] for name in ours["capability"]] == sorted(counts.values(), reverse=True)
    )


def test_mm_vet_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        same = (check_judge if inputs["kind"] == "judge" else check_run)(inputs, official)
        # the official script does not count the reply after a rate limit; here the openai package retries unseen
        return same != (LIMIT in inputs["judge_replies"][1:])

    compare("mm_vet", check)


def parsed(replies: list[str]) -> list[Any]:
    """What the first readable of the replies to a sample holds."""
    for reply in replies:
        with suppress(video_qa.Unreadable):
            return [video_qa.parse(reply)]
    return []


def calls(replies: list[str]) -> int:
    return next(number for number, reply in enumerate(replies, start=1) if parsed([reply]))


def same_averages(values: list[Any], official: Any) -> bool:
    ours = video_qa.evaluate(values)
    names = ("yes_count", "no_count", "accuracy", "average_score")
    if official.get("raises") == "ZeroDivisionError":
        return ours["accuracy"] is None
    return all(ours[name] == official[name] for name in names)


def check_video(inputs: dict[str, Any], official: Any) -> bool:
    kind = inputs["kind"]
    if kind == "dataset":
        by_id = {one["id"]: inputs["replies"][one["id"]] for one in inputs["samples"]}
        same_calls = official["calls"] == {key: calls(replies) for key, replies in by_id.items()}
        return same_calls and same_averages([parsed(replies)[0] for replies in by_id.values()], official)
    if kind == "reply_then_retry":
        if "raises" in official:  # it saved a cut-off file; here the reply is unreadable
            return not parsed(inputs["replies"][:1])
        same_calls = calls(inputs["replies"]) == official["calls"]["v0"]
        return same_calls and same_averages(parsed(inputs["replies"]), official)
    values = [parsed([inputs["reply"]])[0], parsed([inputs["second_sample_reply"]])[0]]
    if kind == "reply_video_chatgpt_script":  # the same without the guard: a bad field ends it
        unsound = video_qa.evaluate(values)["unsound"]
        return bool(unsound) == ("raises" in official) and (bool(unsound) or same_averages(values, official))
    return same_averages(values, official)


def test_video_qa_golden_cases() -> None:
    kinds = {case["inputs"]["kind"] for case in golden("video_qa")} - {"request", "prediction_file"}
    compare("video_qa", check_video, kinds)
    found = video_qa.evaluate([{"pred": "yes"}, {"pred": "yes", "score": 4}])
    assert (found["unsound"], found["neither"], found["accuracy"]) == (1, 0, 1.0), "a reply without a score is unsound"


def test_mm_vet_rounds_as_numpy_does() -> None:
    score = mmvet_benchmark.tables({"a": ["rec"], "b": ["ocr", "rec"]}, {"a": [0.003], "b": [0.0]})
    assert score["total"] == 0.2 and score["capability"] == {"rec": 0.2, "ocr": 0.0} and score["runs"] == [0.2]
    with pytest.raises(ValueError):
        mmvet_benchmark.tables({}, {})


def test_matches_without_a_judge() -> None:
    for answer, reference, contained in (
        ("A brown dog", "dog", True),
        ("nothing", "no", False),
        ("x = -1 or x = -5", "-1<AND>-5", True),
        ("x = -1", "-1<AND>-5", False),
        ("3/4", "0.75<OR>3/4", True),
        ("写着马曳二字", "马曳", True),
        ("", "dog", False),
        ("dog", "", False),
    ):
        assert parsing.contains(answer, reference) == contained, answer
