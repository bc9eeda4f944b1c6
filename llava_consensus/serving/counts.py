"""Counters of the engine for `/metrics`: its worker writes numbers into memory of the server, which answers."""

import mmap
import os
from collections.abc import Iterator
from functools import cache
from multiprocessing import parent_process

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PLACE = "LLAVA_CONSENSUS_COUNTS"  # variable that names the memory
SECONDS, KEPT = 0, 1  # places of the numbers


class EngineMetrics(Collector):
    def collect(self) -> Iterator[Metric]:
        numbers = counts()
        if numbers is not None:
            yield CounterMetricFamily(
                "visual_reduction_seconds",
                "Time of the worker in reductions, on a GPU of launching them",
                numbers[SECONDS],
            )
            yield GaugeMetricFamily(
                "visual_reduction_kept_pictures", "Encoded images kept for their next question", numbers[KEPT]
            )


def show() -> None:
    """Makes the metrics of this process's registry show the counters of its engine."""
    # A process of the engine has the memory of its server; one that another server started has that of another
    own = os.environ.get(PLACE, "").startswith(f"/proc/{os.getpid()}/")
    if parent_process() is None and not own:
        file = os.memfd_create(PLACE)
        os.truncate(file, mmap.PAGESIZE)
        os.environ[PLACE] = f"/proc/{os.getpid()}/fd/{file}"  # processes that it starts may open it while it lives
        REGISTRY.register(EngineMetrics())


@cache
def counts() -> "memoryview[float] | None":
    """The numbers, float64; None outside of a server's processes."""
    try:
        file = os.open(os.environ.get(PLACE, ""), os.O_RDWR)
    except OSError:
        return None
    with os.fdopen(file):
        return memoryview(mmap.mmap(file, mmap.PAGESIZE)).cast("d")
