"""Life of an attachment, and modules and models around it that change: drafts, adapters, threads, hooks."""

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES, prompts

from llava_consensus import attach
from llava_consensus.errors import OptionError

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="needs transformers >= 5.19")
METHODS = ("consensusdrop", "fastv")
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def built(name: str) -> tuple[Any, dict[str, Any], int]:
    case = CASES[name]
    return case.build(), prompts([1, 5, case.picture(0), 7, 8, 9]), case.tokens


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl"])
def test_a_reduced_draft_leaves_the_answer_of_its_target(name: str, method: str, both: bool) -> None:
    target, inputs, tokens = built(name)
    draft = copy.deepcopy(target)
    for parameter in draft.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)  # so that some of its guesses are wrong
    attached = [attach(model, method, tokens) for model in ((draft, target) if both else (draft,))]
    wanted = target.generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), wanted)
    assert [one.after for one in attached[-1].outcomes] == [tokens] * both  # transformers shows drafts no images


@pytest.mark.parametrize("method", METHODS)
def test_an_attachment_is_entered_again_and_keeps_no_model(method: str) -> None:
    model, inputs, tokens = built("llava")
    plain, gone = model(**inputs).logits, weakref.ref(model)
    attached, found, caches = attach(model, method, tokens), [], []
    for _ in range(2):
        with attached:
            found.append(
                model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True).logits[-1]
            )
            caches.append(model(**inputs).past_key_values)  # the hooks that it needs are not registered twice
        assert torch.equal(model(**inputs).logits, plain)
    assert torch.equal(*found)
    del model, caches
    gc.collect()
    assert gone() is None
    with pytest.raises(OptionError, match="the model of this attachment is gone"):
        attached.__enter__()


def test_of_threads_that_attach_at_once_only_one_does() -> None:
    model, inputs, tokens = built("llava")
    start, plain = threading.Barrier(6), model(**inputs).logits

    def work(number: int) -> Any:
        start.wait()
        try:
            return attach(model, METHODS[number % 2], tokens)
        except OptionError as error:
            return str(error)

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(work, range(6)))
    refused = [one for one in found if isinstance(one, str)]
    assert len(refused) == 5 and all("attached already" in one for one in refused)
    next(one for one in found if not isinstance(one, str)).detach()
    assert torch.equal(model(**inputs).logits, plain)


@pytest.mark.parametrize("method", METHODS)
def test_detach_returns_while_other_threads_ask(method: str) -> None:
    model, inputs, tokens = built("llava")
    plain, stop, said = model.generate(**inputs, **GREEDY).tolist(), threading.Event(), list[Any]()
    attached = attach(model, method, tokens)
    reduced = model.generate(**inputs, **GREEDY).tolist()

    def work() -> None:
        while not stop.is_set():
            said.append(model.generate(**inputs, **GREEDY).tolist())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        ending = threading.Thread(target=attached.detach)
        ending.start()
        ending.join(20)
        assert not ending.is_alive() and model.generate(**inputs, **GREEDY).tolist() == plain
        attached.__enter__()
    attached.detach()
    stop.set()
    for thread in threads:
        thread.join()
    assert reduced != plain and said and all(one in (plain, reduced) for one in said)


@pytest.mark.parametrize("method", ["consensusdrop", "visionzip", "fastv"])
@pytest.mark.parametrize("where", [r".*vision_tower.*(q_proj|k_proj)", r".*language_model.*(q_proj|k_proj|v_proj)"])
def test_adapters_added_after_attach_are_followed(method: str, where: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=64, target_modules=where, init_lora_weights=False)
    logits = []
    for first in (True, False):
        model, inputs, tokens = built("llava")
        attached = None if first else attach(model, method, tokens)
        torch.manual_seed(1)
        peft.get_peft_model(model, config)
        with attached or attach(model, method, tokens), torch.no_grad():
            logits.append(model(**inputs).logits)
    assert torch.allclose(*logits, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_attention_maps_are_of_the_rows_that_each_layer_has(method: str) -> None:
    model, inputs, tokens = built("llava")
    model.set_attn_implementation("eager")
    with attach(model, method, tokens) as attached:
        output = model(**inputs, output_attentions=True)
    size = inputs["input_ids"].shape[1]
    (outcome,) = attached.outcomes
    lengths = [size - outcome.before + left for left in outcome.entering or (outcome.after,) * 4]
    assert [tuple(one.shape[-2:]) for one in output.attentions] == [(left, left) for left in lengths]
    assert output.logits.shape[1] == size
