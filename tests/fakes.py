"""A host without weights and a benchmark without data, for tests of everything around the model.
Imported by the other tests as `fakes`; registers nothing by itself.
"""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any
from zlib import crc32

import torch
from PIL import Image

from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.models.base import Answer, Prefill, Runner
from llava_consensus.evaluation.runs.configuration import RunConfig
from llava_consensus.hosts.outcomes import ImageOutcome
from llava_consensus.methods import make
from llava_consensus.reduction.budget import budget
from llava_consensus.reduction.method import Shape
from llava_consensus.reduction.tokens import Reduction

FILES = (DataFile("questions.jsonl", "tests/fakes.py"),)


def reduced(count: int, kept: list[int]) -> Reduction:
    """An image of `count` tokens of which these are kept."""
    owner = torch.full((1, count), -1)
    owner[0, kept] = torch.arange(len(kept))
    index = torch.tensor([kept])
    return Reduction(torch.zeros(1, len(kept), 2), index, index[:, :0], index, owner, vision=torch.rand(1, count))


@dataclass(frozen=True, kw_only=True)
class Fake(Benchmark):
    """A benchmark without data of its own."""

    name = "fake"
    title = "Fake"
    line = "nothing real"
    folder = "fake"
    images = "images"
    files = FILES
    metric = "accuracy"
    max_new_tokens = 8

    def score(self, records: Sequence[Mapping[str, Any]], data: Path) -> dict[str, Any]:
        """Two answers in three are right, by their checksum: any fixed function of the text does."""
        right = [float(crc32(one["text"].encode()) % 3 > 0) for one in records]
        indexes = [one["metadata"]["index"] for one in records]
        extracted = [{"index": index, "correct": value} for index, value in zip(indexes, right, strict=True)]
        return {"accuracy": 100 * sum(right) / len(extracted), "extracted": extracted}


class FakeModel(torch.nn.Module):
    """A model that does nothing, whose forwards can be timed."""

    device = torch.device("cpu")

    def forward(self) -> None:
        """Nothing."""


class FakeAttachment:
    def __init__(self, host: "FakeHost", tokens: int) -> None:
        self.host, self.tokens = host, tokens
        self.model = SimpleNamespace(module=host.model)
        self.outcomes: list[Any] = []

    def detach(self) -> None:
        self.host.tokens = self.host.visual_tokens

    def milliseconds(self) -> dict[str, float]:
        return {}

    def __enter__(self) -> "FakeAttachment":
        self.host.tokens = min(self.tokens, self.host.visual_tokens)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.detach()


class FakeEncoded(int):
    """An image of one colour, whose tokens form a square."""

    tiles = SimpleNamespace(side=24)


class FakeHost:
    """Answers with a function of image, question and tokens; writes down what it was asked."""

    visual_tokens = 576
    ask: Any = Runner.ask

    def __init__(self, seconds: float = 0.0) -> None:
        self.tokens = self.visual_tokens
        self.model = FakeModel()
        self.seconds = seconds
        self.encoded: list[int] = []
        self.asked: list[str] = []
        self.groups: list[int] = []
        self.interrupt_after: int | None = None

    def attach(self, method: Any, budget: Any) -> FakeAttachment:
        available = self.visual_tokens
        return FakeAttachment(self, budget.of(available).tokens if method.reduces else available)

    def encode(self, images: list[Image.Image]) -> list[Any]:
        colours = [FakeEncoded(image.getpixel((0, 0))[0]) for image in images]  # type: ignore[index]
        self.encoded += colours
        return colours

    def answer(self, encoded: list[list[Any]], prompts: list[Any]) -> list[Answer]:
        if self.interrupt_after is not None and len(self.asked) >= self.interrupt_after:
            raise KeyboardInterrupt
        time.sleep(self.seconds)
        self.model()
        self.groups.append(len(prompts))
        self.asked += [prompt.text for prompt in prompts]
        texts = [f"{prompt.text} {own} {'é' * (self.tokens % 5)}" for own, prompt in zip(encoded, prompts, strict=True)]
        before = [len(own) * self.visual_tokens for own in encoded]
        read = [self.prefill(prompt, len(own)) for own, prompt in zip(encoded, prompts, strict=True)]
        seen = [self.outcomes(len(own)) for own in encoded]
        answered = zip(texts, before, seen, read, strict=True)
        return [Answer(t, b, min(b, self.tokens), 0, (), o, r) for t, b, o, r in answered]

    def outcomes(self, pictures: int) -> tuple[ImageOutcome, ...]:
        count = self.visual_tokens
        origin, left = (torch.zeros(count, dtype=torch.long), torch.arange(count)), min(count, self.tokens)
        parts = ((0, reduced(count, list(range(left)))),) if left < count else ()
        return (ImageOutcome(0, count, left, 0, parts, origin=origin),) * pictures

    def grid_columns(self, size: tuple[int, int]) -> int:
        return 0

    def shape(self, text: int = 0) -> Shape:
        return Shape(2, 8, 2, 1, 4, 16, 10, 2, 8, 2, 16, self.visual_tokens, 3, text, number_bytes=4)

    def rows(self, prompt: Any, pictures: int = 1) -> tuple[int, int]:
        return len(prompt.text), len(prompt.text) - 2

    def prefill(self, prompt: Any, pictures: int) -> Prefill:
        text, question = self.rows(prompt, pictures)
        count = pictures * self.tokens
        return Prefill(text, question, (count, count), (2 * 4 * 4 * (text + count),) * 2)


def make_data(folder: Path, pictures: int = 4, each: int = 5) -> Path:
    """`pictures` tiny PNG files with `each` questions about each of them."""
    images = folder / "eval" / "fake" / "images"
    images.mkdir(parents=True)
    lines = []
    for number in range(pictures):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(images / f"{number}.png")
        for question in range(each):
            row = {"question_id": number * 100 + question, "image": f"{number}.png"}
            lines.append(json.dumps(row | {"text": f"what {number} {question}"}) + "\n")
    (folder / "eval" / "fake" / "questions.jsonl").write_text("".join(lines))
    return folder


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlavaLlamaForCausalLM"]}')
    return folder


def make_place(folder: Path, pictures: int = 4, each: int = 5) -> Path:
    """Data and a model in one folder, the model below `model`: what `config(data, data / "model")` is about."""
    make_model(folder / "model")
    return make_data(folder, pictures, each)


def config(
    data: Path,
    model: Path,
    /,
    method: str = "consensusdrop",
    options: Mapping[str, Any] | None = None,
    tokens: int | float = 64,
    merged: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    **changes: Any,
) -> RunConfig:
    """The configuration most tests use, of names and numbers, on the fake benchmark where they do not say another."""
    given = {"benchmark": Fake(), "data": data, "model": str(model), "loading": Loading(device, dtype), **changes}
    return RunConfig(method=make(method, **(options or {})), budget=budget(tokens, merged), **given)


class DyingHost(FakeHost):
    """Dies by SIGKILL in the middle of its work, once: whoever makes the marker."""

    def __init__(self, marker: Path, after: int) -> None:
        super().__init__()
        self.marker, self.after = marker, after

    def answer(self, encoded: list[list[Any]], prompts: list[Any]) -> list[Answer]:
        if len(self.asked) >= self.after and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().answer(encoded, prompts)


@dataclass(frozen=True)
class Loader:
    """Loads fake hosts in processes of their own; with a marker one of them dies."""

    marker: Path | None = None
    after: int = 6
    seconds: float = 0.0

    def __call__(self, model: str, loading: Loading, host_options: Mapping[str, str]) -> FakeHost:
        return FakeHost(self.seconds) if self.marker is None else DyingHost(self.marker, self.after)


class CrashingHost(FakeHost):
    """Ends its process without a word when it is asked one question."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def answer(self, encoded: list[list[Any]], prompts: list[Any]) -> list[Answer]:
        if any(prompt.text == self.text for prompt in prompts):
            os._exit(9)
        return super().answer(encoded, prompts)


@dataclass(frozen=True)
class CrashAt:
    """Loads hosts that end their process at one question."""

    text: str

    def __call__(self, model: str, loading: Loading, host_options: Mapping[str, str]) -> FakeHost:
        return CrashingHost(self.text)
