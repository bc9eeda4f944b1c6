"""When the first token of a batch was there, read off the model while it answers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class FirstToken:
    """Seconds from the start until the first logits; None before."""

    seconds: float | None = None


@contextmanager
def first_token(model: Any) -> Iterator[FirstToken]:
    """Times the body up to the first output of the model's head; the device is waited for there and nowhere else."""
    measured, start = FirstToken(), time.perf_counter()

    def note(head: Any, inputs: Any, logits: torch.Tensor) -> None:
        if measured.seconds is None:
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
            measured.seconds = time.perf_counter() - start

    hook = model.get_output_embeddings().register_forward_hook(note)
    try:
        yield measured
    finally:
        hook.remove()
