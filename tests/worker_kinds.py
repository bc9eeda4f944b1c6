"""What workers can be, for tests of processes without models: imports nothing heavy, since each process imports it."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from llava_consensus.errors import DataError
from llava_consensus.evaluation.runs.execution import Result
from llava_consensus.evaluation.runs.workers import Shard, Work


def answered(shard: Shard) -> Result:
    return Result([{"index": index} for index in shard], [])


@dataclass(frozen=True)
class Dying:
    """A worker dies of the questions `of`."""

    of: tuple[int, ...]

    def __call__(self, number: int) -> Work:
        def work(shard: Shard) -> Result:
            if set(self.of) & set(shard):
                os._exit(7)
            return answered(shard)

        return work


def broken(number: int) -> Callable[[Shard], Result]:
    raise DataError(f"broken {number}")
