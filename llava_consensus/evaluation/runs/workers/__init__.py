"""Engines: where the shards of a run are asked. ENGINES is the only list; an engine's own packages are imported when
it is used.

`for shard, result in conduct("local", workers=2, factory, shards): ...` yields shards as they are done, in any order.
A shard whose worker dies is done again by another one, then question by question. What a worker does with a shard is
said by `batches.py`.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module

from llava_consensus.errors import unknown_name
from llava_consensus.evaluation.runs.workers.base import Crew, Died, Factory, Result, Shard
from llava_consensus.evaluation.runs.workers.schedule import schedule

__all__ = ["ENGINES", "Died", "Factory", "Result", "Shard", "check_engine", "conduct"]

ENGINES = {
    "local": "llava_consensus.evaluation.runs.workers.local",  # processes on this machine
    "ray": "llava_consensus.evaluation.runs.workers.ray",  # actors of a Ray cluster
}


def check_engine(name: str) -> None:
    """Raises OptionError for an unknown engine, MissingDependency for one whose packages are not installed."""
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    import_module(ENGINES[name]).check()


def conduct(
    name: str, workers: int, factory: Factory, shards: Sequence[Shard]
) -> Iterator[tuple[Shard, Result | Died]]:
    """Every shard with its result, as they are done; Died for one question of which workers die.

    Args:
        name: of the engine.
        workers: how many at once; never more than there are shards.
        factory: makes a worker's function in the worker's own process, from the number of the worker.
        shards: what is to be done.
    Raises:
        WorkerError: workers die one after another.
    """
    crew: Crew = import_module(ENGINES[name]).Crew(factory, workers)
    try:
        yield from schedule(crew, shards, workers)
    finally:
        crew.dismiss()
