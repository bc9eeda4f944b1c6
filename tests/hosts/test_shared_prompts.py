"""Prompts that are answered in one batch get the answers that each gets on its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import IMAGE, tiny_llava

from llava_consensus.evaluation.models.base import Answer, Encoding, Prompt
from llava_consensus.evaluation.models.llava import LlavaRunner
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

PICTURE = -200
DTYPE = torch.float32 if transformers.__version__.startswith("4.") else torch.float64
WORDS = [1, 5, 6, 7, 8]
QUESTIONS = [[9, 10, 11], [12, 13, 14, 15, 16], [9, 17], [18, 19, 20, 21], [22, 9, 11, 13]]
BUDGET = Budget(6)


class NumberHost(LlavaRunner):
    """A host whose prompts are ids, written as numbers, and so are its answers."""

    padding = 0

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> torch.Tensor:
        return torch.tensor([*WORDS, *[PICTURE] * pictures, *map(int, prompt.text.split())])

    def decode(self, output: torch.Tensor) -> list[str]:
        return [" ".join(map(str, row)) for row in output.tolist()]


@pytest.fixture
def host(tower_folder: Path) -> Iterator[NumberHost]:
    """In double precision, so that equal answers are no luck. transformers 4.37 makes no masks of padding in it."""
    yield NumberHost(tiny_llava(tower_folder).to(DTYPE))


def encoded(attachment: Attachment, count: int) -> list[Encoding]:
    pixels = torch.randn(count, 3, IMAGE, IMAGE, dtype=DTYPE, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        tiles = attachment.entrance.encode(pixels, [1] * count)
    return [Encoding(one, False, (IMAGE, IMAGE), attachment.method, attachment.budget) for one in tiles]


@pytest.mark.parametrize(
    ("name", "other", "tokens", "refused"),
    [
        ("random", "random", 6, False),
        ("random", "random", 5, False),  # what a method after the tower reads is there for any budget
        ("random", "divprune", 6, True),
        ("tome", "tome", 6, False),
        ("tome", "tome", 5, True),
    ],
)
def test_a_picture_that_was_encoded_for_something_else_is_refused(
    host: NumberHost, name: str, other: str, tokens: int, refused: bool
) -> None:
    with host.attach(make(name), BUDGET) as attachment:
        pictures = encoded(attachment, 1)
    with host.attach(make(other), Budget(tokens)):
        if refused:
            with pytest.raises(ValueError, match="encode it again"):
                host.answer([pictures], [Prompt("9 10", max_new_tokens=2)])
        else:
            assert host.answer([pictures], [Prompt("9 10", max_new_tokens=2)])[0].after == tokens


def ask(host: NumberHost, name: str, shown: list[list[int]]) -> tuple[list[Answer], list[Answer]]:
    """Answers to the questions about images, asked together and each alone."""
    prompts = [Prompt(" ".join(map(str, ids)), max_new_tokens=6) for ids in QUESTIONS[: len(shown)]]
    with host.attach(make(name), BUDGET) as attachment:
        pictures = encoded(attachment, 1 + max((number for numbers in shown for number in numbers), default=0))
        own = [[pictures[number] for number in numbers] for numbers in shown]
        together = host.answer(own, prompts)
        alone = [host.answer([one], [prompt])[0] for one, prompt in zip(own, prompts, strict=True)]
    return together, alone


def given(answers: list[Answer]) -> list[Any]:
    return [(one.text, one.before, one.after, one.structural, one.prefill) for one in answers]


@pytest.mark.parametrize("name", ["full", "visionzip", "consensusdrop", "tome", "fastv"])
@pytest.mark.parametrize("shown", [[[0]] * 5, [[0], [1], [2], [3], [4]], [[0, 1], [0, 1], [0]]])
def test_prompts_are_answered_together_as_each_is_alone(host: NumberHost, name: str, shown: list[list[int]]) -> None:
    together, alone = ask(host, name, shown)
    assert given(together) == given(alone)
