"""The judged part of a benchmark: its prompt, the parser of replies, and the official numbers.

A grader knows no network; `run.py` asks. A prompt is a JSON file,
`{"messages": [{"role": "user", "content": "... {question} ... {answer} ... {prediction} ..."}]}`, with `reminder`
(added to the last message after a reply that could not be read) and `chinese` (other messages for Chinese questions) if
the official script has them. Ours lie beside the graders; official ones are not ours to ship, `--judge-prompt` takes
them. Grades by our own wording are not those of the official prompt. Every run records which it used.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Benchmark
from llava_consensus.evaluation.files import Record, misread, read_json

OWN = "own wording"
SLOT = re.compile(r"\{(question|answer|prediction|options)\}")
CHINESE = re.compile("[\u4e00-\u9fff]")  # one of these in the question, and it is asked in Chinese

Pieces = tuple[str, ...]  # fixed text and names of slots in turn, text first
Messages = tuple[tuple[str, Pieces], ...]  # role and pieces


@dataclass(frozen=True)
class JudgePrompt:
    """Messages with slots: question, prediction, and answer or options."""

    messages: Messages
    reminder: str = ""  # added to the last message after a reply that could not be read
    origin: str = OWN  # or the file it was read from
    chinese: Messages = ()  # in place of `messages` if the question is Chinese
    version: str | None = None  # name of the official version, if the text is a known one

    @property
    def sha256(self) -> str:
        texts = [self.messages, self.reminder, self.chinese] if self.chinese else [self.messages, self.reminder]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()

    def describe(self) -> dict[str, str | None]:
        return {"origin": self.origin, "sha256": self.sha256, "official": self.version}

    def fill(self, fields: Mapping[str, str], again: bool = False) -> list[dict[str, str]]:
        """The messages about one answer; with `again` they end with the reminder."""
        messages = self.chinese if self.chinese and CHINESE.search(fields["question"]) else self.messages
        filled = []
        for role, pieces in messages:
            text = "".join(fields[piece] if i % 2 else piece for i, piece in enumerate(pieces))
            # servers take no halves of surrogate pairs
            filled.append({"role": role, "content": text.encode("utf-8", "replace").decode()})
        filled[-1]["content"] += self.reminder if again else ""
        return filled


class Reply(NamedTuple):
    text: str | None  # None for a refusal
    model: str | None = None  # as the server reports it
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Candidate:
    index: int  # of its question
    key: str  # its id in official files
    fields: Mapping[str, str]  # by slot of the prompt
    options: Mapping[str, str] = field(default_factory=dict)  # texts by letter, if it chose one of several
    settled: Any = None  # a grade that is known without a judge: no request is sent


# By key of the candidate, one for each run. MM-Vet: 0 to 1; video: the parsed reply; MMBench: the letter.
Grades = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Grader(ABC):
    attempts: ClassVar[tuple[Mapping[str, Any], ...]]  # options of each request, until a reply can be read
    fallback: ClassVar[Any] = None  # grade if no reply can be read; None leaves the answer without one
    wording: ClassVar[Path]  # file of the prompt in our own words
    known: ClassVar[Mapping[str, str]]  # names of official versions of the prompt by their hash

    benchmark: Benchmark

    def prompt(self, file: Path | None = None) -> JudgePrompt:
        """The prompt in a file, or our own wording. DataError for a file that holds none."""
        own = file or self.wording
        with misread(str(own), "judge/grader.py says what is in it"):
            content = read_json(own, "Mend it", dict)
            messages, chinese = (
                tuple((one["role"], tuple(SLOT.split(one["content"]))) for one in content.get(name, ()))
                for name in ("messages", "chinese")
            )
            found = JudgePrompt(messages, content.get("reminder", ""), OWN if file is None else file.name, chinese)
        if not messages:
            raise DataError(f"--judge-prompt {file}: no messages in it")
        return replace(found, version=self.known.get(found.sha256))

    @abstractmethod
    def candidates(self, records: Sequence[Record], data: Path) -> tuple[list[Candidate], dict[str, int]]:
        """The answers to judge, and the counts of the join."""

    @abstractmethod
    def read(self, text: str | None, candidate: Candidate, attempt: int) -> Any:
        """The grade in the reply to request number `attempt` (from 0); None asks again."""

    @abstractmethod
    def report(self, candidates: Sequence[Candidate], grades: Grades, data: Path, runs: int) -> dict[str, Any]:
        """The official numbers over the graded answers, and `extracted`, each answer as it was graded."""
