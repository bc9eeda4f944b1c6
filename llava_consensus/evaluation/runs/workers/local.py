"""Engine `local`: processes on this machine. They end when the parent ends, however it ends."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from tqdm import tqdm

from llava_consensus.evaluation.runs.failures import DeviceFailed
from llava_consensus.evaluation.runs.workers.base import Died, Factory, Result, Shard

SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA


def check() -> None:
    """Nothing to install."""


class Crew:
    """One process for each worker, with a pipe to it."""

    def __init__(self, factory: Factory, workers: int) -> None:
        self._factory = factory
        self._processes: dict[int, tuple[BaseProcess, Connection]] = {}
        self._busy: set[int] = set()

    def hire(self, worker: int) -> None:
        """Starts a process."""
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=_serve, args=(pickle.dumps(self._factory), worker, there), daemon=True)
        process.start()
        there.close()
        self._processes[worker] = process, here

    def give(self, worker: int, shard: Shard) -> None:
        """Sends a shard; to a dead worker too, `wait` tells."""
        self._busy.add(worker)
        with contextlib.suppress(OSError):  # it is dead, and its end of the pipe says so
            self._processes[worker][1].send(shard)

    def wait(self) -> Sequence[tuple[int, Result | Died | Exception]]:
        """Results of workers that are done, and the dead: their pipe is at its end."""
        pipes = {self._processes[worker][1]: worker for worker in self._busy}
        return [(pipes[pipe], self._read(pipes[pipe])) for pipe in wait(list(pipes)) if isinstance(pipe, Connection)]

    def _read(self, worker: int) -> Result | Died | Exception:
        self._busy.discard(worker)
        process, pipe = self._processes[worker]
        try:
            outcome: Result | Exception = pipe.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            process.join(5)
            del self._processes[worker]
            return Died(f"exit code {process.exitcode}")
        if isinstance(outcome, DeviceFailed):  # it ends by itself, and the next one has the device anew
            process.join(5)
            del self._processes[worker]
            return Died(str(outcome))
        return outcome

    def dismiss(self) -> None:
        """Kills all processes: what they have finished is on the disk."""
        for process, pipe in self._processes.values():
            process.kill()
            pipe.close()
        for process, _ in self._processes.values():
            process.join()
        self._processes.clear()


def _serve(factory: bytes, worker: int, pipe: Connection) -> None:
    """A worker's life: load once, then shard after shard, until the parent is gone. What it imports for its factory
    takes seconds, in which the parent may die too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed leaves behind
    try:
        make: Factory = pickle.loads(factory)
        work = make(worker)
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
