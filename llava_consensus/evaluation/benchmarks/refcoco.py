"""RefCOCO: the box of the object a sentence describes, as text; right if it overlaps the true one by half.

Data: DATA/eval/refcoco; `refcoco_val.jsonl` in the form that Qwen-VL's and InternVL's evaluations read (`image`,
`sent`, `bbox` as left, top, right, bottom in pixels, `width`, `height`), images from COCO train2014. A line may hold
`text`, the whole prompt for a model that was trained on other words, and `boxes`, the unit of that model's numbers.
Asked as LLaVA-1.5 was trained: its sentence for a region, greedy, at most 128 new tokens.
Scored by the intersection over the union of the two boxes: accuracy at 0.5, and the mean. The first four numbers of an
answer are the box; `boxes` names their unit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.benchmarks.parsing import numbers
from llava_consensus.evaluation.files import Record, read_lines

FILES = (DataFile("refcoco_val.jsonl", "the grounding data of github.com/QwenLM/Qwen-VL (eval_mm/EVALUATION.md)"),)
FIELDS = ("image", "sent", "bbox", "width", "height")
ASKED = "Please provide the bounding box coordinate of the region this sentence describes: {}"
UNITS = ("padded", "unit", "tenths", "thousand", "pixels")
RIGHT = 0.5  # intersection over union
Box = Sequence[float]  # left, top, right, bottom


@dataclass(frozen=True, kw_only=True)
class RefCOCO(Benchmark):
    name = "refcoco"
    title = "RefCOCO"
    line = "RefCOCO: the box of what a sentence describes, right if it overlaps the true one by half"
    folder = "refcoco"
    images = "train2014"
    files = FILES
    metric = "accuracy"
    count = 10834
    max_new_tokens = 128
    licence = "Apache-2.0; COCO images"

    boxes: str = base.option(
        "auto", *UNITS,
        line="unit of the numbers in an answer: auto (that of the line, else padded), shares of the image padded to "
        "a square (LLaVA), of the image, its tenths, its thousandths (Qwen-VL, InternVL), pixels",
    )  # fmt: skip

    def load(self, data: Path) -> list[Question]:
        """One question for each line of the file; of an image's path the name counts."""
        return [
            Question(index, index, (Path(row["image"]).name,), row.get("text") or ASKED.format(row["sent"]))
            for index, row in enumerate(self._rows(data))
        ]

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, Any]:
        return dict(enumerate(self._rows(data)))

    def grade(self, text: str, question: Question, gold: Any) -> Record:
        box = numbers(text, 4)
        value = 0.0 if box is None else overlap(in_pixels(box, gold, self.boxes), gold["bbox"])
        return {"extracted": box, "correct": value >= RIGHT, "overlap": value}

    def readable(self, text: str, row: Record) -> bool:
        return row["extracted"] is not None

    def totals(self, rows: Sequence[Record]) -> Record:
        return {"accuracy": base.share(rows), "mean_iou": base.share(rows, "overlap")}

    def _rows(self, data: Path) -> list[dict[str, Any]]:
        base.require(self.place(data), self.files)
        path = self.place(data) / self.question_file
        rows = read_lines(path, FIELDS)
        for number, row in enumerate(rows, start=1):
            sizes = [*row["bbox"], row["width"], row["height"]] if isinstance(row["bbox"], list) else []
            if len(sizes) != 6 or not all(isinstance(one, int | float) and 0 <= one < 1e6 for one in sizes):
                raise DataError(f"{path}, line {number}: bbox must be left, top, right, bottom in pixels")
            if row.get("boxes", "padded") not in UNITS:
                raise DataError(f"{path}, line {number}: boxes must be one of {', '.join(UNITS)}")
        return rows


def in_pixels(box: Box, row: Mapping[str, Any], boxes: str) -> Box:
    """A box of an answer in pixels of its image. The last tenth that a box touches belongs to it."""
    width, height = row["width"], row["height"]
    if boxes == "auto":
        boxes = row.get("boxes", "padded")
    if boxes == "pixels":
        return box
    side, left, top = max(width, height), 0.0, 0.0
    if boxes == "padded":
        left, top = (side - width) / 2, (side - height) / 2
        width = height = side
    far = 1 if boxes == "tenths" else 0
    parts = {"tenths": 10, "thousand": 1000}.get(boxes, 1)
    sides = (box[0], box[1], box[2] + far, box[3] + far)
    x, y = [width * one / parts - left for one in sides[::2]], [height * one / parts - top for one in sides[1::2]]
    return x[0], y[0], x[1], y[1]


def overlap(one: Box, other: Box) -> float:
    """Intersection over union of two boxes; 0 if a box has no area."""
    across = max(0.0, min(one[2], other[2]) - max(one[0], other[0]))
    down = max(0.0, min(one[3], other[3]) - max(one[1], other[1]))
    areas = [max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) for box in (one, other)]
    shared = across * down
    return shared / (sum(areas) - shared) if shared else 0.0
