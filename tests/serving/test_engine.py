"""One engine under everything that an operator does to it: budgets of requests, caches, several steps of a prompt."""

from pathlib import Path
from typing import Any

import asking
import numpy as np
import pytest
import small
import torch
from asking import answers, assert_equal, counted, reference, requests, served

from llava_consensus.hosts.images import Image as Rows
from llava_consensus.hosts.tower import Tiles

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def llava(made: Any) -> tuple[Path, Any]:
    return made("llava")


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
    with served(folder, "consensusdrop", 5, largest=16) as engine:
        for tokens in (5, 9, 16, 0.5, 5):
            more = {"mm_processor_kwargs": {"visual_tokens": tokens}}
            found = [answers(engine, [request], **more)[0] for request in asked]
            assert_equal(found, reference(model, asked, "consensusdrop", tokens))


def test_a_step_encodes_as_many_pictures_as_a_plain_engine_does(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of 16 tokens in a step of 64, though five are left of each."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    asked = [asking.Request(f"w7 <image> w{8 + number}", [small.picture(number)]) for number in range(16)]
    settings, found = {"max_num_batched_tokens": 64, "max_model_len": 64, "max_num_seqs": 16}, []
    for method, largest in (("visionzip", 9), ("full", 16)):
        encoded: list[int] = []

        def watch(model: Any, encoded: list[int] = encoded) -> None:
            model.vision_tower.register_forward_pre_hook(lambda _, args: encoded.append(len(args[0])))

        with served(llava[0], method, 5, settings, largest=largest) as engine:
            engine.apply_model(watch)
            answers(engine, asked, length=1)
        assert sum(encoded) == 16
        found.append(max(encoded))
    assert found == [4, 4]


def test_bad_requests_are_errors_of_the_request_and_the_engine_goes_on(llava: Any) -> None:
    folder, model = llava
    (asked,) = requests("llava", 2)[1:]
    with served(folder, "visionzip", 5, largest=9) as engine:
        reasons = {0: "at least 1", 10: "more than this server allows", "many": "whole number", 1.5: "share"}
        for tokens, words in reasons.items():
            with pytest.raises(ValueError, match=words):
                answers(engine, [asked], mm_processor_kwargs={"visual_tokens": tokens})
        assert_equal(answers(engine, [asked]), reference(model, [asked], "visionzip", 5))


def test_what_is_kept_of_a_picture_is_what_is_counted() -> None:
    """Not views, which would keep all images of their batch in memory."""
    from llava_consensus.serving.engine import EncodedImage, Kept

    batch, none = torch.zeros(16, 1, 10, 64), np.zeros(0, np.int64)
    kept: Kept[EncodedImage] = Kept(1 << 20)
    rows, tiles = Rows(0, none, none, none, 1, False, 0), Tiles(1, 10, 0, {"key": batch[3]})
    kept.put((1,), EncodedImage(tiles, batch[3, 0], rows, {"pixel_values": batch[3]}))
    found = kept.get((1,))
    assert found is not None
    parts = found.tokens, found.tiles.parts["key"], found.inputs["pixel_values"]
    assert sum(one.untyped_storage().nbytes() for one in parts) == found.size == 3 * batch[3].nbytes


def test_a_prompt_encoded_in_several_steps_is_reduced_once(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    folder, model = llava
    shown = [small.picture(number) for number in range(6)]
    asked = [asking.Request("w7 " + "<image> w8 w9 " * 6 + f"w{number}", shown) for number in (10, 11)]
    prompts, steps = [], []

    def watch(model: Any) -> None:
        reduced, asked = model.engine.reduced, model._asked

        def counting(given: Any) -> Any:
            prompts.append(len(given))
            return reduced(given)

        def stepping(*given: Any) -> Any:
            steps.append(1)
            return asked(*given)

        model.engine.reduced, model._asked = counting, stepping

    settings = {"max_num_batched_tokens": 64, "max_model_len": 64, "limit_mm_per_prompt": {"image": 6}}
    with served(folder, "consensusdrop", 5, settings) as engine:
        engine.apply_model(watch)
        found = answers(engine, asked)
    assert sum(prompts) == 2 < len(steps)
    assert_equal(found, reference(model, asked, "consensusdrop", 5))


def test_long_prompts_are_reduced_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from llava_consensus.serving import engine

    monkeypatch.setattr(engine, "BATCH_ROWS", 100)
    prompts = [engine.FullPrompt(torch.zeros(rows), torch.zeros(rows), [], []) for rows in (40, 50, 30, 300, 20)]
    found = [[len(prompt.ids) for prompt in batch] for batch in engine.batches(prompts)]
    assert found == [[40, 50], [30], [300], [20]]


def test_pictures_that_items_of_a_message_share_are_sent_once() -> None:
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from llava_consensus.serving.wire import send_once

    send_once()
    pixels, other = torch.rand(3, 100, 100), torch.rand(3, 100, 100)
    sent = MsgpackEncoder().encode([pixels, other, pixels, pixels[:1], pixels.view(300, 100)])
    assert sum(len(memoryview(one).cast("B")) for one in sent) < 3.5 * pixels.nbytes + 2**12
    found = MsgpackDecoder(list[torch.Tensor]).decode([bytes(one) for one in sent])
    assert found[0] is found[2] and torch.equal(found[0], pixels) and torch.equal(found[1], other)
    assert torch.equal(found[3], pixels[:1]) and torch.equal(found[4], pixels.view(300, 100))
