"""The nouns of judging: one answer to be judged, the dialogue about it, and what every benchmark must offer.

A `Panel` knows no network: `dialogue` yields what to ask and is sent what was heard (`run.py` drives it), `report`
makes the official numbers out of verdicts, `grades` the official file. `panels.py` lists them.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from llava_consensus.benchmarks.base import Record
from llava_consensus.scorers.mm_vet import Heard


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


class Outcome(NamedTuple):
    """What a dialogue came to. Nothing read and no value: the answer stays without a grade."""

    value: Any  # MM-Vet: the grade, 0 to 1; video: the parsed reply; MMBench: the letter
    content: str  # what it was read from
    read: bool


class Verdict(NamedTuple):
    """The outcome of one dialogue, and who said so."""

    value: Any
    content: str
    model: str | None  # the judge, as its server reports it


Dialogue = Generator[Turn, Heard, Outcome]
Verdicts = Mapping[str, Sequence[Verdict]]  # by sample, one per run


class Panel(Protocol):
    """What a benchmark needs to be judged."""

    @property
    def kind(self) -> str:
        """Of prompt, see `prompts.py`."""

    @property
    def judge(self) -> str:
        """The official judge."""

    @property
    def reply_tokens(self) -> int:
        """Of a reply, for the estimate."""

    def read(self, path: Path) -> list[Record]:
        """An answer file, LLaVA's or the official one of this benchmark."""

    def samples(self, records: Sequence[Record], data: Path) -> tuple[list[Sample], dict[str, int]]:
        """The answered questions, and how many were asked, answered, missing, odd."""

    def without(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Of the benchmark's own report, the numbers that need no judge."""

    def dialogue(self, sample: Sample) -> Dialogue:
        """The dialogue about one answer."""

    def report(self, samples: Sequence[Sample], verdicts: Verdicts, data: Path, runs: int) -> dict[str, Any]:
        """The official numbers over the graded answers."""

    def grades(self, samples: Sequence[Sample], verdicts: Verdicts) -> dict[str, Any]:
        """The content of the official grade file."""
