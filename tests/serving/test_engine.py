"""One engine under everything that an operator does to it: budgets of requests, caches, chunks, preemption, order."""

import random
from pathlib import Path
from typing import Any

import asking
import pytest
import small
import torch
from asking import answers, assert_equal, reference, requests, served

from llava_consensus.hosts.base import Tiles
from llava_consensus.hosts.hf.rows import PictureRows

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llava")
    return folder, small.llava(folder)


def counted(engine: Any, name: str) -> float:
    """What vLLM has counted."""
    return next(one.value for one in engine.get_metrics() if one.name == f"vllm:{name}")


@pytest.mark.parametrize("method", ["consensusdrop+", "visionzip"])
def test_chunks_preemption_and_order(llava: Any, method: str) -> None:
    """Prompts in chunks, a cache of a few blocks that requests take from each other, twice, in mixed order."""
    folder, model = llava
    asked = requests("llava", 12)
    expected = reference(model, asked, method, 5, length=24)
    order = [*range(12), *range(12)]
    random.Random(0).shuffle(order)
    small_ones = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 6, "block_size": 32, "max_model_len": 64}
    with served(folder, method, 5, {**small_ones, "disable_log_stats": False}) as engine:
        found = answers(engine, [asked[i] for i in order], length=24)
        assert counted(engine, "num_preemptions") > 0
    assert_equal(found, [expected[i] for i in order])


@pytest.mark.parametrize("prefix", [True, False])
def test_the_prefix_cache_on_and_off(llava: Any, prefix: bool) -> None:
    folder, model = llava
    asked = [one for one in requests("llava", 12) if len(one.pictures) > 1]
    settings = {"block_size": 32, "enable_prefix_caching": prefix, "disable_log_stats": False}
    with served(folder, "consensusdrop+", 12, settings) as engine:
        first, again = answers(engine, asked), answers(engine, asked)
        assert (counted(engine, "prefix_cache_hits") > 0) == prefix
    for found in (first, again):
        assert_equal(found, reference(model, asked, "consensusdrop+", 12))


def test_two_questions_two_budgets_and_a_picture_shown_twice_share_nothing(llava: Any) -> None:
    folder, model = llava
    one, two = small.picture(1), small.picture(2)
    asked = [
        asking.Request("w7 <image> w8 w9 w10", [one]),
        asking.Request("w7 <image> w80 w90 w100", [one]),
        asking.Request("w7 <image> w8 <image> w10", [one, one]),
        asking.Request("w7 <image> w8 <image> w10", [one, two]),
    ]
    with served(folder, "consensusdrop", 5, largest=9) as engine:
        for tokens in (5, 9, 0.5, 5):
            more = {"mm_processor_kwargs": {"visual_tokens": tokens}}
            found = [answers(engine, [request], **more)[0] for request in asked]
            assert_equal(found, reference(model, asked, "consensusdrop", tokens))


def test_bad_requests_are_errors_of_the_request_and_the_engine_goes_on(llava: Any) -> None:
    folder, model = llava
    (asked,) = requests("llava", 2)[1:]
    with served(folder, "visionzip", 5, largest=9) as engine:
        for tokens, words in [
            (0, "at least 1"),
            (10, "more than this server allows"),
            ("many", "whole number"),
            (1.5, "share"),
        ]:
            with pytest.raises(ValueError, match=words):
                answers(engine, [asked], mm_processor_kwargs={"visual_tokens": tokens})
        assert_equal(answers(engine, [asked]), reference(model, [asked], "visionzip", 5))


def test_what_is_kept_of_a_picture_is_what_is_counted() -> None:
    """Not views, which would keep all pictures of their batch in memory."""
    from llava_consensus.serving.engine import Encoded, Kept

    batch, none = torch.zeros(16, 1, 10, 64), torch.zeros(0)
    kept = Kept()
    kept.put((1,), Encoded(Tiles(batch[3], {"key": batch[3]}), batch[3, 0], PictureRows(none, none, 1), {}))
    found = kept.get((1,))
    assert found is not None
    held = [one.untyped_storage().nbytes() for one in (found.tokens, found.tiles.projected, found.tiles.parts["key"])]
    assert sum(held) == found.size == 3 * batch[3].nbytes


def test_long_prompts_are_reduced_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from llava_consensus.serving import engine

    monkeypatch.setattr(engine, "BATCH_ROWS", 100)
    assert list(engine.batches([0, 1, 2, 4, 5], [40, 50, 30, 1, 300, 20])) == [[0, 1], [2], [4], [5]]
