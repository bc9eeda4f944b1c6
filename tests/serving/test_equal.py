"""vLLM with a method against transformers with the same method attached, same weights: tokens and log-probabilities."""

import os
import random
from pathlib import Path
from typing import Any

import asking
import hf_models
import pytest
import small
import torch
from models import write_clip

from llava_consensus.errors import OptionError
from llava_consensus.methods import METHODS as known
from llava_consensus.methods import make
from llava_consensus.reduction.method import Place

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

METHODS = [name for name in known if make(name).place is Place.TOKENS and not make(name).adaptive]
SLICE = {"divprune", "random", "pool"}  # of other families, where not everything is asked for
ONE = {"internvl", "qwen3_5", "gemma4"}  # families of which there only the test under stress is asked
STRESS = [(family, "consensusdrop") for family in small.FAMILIES]
STRESS += [("llava", "consensusdrop+"), ("llava", "visionzip")]
EVERYTHING = bool(os.environ.get("EVERYTHING"))  # make test-serving EVERYTHING=1


def asked_for(family: str, method: str) -> bool:
    """Every method is asked of LLaVA, a few of other families."""
    return EVERYTHING or family == "llava" or (family not in ONE and method in SLICE)


PAIRS = [(family, method) for family in small.FAMILIES for method in METHODS if asked_for(family, method)]


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_a_method_in_vllm_is_the_method_on_transformers(made: Any, family: str, method: str) -> None:
    folder, model = made(family)
    asked, tokens = asking.requests(family, 8), small.budget(family)
    # random draws by the bits of the pixels, which are bytes where vLLM normalises them in the model
    settings = {"mm_device_do_normalize": False} if method == "random" and "qwen" in family else {}
    # the first token that DivPrune takes is a tie of two, and a tile has few: the last bit of a feature would decide
    options = {"tile_budget": "global"} if method == "divprune" and family == "llava_onevision" else {}
    try:
        with asking.served(folder, method, tokens, settings, **options) as engine:
            ours = asking.answers(engine, asked)
    except OptionError:  # refused: then by attach too
        with pytest.raises(OptionError):
            asking.reference(model, asked, method, tokens, **options)
        return
    asking.assert_equal(ours, asking.reference(model, asked, method, tokens, **options))


@pytest.mark.parametrize(("family", "method"), STRESS)
def test_answers_are_equal_under_stress(made: Any, family: str, method: str) -> None:
    """Prompts in chunks that split images, caches so small that requests take their blocks and images from each other,
    every prompt twice in mixed order, and clients that leave.
    """
    folder, model = made(family)
    asked, tokens = asking.requests(family, 8), small.budget(family)
    order = [*range(8), *range(8)]
    random.Random(0).shuffle(order)
    step = 32 if family == "llava_onevision" else 16  # newlines of a tall image are more than vLLM makes room for
    settings = {"max_num_batched_tokens": step, "block_size": 32, "max_model_len": 128, "disable_log_stats": False}
    blocks = 12 if family == "gemma4" else 6  # for two kinds of layers
    settings |= {} if family == "qwen3_5" else {"num_gpu_blocks_override": blocks}  # its blocks have a state's size
    with asking.served(folder, method, tokens, settings) as engine:
        left = asking.clients_leave(engine, {2: [1, 6], 9: [3, 11]})  # some while they wait, some that have begun
        found = asking.answers(engine, [asked[i] for i in order], length=24)
        assert family == "qwen3_5" or asking.counted(engine, "num_preemptions") > 0
    stay = [i for place, i in enumerate(order) if place not in left]
    assert len(left) == 4 and len(found) == len(stay)
    expected = asking.reference(model, asked, method, tokens, length=24)
    asking.assert_equal(found, [expected[i] for i in stay])


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_a_question_is_read_by_clips_text_tower(family: str, tmp_path: Path) -> None:
    model, processor = small.FAMILIES[family](tmp_path)
    clip = write_clip(tmp_path / "official" / "clip", hf_models.SQUARE)
    torch.nn.init.normal_(clip.vision_model.post_layernorm.weight)  # vLLM builds none, and takes this one
    clip.save_pretrained(tmp_path / "official" / "clip")
    tower = model.model.vision_tower
    getattr(tower, "vision_model", tower).load_state_dict(clip.vision_model.state_dict())
    model.save_pretrained(tmp_path)
    model.config.vision_config._name_or_path = str(tmp_path / "official" / "clip")
    numbered = [(number % 3, one) for number, one in enumerate(asking.requests(family, 8)) for _ in range(2)]
    asked = [one._replace(question=f"where is number {number}?") for number, one in numbered]
    asked[1:3] = [asked[1]._replace(question="who?"), asked[2]._replace(question="how?")]
    with asking.served(tmp_path, "cdpruner", 5) as engine:
        ours = asking.answers(engine, asked)
        for question in (None, 7):
            wrong = asked[2]._replace(question=question).given | {"mm_processor_kwargs": {"question": question}}
            with pytest.raises(OptionError, match=rf"question={question}: .* Say it with the request"):
                engine.generate([wrong], use_tqdm=False)
        assert asking.answers(engine, asked[:3]) == ours[:3]
    asking.assert_equal(ours, asking.reference((model, processor), asked, "cdpruner", 5))
    other = [one._replace(question="nothing of the kind") for one in asked]
    assert asking.reference((model, processor), other, "cdpruner", 5) != ours


@pytest.mark.parametrize("method", ["consensusdrop+", "prumerge"])
@pytest.mark.parametrize("family", small.FAMILIES if EVERYTHING else ["llava"])
def test_many_requests_in_random_order_are_answered_as_each_alone(made: Any, family: str, method: str) -> None:
    folder, _ = made(family)
    every = asking.requests(family, 500 if EVERYTHING else 40)
    order = list(range(len(every)))
    random.Random(0).shuffle(order)
    settings = {"mm_processor_cache_gb": 0.001, "block_size": 32}
    with asking.served(folder, method, small.budget(family), settings) as engine:
        alone = [asking.answers(engine, [one], length=3)[0] for one in every]
        engine.reset_prefix_cache()
        together = asking.answers(engine, [every[i] for i in order], length=3)
    asking.assert_equal(together, [alone[i] for i in order])


@pytest.mark.parametrize("family", ["llava", "llava_onevision", "qwen2_5_vl"] if EVERYTHING else ["llava"])
def test_two_ranks_of_tensor_parallelism_answer_as_attach(made: Any, family: str) -> None:
    folder, model = made(family)
    asked, tokens = asking.requests(family, 4), small.budget(family)
    with asking.served(folder, "consensusdrop", tokens, {"tensor_parallel_size": 2}) as engine:
        ours = asking.answers(engine, asked)
    asking.assert_equal(ours, asking.reference(model, asked, "consensusdrop", tokens))


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="vLLM's int8 kernel for AMX takes no float32")
@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="without VNNI sums of int8 products may saturate")
def test_quantised_weights_answer_as_attach(tmp_path: Path) -> None:
    model = small.llava(tmp_path)
    small.quantise(tmp_path, model[0])
    asked = asking.requests("llava", 8)
    with asking.served(tmp_path, "consensusdrop", 5) as engine:
        ours = asking.answers(engine, asked)
    # a last bit may move an activation by a step of 1/127
    asking.assert_equal(ours, asking.reference(model, asked, "consensusdrop", 5), bound=0.2)
