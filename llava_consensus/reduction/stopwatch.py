"""How long each named step of a reduction takes, without waiting for the device while it works. Torch only."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Stopwatch:
    """Wall time of named stages. On CUDA it records events and waits for nothing until it is read."""

    device: torch.device
    marks: list[tuple[str, Any, Any]] = field(default_factory=list)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Times the body under `name`."""
        start = self._now()
        yield
        self.marks.append((name, start, self._now()))

    def milliseconds(self) -> dict[str, float]:
        """Time of each stage in milliseconds, summed over calls. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total: dict[str, float] = {}
        for name, start, end in self.marks:
            spent = start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else (end - start) * 1e3
            total[name] = total.get(name, 0.0) + spent
        return total
