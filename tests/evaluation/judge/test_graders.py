"""Graders: prompts read out of a script without executing it, equal to the official ones, or in our own words; who is
asked about what in MMBench, and the official result of every recorded group.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from golden_cases import compare, golden, sample
from judge_server import Act, Server
from judged_data import judge_config, write_answers
from tiny_data import make_mmbench

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.judge import grader_of
from llava_consensus.evaluation.judge.grader import CHINESE, Grader, Reply
from llava_consensus.evaluation.judge.run import Grading

MM_VET, VIDEO_QA, MMBENCH = (grader_of(name) for name in ("mmvet", "msvd", "mmbench"))

FIELDS = {"question": "{ground_truth}", "answer": "it's %s", "options": "A. b\n", "prediction": 'two\nlines "quoted"'}


def mm_vet_script(table: str, reminder: str) -> str:
    """A script shaped as MM-Vet's evaluator; run, it would end at once."""
    cells = '" | ".join([line["question"], line["answer"].replace("<AND>", " <AND> "), model_pred, ""])'
    return (
        f"raise SystemExit('executed')\nprompt = {table!r}\ndef runs(args):\n"
        f"    question = args.prompt + '\\n' + {cells}\n"
        f"    question = (args.prompt + '\\n' + {cells} + {reminder!r})\n"
    )


def video_script(system: str, user: str) -> str:
    """A script shaped as Video-LLaVA's: one f-string among plain ones, another list of messages before it."""
    head, tail = user.split("{prediction}")
    asked = repr(head).replace("{prediction}", "{pred}")
    return (
        "raise SystemExit('executed')\nextras = [{'role': 'user', 'content': f'{question} {answer} {pred}'}, 3]\n"
        f"def annotate():\n    create(messages=[{{'role': 'system', 'content': {system!r}}},\n"
        f"        {{'role': 'user', 'content': f{asked}\n         f'{{pred}}' {tail!r}}}])\n"
    )


def mmbench_script(english: str, chinese: str) -> str:
    """A script shaped as VLMEvalKit's: two functions that fill a template, a third that is not wanted."""
    texts = {"build_prompt_blink": "{} {} {}", "build_prompt": english, "build_prompt_cn": chinese}
    return "raise SystemExit('executed')\n" + "".join(
        f"def {name}(question, options, prediction):\n    tmpl = ({text!r})\n    return tmpl.format(question)\n"
        for name, text in texts.items()
    )


def test_a_script_is_read_and_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "evaluator.py"
    path.write_text(mm_vet_script("A table of {things}\n---\n", "\nAgain: "))
    prompt = MM_VET.prompt(path)
    text = 'A table of {things}\n---\n\n{ground_truth} | it\'s %s | two\nlines "quoted" | '
    assert prompt.fill(FIELDS) == [{"role": "user", "content": text}]
    assert prompt.fill(FIELDS, again=True) == [{"role": "user", "content": text + "\nAgain: "}]
    assert prompt.describe() == {"origin": "evaluator.py", "sha256": prompt.sha256, "official": None}
    path.write_text(video_script("Be {strict}.", "Q: {question}\nA: {answer}\nP: {prediction}\nSay {'pred': 1}."))
    messages = VIDEO_QA.prompt(path).fill(FIELDS)
    assert messages[0] == {"role": "system", "content": "Be {strict}."}
    expected = "Q: {ground_truth}\nA: it's %s\nP: two\nlines \"quoted\"\nSay {'pred': 1}."
    assert messages[1] == {"role": "user", "content": expected}


def test_official_prompts_are_known_by_their_hash(tmp_path: Path) -> None:
    texts = json.loads(sample("judge_prompts.json").read_text())
    path = tmp_path / "script.py"
    path.write_text(mm_vet_script(texts["mm_vet"]["few_shot_table"], texts["mm_vet"]["retry_suffix"]))
    prompt = MM_VET.prompt(path)
    assert prompt.describe()["official"] == "MM-Vet at acde843"
    slots = {"question": "{question}", "answer": "{ground_truth}", "prediction": "{prediction}"}
    assert prompt.fill(slots)[0]["content"] == texts["mm_vet"]["user_message_template"]
    path.write_text(video_script(*(one["content"] for one in texts["video_qa"]["messages"])))
    prompt = VIDEO_QA.prompt(path)
    assert prompt.describe()["official"] == "Video-LLaVA at 984e65b"
    cases = [case for case in golden("video_qa") if case["inputs"]["kind"] == "request"]
    for case in cases:
        one = case["inputs"]["sample"]
        fields = {"question": one["question"], "answer": one["answer"], "prediction": one["pred"]}
        assert prompt.fill(fields) == case["official_score"]["messages"]
    print(f"video_qa: request {len(cases)}, 0 differ")
    assert cases


def test_options_are_matched_in_the_language_of_the_question(tmp_path: Path) -> None:
    matching = json.loads(sample("judge_prompts.json").read_text())["mmbench_option_matching"]
    for slot in ("question", "options", "prediction"):
        matching = {name: str(text).replace(f"{{{slot}}}", "{}") for name, text in matching.items()}
    path = tmp_path / "multiple_choice.py"
    path.write_text(mmbench_script(matching["english"], matching["chinese"]))
    prompt = MMBENCH.prompt(path)
    assert prompt.describe()["official"] == "VLMEvalKit at e4e0263"
    fields = {"question": "Which", "options": "A. {}\n", "prediction": "%s"}
    for question, language in (("Which", "english"), ("哪个", "chinese")):
        fields["question"] = question
        assert prompt.fill(fields)[0]["content"] == matching[language].format(*fields.values())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("def (", "not a Python script"),
        ("\0", "not a Python script"),
        ("prompt = 3", "no such prompt"),
        ("prompt = f'{question} {answer} {pred}'", "no such prompt"),
        ("a = [{'role': 'user', 'content': f'{question} {answer} {pred.lower()}'}]", "no such prompt"),
        ("a = [{'role': 'user', 'content': f'{question} {answer} {pred}'}]", "no such prompt"),
        ("a = [{**b}, {'role': 'user'}]", "no such prompt"),
        ("def build_prompt(): return '{} {} {}'", "no such prompt"),
        ("def build_prompt(): return '{} {}'\ndef build_prompt_cn(): return '{} {} {}'", "no such prompt"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "script.py"
    if content is not None:
        path.write_text(content)
    for grader in (MM_VET, VIDEO_QA, MMBENCH):
        with pytest.raises(DataError, match=words) as caught:
            grader.prompt(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(("grader", "third"), [(MM_VET, "answer"), (VIDEO_QA, "answer"), (MMBENCH, "options")])
def test_our_own_words_have_every_slot_once(grader: Grader, third: str) -> None:
    prompt = grader.prompt()
    for messages in filter(None, (prompt.messages, prompt.chinese)):
        slots = [piece for _, pieces in messages for piece in pieces[1::2]]
        assert sorted(slots) == sorted(["prediction", "question", third])
    filled: list[dict[str, Any]] = prompt.fill(FIELDS)
    assert sum(FIELDS["prediction"] in one["content"] for one in filled) == 1
    assert prompt.describe()["official"] is None and prompt.origin == "own wording"


# MMBench: who is asked about what

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
    grader, prompt = MMBENCH, MMBENCH.prompt()
    config = judge_config(tmp_path, "http://127.0.0.1:1/v1")
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
            grading = Grading(grader, prompt, one, 0, config)
            while grading.outcome is None:
                asked.append(one)
                text = replies.pop(0) if replies else "Z"
                grading.hear(Reply(text, model="judge"))
            outcomes[one.key] = [grading.outcome]
        judged += bool(asked)
        hit = grader.report(candidates, outcomes, tmp_path, 1)["accuracy"]
        texts = []
        for one in asked[: len(expected["judge_prompts"])]:
            text = str(matching["chinese" if CHINESE.search(one.fields["question"]) else "english"])
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


def judge_mmbench(data: Path, server: Server, texts: dict[int, str], name: str = "mmbench") -> dict[str, Any]:
    """The command `judge`, and what it measured."""
    file, out = data.parent / "said.jsonl", data.parent / "out"
    write_answers(file, texts)
    place = ["--data", str(data), "--out", str(out), "--no-progress", "--judge-url", server.url]
    assert cli.main(["judge", name, "--answers", str(file), "--judge-model", "j", *place]) == 0
    (path,) = out.glob(f"{name}-said-*/metrics.json")
    metrics = json.loads(path.read_text())
    path.rename(path.with_suffix(".seen"))
    return metrics | {"grades": json.loads((path.parent / "grades.json").read_text())}


def test_only_what_the_rules_cannot_read_is_asked(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(lambda text, number: Act(text="B" if "feline" not in text else "A")) as server:
        metrics = judge_mmbench(data, server, RIGHT | {5: "a feline", 1000006: "一只喵"})
    assert server.total == 2 and {body["temperature"] for body in server.bodies} == {0}
    assert metrics["score"] == metrics["accuracy"] == 100.0
    assert metrics["undecided"] == 0
    assert metrics["grades"]["5"] == {"opt": "A", "log": "A", "judge": "judge-0613"}
    assert metrics["grades"]["6"] == {"opt": "A", "log": "A", "judge": None}
    said = capsys.readouterr().out
    assert "mmbench: accuracy 100.00, 5 of 5 questions graded" in said


def test_nobody_is_asked_about_a_question_that_is_wrong_already(data: Path) -> None:
    with Server(lambda text, number: Act(text="A")) as server:
        metrics = judge_mmbench(data, server, RIGHT | {5: "a feline", 1000005: "A"})
    assert server.total == 0 and metrics["score"] == 50.0


def test_a_judge_without_a_letter_is_asked_three_times(data: Path) -> None:
    with Server(lambda text, number: Act(text="I cannot tell.")) as server:
        metrics = judge_mmbench(data, server, RIGHT | {5: "a feline"})
    assert server.total == 3 and metrics["replies"]["given_up"] == 1 and metrics["score"] == 50.0
