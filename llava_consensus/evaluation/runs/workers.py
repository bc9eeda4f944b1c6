"""Several processes on this machine, each with a model of its own, that ask the questions of a run in shards.

`for shard, outcome in conduct(start_worker, 2, shards): ...` yields shards as they are done, in any order. A shard
whose worker dies is given to a new one; when that dies too its questions are asked one by one, and a question that
still kills two workers comes back as Died. The parent alone writes files. Workers end when it ends, however it ends.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from tqdm import tqdm

from llava_consensus.errors import ConsensusError
from llava_consensus.evaluation.runs.execution import DeviceFailed, Result

SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
MOST_DEATHS = 2  # of workers on one shard
IN_A_ROW = 8  # deaths with nothing answered between them: not the questions' fault

Shard = tuple[int, ...]  # indexes of questions that are asked together, ascending
Work = Callable[[Shard], Result]
StartWorker = Callable[[int], Work]  # called in a worker's process with the number of the worker: loads the model


class WorkerError(ConsensusError):
    """The run cannot go on: its workers die whatever they are given."""


class Died(NamedTuple):
    """A worker is gone, and with it what it was doing."""

    reason: str


def portable(function: Any) -> bool:
    """Whether a function can be given to another process."""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def conduct(start_worker: StartWorker, workers: int, shards: Sequence[Shard]) -> Iterator[tuple[Shard, Result | Died]]:
    """Every shard with its result as they are done; Died for one question of which workers die.

    Args:
        start_worker: gives a worker's function from shards to results; pickled, so importable from other processes.
        workers: how many at once; never more are started than there are shards.
        shards: what is to be done.
    Raises:
        WorkerError: workers die one after another.
        Exception: what a worker's function raised.
    """
    made = pickle.dumps(start_worker)
    waiting, deaths, numbers, row = deque(shards), Counter[Shard](), count(), 0
    processes: dict[Connection, BaseProcess] = {}
    busy: dict[Connection, Shard] = {}
    idle: list[Connection] = []
    loaded: set[Connection] = set()
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                pipe = idle.pop() if idle else _start(made, next(numbers), processes)
                busy[pipe] = waiting.popleft()
                with contextlib.suppress(OSError):  # it is dead already, and its end of the pipe says so below
                    pipe.send(busy[pipe])
            done = wait(list(busy))
            for pipe in [one for one in busy if one in done]:
                outcome = _receive(pipe, processes)
                if outcome is None:
                    loaded.add(pipe)
                    continue
                shard = busy.pop(pipe)
                if isinstance(outcome, Result):
                    idle.append(pipe)
                    row = 0 if outcome.answers else row
                    yield shard, outcome
                    continue
                row += 1
                if row == IN_A_ROW:
                    raise WorkerError(
                        f"{row} workers died one after another, the last at questions {shard[0]}..{shard[-1]} "
                        f"({outcome.reason}). Too little memory? Take fewer --workers or a smaller --batch"
                    )
                deaths[shard] += pipe in loaded  # else it is not the questions' fault
                waiting.extendleft(reversed(_left(shard, deaths[shard])))
                if len(shard) == 1 and deaths[shard] >= MOST_DEATHS:
                    yield shard, outcome
    finally:
        for pipe, process in processes.items():
            process.kill()  # what it has finished was handed over
            pipe.close()
        for process in processes.values():
            process.join()


def _left(shard: Shard, deaths: int) -> list[Shard]:
    """What of a shard is asked again, after so many deaths of workers that were given it."""
    if deaths < MOST_DEATHS:
        return [shard]
    return [(index,) for index in shard] if len(shard) > 1 else []


def _start(made: bytes, number: int, processes: dict[Connection, BaseProcess]) -> Connection:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_serve, args=(made, number, there), daemon=True)
    process.start()
    there.close()
    processes[here] = process
    return here


def _receive(pipe: Connection, processes: dict[Connection, BaseProcess]) -> Result | Died | None:
    """What a worker says, None once its model is loaded. One that has died says nothing, and one whose device failed
    ends by itself: a new one has the device anew.
    """
    try:
        outcome: Result | Exception | None = pipe.recv()
    except (EOFError, OSError, pickle.UnpicklingError):
        outcome = EOFError()
    if isinstance(outcome, Exception) and not isinstance(outcome, DeviceFailed | EOFError):
        raise outcome
    if not isinstance(outcome, Exception):
        return outcome
    process = processes.pop(pipe)
    process.join(5)
    pipe.close()
    return Died(str(outcome) or f"exit code {process.exitcode}")


def _serve(made: bytes, number: int, pipe: Connection) -> None:
    """A worker's life: load once, then shard after shard, until the parent is gone. What is imported to unpickle the
    function takes seconds, in which the parent may die too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed leaves behind
    try:
        start_worker: StartWorker = pickle.loads(made)
        work = start_worker(number)
        pipe.send(None)
        while True:
            pipe.send(work(pipe.recv()))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        pipe.send(error)


def _end_with_parent() -> None:
    """Ends this process as soon as the parent is gone, in the middle of a shard too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
