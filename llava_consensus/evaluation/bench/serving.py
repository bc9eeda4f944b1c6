"""What methods change for whoever serves a model by vLLM: requests a second, times to the first token and between
tokens, and how much of the cache requests take. Engines of one run, each in a process of its own, take turns.

Every request shows a picture that none has shown before, and no prefix is kept: what is measured is never a hit.
"""

import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from PIL import ImageChops
from PIL.Image import Image

from llava_consensus.evaluation.files import Record
from llava_consensus.serving.setting import ASKED, TOKENS

ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}
BLOCK = 32  # tokens


class Load(NamedTuple):
    """Load: a number of concurrent requests, or a rate of requests a second."""

    requests: int
    at_once: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.at_once} at once" if self.rate is None else f"{self.rate:g} a second"


class ServedCase(NamedTuple):
    """An engine, and what its requests ask for."""

    name: str  # plain, or of a method
    overrides: Any  # of vLLM's `hf_overrides`; None is the plain engine
    tokens: int | float | None = None  # of each picture


class Asked(NamedTuple):
    """Input of one measurement."""

    prompt: str
    pictures: Sequence[Image]
    length: int  # tokens of each answer
    blocks: int  # of the cache


def measure(
    model: str, cases: Sequence[ServedCase], loads: Sequence[Load], asked: Asked, repeats: int, settings: Record
) -> Iterator[Record]:
    """A record for each case and load in each round; the first round does not count, and is not told.

    Args:
        model: folder of a checkpoint.
        cases: those of one name share an engine.
        loads: every case meets all of them.
        asked: what is asked.
        repeats: rounds that count.
        settings: of vLLM, the same for all engines.
    """
    overrides = {case.name: case.overrides for case in cases}
    with _engines(model, overrides, asked, settings) as engines:
        for number in range(-1, repeats):
            for load in loads:
                for case in cases:
                    engines[case.name].send((case.tokens, load))
                    found = engines[case.name].recv()
                    if isinstance(found, str):
                        raise RuntimeError(found)
                    if number >= 0:
                        yield {"round": number, "case": case.name, "tokens": case.tokens, "load": str(load), **found}


@contextmanager
def _engines(model: str, overrides: Record, asked: Asked, settings: Record) -> Iterator[dict[str, Connection]]:
    """A process for each engine, and the way to talk to it."""
    context = multiprocessing.get_context("spawn")
    engines, processes = {}, []
    for name, own in overrides.items():
        engines[name], theirs = context.Pipe()
        arguments = {**settings, **({} if own is None else {"hf_overrides": own})}
        processes.append(context.Process(target=_work, args=(theirs, model, arguments, asked), daemon=True))
        processes[-1].start()
    try:
        yield engines
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(connection: Connection, model: str, settings: Record, asked: Asked) -> None:
    """One engine, which measures what it is told."""
    os.environ.update(ALONE)
    from vllm import LLM

    number = 0
    try:
        llm = LLM(
            model,
            num_gpu_blocks_override=asked.blocks,
            block_size=BLOCK,
            enable_prefix_caching=False,
            mm_processor_cache_gb=0,
            **settings,
        )
        while True:
            tokens, load = connection.recv()
            requests = []
            for _ in range(load.requests):
                number += 1
                requests.append(_request(asked, number, tokens))
            connection.send(driven(llm.llm_engine, requests, load, asked.length))
    except EOFError:
        pass
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def _request(asked: Asked, number: int, tokens: int | float | None) -> Record:
    """A question about a picture that none has shown before: one of the given, moved on by some pixels all over, as a
    change of a few may be lost where it is resized and cut.
    """
    picture = asked.pictures[number % len(asked.pictures)]
    picture = ImageChops.offset(picture, 2 * number % picture.width, 2 * number // picture.width)
    request: Record = {"prompt": asked.prompt, "multi_modal_data": {"image": picture}}
    return request if tokens is None else {**request, "mm_processor_kwargs": {TOKENS: tokens, ASKED: asked.prompt}}


def driven(engine: Any, requests: list[Record], load: Load, length: int) -> Record:
    """Times, in seconds, and the most of the cache that was in use. A request of a fixed rate counts from when it was
    due, so that its wait for the engine is in its time. The processor's time is that of this process: what else runs on
    the machine changes it least.
    """
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    scheduler = engine.engine_core.engine_core.scheduler
    begun: dict[str, float] = {}
    first: dict[str, float] = {}
    ended: dict[str, float] = {}
    blocks = running = 0
    start, spent = time.perf_counter(), time.process_time()
    while len(ended) < len(requests):
        now = time.perf_counter()
        while len(begun) < len(requests) and _due(load, len(begun), len(ended), now - start):
            name = str(len(begun))
            begun[name] = now if load.rate is None else start + int(name) / load.rate
            engine.add_request(name, requests[int(name)], parameters)
        if len(begun) == len(ended):
            time.sleep(0.001)
            continue
        outputs = engine.step()
        now = time.perf_counter()
        manager = scheduler.kv_cache_manager
        blocks = max(blocks, round(manager.usage * (manager.block_pool.num_gpu_blocks - 1)))
        running = max(running, len(scheduler.running))
        for output in outputs:
            first.setdefault(output.request_id, now)
            if output.finished:
                ended[output.request_id] = now
    waits = sorted(first[name] - begun[name] for name in begun)
    steps = sorted((ended[name] - first[name]) / max(length - 1, 1) for name in begun)
    return {
        "processor_seconds": (time.process_time() - spent) / len(requests),
        "requests_per_second": len(requests) / (max(ended.values()) - start),
        "first_token_p50": waits[len(waits) // 2],
        "first_token_p99": waits[min(len(waits) - 1, round(0.99 * len(waits)))],
        "per_token": steps[len(steps) // 2],
        "blocks": blocks,
        "running": running,
    }


def rename_tower(folder: Path) -> None:
    """Gives the tower's weights of a LLaVA in a folder the names that vLLM 0.32 knows them by, which are not those that
    transformers saves them by since 5.19.
    """
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    tower = re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)")
    weights = {tower.sub("vision_tower.vision_model.", name): one for name, one in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def _due(load: Load, begun: int, ended: int, elapsed: float) -> bool:
    """Whether the next request comes."""
    return begun - ended < (load.at_once or 1) if load.rate is None else elapsed >= begun / load.rate


def lines(records: Sequence[Record]) -> Iterator[str]:
    """A table in Markdown: medians over rounds, and in brackets the median of the ratios to the plain engine in the
    same round.
    """
    titles = ("engine", "tokens", "requests", "processor ms/request", "requests/s", "first token p50, p99 (ms)")
    yield f"| {' | '.join((*titles, 'per token (ms)', 'blocks', 'at once'))} |"
    yield f"| :-- |{' --: |' * 8}"

    def rounds(load: str, case: str, tokens: int | float | None) -> dict[int, Record]:
        same = (one for one in records if (one["load"], one["case"], one["tokens"]) == (load, case, tokens))
        return {one["round"]: one for one in same}

    for load, case, tokens in dict.fromkeys((one["load"], one["case"], one["tokens"]) for one in records):
        own, plain = rounds(load, case, tokens), rounds(load, "plain", None)

        def cell(name: str, scale: float = 1.0, digits: int = 0) -> str:
            return f"{scale * median(one[name] for one in own.values()):.{digits}f}"  # noqa: B023

        def ratio(name: str) -> str:
            return f"({median(own[number][name] / plain[number][name] for number in own):.2f})"  # noqa: B023

        cells = (
            case,
            str(tokens or "all"),
            load,
            f"{cell('processor_seconds', 1e3)} {ratio('processor_seconds')}",
            f"{cell('requests_per_second', digits=2)} {ratio('requests_per_second')}",
            f"{cell('first_token_p50', 1e3)}, {cell('first_token_p99', 1e3)} {ratio('first_token_p50')}",
            f"{cell('per_token', 1e3, 1)} {ratio('per_token')}",
            cell("blocks"),
            cell("running"),
        )
        yield f"| {' | '.join(cells)} |"
