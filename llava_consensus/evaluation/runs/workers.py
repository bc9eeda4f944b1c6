"""Several processes on this machine, each with its own model, that ask the questions of a run in shards.

`for result in run_shards(start, 2, shards): ...` yields results as they are done, in any order. Only the parent writes
files. Workers end when their parent does, however it ends.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llava_consensus.errors import ConsensusError
from llava_consensus.evaluation.runs.execution import DeviceFailed, Result

SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA

Shard = tuple[int, ...]  # indexes of questions that are asked together, ascending
Work = Callable[[Shard], Result]
StartWorker = Callable[[int], Work]  # called in a worker's process with the number of the worker: loads the model

_START: Callable[[], Work]  # in a worker's process
_WORK: Work | None = None


class WorkerError(ConsensusError):
    """A worker died; finished answers are kept."""


def run_shards(start: StartWorker, workers: int, shards: Sequence[Shard]) -> Iterator[Result]:
    """Yields the results of all shards as they are done.

    Args:
        start: makes a worker's function from shards to results; pickled, so importable from other processes.
        workers: processes at once; never more than there are shards.
        shards: indexes of questions that are asked together.
    Raises:
        WorkerError: a worker died. Results of finished shards are yielded first.
        Exception: raised by a worker's function.
    """
    died = False
    pool = ProcessPoolExecutor(min(workers, len(shards)), SPAWN, _begin, (pickle.dumps(start), SPAWN.Value("i", 0)))
    try:
        for future in as_completed([pool.submit(_work, shard) for shard in shards]):
            try:
                yield future.result()
            except BrokenProcessPool:
                died = True
    finally:
        processes = list((pool._processes or {}).values())  # taken before `shutdown` forgets them
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()  # finished shards have arrived
        for process in processes:
            process.join()
    if died:
        raise WorkerError(
            "a worker died. Too little memory? Take fewer --workers or a smaller --batch. What was answered is kept; "
            "the same command resumes"
        )


def run_apart(start: StartWorker, indexes: Sequence[int], asking: Path) -> Iterator[Result | int]:
    """Yields the result of each question, asked in a child process by itself; the index of one that ends it twice. The
    worker adds the index of a question to the file `asking` first. WorkerError if it ends before that.
    """
    waiting, ended = list(indexes), Counter[int]()
    while waiting:
        written = asking.stat().st_size
        try:
            for result in run_shards(start, 1, [(index,) for index in waiting]):
                waiting.remove(
                    next(record.get("metadata", record)["index"] for records in result for record in records)
                )
                yield result
        except (WorkerError, DeviceFailed):
            last = asking.read_bytes()[written:].split()[-1:]
            if not last:
                raise
            index = int(last[0])
            ended[index] += 1
            if ended[index] == 2 and index in waiting:
                waiting.remove(index)
                yield index


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


def _work(shard: Shard) -> Result:
    global _WORK
    if _WORK is None:
        _WORK = _START()
    return _WORK(shard)


def _end_with_parent() -> None:
    """Ends this process as soon as the parent is gone: it would wait for its next shard for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)
