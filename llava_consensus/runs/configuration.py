"""What a run is: checked before any weight loads, and written down to the last thing that can change an answer.

`prepare(RunConfig("gqa", tokens=64))` returns a Plan or raises what the user can mend. `Plan.description` becomes
config.json and names the run: method options with defaults filled in, contents of question files and weights, versions.
Batch size and the folder of results are not in it.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from llava_consensus import benchmarks
from llava_consensus.benchmarks import Benchmark, Question
from llava_consensus.errors import DataError, OptionError, unknown_name
from llava_consensus.hosts.checkpoints import DTYPES, check_checkpoint
from llava_consensus.hosts.llava.checks import check_conversation
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.checks import choose
from llava_consensus.reduction.costs import MATCHES
from llava_consensus.reduction.method import Method
from llava_consensus.runs.store import Record

MINI = Path("playground/mini")  # the generated data
LARGE = 1 << 26  # bytes; of larger weight files only size, beginning and end are read
PACKAGES = (
    "llava-consensus",
    "torch",
    "transformers",
    "llava-torch",
    "tokenizers",
    "pillow",
)  # their versions can change answers


@dataclass(frozen=True)
class RunConfig:
    """What is measured. Anything here may change an answer; batch size and the folder of results cannot.

    Args:
        benchmark: name in BENCHMARKS.
        method: name in METHODS; `options` are its options, defaults filled in.
        tokens: visual tokens per image handed to the language model.
        merged: how many of them are merged ones; None is the split of the paper.
        match: by which count `tokens` is meant, `kept` | `entering` | `average` | `flops` (`account.match`).
        model: folder of a LLaVA checkpoint, or hub name.
        data: folder that holds `eval/<benchmark>/...` in LLaVA's layout.
        limit: only the first questions.
        device, dtype: `auto`, or as torch calls them.
        conversation, max_new_tokens: instead of the benchmark's own.
        choices: options of the benchmark; only those that change what is asked are part of the configuration.
    """

    benchmark: str
    method: str = "consensusdrop"
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 64
    merged: int | None = None
    match: str = "kept"
    model: str = "checkpoints/llava-mini"
    data: str = str(MINI)
    limit: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    conversation: str | None = None
    max_new_tokens: int | None = None
    choices: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A checked configuration: what the loop works with; `description` is config.json and names the run."""

    benchmark: Benchmark
    method: Method
    budget: Budget
    questions: list[Question]
    data: Path
    device: str
    description: Record
    match: str = "kept"

    def shown(self, question: Question) -> int:
        """How many pictures the model sees with a question: of a video, its frames."""
        return len(question.images) * max(1, self.benchmark.frames)

    def pictures(self, question: Question) -> tuple[Path, ...]:
        """The files of a question's pictures."""
        folder = self.data / "eval" / self.benchmark.folder / self.benchmark.images
        return tuple(folder / name for name in question.images)

    @property
    def content(self) -> Callable[[Path], bytes] | None:
        """Reads a picture that is no file of its own (MMBench's are inside its table); None where all are files."""
        read = self.benchmark.picture
        return None if read is None else lambda path: read(self.data, path.name)


def prepare(config: RunConfig) -> Plan:
    """Checks everything that needs no weights, and writes down the whole configuration."""
    benchmark = benchmarks.get(config.benchmark, config.choices)
    method = make(config.method, **config.options)
    budget = Budget(config.tokens, config.merged)
    for name, value in (("limit", config.limit), ("max_new_tokens", config.max_new_tokens)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} must be at least 1")
    choose("match", config.match, MATCHES)
    device = _device(config.device)
    if config.dtype not in DTYPES:
        raise unknown_name("dtype", config.dtype, DTYPES)
    check_checkpoint(config.model)
    if config.conversation is not None:
        check_conversation(config.conversation)
    if benchmark.frames:
        from llava_consensus.runs import videos as video  # only now: it takes a while

        video.decoder()  # or says what to install
    questions = _read_questions(config, benchmark)
    description = _describe(config, benchmark, method) | {"device": device}
    return Plan(benchmark, method, budget, questions, Path(config.data).expanduser(), device, description, config.match)


def _read_questions(config: RunConfig, benchmark: Benchmark) -> list[Question]:
    """The questions to ask. Files that are missing are named by the benchmark, a missing folder of pictures here."""
    data = Path(config.data).expanduser()
    folder = data / "eval" / benchmark.folder
    if data == MINI and not (data / "eval").is_dir():
        raise DataError(f"{data / 'eval'}: not generated yet. Type: make data (or python -m playground.mini.build)")
    questions = benchmark.load(data)[: config.limit]
    if not questions:
        raise DataError(f"{folder / benchmark.questions}: no questions in it")
    as_files = benchmark.picture is None and any(question.images for question in questions)
    if as_files and not (folder / benchmark.images).is_dir():
        raise DataError(f"missing folder: {folder / benchmark.images}\n  it holds the pictures of {benchmark.name}")
    return questions


def _device(name: str) -> str:
    if name == "cpu":
        return name
    if not re.fullmatch(r"auto|mps|cuda(:\d+)?", name):
        raise unknown_name("device", name, ("auto", "cpu", "cuda", "mps"))
    import torch  # only now: it takes a second

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and int(name[5:] or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices. Take --device auto"
        )
    return name


def _describe(config: RunConfig, benchmark: Benchmark, method: Method) -> Record:
    """The whole configuration, down to the content of question files and weights. Equal texts mean equal answers."""
    options = _options(method)
    folder = Path(config.data).expanduser() / "eval" / benchmark.folder
    files = [folder / file.path for file in benchmark.files]
    return {
        "benchmark": benchmark.name,
        "method": config.method,
        "tokens": config.tokens,
        "merged": config.merged,
        "options": {name: value for name, (value, _) in options.items()},
        "changed": {name: value for name, (value, default) in options.items() if value != default},
        "model": _place(config.model),
        "weights": _fingerprint(_weights(Path(config.model).expanduser())),
        "data": _place(config.data),
        "questions": _fingerprint(path for path in files if path.is_file()),
        "limit": config.limit,
        "conversation": config.conversation or benchmark.conversation,
        "max_new_tokens": config.max_new_tokens or benchmark.max_new_tokens,
        "decoding": "greedy",
        "dtype": config.dtype,
        "versions": {name: _version(name) for name in (*PACKAGES, *(("av",) if benchmark.frames else ()))},
        **({"choices": benchmark.asking} if benchmark.asking else {}),
        **({} if config.match == "kept" else {"match": config.match}),
    }


def _options(method: Method) -> dict[str, tuple[Any, Any]]:
    """Every option of a method, with its default; a whole number given for a fraction counts as one: 1 is 1.0."""
    found = {}
    for one in fields(method):  # type: ignore[arg-type]  # every method is a dataclass
        value = getattr(method, one.name)
        if isinstance(one.default, float) and isinstance(value, int):
            value = float(value)
        plain = value if value is None or isinstance(value, bool | int | float | str) else repr(value)
        found[one.name] = (plain, one.default)
    return found


def _place(name: str) -> str:
    """A folder as seen from here if it lies below, else its full path; a hub name as it is."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _weights(folder: Path) -> list[Path]:
    """What a checkpoint folder holds that can change answers, a vision tower in a folder of its own included."""
    suffixes = {".json", ".safetensors", ".bin", ".model", ".txt"}
    found = (*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")) if folder.is_dir() else ()
    return sorted(path for path in found if path.suffix in suffixes)


def _fingerprint(paths: Iterable[Path]) -> str:
    """One hash of the names and contents of files; of large ones, of their sizes, beginnings and ends."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if size <= LARGE:
                digest.update(file.read())
            else:
                digest.update(file.read(1 << 20))
                file.seek(-(1 << 20), os.SEEK_END)
                digest.update(file.read())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
