"""What workers can be, for tests of processes without models: imports nothing heavy, since each process imports it."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from llava_consensus.errors import DataError
from llava_consensus.evaluation.runs.execution import Result
from llava_consensus.evaluation.runs.workers import Shard, Work


def answered(shard: Shard) -> Result:
    """Every question of a shard with an answer."""
    return Result([{"index": index} for index in shard], [])


@dataclass(frozen=True)
class Dying:
    """A worker dies of the questions `of`; of everything where that is None."""

    of: tuple[int, ...] | None = ()
    code: int = 7

    def __call__(self, number: int) -> Work:
        def work(shard: Shard) -> Result:
            if self.of is None or set(self.of) & set(shard):
                os._exit(self.code)
            return answered(shard)

        return work


@dataclass(frozen=True)
class FirstDies:
    """The worker with the number 0 dies of shards of several questions."""

    def __call__(self, number: int) -> Work:
        def work(shard: Shard) -> Result:
            if number == 0 and len(shard) > 1:
                os._exit(7)
            return answered(shard)

        return work


def broken(number: int) -> Callable[[Shard], Result]:
    """A worker that cannot load its model."""
    raise DataError(f"broken {number}")


def dies_loading(number: int) -> Work:
    """A worker that dies while it loads its model."""
    os._exit(7)
