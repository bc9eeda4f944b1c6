"""Scorers of questions with options, and of yes and no: ScienceQA, MME, MMBench, SEED-Bench against the official ones.

The cases are in tests/data/scorers. `pytest -rP` prints how many cases were compared.
"""

import io
import json
from pathlib import Path
from typing import Any

from golden_cases import compare, sample

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import make, mme, parsing, seed, sqa


def test_sqa_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        if inputs["kind"] == "parse":
            letter = parsing.sqa_letter(inputs["text"])
            index = parsing.option_index(letter, inputs["n_choices"])
            return {"parsed": letter, "pred_idx": index, "correct": index == inputs["answer"]} == official
        try:
            rows = inputs.get("predictions") or list(map(json.loads, inputs.get("prediction_lines", "").splitlines()))
            said = {one["question_id"]: sqa.ChoiceAnswer(one["text"] + "", "<image>" in one["prompt"]) for one in rows}
            ours = sqa.evaluate(inputs["problems"], inputs["pid_splits"][inputs["split"]], said)
        except (ValueError, KeyError, TypeError):
            return "raises" in official
        if ours["img_accuracy"] is None:
            return official == {"raises": "ZeroDivisionError"}
        ours |= {"acc": ours["accuracy"], "img_acc": ours["img_accuracy"]}
        official = {name: official[name] for name in ("acc", "img_acc")}
        return ours | official == ours

    compare("scienceqa", check)


def mme_pairs(text: str) -> list[mme.Pair]:
    """The pairs in one task's file of the official results folder; ValueError where the tool would misread it."""
    rows = [line.split("\t") for line in io.StringIO(text)]
    pairs = []
    for (picture, _, right, said), (other, _, other_right, other_said) in zip(rows[::2], rows[1::2], strict=True):
        if picture != other:
            raise ValueError(f"{picture} and {other}")
        pairs.append(
            mme.Pair(
                (mme.ground_truth(right), mme.ground_truth(other_right)),
                (parsing.mme_word(said), parsing.mme_word(other_said)),
            )
        )
    return pairs


def test_mme_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        if inputs["kind"] == "parse":
            return parsing.mme_word(inputs["lower_cased_answer"]) == official
        try:
            tasks = {name: mme_pairs(text) for name, text in inputs["files"].items()}
            ours = mme.evaluate(tasks)
        except ValueError:
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
    records = [
        {"question_id": one.question_id, "prompt": one.text, "text": "Yes"} for one in make("mme").load(tmp_path)
    ]
    report = make("mme").score(records, tmp_path)
    assert report["complete"] and report["counts"]["answered"] == 2374
    assert report["perception"] == 500 and report["cognition"] == 200  # each image has one yes and one no


def seed_printed(report: dict[str, Any]) -> str:
    """The last lines that LLaVA's script prints."""
    rows = [("Total accuracy", report["accuracy"]), *((f"{kind} accuracy", report[kind]) for kind in seed.KINDS)]
    return "".join(f"{name}: {value:.2f}%\n" for name, value in rows)


def test_seed_golden_cases(tmp_path: Path) -> None:
    folder = tmp_path / "eval" / "seed_bench"
    folder.mkdir(parents=True)
    benchmark = make("seed")

    def check(inputs: dict[str, Any], official: Any) -> bool:
        annotation = inputs["annotation"]
        records = [json.loads(line) for line in inputs["result_lines"].splitlines()]
        ours = seed.evaluate(annotation["questions"], {one["question_id"]: one["text"] for one in records})
        keys = [seed.key_of(one["question_id"]) for one in annotation["questions"]]
        (folder / "SEED-Bench.json").write_text(json.dumps(annotation))
        asked = [{"question_id": key, "image": "i.png", "text": "q"} for key in keys]
        (folder / "llava-seed-bench.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
        upload = tmp_path / "upload.jsonl"
        upload.unlink(missing_ok=True)
        try:
            assert benchmark.export
            benchmark.export(records, tmp_path, upload)
        except DataError:
            assert not upload.exists()
        if "raises" in official:
            return True
        return official["stdout"].endswith(seed_printed(ours)) and upload.read_text() == official["upload"]

    compare("seed_bench", check)


def test_mmbench_reads_an_option_beside_the_words_of_a_failed_call() -> None:
    options = {"A": "a cat", "B": "a dog"}
    assert parsing.mmbench_option(f"{parsing.FAILED_CALL}. It was a dog", options) == "B"
    assert parsing.mmbench_option(f"{parsing.FAILED_CALL} B", options) is None, "letters are not looked for"


def test_mmbench_golden_cases() -> None:
    def check(inputs: dict[str, Any], official: Any) -> bool:
        text = "nan" if inputs.get("prediction_is_nan") else str(inputs["prediction"])
        return (parsing.mmbench_option(text, inputs["choices"]) or False) == official["vlmevalkit_v0.2"]

    compare("mmbench", check, {"can_infer"})  # groups: tests/evaluation/judge/test_graders.py
