"""The nouns of judging: one answer to be judged, the dialogue about it, and what a benchmark needs to be judged.

A `Grader` knows no network: `dialogue` yields what to ask and is sent what was heard (`run.py` drives it), `report`
makes the official numbers out of verdicts, `grades` the official file. Everything about the judging of one benchmark
is in the one file of its grader; `graders.py` lists them.
"""

import ast
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Benchmark, judged
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.judge.prompts import Prompt


@dataclass(frozen=True)
class Sample:
    """One answer to be judged."""

    index: int
    key: str  # the id in official files
    fields: Mapping[str, str]  # what its prompt has slots for
    options: Mapping[str, str] = field(default_factory=dict)  # texts by letter, where it chose one of several
    settled: "Outcome | None" = None  # known without a judge: nobody is asked
    copy: int = 0  # how many samples before it have the same fields; each gets a grade of its own


class Turn(NamedTuple):
    """What to ask next: with the reminder or not, with these options of the request."""

    again: bool
    options: Mapping[str, Any]


class Heard(NamedTuple):
    """A reply: its text (None: none came), and whether the server had refused it before, for its rate limit."""

    text: str | None
    limited: bool = False


class Outcome(NamedTuple):
    """What a dialogue came to. Nothing read and no value: the answer stays without a grade."""

    value: Any  # MM-Vet: the grade, 0 to 1; video: the parsed reply; MMBench: the letter
    content: str  # what it was read from
    read: bool  # whether a reply could be read; a value may also stand by rule where none could


class Verdict(NamedTuple):
    """The outcome of one dialogue, and who said so."""

    value: Any
    content: str
    model: str | None  # the judge, as its server reports it


Dialogue = Generator[Turn, Heard, Outcome]
Verdicts = Mapping[str, Sequence[Verdict]]  # by sample, one per run


@dataclass(frozen=True)
class Grader(ABC):
    """How the answers to one benchmark are judged."""

    official_judge: ClassVar[str]  # the model that gave the published grades
    reply_tokens: ClassVar[int]  # of a reply, for the estimate
    script: ClassVar[str]  # the official script that holds the prompt, and where it is
    wording: ClassVar[Prompt]  # the prompt in this project's own words
    known: ClassVar[Mapping[str, str]]  # official versions of the prompt by the hash of their text

    benchmark: Benchmark

    def prompt(self, script: Path | None = None) -> Prompt:
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
    def official(self, tree: ast.Module, origin: str) -> Prompt | None:
        """The prompt in the syntax tree of the official script; nothing in it is executed. None where it has none."""

    @abstractmethod
    def samples(self, records: Sequence[Record], data: Path) -> tuple[list[Sample], dict[str, int]]:
        """The answered questions, and how many were asked, answered, missing, odd."""

    def hear(self, text: str | None) -> str | None:
        """A reply as the dialogue is given it."""
        return text

    @abstractmethod
    def dialogue(self, sample: Sample) -> Dialogue:
        """The dialogue about one answer."""

    @abstractmethod
    def report(self, samples: Sequence[Sample], verdicts: Verdicts, data: Path, runs: int) -> dict[str, Any]:
        """The official numbers over the graded answers, and `extracted`, each answer as it was graded."""

    @abstractmethod
    def grades(self, samples: Sequence[Sample], verdicts: Verdicts) -> dict[str, Any]:
        """The content of the official grade file."""

    def unjudged(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Of the benchmark's own report, the scores computed without a judge: exact and contained matches."""
        return judged.matches(report)

    def summary(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        """What the judge's numbers say beside the headline, as lines for people."""
        yield from ()

    def unjudged_summary(self, metrics: Mapping[str, Any]) -> str | None:
        """What was computed without a judge, as a line for people."""
        if metrics.get("contains") is None:
            return None
        return f"without a judge: exact {metrics['exact']:.1f} %, contained {metrics['contains']:.1f} %"
