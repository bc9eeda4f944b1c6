"""How the work of methods grows: time and memory of `reduce` on random features, over the number of patches, of
pictures in a batch and of merged tokens. No model is needed. Only methods after the vision tower are here, as the work
of the others is part of the model's.

The file has `width`, `threads`, `device` and `points`, one for each measurement:

    curve       fixed (T = 64) | ninth (T = N / 9) | batch (N = 576, T = 64) | merged (N = 2304, 64 tokens are kept)
    method, patches, tokens, merged, batch
    ms          median of the repeats: on the CPU of processor time, so that a busy machine matters less; None where it
                was left out
    bytes       most memory that was taken beside the inputs, None where it is not known
    reason      why it was left out
"""

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from llava_consensus.evaluation.bench.timing import free_bytes, give_back, peak_bytes, reset_peak
from llava_consensus.evaluation.files import Record
from llava_consensus.hosts.timing import now
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import ClipSides, Need, TextProbe, VisionAttention, VisualTokens, WholePictures

WIDTH, HEADS, TEXT = 256, 4, 32
PATCHES = (576, 1024, 2304, 4096, 9216, 16384)
BATCHES = (1, 2, 4, 8, 16, 32)
MERGED = (5, 10, 50, 100, 200, 500)
LONGEST = 10.0  # seconds; what would take longer is left out


class CurvePoint(NamedTuple):
    """What is measured once."""

    curve: str
    patches: int
    tokens: int
    merged: int | None = None
    batch: int = 1

    @property
    def size(self) -> float:
        """A number that grows along a curve at least as fast as the work of a method that compares everything."""
        return float(self.patches**2 * self.batch * (self.merged or 1))


CURVES = {
    "fixed": [CurvePoint("fixed", patches, 64) for patches in PATCHES],
    "ninth": [CurvePoint("ninth", patches, patches // 9) for patches in PATCHES],
    "batch": [CurvePoint("batch", 576, 64, batch=batch) for batch in BATCHES],
    "merged": [CurvePoint("merged", 2304, 64 + merged, merged) for merged in MERGED],
}


def growing(methods: Mapping[str, Method]) -> dict[str, Method]:
    """Those whose work can be measured without a model."""
    return {name: one for name, one in methods.items() if one.place is Place.TOKENS and one.reduces}


def measure(
    methods: Mapping[str, Method],
    device: torch.device,
    curves: Mapping[str, list[CurvePoint]] | None = None,
    repeats: int = 3,
) -> Iterator[Record]:
    """Every method along every curve, point by point. A curve ends for a method where the next point would take too
    long or would not fit into memory, as the one before says.
    """
    for method in methods.values():  # what is loaded at the first call does not count
        method.reduce(random_unit(64, 1, device), Budget(9))
    for points in (CURVES if curves is None else curves).values():
        ends: dict[str, str] = {}
        last: dict[str, tuple[CurvePoint, Record]] = {}
        for point in points:
            tokens = random_unit(point.patches, point.batch, device)
            for name, method in methods.items():
                if point.merged is not None and Need.PROBE not in method.needs:
                    continue  # the others merge as many as they do
                reason = _too_much(*last[name], point, device) if name in last and name not in ends else ""
                if reason:
                    ends[name] = reason
                base = {"method": name, **point._asdict()}
                if name in ends:
                    yield {**base, "ms": None, "bytes": None, "reason": ends[name]}
                    continue
                found = {**base, **_measured(method, tokens, Budget(point.tokens, point.merged), repeats), "reason": ""}
                last[name] = point, found
                yield found


def _too_much(before: CurvePoint, found: Record, point: CurvePoint, device: torch.device) -> str:
    """Why a point is left out, by what the one before took, as if the work grew with its `size`; empty where it is
    not.
    """
    ratio, free = point.size / before.size, free_bytes(str(device))
    if found["ms"] * ratio > 1e3 * LONGEST:
        return f"more than {LONGEST:g} s"
    return "more memory than there is" if free is not None and (found["bytes"] or 0) * ratio > 0.8 * free else ""


def _measured(method: Method, tokens: VisualTokens, budget: Budget, repeats: int) -> Record:
    """Milliseconds and bytes of one reduction, after one that does not count."""
    device, times = tokens.projected.device, []
    with torch.inference_mode():
        give_back()
        reset_peak()
        before = _used(device)
        start = _clock(device)
        method.reduce(tokens, budget)
        first = _clock(device) - start
        peak = peak_bytes()
        for _ in range(repeats if first < LONGEST / 6 else 0):
            start = _clock(device)
            method.reduce(tokens, budget)
            times.append(_clock(device) - start)
    taken = None if peak is None or before is None else max(peak - before, 0)
    return {"ms": 1e3 * statistics.median(times or [first]), "bytes": taken}


def _clock(device: torch.device) -> float:
    """Seconds: of the processor on the CPU, else once the device has done what it was given."""
    return time.process_time() if device.type == "cpu" else now(device)


def _used(device: torch.device) -> int | None:
    """Memory in use, which `peak_bytes` says right after it was reset."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else peak_bytes()


def random_unit(patches: int, batch: int, device: torch.device) -> VisualTokens:
    """Random pictures of one tile each, with all that methods after the tower ask for."""
    noise = torch.Generator().manual_seed(64 * patches + batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise).to(device)

    weight, units = normal(WIDTH, WIDTH) / WIDTH**0.5, torch.arange(batch, device=device)
    real = torch.ones(batch, patches + TEXT, dtype=torch.bool, device=device)
    places = torch.arange(patches + TEXT, device=device).expand(batch, -1)
    heads, head = (batch, HEADS), WIDTH // HEADS
    angles, scale = normal(batch, patches + TEXT, head), head**-0.5
    probe = TextProbe(
        query=normal(*heads, TEXT, head),
        key=normal(*heads, patches + TEXT, head),
        cos=angles.cos(),
        sin=angles.sin(),
        scale=scale,
        rows=places[:, patches:],
        row_mask=real[:, patches:],
        key_mask=real,
    )
    attention = VisionAttention(normal(*heads, 1 + patches, head), normal(*heads, 1 + patches, head), scale, 1)
    return VisualTokens(
        projected=normal(batch, patches, WIDTH),
        tile=units[:, None].expand(-1, patches),
        patch=places[:, :patches],
        side=math.isqrt(patches),
        attention=attention,
        earlier=attention,
        features=normal(batch, patches, WIDTH) + normal(WIDTH),  # patches of a picture have much in common
        class_feature=normal(batch, WIDTH),
        project=lambda values: values @ weight.to(values.dtype),
        probe=probe,
        picture=units,
        prompt=units,
        columns=places[:, :patches],
        fingerprint=units,
        clip=ClipSides(normal(batch, patches, 64), normal(batch, 1, 64), real[:, :1]),
        whole=WholePictures(units, real[:, :patches]),
    )
