"""Memory: how much was in use at most, how much there is, and a refusal of what does not fit before it is allocated."""

import re
from pathlib import Path

import torch

from llava_consensus.errors import OptionError

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
AVAILABLE = Path("/proc/meminfo")
SLACK = 1.1  # activations and the allocator's own, beside weights and cache


def reset_peak() -> None:
    """Starts the measurement of peak memory anew, on CUDA where this process uses it."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    elif CLEAR.exists():
        CLEAR.write_text("5")  # proc(5): resets VmHWM


def peak_bytes() -> int | None:
    """Most memory since `reset_peak`, weights included: allocated by torch on CUDA, resident in all on Linux; None
    elsewhere.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return int(found[1]) << 10 if found else None


def peak_meaning() -> str:
    """What `peak_bytes` counts here."""
    if torch.cuda.is_initialized():
        return "allocated by torch on the device, at most while answering"
    return "resident set of the process, at most while answering" if STATUS.exists() else "not measured here"


def free_bytes(device: str) -> int | None:
    """Memory of a device (`cpu`, `cuda`, `cuda:N`) that can still be had; None where the system does not tell."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"MemAvailable:\s+(\d+) kB", AVAILABLE.read_text()) if AVAILABLE.exists() else None
    return int(found[1]) << 10 if found else None


def refuse_too_large(name: str, weights: int, cache: int, device: str) -> None:
    """Raises OptionError where a model does not fit into the memory that is free.

    Args:
        name: of the model, for the message.
        weights, cache: bytes of its weights, and of keys and values of the longest prompt.
        device: that will hold it.
    """
    free, needed = free_bytes(device), SLACK * (weights + cache)
    if free is not None and needed > free:
        raise OptionError(
            f"shape={name!r} on {device}: needs about {_gib(needed)} (weights {_gib(weights)}, cache {_gib(cache)}), "
            f"{_gib(free)} are free. Take --dtype bfloat16 or float16, a smaller --shape, or another machine"
        )


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
