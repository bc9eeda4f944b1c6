"""Questions of a run, and the files and packages in its description. Needs no torch: runs by URL use it too."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

from PIL.Image import Image

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Benchmark, Question
from llava_consensus.evaluation.checksums import checksum_of
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.runs import DATA

OWN = "llava-consensus"
PACKAGES = (OWN, "torch", "transformers", "llava-torch", "tokenizers", "pillow")  # their versions can change answers


@dataclass(frozen=True)
class Asked:
    """Which questions a run asks, see `RunConfig`."""

    benchmark: Benchmark
    _: KW_ONLY
    data: Path = Path(DATA)
    limit: int | None = None
    sample: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan(Asked):
    """A checked configuration with nothing left open, and the questions it asks.

    Args:
        questions: in the order of the benchmark's file.
        description: the whole configuration as JSON values; it becomes config.json and names the run.
        method: None if it is the server's.
        match: as in `RunConfig`.
    """

    questions: list[Question]
    description: Record
    method: Any = None
    match: str = "kept"

    @cached_property
    def folder(self) -> Path:
        return self.benchmark.place(self.data) / self.benchmark.images

    def images(self, question: Question) -> tuple[Path, ...]:
        return tuple(self.folder / name for name in question.images)

    def open(self, path: Path) -> Image:
        """An image as RGB, which may lie inside a file of the benchmark, as MMBench's do. May raise ImageError."""
        read = self.benchmark.read_image
        return open_image(path, content=None if read is None else read(self.data, path.name))


def place(name: str) -> str:
    """A folder as seen from here if it lies below, else its full path; the name of a hub's model as it is."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def versions(*more: str) -> dict[str, str | None]:
    return {name: _version(name) for name in (*PACKAGES, *more)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def read_questions(config: Asked) -> list[Question]:
    """The questions to ask. DataError for missing files, also for a missing folder of images."""
    benchmark, data = config.benchmark, config.data
    folder = data / "eval" / benchmark.folder
    if data == Path(DATA) and not (data / "eval").is_dir() and not folder.is_dir():
        raise DataError(f"{data / 'eval'}: not generated yet. Type: llava-consensus data mini, in a checkout make data")
    questions = benchmark.load(data)[: config.limit]
    if config.sample is not None:
        questions = drawn(questions, config.sample, benchmark.together)
    if not questions:
        raise DataError(f"{folder / benchmark.question_file}: no questions in it")
    as_files = benchmark.read_image is None and any(question.images for question in questions)
    if as_files and not (folder / benchmark.images).is_dir():
        raise DataError(f"missing folder: {folder / benchmark.images}\n  it holds the images of {benchmark.name}")
    return questions


def describe_questions(config: Asked) -> dict[str, object]:
    """Description of the questions, with the content of question files, for a run's config.json."""
    benchmark = config.benchmark
    files = [benchmark.place(config.data.expanduser()) / file.path for file in benchmark.files]
    return {
        "benchmark": benchmark.name,
        "benchmark_version": benchmark.answer_version,
        "data": place(str(config.data)),
        "questions": checksum_of(path for path in files if path.exists()),
        "limit": config.limit,
        **({} if config.sample is None else {"sample": config.sample}),
        "max_new_tokens": config.max_new_tokens or benchmark.max_new_tokens,
        "decoding": "greedy",
        **({"choices": benchmark.asking} if benchmark.asking else {}),
    }


def drawn(questions: Sequence[Question], count: int, together: Callable[[Question], Hashable]) -> list[Question]:
    """At least `count` of these questions in their order, all of them if there are fewer. Each has the same chance,
    whatever its image is, so their score estimates that of the whole set.
    """
    groups: dict[Hashable, list[Question]] = {}
    for question in questions:
        groups.setdefault(together(question), []).append(question)
    chance = Random(0)  # the same questions on every machine: `random()` gives the same numbers in every Python
    found: list[Question] = []
    for group in sorted(groups.values(), key=lambda _: chance.random()):
        if len(found) >= count:
            break
        found += group
    return sorted(found, key=lambda question: question.index)
