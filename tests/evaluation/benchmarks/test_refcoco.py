"""RefCOCO: boxes in the words of several models, against overlaps worked out by hand."""

from pathlib import Path

import pytest
from tiny_data import write_lines

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import make

# an image of 400 x 200 pixels: padded to a square it begins at 100 from the top
ROW: dict[str, object] = {"image": "data/coco/train2014/one.jpg", "sent": "left dog", "bbox": [100, 50, 300, 150]}
ROW |= {"width": 400, "height": 200}
SAME = {  # the true box in each unit
    "padded": "[0.25, 0.375, 0.75, 0.625]",
    "unit": "[0.25,0.25,0.75,0.75]",
    "thousand": "<box>(250,250),(750,750)</box>",
    "pixels": "100 50 300 150",
}


def ask(data: Path, **row: object) -> Path:
    write_lines(data / "eval/refcoco/refcoco_val.jsonl", [{**ROW, **row}])
    return data


@pytest.mark.parametrize("boxes", SAME)
def test_the_true_box_in_every_unit(boxes: str, tmp_path: Path) -> None:
    benchmark, data = make("refcoco", boxes=boxes), ask(tmp_path)
    question = benchmark.load(data)[0]
    assert question.images == ("one.jpg",) and question.text.endswith("describes: left dog")
    report = benchmark.score([{"question_id": 0, "text": SAME[boxes]}], data)
    assert report["mean_iou"] == pytest.approx(100) and report["accuracy"] == 100


def test_overlaps_and_answers_that_are_no_box(tmp_path: Path) -> None:
    benchmark, data = make("refcoco", boxes="pixels"), ask(tmp_path)
    for text, overlap in (("200 50 400 150", 100 / 3), ("100 50 200 150", 50), ("300 50 400 150", 0), ("no", 0)):
        report = benchmark.score([{"question_id": 0, "text": text}], data)
        assert report["mean_iou"] == pytest.approx(overlap) and report["accuracy"] == 100 * (overlap >= 50)
        assert report["extracted"][0]["correct"] == (overlap >= 50)
        assert report["unreadable_answers"] == (text == "no")


def test_tenths_hold_the_last_one_they_touch(tmp_path: Path) -> None:
    data = ask(tmp_path, text="Give the box of the dog.", boxes="tenths", bbox=[120, 40, 240, 120])
    benchmark = make("refcoco")
    assert benchmark.load(data)[0].text == "Give the box of the dog."
    assert benchmark.score([{"question_id": 0, "text": "3 2 5 5"}], data)["mean_iou"] == pytest.approx(100)


def test_a_damaged_box_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: bbox must be"):
        make("refcoco").load(ask(tmp_path, bbox=[1, 2, "x", 4]))
    with pytest.raises(DataError, match="line 1: boxes must be one of padded, unit"):
        make("refcoco").load(ask(tmp_path, boxes="inches"))
