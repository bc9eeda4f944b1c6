"""Engine `ray` (extra `ray`): one actor for each worker, on this machine or on a cluster joined with `ray start`.

Each actor holds one model, on a GPU of its own where the run uses CUDA. The nodes see the same folders of model and
data; results come back through Ray, so the folder of results is needed only here. A cluster that was started here ends
with this process, however that ends (`orphans.py`).
"""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from llava_consensus.errors import OptionError, missing_extra
from llava_consensus.evaluation.runs.failures import DeviceFailed
from llava_consensus.evaluation.runs.workers import orphans
from llava_consensus.evaluation.runs.workers.base import Died, Factory, Result, Shard, Work, WorkerError

log = logging.getLogger(__name__)

STARTS = 3  # tries to start a cluster


def check() -> None:
    """Raises MissingDependency where Ray is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise missing_extra("engine 'ray'", "ray") from error


def start(ray: Any) -> None:
    """Starts a cluster on this machine. Ray gives its daemons half a minute, which a busy machine may need more than
    once.

    Raises:
        WorkerError: when it has not started after `STARTS` tries.
    """
    for left in reversed(range(STARTS)):
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            return
        except Exception as error:  # whatever its daemons can fail at, a plain Exception too
            ray.shutdown()
            if not left:
                raise WorkerError(f"Ray does not start ({error}). Take --engine local, or join a cluster") from error
            log.warning("Ray does not start (%s): once more", error)


class Crew:
    """Actors; a cluster that is there already is joined, else one is started here."""

    def __init__(self, factory: Factory, workers: int) -> None:
        import ray

        self._ray = ray
        self._owned = not ray.is_initialized()
        self._watcher = orphans.watch() if self._owned else None
        if self._owned:
            start(ray)
        self._gpus = int(getattr(factory, "gpus", 0))
        there = int(ray.cluster_resources().get("GPU", 0))
        if self._gpus * workers > there:
            raise OptionError(f"workers={workers}: the Ray cluster has {there} GPUs, one for each worker")
        self._factory = ray.put(factory)
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}

    def hire(self, worker: int) -> None:
        """Starts an actor; Ray never restarts it, the schedule does."""
        paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        actor = self._ray.remote(num_cpus=0, num_gpus=self._gpus, max_restarts=0, runtime_env=paths)(Holder)
        self._actors[worker] = actor.remote([self._factory], worker)

    def give(self, worker: int, shard: Shard) -> None:
        """Sends a shard."""
        self._pending[self._actors[worker].work.remote(shard)] = worker

    def wait(self) -> Sequence[tuple[int, Result | Died | Exception]]:
        """The next worker that is done or dead."""
        (done, *_), _ = self._ray.wait(list(self._pending), num_returns=1)
        worker = self._pending.pop(done)
        try:
            return [(worker, Result(*self._ray.get(done)))]
        except self._ray.exceptions.RayActorError as error:
            del self._actors[worker]
            return [(worker, Died(str(error).splitlines()[0]))]
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DeviceFailed):  # of no use any more; the next one has the device anew
                self._ray.kill(self._actors.pop(worker))
                return [(worker, Died(str(error.cause)))]
            return [(worker, error.cause if isinstance(error.cause, Exception) else error)]

    def dismiss(self) -> None:
        """Kills the actors, and leaves the cluster if this run joined it."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        if self._owned:
            self._ray.shutdown()
        if self._watcher is not None:
            with self._watcher:
                self._watcher.kill()


class Holder:
    """An actor: a loaded model and what is done with it. Loading is part of the first shard, so that its errors are
    those of a task, which reach the user as they are.
    """

    def __init__(self, factory: list[Any], worker: int) -> None:
        self._factory, self._worker = factory, worker  # a reference in a list is not looked up yet
        self._work: Work | None = None

    def work(self, shard: Shard) -> Result:
        """One shard."""
        if self._work is None:
            import ray

            factory: Factory = ray.get(self._factory[0])
            self._work = factory(self._worker)
        return self._work(shard)
