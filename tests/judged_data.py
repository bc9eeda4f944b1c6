"""MM-Vet and a video QA set with a handful of questions each, in the official layout and file formats, and how they are
judged by a server on loopback.
"""

import json
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from judge_server import MODEL
from tiny_data import write_lines

from llava_consensus.evaluation.judge.client import NAME, JudgeConfig
from llava_consensus.evaluation.judge.mmvet import MMVetGrader, read_grade
from llava_consensus.evaluation.judge.run import run

LIMIT, BROKEN = "<<RATE LIMIT>>", "<<OTHER ERROR>>"  # scripted replies that are none
SECRET = "sk-test-0123456789-secret"
VIDEO = "eval/GPT_Zero_Shot_QA/MSVD_Zero_Shot_QA"
SAMPLES = [  # question, answer, capabilities
    ("What is x?", "-1<AND>-5", ["ocr", "math"]),
    ("Which animal?", "dog<OR>a dog", ["rec"]),
    ("Where is the dog?", "left", ["rec", "spat"]),
    ("What does the sign say?", "stop", ["ocr"]),
    ("Tell a story.", "once upon a time", ["rec", "gen", "know"]),
]


def make_mmvet(data: Path) -> Path:
    """Five samples; the question file as LLaVA has it, the gold file as MM-Vet has it."""
    asked, gold = [], {}
    for number, (question, answer, capability) in enumerate(SAMPLES):
        image = f"v1_{number}.png"
        asked.append({"image": image, "text": question, "category": "conv", "question_id": number})
        gold[f"v1_{number}"] = {"imagename": image, "question": question, "answer": answer}
        gold[f"v1_{number}"] |= {"capability": capability, "imagesource": "here"}
    write_lines(data / "eval/mm-vet/llava-mm-vet.jsonl", asked)
    (data / "eval/mm-vet/mm-vet.json").write_text(json.dumps(gold))
    return data


def make_msvd(data: Path, count: int = 6) -> Path:
    """Questions on three videos, answers with ids by position; two videos are there."""
    asked, answers, folder = [], [], data / VIDEO
    for number in range(count):
        key = {"question_id": f"v_clip{number % 3}_{number}"}
        asked.append({"video_name": f"clip{number % 3}", "question": f"what does number {number} do?", **key})
        answers.append({"answer": f"act {number}", "type": 0, **key})
    (folder / "videos").mkdir(parents=True)
    (folder / "test_q.json").write_text(json.dumps(asked))
    (folder / "test_a.json").write_text(json.dumps(answers))
    for name in ("clip0.avi", "clip1.gif", "clip1.mkv"):
        (folder / "videos" / name).touch()
    return data


def write_answers(path: Path, texts: dict[Any, str]) -> Path:
    write_lines(path, [{"question_id": key, "text": text} for key, text in texts.items()])
    return path


def judge_config(place: Path, url: str, name: str = "mmvet", **options: Any) -> JudgeConfig:
    """Five answers to MM-Vet, or six to MSVD, judged by the server at `url`."""
    data = place / "data"
    if not data.exists():
        texts: dict[Any, str] = {number: f"answer {number}" for number in range(5)}
        if name == "msvd":
            texts = {f"v_clip{number % 3}_{number}": f"act {number}" for number in range(6)}
        write_answers(place / "answers.jsonl", texts)
        (make_mmvet if name == "mmvet" else make_msvd)(data)
    wanted = {"out": place / "out", "timeout": 10.0, "tries": 3, **options}
    return JudgeConfig(name, place / "answers.jsonl", data, MODEL, url, **wanted)


def judge(wanted: JudgeConfig) -> dict[str, Any]:
    return run(wanted, progress=False).metrics


def stored(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "out" / NAME).read_text().splitlines()]


def mm_vet_dialogue(replies: list[str | None]) -> tuple[tuple[float, str] | None, list[tuple[bool, Any]]]:
    """The grade that scripted replies lead to, the last of them for ever, and for every request whether it has the
    reminder, and its options.
    """
    attempts, asked, given = MMVetGrader.attempts, list[tuple[bool, Any]](), chain(replies, repeat(replies[-1]))
    for attempt, options in enumerate(attempts):
        asked.append((attempt > 0, options))
        text = next(given)
        if text == BROKEN:
            return None, asked
        while text == LIMIT:  # the openai package waits and tries again
            asked.append(asked[-1])
            text = next(given)
        if attempt < len(attempts) - 1 and (grade := read_grade(text)) is not None:
            return grade, asked
    return (MMVetGrader.fallback, text or ""), asked
