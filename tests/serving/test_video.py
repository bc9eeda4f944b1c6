"""Videos of LLaVA-OneVision in vLLM against the same method attached to transformers."""

import os
from typing import Any

import asking
import pytest
import small
from asking import answers, assert_equal, clips, counted, reference, served

from llava_consensus.errors import OptionError
from llava_consensus.methods import METHODS as known
from llava_consensus.methods import make
from llava_consensus.reduction.method import Place

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

METHODS = [name for name in known if make(name).place is Place.TOKENS]
SLICE = ["divprune", "pool", "vispruner"]
EVERYTHING = bool(os.environ.get("EVERYTHING"))  # make test-serving EVERYTHING=1
BOTH = asking.Request("w7 <image> w50 <video> w9 w13", [small.picture(3)], [small.clip(3, 6)])


@pytest.mark.parametrize("method", METHODS if EVERYTHING else SLICE)
def test_a_budget_counts_the_tokens_of_a_video_as_attach_does(made: Any, method: str) -> None:
    """Alone and in batches of unequal length; beside an image where the method does not read the prompt."""
    folder, model = made("llava_onevision")
    asked = clips(4) if make(method).reads_prompt else [*clips(4), BOTH]
    try:
        with served(folder, method, 20, largest=0.99) as engine:
            for tokens in (20, 0.5):
                found = answers(engine, asked, mm_processor_kwargs={"visual_tokens": tokens})
                assert_equal(found, reference(model, asked, method, tokens))
    except OptionError:  # refused: then by attach too
        with pytest.raises(OptionError):
            reference(model, asked, method, 20)


@pytest.mark.parametrize("method", ["consensusdrop", "consensusdrop+"])
def test_questions_about_videos_kept_and_new_positions_and_the_prefix_cache(made: Any, method: str) -> None:
    folder, model = made("llava_onevision")
    asked = clips(4) + clips(4, seed=1)
    with served(folder, method, 20, {"block_size": 32, "disable_log_stats": False}) as engine:
        with pytest.raises(ValueError, match="images and videos in one prompt are not adapted to a method"):
            answers(engine, [BOTH])
        first, again = answers(engine, asked), answers(engine, asked)
        assert counted(engine, "prefix_cache_hits") > 0
    for found in (first, again):
        assert_equal(found, reference(model, asked, method, 20))
