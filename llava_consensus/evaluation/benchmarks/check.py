"""Checks that a benchmark's data is complete and of the right version: `llava-consensus data check`.

Each finding says for which use it matters: answering needs the images, scoring the right answers, an export its own
files.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from llava_consensus.errors import DataError, listed
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.files import digest, misread

SCORING, EXPORT, ANSWERING = USES = ("scoring", "export", "answering")


class DataFinding(NamedTuple):
    state: str  # one or two words
    text: str
    blocks: tuple[str, ...] = ()  # the uses it has to be mended for


def check(benchmark: Benchmark, data: Path) -> Iterator[DataFinding]:
    """Checks files, number of questions, right answers and images, as far as the files at hand allow."""
    folder = benchmark.place(data)
    for file in benchmark.files:
        yield _file(folder / file.path, file)
    try:
        with misread(f"{folder}: a file of {benchmark.name}"):
            questions = benchmark.load(data)
    except DataError as error:
        yield DataFinding("wrong" if folder.is_dir() else "missing", str(error), USES)
        return
    try:
        with misread(f"{folder}: a file of {benchmark.name}"):
            benchmark.score([], data)
    except DataError as error:
        yield DataFinding("wrong", str(error), (SCORING,))
    other = benchmark.count not in (None, len(questions))
    official = f", but the official set has {benchmark.count:,}: a part, or another version" if other else ""
    yield DataFinding("other" if other else "there", f"{len(questions):,} questions{official}")
    yield from _images(benchmark, folder, questions)


def uses(benchmark: Benchmark, data: Path, findings: Sequence[DataFinding]) -> dict[str, str]:
    """State of the data for each use: `ready`, `not ready`, or the external tool that does it."""
    blocked = {use for finding in findings for use in finding.blocks}
    states = {use: "not ready" if use in blocked else "ready" for use in USES}
    elsewhere = benchmark.scored_by(data)
    if elsewhere is not None and states[SCORING] == "ready":
        states[SCORING] = f"by {elsewhere}"
    if benchmark.export is None:
        del states[EXPORT]
    return states


def _file(path: Path, file: DataFile) -> DataFinding:
    if not path.exists():
        state = "absent" if file.optional else "missing"
        text = f"{path}{' (optional)' if file.optional else ''}\n  from {file.source}"
        return DataFinding(state, text, (EXPORT,) if file.exported else ())
    if file.sha256 and digest(path) != file.sha256:
        return DataFinding("other", f"{path}: its content is not that of the known version\n  from {file.source}")
    return DataFinding("there", f"{path}{' (the known version)' if file.sha256 else ''}")


def _images(benchmark: Benchmark, folder: Path, questions: list[Question]) -> Iterator[DataFinding]:
    if benchmark.read_image is not None:  # they are inside the question file
        return
    names = list(dict.fromkeys(name for question in questions for name in question.images))
    media, place = "videos" if benchmark.frames else "images", folder / benchmark.images
    absent = [name for name in names if not (place / name).exists()]
    if absent:
        text = f"{len(absent):,} of {len(names):,} {media} in {place}: {listed(absent)}"
        yield DataFinding("missing", text, (ANSWERING,))
    elif names:
        yield DataFinding("there", f"{len(names):,} {media} in {place}")
