"""Several processes on this machine, each with a model of its own, that ask the questions of a run in shards.

`for shard, result in run_shards(start, 2, shards): ...` yields shards as they are done, in any order. The questions
that were in flight when a worker died are asked one by one; one that kills its worker again has None for a result. Only
the parent writes files. Workers end when their parent does, however it ends.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from typing import Any

from tqdm import tqdm

from llava_consensus.errors import ConsensusError
from llava_consensus.evaluation.runs.execution import DeviceFailed, Result

SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
IN_A_ROW = 8  # deaths with nothing answered between them: not the questions' fault
MEMORY = "Too little memory? Take fewer --workers or a smaller --batch"

Shard = tuple[int, ...]  # indexes of questions that are asked together, ascending
Outcome = tuple[Shard, Result | None]  # None: a worker died
Work = Callable[[Shard], Result]
StartWorker = Callable[[int], Work]  # called in a worker's process with the number of the worker: loads the model

_START: Callable[[], Work]  # in a worker's process
_WORK: Work | None = None


class WorkerError(ConsensusError):
    """The run cannot be continued: its workers die whatever they are given."""


def is_picklable(function: Any) -> bool:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def run_shards(start: StartWorker, workers: int, shards: Sequence[Shard]) -> Iterator[Outcome]:
    """Yields every shard with its result as they are done; None for a single question that kills workers.

    Args:
        start: makes a worker's function from shards to results; pickled, so importable from other processes.
        workers: processes at once; never more than there are shards.
        shards: indexes of questions that are asked together.
    Raises:
        WorkerError: workers die one after another.
        Exception: raised by a worker's function.
    """
    waiting = deque(shards)
    while waiting:
        lost: list[int] = []
        with _pool(start, min(workers, len(waiting))) as pool:
            for shard, result in _in_parallel(pool, workers, waiting):
                if result is None:
                    lost += shard
                else:
                    yield shard, result
        yield from one_by_one(start, sorted(lost))


def one_by_one(start: StartWorker, indexes: Sequence[int]) -> Iterator[Outcome]:
    """Yields the result of each question, asked by itself in a child process; None for one that kills it."""
    waiting, row = deque[Shard]((index,) for index in indexes), 0
    while waiting:
        with _pool(start, 1) as pool:
            try:
                pool.submit(_load).result()
            except BrokenProcessPool:  # not the question's fault
                raise WorkerError(f"a worker died while it loaded the model. {MEMORY}") from None
            for shard, result in _in_parallel(pool, 1, waiting):
                row = row + 1 if result is None else 0
                if row == IN_A_ROW:
                    raise WorkerError(f"{row} workers died one after another. {MEMORY}")
                yield shard, result


def _in_parallel(pool: ProcessPoolExecutor, workers: int, waiting: deque[Shard]) -> Iterator[Outcome]:
    """Takes shards from `waiting` until it is empty or a worker died; None for a shard that was in flight then."""
    flying: dict[Future[Result], Shard] = {}
    broken = False
    while flying or (waiting and not broken):
        while waiting and not broken and len(flying) < workers:
            shard = waiting.popleft()
            try:
                flying[pool.submit(_work, shard)] = shard
            except BrokenProcessPool:  # a worker died since; the shards in flight raise it too
                waiting.appendleft(shard)
                broken = True
        for future in wait(flying, return_when=FIRST_COMPLETED).done:
            shard = flying.pop(future)
            try:
                yield shard, future.result()
            except BrokenProcessPool:
                broken = True
                yield shard, None


@contextmanager
def _pool(start: StartWorker, workers: int) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(workers, SPAWN, _begin, (pickle.dumps(start), SPAWN.Value("i", 0)))
    try:
        yield pool
    finally:
        processes = list((pool._processes or {}).values())  # taken before `shutdown` forgets them
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()  # finished shards were handed over
        for process in processes:
            process.join()


def _begin(start: bytes, numbers: Any) -> None:
    """Prepares a worker's process. Its first shard unpickles `start`, which imports torch, and loads the model: errors
    are raised there, and the process ends with its parent meanwhile.
    """
    global _START
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed leaves behind
    with numbers.get_lock():
        number = numbers.value
        numbers.value += 1
    _START = lambda: pickle.loads(start)(number)  # noqa: E731


def _load() -> None:
    global _WORK
    if _WORK is None:
        _WORK = _START()


def _work(shard: Shard) -> Result:
    _load()
    assert _WORK is not None
    try:
        return _WORK(shard)
    except DeviceFailed:
        os._exit(1)  # a new process has the device anew


def _end_with_parent() -> None:
    """Ends this process as soon as the parent is gone: it would wait for its next shard for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)
