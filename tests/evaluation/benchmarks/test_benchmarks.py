"""Benchmarks on tiny data in the official layout: reading, joining by id, and every way the files can be wrong."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_data import MADE

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.benchmarks import BENCHMARKS, Question, make
from llava_consensus.evaluation.benchmarks.base import join

Change = Callable[[list[dict[str, Any]]], None]


NAMES = ("gqa", "mme", "pope", "seed", "textvqa")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in NAMES:
        MADE[name](tmp_path)
    return tmp_path


def answers_to(name: str, data: Path, text: str = "yes", ours: bool = False) -> list[dict[str, Any]]:
    records = []
    for one in make(name).load(data):
        metadata = {"index": one.index, "before": 576, "after": 64, "structural": 0, "notes": []} if ours else {}
        records.append({"question_id": one.question_id, "prompt": one.text, "text": text, "metadata": metadata})
    return records


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, data: Path) -> tuple[str, Path]:
    return request.param, data


def test_registry_names_near_misses_and_official_sizes() -> None:
    assert {"gqa", "pope", "textvqa"} <= set(BENCHMARKS)
    assert all(name == one.name and one.line and one.title and make(name).files for name, one in BENCHMARKS.items())
    assert (make("gqa").paper, make("pope").paper, make("textvqa").paper) == (62.0, 85.9, 58.2)
    assert all(one.max_new_tokens in (128, 1024) for one in BENCHMARKS.values())
    with pytest.raises(OptionError, match="Did you mean 'textvqa'"):
        make("text_vqa")
    sizes = {name: make(name).count for name in ("gqa", "vqav2", "mmvet", "seed", "mme")}  # as their authors count
    assert sizes == {"gqa": 12578, "vqav2": 107394, "mmvet": 218, "seed": 19242, "mme": 2374}


def test_order_duplicates_and_strangers_do_not_move_the_score(case: tuple[str, Path]) -> None:
    name, data = case
    records = answers_to(name, data, "no")
    expected = make(name).score(records, data)
    shuffled = answers_to(name, data, "no", ours=True)
    random.Random(0).shuffle(shuffled)
    assert make(name).score(shuffled, data) == expected
    wrong_first = [{**shuffled[0], "text": "something else"}]
    stranger = [{"question_id": "nobody", "prompt": "who?\nAnswer", "text": "no"}]
    odd = make(name).score(wrong_first + stranger + shuffled, data)
    assert odd.pop("counts") == expected.pop("counts") | {"duplicate": 1, "unknown": 1}
    assert odd == expected


def test_equal_questions_take_their_answers_in_turn_and_a_stated_index_counts_if_its_id_agrees() -> None:
    questions = [Question(index, 7, (), "Is it?") for index in range(2)]
    joined = join([{"question_id": 7, "text": text} for text in ("one", "two", "three")], questions)
    assert {index: one["text"] for index, one in joined.answers.items()} == {0: "one", 1: "three"}
    assert joined.counts["duplicate"] == 1
    stated = join([{"question_id": 7, "text": "last", "metadata": {"index": 1}}], questions)
    assert list(stated.answers) == [1], "the question that our harness asked"
    others = [Question(index, str(index), (), "Is it?") for index in range(5)]
    wrong: list[Any] = [True, -1, 99, "0", 1]  # indexes of other ids, or none
    said = [{"question_id": str(id), "text": "a", "metadata": {"index": one}} for id, one in enumerate(wrong)]
    assert sorted(join(said, others).answers) == list(range(5))


def test_report_is_json_and_marked_where_answers_are_missing(case: tuple[str, Path]) -> None:
    name, data = case
    records = answers_to(name, data)
    report = make(name).score(records, data)
    assert json.loads(json.dumps(report)) == report
    assert 0 <= report[make(name).metric] <= 2000 and report["complete"]
    assert [one["index"] for one in report["extracted"]] == list(range(len(records)))
    report = make(name).score(records[:3], data)
    assert not report["complete"] and report["counts"]["missing"] == len(records) - 3
    assert report["counts"]["answered"] == 3 and len(report["extracted"]) == 3
    nothing = make(name).score([], data)
    assert nothing[make(name).metric] is None and nothing["counts"]["answered"] == 0
    assert json.loads(json.dumps(nothing)) == nothing


def test_missing_files_are_named_with_their_source(case: tuple[str, Path]) -> None:
    name, data = case
    for file in [one for one in make(name).files if not one.optional][1::-1]:
        (data / "eval" / make(name).folder / file.path).unlink()
        with pytest.raises(DataError) as caught:
            make(name).load(data)
        assert file.path in str(caught.value) and file.source in str(caught.value)


def test_damaged_lines_name_file_and_line(case: tuple[str, Path]) -> None:
    name, data = case
    path = data / "eval" / make(name).folder / make(name).question_file
    lines = path.read_text().splitlines()
    damages = ['{"question_id": 1, "te', "[]", "{}", "", '"text"', "[" * 100_000, '{"question_id": [1], "text": "a"}']
    for damage in damages:
        path.write_text("\n".join([lines[0], damage, *lines[1:]]) + "\n")
        with pytest.raises(DataError, match="line 2") as caught:
            make(name).load(data)
        assert str(path) in str(caught.value), damage[:9]


def test_answers_of_another_kind(case: tuple[str, Path]) -> None:
    changes: list[tuple[Change, str]] = [
        (lambda records: [one.pop("text") for one in records], "no text"),
        (lambda records: [one.pop("question_id") for one in records], "no question_id"),
        (lambda records: [one.update(question_id=[1]) for one in records], "no question_id"),
        (lambda records: [one.update(text=3) for one in records], "no text"),
        (lambda records: [one.update(question_id="else") for one in records], "none of the answers"),
    ]
    for change, words in changes:
        records = answers_to(*case)
        change(records)
        with pytest.raises(DataError, match=words):
            make(case[0]).score(records, case[1])


LABELS, ASKED, GOLD = "pope/coco/coco_pope_random.json", "MME/llava_mme.jsonl", "gqa/" + make("gqa").files[1].path


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (GOLD, lambda rows: rows[0].pop("2"), "does not know question '2'"),
        (LABELS, lambda rows: rows.append(dict(rows[0])), f"{LABELS}.* 13 lines, but 12 random questions"),
        (LABELS, lambda rows: rows[4].update(text="Is there a car?"), f"{LABELS}.*line 5 is .*Is there a car"),
        (LABELS, lambda rows: rows[3].update(text=rows[3]["text"][:-1]), f"{LABELS}.*line 4"),
        (LABELS, lambda rows: rows[2].update(image="other.jpg"), f"{LABELS}.*line 3 is other.jpg"),
        (LABELS, lambda rows: rows[2].pop("label"), f"{LABELS}.*line 3: expected an object with label"),
        (ASKED, lambda rows: rows.insert(2, rows.pop(4)), "lines 3 and 4 are about"),
        (ASKED, lambda rows: [one.update(text="Is it?" + one["text"]) for one in rows], "not among the official"),
        (ASKED, lambda rows: [one.update(question_id="posters/1.jpg") for one in rows], "missing file: .*posters.txt"),
    ],
)
def test_files_of_another_version_are_refused(data: Path, file: str, change: Change, words: str) -> None:
    path = data / "eval" / file
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=words):
        make(file.partition("/")[0].lower()).score([], data)


def test_textvqa_tells_the_questions_of_one_picture_apart(data: Path) -> None:
    records = answers_to("textvqa", data)
    for record in records:
        record["text"] = "Dakota" if record["prompt"].startswith("What Brand") else "1999"
        record["prompt"] = record["prompt"].split("\n")[0].upper() + "\nAnswer the question using a single word."
    report = make("textvqa").score(records[::-1], data)
    assert report["accuracy"] == pytest.approx(100.0)
    assert report["extracted"][1] == {"index": 1, "extracted": "1999", "correct": 1.0}


def test_seed_questions_that_are_not_annotated_are_counted(data: Path) -> None:
    path = data / "eval" / "seed_bench" / "SEED-Bench.json"
    content = json.loads(path.read_text())
    content["questions"].pop()
    path.write_text(json.dumps(content))
    report = make("seed").score(answers_to("seed", data, "B"), data)
    assert report["not_annotated"] == 1 and len(report["extracted"]) == 3 and report["video"] is None
    content["questions"][0].pop("answer")
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="entry 1: no answer"):
        make("seed").score([], data)


def test_textvqa_without_ocr_tokens(data: Path) -> None:
    without = make("textvqa", ocr="without")
    assert without.asking == {"ocr": "without"} and without.paper is None
    plain = [one.text for one in without.load(data)]
    assert plain[0] == "What Brand is it?\nAnswer the question using a single word or phrase."
    records = [{**one, "prompt": text} for one, text in zip(answers_to("textvqa", data), plain, strict=True)]
    assert without.score(records, data)["complete"]
