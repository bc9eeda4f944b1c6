"""What an engine is: a crew of workers that are hired, given shards, and waited for."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from llava_consensus.errors import ConsensusError
from llava_consensus.evaluation.files import Record


class Shard(NamedTuple):
    """A range of questions that are asked together; those of them that are answered already are left out."""

    indexes: tuple[int, ...]  # ascending

    @property
    def name(self) -> str:
        """Its range, as the name of its file."""
        return f"{self.indexes[0]:08d}-{self.indexes[-1]:08d}"


class Result(NamedTuple):
    """What came of a shard."""

    answers: list[Record]
    errors: list[Record]


Work = Callable[[Shard], Result]
Factory = Callable[[int], Work]


class Died(NamedTuple):
    """A worker is gone, and with it what it was doing."""

    reason: str


class WorkerError(ConsensusError):
    """A shard cannot be done: its workers die."""


class Crew(Protocol):
    """The workers of one run. A worker is a number that is never used twice."""

    def hire(self, worker: int) -> None:
        """Starts a worker; it loads the model by itself, so this returns at once."""
        ...

    def give(self, worker: int, shard: Shard) -> None: ...

    def wait(self) -> Sequence[tuple[int, Result | Died | Exception]]:
        """Blocks until something is known of a worker that was given a shard."""
        ...

    def dismiss(self) -> None:
        """Stops all workers, whatever they do."""
        ...
