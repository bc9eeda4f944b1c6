"""Hands shards to workers, and hands those of a dead worker out again. Knows no engine."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import count

from llava_consensus.runs.workers.base import Crew, Died, Result, Shard, WorkerError

MOST_DEATHS = 3  # of workers on one shard, before it is taken for the cause


def schedule(crew: Crew, shards: Sequence[Shard], workers: int) -> Iterator[tuple[Shard, Result]]:
    """Every shard with its result, as they are done. An error raised in a worker is raised here."""
    waiting, busy, deaths = deque(shards), dict[int, Shard](), Counter[Shard]()
    idle, numbers = list[int](), count()
    while waiting or busy:
        while waiting and len(busy) < workers:
            worker = idle.pop(0) if idle else _hire(crew, next(numbers))
            busy[worker] = waiting.popleft()
            crew.give(worker, busy[worker])
        for worker, outcome in crew.wait():
            shard = busy.pop(worker)
            if isinstance(outcome, Result):
                idle.append(worker)
                yield shard, outcome
            else:
                deaths[shard] += 1
                _raise_if_hopeless(shard, outcome, deaths[shard])
                waiting.appendleft(shard)


def _hire(crew: Crew, worker: int) -> int:
    crew.hire(worker)
    return worker


def _raise_if_hopeless(shard: Shard, outcome: Died | Exception, deaths: int) -> None:
    """Raises what the worker raised, or WorkerError for a shard that kills every worker."""
    if not isinstance(outcome, Died):
        raise outcome
    if deaths == MOST_DEATHS:
        raise WorkerError(
            f"questions {shard.indexes[0]}..{shard.indexes[-1]}: {MOST_DEATHS} workers died of them "
            f"({outcome.reason}). Too little memory? Take fewer --workers or a smaller --batch"
        )
