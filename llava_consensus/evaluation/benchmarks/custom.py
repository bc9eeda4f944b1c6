"""Questions from any file, answered and not scored, as LLaVA's `model_vqa` scripts do.

`Custom(questions=Path("q.jsonl"), image_folder=Path("images"))` is passed to a run like a benchmark. It is not in
BENCHMARKS, because it has no data files.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError, listed
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.benchmarks.video_qa import VideoQA
from llava_consensus.evaluation.files import ANSWERS, Record, digest, to_lines, write_out
from llava_consensus.evaluation.user_files import read_answers, read_rows

log = logging.getLogger(__name__)

IDS = ("question_id", "id")
TEXTS = ("text", "question", "prompt")
IMAGES = ("image", "images", "image_path", "image_paths")
VIDEOS = ("video", "videos", "video_path", "video_paths")
MEDIA = re.compile(r"image|img|picture|photo|video|clip|frame|media|visual|file|path", re.I)  # in the name of a key
FILE = re.compile(
    r"^[^\n]*\.(jpe?g|png|gif|bmp|webp|avif|tiff?|heic|heif|mp4|avi|mov|mkv|webm|wav|mp3|flac|ogg)$", re.I
)
MARKER = re.compile(r"<(?:image|video)>")  # in LLaVA's training form
AROUND = re.compile(r"^(?:\s*<(?:image|video)>)+\s*|\s*(?:<(?:image|video)>\s*)+$")
TURNS = "conversations"


@dataclass(frozen=True, kw_only=True)
class Custom(Benchmark):
    """A question file and a folder of images or videos.

    Args:
        questions: JSON lines, a JSON list, CSV or TSV. Each row has `question_id` or `id` (else its number counts), a
            question in `text`, `question`, `prompt` or LLaVA's `conversations`, and images or a video, if any.
        image_folder: folder of the images or videos.
        pictures: its former name, accepted until the next release.
    """

    name = "custom"
    title = "custom"
    line = "questions from your own file, answered and not scored"
    metric = "score"
    max_new_tokens = 128

    questions: Path
    image_folder: Path = Path()
    pictures: InitVar[Path | None] = None

    def __post_init__(self, pictures: Path | None) -> None:
        if pictures is not None:
            object.__setattr__(self, "image_folder", pictures)

    @property
    def chosen(self) -> dict[str, str]:
        return {}

    asking = chosen

    @property
    def folder(self) -> str:  # type: ignore[override]
        return str(self.questions.expanduser().absolute().parent)

    @property
    def files(self) -> tuple[DataFile, ...]:
        return (DataFile(self.questions.name, "you (--question-file)"),)

    @property
    def images(self) -> str:
        return str(self.image_folder.expanduser().absolute())

    @property
    def frames(self) -> int:  # type: ignore[override]
        return VideoQA.frames if self.questions.is_file() and self._read()[1] else 0

    def load(self, data: Path) -> list[Question]:
        base.require(self.place(data), self.files)
        return list(self._read()[0])

    def _read(self) -> tuple[tuple[Question, ...], bool]:
        path = self.questions.expanduser().absolute()
        return _questions(path, digest(path))

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """How complete the answers are; there are no labels."""
        known = {question.question_id for question in self.load(data)}
        answered = sum(record["question_id"] in known for record in records)
        counts = {"asked": len(known), "answered": answered, "missing": len(known) - answered}
        return {"benchmark": self.name, "score": None, "complete": not counts["missing"], "counts": counts}


def write_answers(run: Path, to: Path) -> None:
    rows = sorted(read_answers(run / ANSWERS), key=lambda row: row["metadata"]["index"])
    write_out(to, to_lines(rows))


@lru_cache(maxsize=1)
def _questions(path: Path, _content: str) -> tuple[tuple[Question, ...], bool]:
    """The questions in a file, and whether they show videos. DataError for a row without a text, or one that names an
    image or video in a way that is not understood.
    """
    questions, kinds, keys = [], dict[bool, str](), set[str]()
    for index, (where, row) in enumerate(read_rows(path)):
        keys |= row.keys()
        key = next((row[name] for name in IDS if row.get(name) not in (None, "")), index)
        if not isinstance(key, int | str) or isinstance(key, bool):
            raise DataError(f"{where}: question_id {key!r} is neither a number nor a text")
        names, video = _media(where, row)
        if names:
            kinds.setdefault(video, where)
        category = str(row.get("category") or "default")
        questions.append(Question(index, key, names, _text(where, row, len(names)), category))
    if unused := sorted(keys.difference(IDS, TEXTS, IMAGES, VIDEOS, (TURNS, "category"))):
        log.warning("%s: keys that are not used: %s", path, listed(unused))
    if len(kinds) > 1:
        raise DataError(f"{kinds[True]}: shows a video, and {kinds[False]} an image. Ask about them in two files")
    return tuple(questions), True in kinds


def _text(where: str, row: Record, shown: int) -> str:
    """The question of a row with this number of images; of LLaVA's training form the only turn of the user."""
    texts = {name: row[name] for name in TEXTS if str(row.get(name) or "").strip()}
    if not texts and isinstance(turns := row.get(TURNS), list):
        said = [turn.get("value") for turn in turns if isinstance(turn, dict) and turn.get("from") in ("human", "user")]
        if len(said) != 1:
            raise DataError(f"{where}: {len(said)} turns of the user, and one question is asked. Keep one a row")
        texts = {TURNS: said[0]}
    if not texts:
        raise DataError(f"{where}: no question. Name it {', '.join(TEXTS)} or {TURNS}, not {str(list(row))[:60]}")
    wrong = [name for name, text in texts.items() if not isinstance(text, str)]
    if wrong:
        raise DataError(f"{where}: {wrong[0]} is no text but {str(texts[wrong[0]])[:60]!r}")
    if len(set(texts.values())) > 1:
        raise DataError(f"{where}: {' and '.join(texts)} differ, and only one is asked. Keep one of them")
    text = next(iter(texts.values()))
    marked, rest = len(MARKER.findall(text)), AROUND.sub("", text)
    if marked and (marked != shown or MARKER.search(rest)):
        raise DataError(
            f"{where}: {marked} markers {MARKER.findall(text)[0]} and {shown} images or videos, shown in front of "
            "the question. Name each in the row, and leave markers inside the question out"
        )
    return rest if marked else text


def _media(where: str, row: Record) -> tuple[tuple[str, ...], bool]:
    """The files that a row shows, and whether they are a video."""
    given = {key: value for key, value in row.items() if value not in (None, "", [])}
    found = {
        key: tuple(_file_name(where, key, one) for one in (value if isinstance(value, list) else [value]))
        for key, value in given.items()
        if key in (*IMAGES, *VIDEOS)
    }
    used = set(found.values())
    for key, value in given.items():
        if key in (*found, *IDS, *TEXTS, TURNS):
            continue
        parts = value if isinstance(value, list) else [value]
        names_file = any(isinstance(part, str) and FILE.search(part) for part in parts)
        if names_file or (MEDIA.search(key) and (not used or isinstance(value, list | dict))):
            raise DataError(
                f"{where}: the key {key!r} seems to name an image, video or sound. Name it {IMAGES[0]}, {IMAGES[1]} or "
                f"{VIDEOS[0]}, or remove it"
            )
    if len(used) > 1:
        raise DataError(f"{where}: {' and '.join(found)} name different files. Keep one of them")
    videos = [key for key in found if key in VIDEOS]
    if videos and len(used.copy().pop()) > 1:
        raise DataError(f"{where}: several videos, and a question shows one. Ask about each in a row of its own")
    return (used.pop() if used else ()), bool(videos)


def _file_name(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} is {str(value)[:60]!r}. Give the name of a file")
    if value.startswith("data:"):
        raise DataError(f"{where}: {key} is a data URL. Write its content to a file and give the name of that")
    if re.match(r"[a-z]+://", value):
        raise DataError(f"{where}: {key} is the address {value[:60]!r}. Fetch it and give the name of the file")
    if value.startswith(("/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD")):  # JPEG, PNG, WebP, GIF
        raise DataError(f"{where}: {key} is an image in base64. Write it to a file and give the name of that")
    return value
