"""Is a benchmark's data all there, and is it the right version? What `llava-consensus check-data` says.

Files by presence, and by content where the known version's is known; questions by number; pictures by name; right
answers by what scoring itself checks (POPE's labels line by line against the questions, for example).
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llava_consensus.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.errors import DataError

CHUNK = 1 << 20


class Finding(NamedTuple):
    """One line of a check; `ready` is false for what has to be mended before the benchmark can be asked or scored."""

    ready: bool
    state: str  # one or two words
    text: str


def check(benchmark: Benchmark, data: Path) -> Iterator[Finding]:
    """Files, number of questions, right answers, pictures; it goes on as far as what is there allows."""
    folder = benchmark.place(data)
    for file in benchmark.files:
        yield _file(folder / file.path, file)
    try:
        questions = benchmark.load(Path(data))
    except DataError as error:
        if all(file.optional or (folder / file.path).is_file() for file in benchmark.files):
            yield Finding(False, "wrong", str(error))
        return
    yield _count(benchmark, questions)
    try:
        benchmark.score([], Path(data))
    except DataError as error:
        yield Finding(False, "wrong", str(error))
    yield from _pictures(benchmark, folder, questions)


def _file(path: Path, file: DataFile) -> Finding:
    if not path.exists():
        state = "absent" if file.optional else "missing"
        return Finding(file.optional, state, f"{path}{' (optional)' if file.optional else ''}\n  from {file.source}")
    if not file.sha256:
        return Finding(True, "there", str(path))
    if _digest(path) == file.sha256:
        return Finding(True, "there", f"{path} (the known version)")
    return Finding(True, "other", f"{path}: its content is not that of the known version\n  from {file.source}")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _count(benchmark: Benchmark, questions: list[Question]) -> Finding:
    text = f"{len(questions):,} questions"
    if benchmark.count is None:
        return Finding(True, "there", text)
    if len(questions) == benchmark.count:
        return Finding(True, "there", f"{text}, as the official set has")
    return Finding(True, "other", f"{text}, but the official set has {benchmark.count:,}: a part, or another version")


def _pictures(benchmark: Benchmark, folder: Path, questions: list[Question]) -> Iterator[Finding]:
    names = list(dict.fromkeys(name for question in questions for name in question.images))
    media = "videos" if benchmark.frames else "pictures"
    if benchmark.picture is not None:
        yield Finding(True, "there", f"{len(names):,} {media}, inside {benchmark.question_file}")
        return
    place = folder / benchmark.images
    absent = [name for name in names if not (place / name).exists()]
    if absent:
        yield Finding(
            False, "missing", f"{len(absent):,} of {len(names):,} {media} in {place}, the first is {absent[0]}"
        )
    elif names:
        yield Finding(True, "there", f"{len(names):,} {media} in {place}")
