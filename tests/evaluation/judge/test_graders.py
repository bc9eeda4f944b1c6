"""Graders: prompts read out of a script without executing it, equal to the official ones, or in our own words; who is
asked about what in MMBench, and the official result of every recorded group.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from golden_cases import compare, golden, sample
from judge_server import Act, Server
from judged_data import write_answers
from tiny_data import make_mmbench

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.judge import grader_of
from llava_consensus.evaluation.judge.grader import CHINESE

MM_VET, VIDEO_QA, MMBENCH = (grader_of(name) for name in ("mmvet", "msvd", "mmbench"))


def written(path: Path, **content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def filled(text: str, fields: dict[str, str]) -> str:
    for slot, words in fields.items():
        text = text.replace(f"{{{slot}}}", words)
    return text


def test_official_prompts_are_known_by_their_hash(tmp_path: Path) -> None:
    texts, path = json.loads(sample("judge_prompts.json").read_text()), tmp_path / "prompt.json"
    table, reminder = texts["mm_vet"]["few_shot_table"], texts["mm_vet"]["retry_suffix"]
    content = f"{table}\n{{question}} | {{answer}} | {{prediction}} | "
    prompt = MM_VET.prompt(written(path, messages=[{"role": "user", "content": content}], reminder=reminder))
    assert prompt.describe() == {"origin": "prompt.json", "sha256": prompt.sha256, "official": "MM-Vet at acde843"}
    slots = {"question": "{question}", "answer": "{ground_truth}", "prediction": "{prediction}"}
    assert prompt.fill(slots)[0]["content"] == texts["mm_vet"]["user_message_template"]
    assert prompt.fill(slots, again=True)[0]["content"].endswith(reminder)
    prompt = VIDEO_QA.prompt(written(path, messages=texts["video_qa"]["messages"]))
    assert prompt.describe()["official"] == "Video-LLaVA at 984e65b"
    cases = [case for case in golden("video_qa") if case["inputs"]["kind"] == "request"]
    for case in cases:
        one = case["inputs"]["sample"]
        fields = {"question": one["question"], "answer": one["answer"], "prediction": one["pred"]}
        assert prompt.fill(fields) == case["official_score"]["messages"]
    print(f"video_qa: request {len(cases)}, 0 differ")
    assert cases


def test_options_are_matched_in_the_language_of_the_question(tmp_path: Path) -> None:
    texts = json.loads(sample("judge_prompts.json").read_text())["mmbench_option_matching"]
    english, chinese = ([{"role": "user", "content": texts[language]}] for language in ("english", "chinese"))
    prompt = MMBENCH.prompt(written(tmp_path / "prompt.json", messages=english, chinese=chinese))
    assert prompt.describe()["official"] == "VLMEvalKit at e4e0263"
    for question, language in (("Which", "english"), ("哪个", "chinese")):
        fields = {"question": question, "options": "A. {}\n", "prediction": "%s"}
        assert prompt.fill(fields)[0]["content"] == filled(texts[language], fields)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"messages": [{"role": "user"}]}'])
def test_other_files_are_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "prompt.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=re.escape(str(path))):
        MM_VET.prompt(path)


COLUMNS = ("index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image", "split")
RIGHT = {5: "A", 1000005: "C", 2000005: "B", 6: "A", 1000006: "B"}


def write(data: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as MMBench's table; returns their predictions as an answer file has them."""
    path = data / "eval/mmbench/mmbench_dev_20230712.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(COLUMNS)]
    lines += ["\t".join(str(row.get(name, "x" if name == "image" else "")) for name in COLUMNS) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return [{"question_id": row["index"], "text": str(row["prediction"])} for row in rows]


def test_mmbench_groups_equal_the_official_ones(tmp_path: Path) -> None:
    matching = json.loads(sample("judge_prompts.json").read_text())["mmbench_option_matching"]
    grader = MMBENCH
    judged = 0

    def check(inputs: dict[str, Any], official: Any) -> bool:
        nonlocal judged
        expected = official["vlmevalkit_v0.2"]
        records = write(tmp_path, inputs["rows"])
        if inputs["exact_matching"]:
            found: float = benchmarks.make("mmbench").score(records, tmp_path)["accuracy"]
            return found == 100 * expected["hit"]
        candidates, _ = grader.candidates(records, tmp_path)
        replies, outcomes, asked = list(inputs["judge_replies"]), {}, []
        for one in sorted(candidates, key=lambda one: int(one.key)):
            grade = one.settled
            for attempt in range(len(grader.attempts)):
                if grade is None:
                    asked.append(one)
                    grade = grader.read(replies.pop(0) if replies else "Z", one, attempt)
            outcomes[one.key] = [grader.fallback if grade is None else grade]
        judged += bool(asked)
        hit = grader.report(candidates, outcomes, tmp_path, 1)["accuracy"]
        texts = []
        for one in asked[: len(expected["judge_prompts"])]:
            language = "chinese" if CHINESE.search(one.fields["question"]) else "english"
            slots = ("question", "options", "prediction")
            texts.append(filled(matching[language], {slot: one.fields[slot] for slot in slots}))
        return hit == 100 * expected["hit"] and texts == expected["judge_prompts"]

    compare("mmbench", check, {"circular_group"})
    print(f"with a judge: {judged}")
    assert judged


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_mmbench(make_mmbench(tmp_path / "data"), chinese=True)


def judge_mmbench(data: Path, server: Server, texts: dict[int, str], name: str = "mmbench") -> dict[str, Any]:
    """The command `judge`, and what it measured."""
    file, out = data.parent / "said.jsonl", data.parent / "out"
    write_answers(file, texts)
    place = ["--data", str(data), "--out", str(out), "--no-progress", "--judge-url", server.url]
    assert cli.main(["judge", name, "--answers", str(file), "--judge-model", "j", *place]) == 0
    (path,) = out.glob(f"{name}-said-*/metrics.json")
    metrics = json.loads(path.read_text())
    path.rename(path.with_suffix(".seen"))
    return metrics


def test_only_what_the_rules_cannot_read_is_asked(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(lambda text, number: Act(text="B" if "feline" not in text else "A")) as server:
        metrics = judge_mmbench(data, server, RIGHT | {5: "a feline", 1000006: "一只喵"})
    assert server.total == 2 and {body["temperature"] for body in server.bodies} == {0}
    assert metrics["score"] == metrics["accuracy"] == 100.0 and metrics["undecided"] == 0
    assert "mmbench: accuracy 100.00, 5 of 5 questions graded" in capsys.readouterr().out


def test_a_judge_without_a_letter_is_asked_three_times_and_not_about_what_is_wrong_already(data: Path) -> None:
    with Server(lambda text, number: Act(text="I cannot tell.")) as server:
        metrics = judge_mmbench(data, server, RIGHT | {5: "a feline", 1000005: "A"})
        assert server.total == 0 and metrics["score"] == 50.0
        metrics = judge_mmbench(data, server, RIGHT | {5: "a feline"})
    assert server.total == 3 and metrics["replies"]["given_up"] == 1 and metrics["score"] == 50.0
