"""Scorers of questions with options or of yes and no (ScienceQA, MME, MMBench, SEED-Bench) and the official ones."""

import io
import json
from pathlib import Path
from typing import Any

from golden_cases import compare, sample
from tiny_data import said, write_lines

from llava_consensus.evaluation.benchmarks import Question, make, mme, parsing, seed


def test_sqa_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        if inputs["kind"] == "parse":
            letter = parsing.sqa_letter(inputs["text"])
            index = parsing.option_index(letter, inputs["n_choices"])
            return {"parsed": letter, "pred_idx": index, "correct": index == inputs["answer"]} == official
        try:
            rows = inputs.get("predictions") or list(map(json.loads, inputs.get("prediction_lines", "").splitlines()))
            texts = {one["question_id"]: one["text"] + "" for one in rows}
            seeing = {one["question_id"] for one in rows if "<image>" in one["prompt"]}
            split = {key: inputs["problems"][key] for key in inputs["pid_splits"][inputs["split"]]}
        except (KeyError, TypeError, ValueError):
            return "raises" in official
        if any(problem["answer"] >= len(parsing.LETTERS) for problem in split.values()):
            return "raises" in official
        asked = [Question(at, key, ("i",) if key in seeing else (), "") for at, key in enumerate(split)]
        graded = [make("sqa").grade(texts.get(one.question_id, ""), one, split[one.question_id]) for one in asked]
        ours = make("sqa").totals(graded)
        if ours["img_accuracy"] is None:
            return official == {"raises": "ZeroDivisionError"}
        return (ours["accuracy"], ours["img_accuracy"]) == (official["acc"], official["img_acc"])

    compare("scienceqa", check)


def mme_rows(task: str, table: str) -> list[dict[str, Any]]:
    """Graded answers of one task's file of the official results folder; ValueError where the tool would misread it."""
    lines, rows = [line.split("\t") for line in io.StringIO(table)], []
    for place, (image, _, right, text) in enumerate(lines):
        if image != lines[place ^ 1][0] or right.lower() not in ("yes", "no"):
            raise ValueError(f"{image}: {right}")
        graded = make("mme").grade(text, Question(place, f"{task}/{image}", (), ""), right.lower())
        rows.append(graded | {"unit": place // 2})
    return rows


def test_mme_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        if inputs["kind"] == "parse":
            return parsing.mme_word(inputs["lower_cased_answer"]) == official
        try:
            ours = make("mme").totals([row for task, text in inputs["files"].items() for row in mme_rows(task, text)])
        except (ValueError, IndexError):
            return "raises" in official
        if "raises" in official:  # the tool wants all files, with something readable in each
            return len(ours["tasks"]) < 14 or bool(ours["unreadable"])
        parts = {}
        for part, names in mme.PARTS.items():
            parts[part.capitalize()] = {"total": ours[part]} | {name: ours["tasks"][name]["score"] for name in names}
        return parts == official

    compare("mme", check, {"parse", "results_dir"})


def test_real_mme_questions_all_have_their_official_line(tmp_path: Path) -> None:
    source, folder = sample("mme"), tmp_path / "eval" / "MME"
    (folder / "eval_tool").mkdir(parents=True)
    (folder / "llava_mme.jsonl").symlink_to(source / "llava_mme.jsonl")
    (folder / "eval_tool" / "Your_Results").symlink_to(source / "ground_truth")
    report = make("mme").score(said(make("mme").load(tmp_path), lambda _: "Yes"), tmp_path)
    assert report["complete"] and report["counts"]["answered"] == 2374
    assert report["perception"] == 500 and report["cognition"] == 200  # each image has one yes and one no
    assert [make("mme").readable("", {"extracted": word}) for word in ("yes", "no", "other")] == [True, True, False]


def test_seed_golden_cases(tmp_path: Path) -> None:
    folder = tmp_path / "eval" / "seed_bench"
    folder.mkdir(parents=True)

    def check(inputs: dict[str, Any], official: Any) -> bool:
        annotation = inputs["annotation"]
        records = [json.loads(line) for line in inputs["result_lines"].splitlines()]
        if "raises" in official:
            return True
        (folder / "SEED-Bench.json").write_text(json.dumps(annotation))
        asked = [{"question_id": one["question_id"], "text": "q"} for one in annotation["questions"]]
        write_lines(folder / "llava-seed-bench.jsonl", asked)
        report = make("seed").score(records, tmp_path)
        rows = {"Total": report["accuracy"], **{kind: report[kind] for kind in seed.KINDS}}
        printed = "".join(f"{name} accuracy: {value:.2f}%\n" for name, value in rows.items())
        return report["complete"] and official["stdout"].endswith(printed)

    compare("seed_bench", check)


def test_mmbench_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        text = "nan" if inputs.get("prediction_is_nan") else str(inputs["prediction"])
        return (parsing.mmbench_option(text, inputs["choices"]) or False) == official["vlmevalkit_v0.2"]

    compare("mmbench", check, {"can_infer"})  # groups: tests/evaluation/judge/test_graders.py
    options = {"A": "a cat", "B": "a dog"}
    assert parsing.mmbench_option(f"{parsing.FAILED_CALL}. It was a dog", options) == "B"
    assert parsing.mmbench_option(f"{parsing.FAILED_CALL} B", options) is None, "letters are not looked for"
