"""Requests of words and images, what vLLM answers to them, and what transformers with a method attached does."""

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import small
import torch

import llava_consensus
from llava_consensus import attach

SIZES = [(70, 60), (120, 70), (60, 130), (230, 215)]


class Answer(NamedTuple):
    """Ids of an answer and their log-probabilities."""

    ids: list[int]
    logs: list[float]


class Request(NamedTuple):
    words: str
    pictures: list[Any]
    videos: list[Any] = []  # noqa: RUF012
    question: str = ""

    @property
    def given(self) -> dict[str, Any]:
        shown = {"image": self.pictures, "video": self.videos}
        given = {"prompt": self.words, "multi_modal_data": {name: every for name, every in shown.items() if every}}
        return given | ({"mm_processor_kwargs": {"question": self.question}} if self.question else {})


def requests(family: str, count: int, seed: int = 0) -> list[Request]:
    """Prompts of no, one, two and three images in turn, of OneVision with one that it resizes."""
    sizes = SIZES[-3:] if family == "llava_onevision" else SIZES
    noise = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        words = [f"w{int(word)}" for word in torch.randint(5, 400, (12,), generator=noise)]
        for place in range(number % 4):
            words.insert(2 + 3 * place, small.placeholder(family))
        pictures = [small.picture(seed * 1000 + number * 5 + place, sizes[place]) for place in range(number % 4)]
        found.append(Request(" ".join(words), pictures))
    return found


def clips(count: int, seed: int = 0) -> list[Request]:
    """Prompts of one and two videos in turn, whose lengths differ from prompt to prompt."""
    found = []
    for number in range(count):
        words = [f"w{7 + number}", *["<video>", f"w{9 + seed + number}", "w11"] * (1 + number % 2)]
        videos = [small.clip(seed + 10 * number + place, 6 + number) for place in range(1 + number % 2)]
        found.append(Request(" ".join(words), [], videos))
    return found


@contextmanager
def served(
    folder: Path, method: str, tokens: int | float | str, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """An engine with a method, gone when the body ends."""
    engine = small.engine(folder, **llava_consensus.vllm(method=method, tokens=tokens, **options), **(settings or {}))
    try:
        yield engine
    finally:
        from vllm.distributed import cleanup_dist_env_and_memory

        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def counted(engine: Any, name: str) -> float:
    return next(one.value for one in engine.get_metrics() if one.name == f"vllm:{name}")


def clients_leave(engine: Any, leaving: dict[int, list[int]]) -> set[int]:
    """Makes requests, by their number, leave before a step of the engine, by its number. The numbers that have left."""
    llm, steps, left = engine.llm_engine, itertools.count(), set[int]()
    step = llm.step

    def stepping() -> Any:
        gone = leaving.get(next(steps), [])
        left.update(one for one in gone if str(one) in llm.output_processor.external_req_ids)
        llm.abort_request([str(one) for one in gone])
        return step()

    llm.step = stepping
    return left


def answers(engine: Any, asked: list[Request], length: int = 6, **more: Any) -> list[Answer]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=length, logprobs=1, ignore_eos=True)
    found = []
    for output in engine.generate([one.given | more for one in asked], parameters, use_tqdm=False):
        one = output.outputs[0]
        logs = [step[word].logprob for word, step in zip(one.token_ids, one.logprobs, strict=True)]
        found.append(Answer(list(one.token_ids), logs))
    return found


def reference(
    made: Any, asked: list[Request], method: str, tokens: int | float, length: int = 6, **options: Any
) -> list[Answer]:
    """Of transformers with the method attached, greedily."""
    model, processor = made
    way, found = dict(do_sample=False, output_logits=True, return_dict_in_generate=True), []
    for one in asked:
        inputs = processor(text=one.words, images=one.pictures or None, videos=one.videos or None, return_tensors="pt")
        with (
            attach(model, method, tokens=tokens, **options) as attached,
            attached.asking([one.question]) if one.question else nullcontext(),
        ):
            result = model.generate(**inputs, max_new_tokens=length, **way)
        ids = result.sequences[0, inputs.input_ids.shape[1] :].tolist()
        logs = [step[0].log_softmax(-1)[word].item() for word, step in zip(ids, result.logits, strict=True)]
        found.append(Answer(ids, logs))
    return found


def assert_equal(ours: list[Answer], theirs: list[Answer], bound: float = 1e-4) -> None:
    """Equal tokens, and log-probabilities within the bound."""
    assert [one.ids for one in ours] == [one.ids for one in theirs]
    assert [one.logs for one in ours] == [pytest.approx(one.logs, rel=0, abs=bound) for one in theirs]
