"""MM-Vet and video QA on tiny data in the official layout: reading, joining by id, exports, and files that disagree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden_cases import sample
from judged_data import VIDEO, make_mmvet, make_msvd

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import make

Rows = list[dict[str, Any]]


@pytest.fixture
def mmvet(tmp_path: Path) -> Path:
    return make_mmvet(tmp_path / "mmvet")


@pytest.fixture
def msvd(tmp_path: Path) -> Path:
    return make_msvd(tmp_path / "msvd")


def answers_to(name: str, data: Path, texts: dict[int, str] | None = None) -> Rows:
    return [
        {"question_id": one.question_id, "prompt": one.text, "text": (texts or {}).get(one.index, "dog")}
        for one in make(name).load(data)
    ]


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    edited = edit(content)
    path.write_text(json.dumps(content if edited is None else edited))


def test_mmvet_questions_and_matches(mmvet: Path) -> None:
    questions = make("mmvet").load(mmvet)
    assert [(one.text, one.images) for one in questions][1] == ("Which animal?", ("v1_1.png",))
    answers = answers_to("mmvet", mmvet, {0: "-5 and -1", 2: "to the left of it", 3: "STOP."})
    report = make("mmvet").score(answers[::-1], mmvet)
    assert report["total"] is None and report["judge"] is None and report["complete"]
    assert report["contains"] == pytest.approx(80)
    assert report["extracted"][3] == {"index": 3, "extracted": "stop", "correct": True}
    assert json.loads(json.dumps(report)) == report
    nothing = make("mmvet").score([], mmvet)
    assert nothing["contains"] is None and nothing["counts"]["missing"] == 5


def test_real_mmvet_questions_join_their_capabilities(tmp_path: Path) -> None:
    folder = tmp_path / "eval/mm-vet"
    folder.mkdir(parents=True)
    (folder / "llava-mm-vet.jsonl").symlink_to(sample("mm_vet") / "llava-mm-vet.jsonl")
    known = json.loads((sample("mm_vet") / "capabilities.json").read_text())
    gold = {key: {"question": "", "answer": "yes", "capability": one} for key, one in known.items()}
    (folder / "mm-vet.json").write_text(json.dumps(gold))
    report = make("mmvet").score(answers_to("mmvet", tmp_path, {3: "Yes."}), tmp_path)
    assert report["counts"] == {"asked": 218, "answered": 218, "missing": 0, "duplicate": 0, "unknown": 0}
    assert report["contains"] == pytest.approx(100 / 218)


def test_videos_are_found_by_name_and_matched_by_id_or_position(msvd: Path) -> None:
    questions = make("msvd").load(msvd)
    assert [one.images[0] for one in questions[:3]] == ["clip0.avi", "clip1.mkv", "clip2.mp4"]
    assert questions[4].question_id == "v_clip1_4" and questions[4].text == "what does number 4 do?"
    answers = answers_to("msvd", msvd, {1: "Act 1.", 5: "they act 5 times", 2: "act 22"})[::-1]
    report = make("msvd").score(answers, msvd)
    assert report["accuracy"] is None and report["average_score"] is None and report["complete"]
    assert report["contains"] == pytest.approx(200 / 6)
    change(msvd / VIDEO / "test_a.json", lambda rows: [{"answer": one["answer"]} for one in rows])
    by_position = make("msvd").score(answers_to("msvd", msvd, {0: "act 0"}), msvd)
    assert by_position["contains"] == pytest.approx(100 / 6)


def test_the_first_thousand_are_asked_and_complete(tmp_path: Path) -> None:
    data = make_msvd(tmp_path, 1003)
    assert len(make("msvd").load(data)) == 1000
    everything = make("msvd", questions="all")
    assert len(everything.load(data)) == 1003 and everything.asking == {"questions": "all"}
    assert (make("msvd").count, everything.count, make("tgif", questions="all").count) == (1000, 13157, 13691)
    assert make("msrvtt", questions="all").count == 72821
    answers = answers_to("msvd", data)
    report = make("msvd").score(answers, data)
    assert report["complete"] and report["counts"]["asked"] == 1000
    assert make("msvd").score(answers[:-1], data)["counts"]["missing"] == 1
    later = [{"question_id": "v_clip0_1002", "text": "act 1002"}]
    report = make("msvd").score(answers + later, data)
    assert report["counts"]["asked"] == 1003 and report["counts"]["missing"] == 2


GOLD = "eval/mm-vet/mm-vet.json"


@pytest.mark.parametrize(
    ("file", "edit", "words"),
    [
        (GOLD, lambda gold: gold.pop("v1_3") and None, r"know question 'v1_3' \(line 4 of"),
        (GOLD, lambda gold: gold["v1_2"].pop("capability") and None, "entry 'v1_2': no capability"),
        (GOLD, lambda gold: gold["v1_2"].update(answer=3), "entry 'v1_2': answer of another type"),
        (GOLD, lambda gold: list(gold), "expected a JSON dict"),
        (f"{VIDEO}/test_a.json", lambda rows: rows[::-1], "entry 1: question_id is 'v_clip2_5'"),
        (f"{VIDEO}/test_a.json", lambda rows: rows[:-1], "5 answers, test_q.json 6 questions"),
        (f"{VIDEO}/test_a.json", lambda rows: rows[2].pop("answer") and None, "entry 3: no answer"),
        (f"{VIDEO}/test_a.json", lambda rows: {}, "expected a JSON list"),
        (f"{VIDEO}/test_q.json", lambda rows: rows[1].pop("video_name") and None, "entry 2: no video_name"),
        (f"{VIDEO}/test_q.json", lambda rows: [*rows, 3], "entry 7: not an object"),
    ],
)
def test_files_that_disagree_are_refused(mmvet: Path, msvd: Path, file: str, edit: Any, words: str) -> None:
    name, data = ("mmvet", mmvet) if file == GOLD else ("msvd", msvd)
    change(data / file, edit)
    with pytest.raises(DataError, match=words) as caught:
        make(name).score([], data)
    assert file.rpartition("/")[2] in str(caught.value)
