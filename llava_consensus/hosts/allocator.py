"""Freed memory, where the C library is glibc: what a forward on the CPU frees stays, and goes back when it is told."""

import ctypes
import sys

BLOCK = 31 << 20  # bytes; larger blocks than 32 MiB never raise the threshold


def keep_freed_memory() -> None:
    """Lets glibc see one large block come and go. From then on it takes smaller blocks from its heap, and gives the
    heap back to the system only from twice that size on (mallopt(3), M_MMAP_THRESHOLD). Otherwise the attention maps of
    a vision tower are mapped anew and filled with zeros page by page in every layer: on LLaVA's own pins that was a
    third to a half of the time to the first token (docs/efficiency.md). Other C libraries ignore it.
    """
    import torch

    torch.empty(BLOCK, dtype=torch.uint8)  # freed at once, which is what raises the threshold of glibc


def give_back() -> None:
    """Has the C library give memory back that nobody uses, so that what is taken next comes in its place."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
