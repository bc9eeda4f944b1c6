"""The same weights on two hosts: the embedded model in official LLaVA and in transformers gives the same answers,
counts, choices and caches with a method for each place.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llava_consensus import cli
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import make as make_benchmark
from llava_consensus.evaluation.media import open_image
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="models of transformers need version 5.19 or later"
)
DATA = Path("playground/mini")
PLACES = ("full", "consensusdrop", "consensusdrop+", "prumerge", "tome", "resize", "sparsevlm")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    out = tmp_path_factory.mktemp("converted") / "llava-mini-hf"
    assert cli.main(["model", "convert", "checkpoints/llava-mini", str(out)]) == 0
    loading = models.Loading("cpu", "float32")
    return models.load("checkpoints/llava-mini", loading), models.load(str(out), loading)


def answers(host: Any, name: str, budget: int = 64) -> list[Any]:
    """Six questions about six images, one about two of them, and one about none."""
    benchmark = make_benchmark("gqa")
    questions = benchmark.load(DATA)[:60:10]
    with host.attach(make(name), Budget(budget)):
        folder = benchmark.place(DATA) / benchmark.images
        pictures = host.encode([open_image(folder / question.images[0]) for question in questions])
        seen = [*([picture] for picture in pictures), pictures[:2], []]
        texts = [*(question.text for question in questions), "Which is larger?", "What is two plus two?"]
        return host.answer(seen, [models.Prompt(text, None, 8) for text in texts])


@pytest.mark.parametrize("name", PLACES)
def test_both_hosts_answer_alike(both: tuple[Any, Any], name: str) -> None:
    official, own = (answers(host, name) for host in both)
    for left, right in zip(official, own, strict=True):
        assert (left.text, left[1:5], left.prefill) == (right.text, right[1:5], right.prefill)
        for one, other in zip(left.outcomes, right.outcomes, strict=True):
            assert one[:4] == other[:4] and one.entering == other.entering
            for (_, chosen), (_, again) in zip(one.reductions, other.reductions, strict=True):
                assert torch.equal(chosen.kept, again.kept) and torch.equal(chosen.owner, again.owner)
