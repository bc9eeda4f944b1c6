"""Base class of the judged part of a benchmark, `Grader`, and the types that graders and the judge share.

A grader knows no network. `dialogue` yields what to ask and is sent each reply (`run.py` drives it), `report` makes the
official numbers of the outcomes and `grades` the official file. Everything about the judging of one benchmark stands in
the one file of its grader, which the benchmark names by its `judge`.

The official prompts are not ours to ship. A grader reads its prompt out of the user's own copy of the official script,
by `ast` and without executing anything in it, or uses one in our own words. That one has the official structure, so
that replies are read the same way, but its grades are not those of the official prompt: every judged run records which
prompt it used, by hash and, where the text is a known one, by name.
"""

import ast
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Benchmark
from llava_consensus.evaluation.files import Record

OWN = "own wording"
CHINESE = re.compile("[\u4e00-\u9fff]")  # one of these in the question, and it is asked in Chinese

Pieces = tuple[str, ...]  # fixed text and names of slots in turn, text first
Messages = tuple[tuple[str, Pieces], ...]  # role and pieces


@dataclass(frozen=True)
class JudgePrompt:
    """Messages with slots: question, prediction, and answer or options."""

    messages: Messages
    reminder: str = ""  # added to the last message after a reply that could not be read
    origin: str = OWN  # or the file it was read from
    chinese: Messages = ()  # in place of `messages` where the question is Chinese
    version: str | None = None  # name of the official version, where the text is a known one

    @property
    def sha256(self) -> str:
        """Hash of the prompt before its slots are filled: all fixed text and the order of slots."""
        texts = [self.messages, self.reminder, self.chinese] if self.chinese else [self.messages, self.reminder]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()

    def describe(self) -> dict[str, str | None]:
        """Identity of the prompt, for the record of a run."""
        return {"origin": self.origin, "sha256": self.sha256, "official": self.version}

    def fill(self, fields: Mapping[str, str], again: bool = False) -> list[dict[str, str]]:
        """The messages about one answer; with `again` they end with the reminder.

        Halves of surrogate pairs, which no server takes, become question marks.
        """
        messages = self.chinese if self.chinese and CHINESE.search(fields["question"]) else self.messages
        filled = []
        for role, pieces in messages:
            text = "".join(fields[piece] if at % 2 else piece for at, piece in enumerate(pieces))
            filled.append({"role": role, "content": text.encode("utf-8", "replace").decode()})
        filled[-1]["content"] += self.reminder if again else ""
        return filled


class Reply(NamedTuple):
    """Reply of a server to one request."""

    text: str | None
    refused: bool = False  # by its content filter, or in the field for refusals
    model: str | None = None  # as the server reports it
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    failed_tries: int = 0  # retries of the openai package before this one


class Turn(NamedTuple):
    """Next request of a dialogue."""

    again: bool  # with the prompt's reminder
    options: Mapping[str, Any]  # of the request


class Outcome(NamedTuple):
    """Result of a dialogue. Nothing read and no value: the answer stays without a grade."""

    value: Any  # MM-Vet: the grade, 0 to 1; video: the parsed reply; MMBench: the letter
    content: str  # what it was read from
    read: bool  # whether a reply could be read; a value may also stand by rule where none could
    model: str | None = None  # who said so, as the server reports it


@dataclass(frozen=True)
class Candidate:
    """One answer to be judged."""

    index: int  # of its question
    key: str  # its id in official files
    fields: Mapping[str, str]  # what its prompt has slots for
    options: Mapping[str, str] = field(default_factory=dict)  # texts by letter, where it chose one of several
    settled: Outcome | None = None  # known without a judge: no request is sent
    copy: int = 0  # how many candidates before it have the same fields; each gets a grade of its own


Dialogue = Generator[Turn, Reply, Outcome]
Outcomes = Mapping[str, Sequence[Outcome]]  # by key of the candidate, one for each run


@dataclass(frozen=True)
class Grader(ABC):
    """Judging of the answers to one benchmark."""

    reply_tokens: ClassVar[int]  # of a reply, for the estimate of the cost
    script: ClassVar[str]  # the official script that holds the prompt, and where it is
    wording: ClassVar[JudgePrompt]  # the prompt in this project's own words
    known: ClassVar[Mapping[str, str]]  # names of official versions of the prompt by their hash

    benchmark: Benchmark

    def prompt(self, script: Path | None = None) -> JudgePrompt:
        """The official prompt out of the user's copy of the official script, or without one our own wording.

        Raises:
            DataError: the file cannot be read, is no Python, or does not hold this prompt.
        """
        if script is None:
            return self.wording
        wanted = f"Wanted: {self.script}"
        try:
            tree = ast.parse(script.read_bytes())
        except OSError as error:
            raise DataError(f"--judge-prompt-from {script}: cannot be read ({error.strerror})") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise DataError(f"--judge-prompt-from {script}: not a Python script ({error}). {wanted}") from None
        found = self.official(tree, script.name)
        if found is None:
            raise DataError(f"--judge-prompt-from {script}: no such prompt in it. {wanted}")
        return replace(found, version=self.known.get(found.sha256))

    @abstractmethod
    def official(self, tree: ast.Module, origin: str) -> JudgePrompt | None:
        """The prompt in the syntax tree of the official script, or None where it has none."""

    @abstractmethod
    def candidates(self, records: Sequence[Record], data: Path) -> tuple[list[Candidate], dict[str, int]]:
        """The answers to judge, and how many were asked, answered, missing, odd."""

    def hear(self, reply: Reply) -> Reply:
        """A reply as the dialogue is sent it."""
        return reply

    @abstractmethod
    def dialogue(self, candidate: Candidate) -> Dialogue:
        """The dialogue about one answer."""

    @abstractmethod
    def report(self, candidates: Sequence[Candidate], outcomes: Outcomes, data: Path, runs: int) -> dict[str, Any]:
        """The official numbers over the graded answers, and `extracted`, each answer as it was graded."""

    @abstractmethod
    def grades(self, candidates: Sequence[Candidate], outcomes: Outcomes) -> dict[str, Any]:
        """The content of the official grade file."""

    def summary(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        """The judge's numbers beside the headline, as lines for people."""
        yield from ()
