"""Hands shards to workers, and hands those of a dead worker out again. Knows no engine."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from llava_consensus.engines.base import Crew, Died, Result, Shard, WorkerError

MOST_DEATHS = 3  # of workers on one shard, before it is taken for the cause


def schedule(crew: Crew, shards: Sequence[Shard], workers: int) -> Iterator[tuple[Shard, Result]]:
    """Every shard with its result, as they are done. An error raised in a worker is raised here."""
    waiting, busy, deaths = deque(shards), dict[int, Shard](), Counter[Shard]()
    hired = min(workers, len(shards))
    for worker in range(hired):
        crew.hire(worker)
    idle = list(range(hired))
    while waiting or busy:
        while waiting and idle:
            worker = idle.pop(0)
            busy[worker] = waiting.popleft()
            crew.give(worker, busy[worker])
        for worker, outcome in crew.wait():
            shard = busy.pop(worker)
            if isinstance(outcome, Result):
                idle.append(worker)
                yield shard, outcome
            elif isinstance(outcome, Died):
                deaths[shard] += 1
                if deaths[shard] == MOST_DEATHS:
                    raise WorkerError(
                        f"questions {shard.indexes[0]}..{shard.indexes[-1]}: {MOST_DEATHS} workers died of them "
                        f"({outcome.reason}). Too little memory? Take fewer --workers or a smaller --batch"
                    )
                waiting.appendleft(shard)
                crew.hire(hired)
                idle.append(hired)
                hired += 1
            else:
                raise outcome
