"""Checksums of what a run holds, so that a flipped bit or a score changed by hand is told.

Each record has a short one in its metadata (`sum`), and metrics.json has digests of answers and scores and of itself.
Runs written before have none and are read as they are. `llava-consensus report verify` prints `problems(folder)`.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.files import (
    ANSWERS,
    CONFIG,
    METRICS,
    SCORES,
    Record,
    canonical,
    parse,
    read_json,
    to_json,
    whole_lines,
)

SUM, PICTURES, DIGESTS = "sum", "pictures", "sha256"
BEFORE_SUM = b', "sum": "'  # in the line of a record, whose checksum is the last thing in it
PASSING = ("timing", "environment", DIGESTS)  # of metrics: other on every machine
MEND = "Remove the line; the same command asks that question again"


def signed(record: Record) -> Record:
    """The record with its checksum, as the last entry of its metadata."""
    return record | {"metadata": record["metadata"] | {SUM: _sum(to_json(record))}}


def intact(line: bytes) -> bool:
    """Whether a line ends with the checksum of everything before it. One that does not may still be whole: it was
    written in another way, or before there were checksums, which `check` tells.
    """
    record, _, end = line.rpartition(BEFORE_SUM)
    return end == b'%08x"}}' % crc32(b"}}", crc32(record))


def of_pictures(paths: Sequence[Path]) -> Record:
    """What a record says of the contents of its question's pictures; nothing of a question without."""
    found = [_short(path, *_stamp(path)) for path in paths]
    return {PICTURES: "".join(found)} if found else {}


def changed_pictures(
    path: Path,
    questions: Sequence[Question],
    pictures: Callable[[Question], Sequence[Path]],
    answers: Mapping[int, Record],
) -> list[int]:
    """Indexes of questions whose pictures are no longer those that were answered about. Pictures that are older than
    the answers, in the file `path`, are taken to be the same; those that are gone too.

    Args:
        path: the file of the answers.
        questions: of the run.
        pictures: the files of a question's pictures.
        answers: records by the index of the question.
    """
    written = path.stat().st_mtime_ns
    answered = [question for question in questions if question.index in answers]
    every = {picture for question in answered for picture in pictures(question)}
    newer = {picture for picture in every if _is_newer(picture, written)}
    return [
        question.index
        for question in (answered if newer else ())
        if not newer.isdisjoint(pictures(question))
        if _differ(pictures(question), answers[question.index]["metadata"].get(PICTURES))
    ]


def _differ(pictures: Sequence[Path], stored: str | None) -> bool:
    try:
        return stored is not None and of_pictures(pictures)[PICTURES] != stored
    except OSError:
        return False


def _is_newer(path: Path, written: int) -> bool:
    try:
        return max(_stamp(path)) > written
    except OSError:
        return False


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=1024)
def _short(path: Path, *_times: int) -> str:
    return f"{crc32(path.read_bytes()):08x}"


def check(path: Path, number: int, record: Mapping[str, Any]) -> None:
    """Raises DataError for a record that is not what was written; one without a checksum is from before there were."""
    stored = record["metadata"].get(SUM)
    if stored is None:
        return
    plain = {**record, "metadata": {name: value for name, value in record["metadata"].items() if name != SUM}}
    expected = _sum(to_json(plain))
    if stored not in (expected, _sum(canonical(plain))):  # the latter is how it was made until version 0.2
        raise DataError(f"{path}, line {number}: damaged, its checksum is {stored!r} and must be {expected!r}. {MEND}")


def digests(folder: Path, metrics: Mapping[str, Any]) -> Record:
    """What metrics.json says of the files it was made from, and of itself."""
    steady = {name: value for name, value in metrics.items() if name not in PASSING}
    own = hashlib.sha256(canonical(steady).encode()).hexdigest()
    return {**{name: _of_file(folder / name) for name in (ANSWERS, SCORES)}, METRICS: own}


def problems(folder: Path) -> list[str]:
    """Everything in the folder of a run that is not as it was written, a line each.

    Raises:
        DataError: it is no folder of a run.
    """
    if not (folder / CONFIG).is_file():
        raise DataError(f"{folder}: no {CONFIG}, so it is no folder of a run")
    return [*_in_answers(folder / ANSWERS), *_in_metrics(folder)]


def _in_answers(path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"{path}: missing"
        return
    lines, end = whole_lines(path)
    without = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = parse(path, number, line, ("question_id", "text", "metadata"), MEND)
            if not isinstance(record["metadata"], dict):
                raise DataError(f"{path}, line {number}: damaged, metadata is no object. {MEND}")
            if not intact(line):
                check(path, number, record)
            without += SUM not in record["metadata"]
        except DataError as error:
            yield str(error)
    if without:
        yield f"{path}: {without} of {len(lines)} lines have no checksum: written before there were any, or damaged"
    if end is not None:
        yield f"{path}: the last line is cut; the same command asks for it again"


def _in_metrics(folder: Path) -> Iterator[str]:
    path = folder / METRICS
    if not path.is_file():
        yield f"{path}: missing: the run is not complete, or the same command makes it again"
        return
    try:
        metrics = read_json(path, "Delete it; the same command makes it again", dict)
        stored = metrics.get(DIGESTS)
        if not isinstance(stored, dict):
            yield f"{path}: no digests: written before there were any, or damaged"
            return
        found = digests(folder, metrics)
    except (DataError, ValueError) as error:
        yield str(error)
        return
    for name, digest in found.items():
        if stored.get(name) != digest:
            yield f"{folder / name}: changed since the run was finished. Delete {METRICS} to score the answers again"


def _sum(text: str) -> str:
    return f"{crc32(text.encode()):08x}"


def _of_file(path: Path) -> str | None:
    if not path.is_file():
        return None
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while part := opened.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
