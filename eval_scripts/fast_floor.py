"""Answers in fixed shapes on a GPU, beside the floor measured on that GPU: time to the first token, time of a further
one, selection and peak memory, with `fast` and without, on random weights of a published size.

Run it: python eval_scripts/fast_floor.py [--shape llava-1.5-7b --dtype bfloat16 --tokens 64 --repeats 20]. It needs a
CUDA device. The clock starts with pixels and ids on the device, and is read when a token is known there. The last line
is one of JSON.

The floor is arithmetic on three measured rates. A further token reads the weights of the language model once. The first
token takes at least the larger of reading and multiplying, for the tower and for the language model: two FLOPs for each
weight and row. What is launched one by one takes at least a launch each.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from llava_consensus import make
from llava_consensus.bench.memory import peak_bytes, reset_peak
from llava_consensus.bench.timing import now
from llava_consensus.hosts import Loading, Prompt
from llava_consensus.hosts.hf.random_weights import AFTER, BEFORE, plan
from llava_consensus.reduction.budget import Budget

NO_GPU = "fast_floor.py: needs a CUDA device, and this machine has none. On a CPU nothing of this can be measured"
GOALS = {"ttft_ms": 10.0, "tpot_over_floor": 1.3, "selection_ms": 0.24, "peak_over_full": 1.0}  # at most, on an H200
COPIED, MULTIPLIED, LAUNCHED = 1 << 31, 8192, 2000  # bytes, width of a square matrix, launches of one measurement
ROUNDS = 5


class Rates(NamedTuple):
    """What the device does at best, measured."""

    bytes_per_second: float  # read
    flops_per_second: float  # in the type of the weights
    launch_seconds: float  # of a small kernel, one after the other


class Sizes(NamedTuple):
    """What is read and multiplied for one prompt."""

    tower_weights: int  # numbers, not bytes
    text_weights: int  # without the table of words, of which a token reads one row
    itemsize: int
    tower_rows: int
    text_rows: int

    def floor_ms(self, rates: Rates) -> dict[str, float]:
        """Least milliseconds of the first token and of a further one."""
        parts = (self.tower_weights, self.tower_rows), (self.text_weights, self.text_rows)
        first = sum(
            max(weights * self.itemsize / rates.bytes_per_second, 2.0 * weights * rows / rates.flops_per_second)
            for weights, rows in parts
        )
        further = self.text_weights * self.itemsize / rates.bytes_per_second
        return {"ttft_ms": 1e3 * first, "tpot_ms": 1e3 * further}


class Measured(NamedTuple):
    """One answer."""

    ttft_ms: float
    tpot_ms: float
    selection_ms: float
    peak_bytes: int


def least_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs, after one that does not count."""
    work()
    spent = []
    for _ in range(ROUNDS):
        start = now(device)
        work()
        spent.append(now(device) - start)
    return min(spent)


def rates(device: torch.device, dtype: torch.dtype, scale: int = 1) -> Rates:
    """The rates of a device; `scale` makes the work smaller for a trial.

    A copy reads and writes, so that twice its bytes are moved.
    """
    source = torch.zeros(COPIED // scale, dtype=torch.uint8, device=device)
    target, width = torch.empty_like(source), MULTIPLIED // scale
    copied = least_seconds(lambda: target.copy_(source), device)
    matrix = torch.ones(width, width, device=device, dtype=dtype)
    multiplied = least_seconds(lambda: matrix @ matrix, device)
    number, count = torch.zeros(1, device=device), LAUNCHED // scale
    launched = least_seconds(lambda: [number.add_(1) for _ in range(count)], device)
    return Rates(2 * source.nbytes / copied, 2.0 * width**3 / multiplied, launched / count)


def sizes(model: Any, tokens: int, patches: int) -> Sizes:
    """Of a model of transformers of the kind of LLaVA, for a prompt of one picture and the words of random weights."""
    inner = model.model
    tower = [*inner.vision_tower.parameters(), *inner.multi_modal_projector.parameters()]
    text = [*inner.language_model.layers.parameters(), *model.lm_head.parameters()]
    tower_weights, text_weights = (sum(weight.numel() for weight in part) for part in (tower, text))
    return Sizes(tower_weights, text_weights, model.dtype.itemsize, patches + 1, BEFORE + tokens + AFTER)


def measured(
    host: Any, inputs: dict[str, Any], side: tuple[Any, Budget], fast: bool, length: int, repeats: int
) -> list[Measured]:
    """Answers of `length` tokens, after two that do not count and in which everything is captured."""
    model, found = host.model, []
    settings = {"do_sample": False, "max_new_tokens": length, "min_new_tokens": length}
    with host.attach(*side) as attached:
        attached = attached.hasten() if fast else attached
        for _ in range(repeats + 2):
            ends: list[float] = []
            reset_peak()
            start = now(model.device)
            listening: Any = nullcontext()
            if fast:
                listening = attached.fast.listening(lambda _, ends=ends: ends.append(now(model.device)))
            handle = model.register_forward_hook(lambda *_, ends=ends: ends.append(now(model.device)))
            with listening:
                model.generate(**inputs, **settings)
            handle.remove()
            first, last = ends[0] - start, ends[-1] - ends[0]
            selection = sum(attached.milliseconds().values())
            found.append(Measured(1e3 * first, 1e3 * last / (len(ends) - 1), selection, peak_bytes() or 0))
    return found[2:]


def medians(samples: list[Measured]) -> dict[str, float]:
    """Medians of the times, and the highest peak."""
    times = {name: statistics.median(getattr(one, name) for one in samples) for name in Measured._fields[:3]}
    return {**times, "peak_bytes": max(one.peak_bytes for one in samples)}


def verdicts(fast: dict[str, float], full: dict[str, float], floor: dict[str, float]) -> dict[str, dict[str, Any]]:
    """What the goals ask for: the number, the most it may be, and whether it is."""
    numbers = {
        "ttft_ms": fast["ttft_ms"],
        "tpot_over_floor": fast["tpot_ms"] / floor["tpot_ms"],
        "selection_ms": fast["selection_ms"],
        "peak_over_full": fast["peak_bytes"] / full["peak_bytes"],
    }
    return {
        name: {"number": number, "at_most": GOALS[name], "reached": number <= GOALS[name]}
        for name, number in numbers.items()
    }


def report(host: Any, method: str, tokens: int, length: int, repeats: int, scale: int = 1) -> dict[str, Any]:
    """Everything, as JSON values."""
    model, (start, patches) = host.model, (time.time(), host.visual_tokens)
    with tempfile.TemporaryDirectory() as folder:
        inputs = host.own_inputs(Prompt("any"), Image.new("RGB", (336, 336), (90, 60, 30)), Path(folder))
    ours, full = (make(method), Budget(tokens)), (make("full"), Budget(patches))
    runs = {
        name: medians(measured(host, inputs, side, fast, length, repeats))
        for name, side, fast in (
            ("full, plain", full, False),
            ("full, fast", full, True),
            (f"{method}, plain", ours, False),
            (f"{method}, fast", ours, True),
        )
    }
    found = rates(model.device, model.dtype, scale)
    floor = sizes(model, tokens, patches).floor_ms(found)
    goals = verdicts(runs[f"{method}, fast"], runs["full, plain"], floor)
    return {
        "tokens": tokens,
        "rates": found._asdict(),
        "floor": floor,
        "runs": runs,
        "goals": goals,
        "seconds": time.time() - start,
    }


def lines(content: dict[str, Any]) -> list[str]:
    """The report for people."""
    rate, floor = content["rates"], content["floor"]
    told = [
        f"measured rates: {rate['bytes_per_second'] / 1e9:.0f} GB/s, {rate['flops_per_second'] / 1e12:.1f} TFLOP/s, "
        f"{rate['launch_seconds'] * 1e6:.1f} us for a launch",
        f"floor: first token {floor['ttft_ms']:.2f} ms, a further one {floor['tpot_ms']:.2f} ms",
    ]
    for name, run in content["runs"].items():
        told.append(
            f"{name:24} first token {run['ttft_ms']:9.2f} ms, a further one {run['tpot_ms']:8.2f} ms, selection "
            f"{run['selection_ms']:7.3f} ms, peak {run['peak_bytes'] / 2**30:.2f} GiB"
        )
    for name, goal in content["goals"].items():
        said = "reached" if goal["reached"] else "not reached"
        told.append(f"{name}: {goal['number']:.3f}, goal at most {goal['at_most']:g}: {said}")
    return told


def main() -> None:
    """Measures, or says that there is no device for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llava-1.5-7b", choices=["llava-1.5-1b", "llava-1.5-7b", "llava-1.5-13b"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--method", default="consensusdrop")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=32, help="tokens of an answer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(NO_GPU)
    host = plan(given.shape, Loading("cuda", given.dtype)).host()
    content = {
        "device": torch.cuda.get_device_name(),
        "shape": given.shape,
        "dtype": given.dtype,
        **report(host, given.method, given.tokens, given.length, given.repeats),
    }
    print("\n".join([f"{content['device']}, {given.shape} in {given.dtype}", *lines(content)]))
    print(json.dumps(content))


if __name__ == "__main__":
    main()
