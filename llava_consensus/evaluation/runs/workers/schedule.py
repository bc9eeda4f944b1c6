"""Hands shards to workers, and hands those of a dead worker out again. Knows no engine."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import count

from llava_consensus.evaluation.runs.workers.base import Crew, Died, Result, Shard, WorkerError

MOST_DEATHS = 2  # of workers on one shard: after them it is asked question by question, and one question is given up
IN_A_ROW = 8  # deaths with nothing answered between: not the questions' fault


def schedule(crew: Crew, shards: Sequence[Shard], workers: int) -> Iterator[tuple[Shard, Result | Died]]:
    """Every shard with its result, as they are done; one question of which workers die, with the last death. An error
    raised in a worker is raised here.
    """
    waiting, busy, deaths = deque(shards), dict[int, Shard](), Counter[Shard]()
    idle, numbers, row = list[int](), count(), 0
    while waiting or busy:
        while waiting and len(busy) < workers:
            worker = idle.pop(0) if idle else _hire(crew, next(numbers))
            busy[worker] = waiting.popleft()
            crew.give(worker, busy[worker])
        for worker, outcome in crew.wait():
            shard = busy.pop(worker)
            if isinstance(outcome, Result):
                idle.append(worker)
                row = 0 if outcome.answers else row
                yield shard, outcome
            elif isinstance(outcome, Died):
                deaths[shard] += 1
                row += 1
                _raise_if_hopeless(shard, outcome, row)
                if deaths[shard] < MOST_DEATHS:
                    waiting.appendleft(shard)
                elif len(shard.indexes) > 1:
                    waiting.extendleft(Shard((index,)) for index in reversed(shard.indexes))
                else:
                    yield shard, outcome
            else:
                raise outcome


def _hire(crew: Crew, worker: int) -> int:
    crew.hire(worker)
    return worker


def _raise_if_hopeless(shard: Shard, outcome: Died, row: int) -> None:
    """Raises WorkerError where workers die whatever they are given."""
    if row == IN_A_ROW:
        raise WorkerError(
            f"{row} workers died one after another, the last at questions {shard.indexes[0]}..{shard.indexes[-1]} "
            f"({outcome.reason}). Too little memory? Take fewer --workers or a smaller --batch"
        )
