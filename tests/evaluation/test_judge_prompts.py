"""The judge's prompts: read out of a script without executing it, equal to the official ones, or in our own words."""

import json
from pathlib import Path
from typing import Any

import pytest
from golden_cases import golden, sample

from llava_consensus.errors import DataError
from llava_consensus.evaluation.judge import graders
from llava_consensus.evaluation.judge.grader import Grader

MM_VET, VIDEO_QA, MMBENCH = (graders.get(name) for name in ("mmvet", "msvd", "mmbench"))

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


@pytest.mark.parametrize("grader", [MM_VET, VIDEO_QA, MMBENCH])
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
def test_other_files_are_refused(tmp_path: Path, grader: Grader, content: str | None, words: str) -> None:
    path = tmp_path / "script.py"
    if content is not None:
        path.write_text(content)
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


def test_our_own_words_are_not_the_official_ones() -> None:
    texts = json.loads(sample("judge_prompts.json").read_text())
    official = texts["mm_vet"]["few_shot_table"] + " ".join(one["content"] for one in texts["video_qa"]["messages"])
    official += texts["mmbench_option_matching"]["english"]
    for grader in (MM_VET, VIDEO_QA, MMBENCH):
        ours = " ".join(one["content"] for one in grader.prompt().fill({**FIELDS, "answer": ""})).split()
        runs = (" ".join(ours[at : at + 8]) for at in range(len(ours) - 7))
        assert [run for run in runs if run in official] == []


def test_half_characters_are_replaced() -> None:
    filled = VIDEO_QA.prompt().fill({**FIELDS, "prediction": "a\ud83d"})
    assert "Answer of the model: a?" in filled[1]["content"]
