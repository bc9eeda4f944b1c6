"""vLLM with a method against transformers with the same method attached, same weights: tokens and log-probabilities."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asking
import pytest
import small

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

METHODS = [
    "consensusdrop",
    "consensusdrop+",
    "visionzip",
    "vispruner",
    "divprune",
    "prumerge",
    "prumerge_plus",
    "tome_post",
    "random",
    "uniform_grid",
    "pool",
    "full",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Folder and model of every family, made once."""
    known: dict[str, Any] = {}

    def make(family: str) -> tuple[Path, Any]:
        if family not in known:
            folder = tmp_path_factory.mktemp(family)
            known[family] = folder, small.FAMILIES[family](folder)
        return known[family]

    yield make


@pytest.mark.parametrize("method", METHODS)
def test_llava(made: Any, method: str) -> None:
    folder, model = made("llava")
    asked = asking.requests("llava", 8)
    with asking.served(folder, method, 5) as engine:
        ours = asking.answers(engine, asked)
    asking.assert_equal(ours, asking.reference(model, asked, method, 5))


@pytest.mark.parametrize("method", ["consensusdrop", "divprune", "random", "pool"])
@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl", "qwen3_vl"])
def test_other_families(made: Any, family: str, method: str) -> None:
    folder, model = made(family)
    asked = asking.requests(family, 8)
    # random draws by the bits of the pixels, which are bytes where vLLM normalises them in the model
    settings = {"mm_device_do_normalize": False} if method == "random" and "qwen" in family else {}
    with asking.served(folder, method, 6, settings) as engine:
        ours = asking.answers(engine, asked)
    asking.assert_equal(ours, asking.reference(model, asked, method, 6))
