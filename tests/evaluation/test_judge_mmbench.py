"""MMBench with a judge: who is asked about what, and the official result of every recorded group."""

import json
from pathlib import Path
from typing import Any

import pytest
from golden_cases import compare, sample
from judge_server import Act, Server
from tiny_data import make_mmbench

from llava_consensus import cli
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.judge import graders, prompts
from llava_consensus.evaluation.judge.client import Server as Asked
from llava_consensus.evaluation.judge.grading import Grading, JudgeConfig
from llava_consensus.evaluation.judge.store import Reply

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


def test_groups_equal_the_official_ones(tmp_path: Path) -> None:
    matching = json.loads(sample("judge_prompts.json").read_text())["mmbench_option_matching"]
    grader = graders.get("mmbench")
    prompt = grader.prompt()
    config = JudgeConfig("mmbench", Path(), tmp_path, Asked("judge", "http://127.0.0.1:1/v1"))
    judged = 0

    def check(inputs: dict[str, Any], official: Any) -> bool:
        nonlocal judged
        expected = official["vlmevalkit_v0.2"]
        records = write(tmp_path, inputs["rows"])
        if inputs["exact_matching"]:
            return (
                grader.unjudged(benchmarks.make("mmbench").score(records, tmp_path))["by_rules"]
                == 100 * expected["hit"]
            )
        samples, _ = grader.samples(records, tmp_path)
        replies, verdicts, asked = list(inputs["judge_replies"]), {}, []
        for one in sorted(samples, key=lambda one: int(one.key)):
            grading = Grading(grader, prompt, one, 0, config)
            while grading.outcome is None:
                asked.append(one)
                text = replies.pop(0) if replies else "Z"
                grading.hear(Reply(text, False, "judge", 1, 1, False))
            verdicts[one.key] = [grading.verdict]
        judged += bool(asked)
        hit = grader.report(samples, verdicts, tmp_path, 1)["accuracy"]  # type: ignore[arg-type]
        texts = []
        for one in asked[: len(expected["judge_prompts"])]:
            text = str(matching["chinese" if prompts.CHINESE.search(one.fields["question"]) else "english"])
            for slot in ("question", "options", "prediction"):
                text = text.replace(f"{{{slot}}}", one.fields[slot])
            texts.append(text)
        return hit == 100 * expected["hit"] and texts == expected["judge_prompts"]

    compare("mmbench", check, {"circular_group"})
    print(f"with a judge: {judged}")
    assert judged


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_mmbench(make_mmbench(tmp_path / "data"), chinese=True)


def run(data: Path, server: Server, texts: dict[int, str], name: str = "mmbench") -> dict[str, Any]:
    """The command `judge`, and what it measured."""
    pytest.importorskip("openai")
    file, out = data.parent / "said.jsonl", data.parent / "out"
    file.write_text("".join(json.dumps({"question_id": key, "text": text}) + "\n" for key, text in texts.items()))
    place = ["--data", str(data), "--out", str(out), "--no-progress", "--judge-url", server.url]
    assert cli.main(["judge", name, "--answers", str(file), "--judge-model", "j", *place]) == 0
    (path,) = out.glob(f"{name}-said-*/metrics.json")
    metrics = json.loads(path.read_text())
    path.rename(path.with_suffix(".seen"))
    return metrics | {"grades": json.loads((path.parent / "grades.json").read_text())}


def test_only_what_the_rules_cannot_read_is_asked(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(lambda text, number: Act(text="B" if "feline" not in text else "A")) as server:
        metrics = run(data, server, RIGHT | {5: "a feline", 1000006: "一只喵"})
    assert server.total == 2 and {body["temperature"] for body in server.bodies} == {0}
    assert metrics["score"] == metrics["accuracy"] == 100.0 and metrics["by_rules"] == 0.0
    assert metrics["undecided"] == 0 and metrics["undecided_by_rules"] == 2
    assert metrics["grades"]["5"] == {"opt": "A", "log": "A", "judge": "judge-0613"}
    assert metrics["grades"]["6"] == {"opt": "A", "log": "A", "judge": None}
    said = capsys.readouterr().out
    assert "mmbench: accuracy 100.00, 5 of 5 questions graded" in said
    assert "0.00 by the rules, which cannot read 2 answers" in said


def test_nobody_is_asked_about_a_question_that_is_wrong_already(data: Path) -> None:
    with Server(lambda text, number: Act(text="A")) as server:
        metrics = run(data, server, RIGHT | {5: "a feline", 1000005: "A"})
    assert server.total == 0 and metrics["score"] == 50.0


def test_a_judge_without_a_letter_is_asked_three_times(data: Path) -> None:
    with Server(lambda text, number: Act(text="I cannot tell.")) as server:
        metrics = run(data, server, RIGHT | {5: "a feline"})
    assert server.total == 3 and metrics["replies"]["given_up"] == 1 and metrics["score"] == 50.0


def test_the_chinese_set_is_judged_too(data: Path) -> None:
    with Server(lambda text, number: Act(text="B")) as server:
        metrics = run(data, server, RIGHT | {1000006: "一只喵"}, "mmbench_cn")
    assert server.total == 1 and metrics["score"] == 100.0
    assert server.bodies[0]["messages"][0]["content"].endswith("回答：一只喵\n字母：")
