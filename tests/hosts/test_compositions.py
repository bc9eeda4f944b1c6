"""Methods one after the other: each acts on what the one before it left. In float64, against models made so."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import CASES, double, prompts
from models import IMAGE, tiny_llava
from torch import Tensor

from llava_consensus import attach, make
from llava_consensus.errors import OptionError
from llava_consensus.hosts.open_tower import positions, shrink
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import SHAPES, account, kv_bytes, llm_flops

SMALL, LEFT, PATCH = 9, 4, 14  # tokens of the smaller image, 3 x 3, and what stays of them
IDS = [1, 7, 8, 9, 5, 11]


def smaller_tower(vision: Any) -> None:
    """Makes a tower of 4 x 4 patches one of 3 x 3, its position embeddings as `resize` has them."""
    embeddings = getattr(vision, "vision_model", vision).embeddings
    embeddings.position_embedding.weight = torch.nn.Parameter(positions(embeddings.position_embedding.weight, 3, 3, 1))
    embeddings.position_embedding.num_embeddings = SMALL + 1
    embeddings.position_ids = torch.arange(SMALL + 1)[None]
    embeddings.image_size = embeddings.config.image_size = vision.config.image_size = 3 * PATCH


def hf_logits(model: Any, count: int, pixels: Tensor) -> Tensor:
    ids = torch.tensor([[*IDS[:2], *[CASES["llava"].picture(0).ids[0]] * count, *IDS[2:]]])
    logits: Tensor = model(input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids)).logits
    return logits[:, -len(IDS[2:]) :]


def official_logits(model: Any, count: int, pixels: Tensor) -> Tensor:
    logits: Tensor = model(torch.tensor([[*IDS[:2], -200, *IDS[2:]]]), images=pixels).logits
    return logits[:, -len(IDS[2:]) :]


@pytest.mark.parametrize("host", ["transformers", "official"])
@pytest.mark.parametrize("method", ["consensusdrop", "visionzip", "divprune"])
def test_a_smaller_picture_then_a_method_is_the_method_on_a_smaller_model(
    host: str, method: str, tower_folder: Path
) -> None:
    official = host == "official"
    logits = official_logits if official else hf_logits
    model = (tiny_llava(tower_folder) if official else CASES["llava"].build()).double()
    small = copy.deepcopy(model)
    smaller_tower(small.get_vision_tower().vision_tower if official else small.model.vision_tower)
    pixels = torch.randn(1, 3, IMAGE, IMAGE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with attach(small, method, tokens=LEFT):
        twin = logits(small, SMALL, shrink(pixels, 3 * PATCH, 3 * PATCH).double())
    with attach(model, f"resize:tokens={SMALL}+{method}", tokens=LEFT) as attached:
        ours = logits(model, 16, pixels)
        assert [(one.before, one.after) for one in attached.outcomes] == [(16, LEFT)]
    torch.testing.assert_close(ours, twin, rtol=0, atol=1e-9)


def rows_of(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that enter the first layer, what leaves the second, and the logits of the last row."""
    found = {}
    first, second = model.model.language_model.layers[:2]
    note = first.register_forward_pre_hook(lambda _, args: found.update(rows=args[0]))
    with note, second.register_forward_pre_hook(lambda _, args: found.update(second=args[0])):
        logits = model(**inputs).logits[:, -1]
    return found["rows"], found["second"], logits


@pytest.mark.parametrize("first", ["consensusdrop:tokens=8", "resize:tokens=9", "divprune:tokens=8,positions=keep"])
def test_what_is_left_is_cut_between_layers(first: str) -> None:
    """FastV by hand: the second layer's input under the first method, its last row's attention, the layers after it."""
    model = CASES["llava"].build().double()
    inputs = double(prompts([*IDS[:2], CASES["llava"].picture(0), *IDS[2:]]))
    name, _, options = first.partition(":")
    given = dict(one.split("=") for one in options.split(","))
    count = int(given.pop("tokens"))
    with attach(model, name, tokens=count, **given) as attached:
        places = torch.arange(len(IDS) + count)
        if given:  # positions that are kept
            model(**inputs)
            chosen = attached.outcomes[0].reductions[0][1].kept[0]
            places = torch.cat((torch.tensor([0, 1]), 2 + chosen, torch.arange(18, 18 + len(IDS) - 2)))
        rows, second, _ = rows_of(model, inputs)
    decoder = model.model.language_model
    layer = decoder.layers[0]  # whose attention FastV reads, in a model of four layers
    model.set_attn_implementation("eager")
    maps = decoder(inputs_embeds=rows, position_ids=places[None], output_attentions=True).attentions[0]  # [1, H, S, S]
    model.set_attn_implementation("sdpa")
    seen = maps[0, :, -1].mean(0)[2 : 2 + count]
    best = seen.topk(LEFT).indices.sort().values
    left = torch.cat((torch.tensor([0, 1]), 2 + best, torch.arange(2 + count, rows.shape[1])))
    # with a word after the prompt, whose row a decode step computes on the cache: no row before it changes
    word = torch.tensor([[13]])
    places, left = torch.cat((places, places[-1:] + 1)), torch.cat((left, torch.tensor([rows.shape[1]])))
    hidden = torch.cat((rows, decoder.embed_tokens(word)), 1)
    turned = decoder.rotary_emb(hidden, places[None])
    hidden = layer(hidden, attention_mask=None, position_embeddings=turned, position_ids=places[None])
    torch.testing.assert_close(hidden[:, :-1], second)
    hidden, turned = hidden[:, left], tuple(one[:, left] for one in turned)
    for after in decoder.layers[1:]:
        hidden = after(hidden, attention_mask=None, position_embeddings=turned, position_ids=places[None, left])
    twin = model.lm_head(decoder.norm(hidden))[:, -2:]
    with attach(model, f"{first}+fastv", tokens=LEFT) as attached:
        ours = rows_of(model, inputs)[2]
        assert attached.outcomes[0][:3] == (0, 16, LEFT) and attached.outcomes[0].entering == (count, *[LEFT] * 3)
        cache = model(**inputs, use_cache=True).past_key_values
        step = model(input_ids=word, past_key_values=cache).logits[:, -1]
        asked = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        turn = model.generate(**inputs, max_new_tokens=1, **asked)
        whole = torch.cat((inputs["input_ids"], word), 1)  # a later turn, on a cache of the prompt
        later = {"input_ids": whole, "attention_mask": torch.ones_like(whole), "past_key_values": turn.past_key_values}
        later = model.generate(**later, max_new_tokens=1, **asked)
    torch.testing.assert_close(torch.stack((ours, step), 1), twin, rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.stack((turn.logits[0], later.logits[0]), 1), twin.float(), rtol=0, atol=1e-5)


def test_costs_add_up() -> None:
    """Tokens and cache follow the last method, the tower the first, and the methods' own work is the sum."""
    shape = SHAPES["llava-1.5-7b"]
    whole = make("resize:tokens=256+consensusdrop:tokens=128+fastv")
    found = account(whole, Budget(64), shape)
    assert found.layers == (128, 128, *[64] * (shape.layers - 2))
    assert found.kv_bytes == kv_bytes(shape, found.layers)
    assert found.flops.llm == llm_flops(shape, found.layers)
    assert found.flops.vision == account(make("resize"), Budget(256), shape).flops.vision
    own = make("consensusdrop").flops(shape._replace(patches=256), Budget(128))
    cut = make("fastv").flops(shape._replace(patches=128), Budget(64))
    assert found.flops.method == pytest.approx(own + cut)
    assert make("resize:tokens=64+fastv").entering(Budget(64), 576, 4) == [64] * 4
    assert make("resize:tokens=576+fastv").vision_tokens(Budget(64), shape) == [576] * shape.blocks


@pytest.mark.parametrize(
    ("name", "tokens", "line"),
    [
        ("consensusdrop:tokens=64+visionzip", 8, "act in one place"),
        ("fastv:tokens=64+consensusdrop", 8, "Write ConsensusDrop in front"),
        ("consensusdrop+fastv", 8, "tokens ConsensusDrop leaves, as in consensusdrop:tokens=128"),
        ("consensusdrop:tokens=4+fastv", 8, "fewer than the 8"),
        ("consensusdrop:tokens=8+fastv:tokens=4", 4, "Leave its tokens= out"),
        ("resize:tokens=9+divprune:positions=keep", 4, "behind a method that renumbers"),
        ("divprune:tokens=8,positions=keep+pyramiddrop", 4, "positions=renumber of PyramidDrop"),
        ("visionzip:tokens=8+restore_calibrated", 4, "both read the vision tower"),
        ("divprune:tokens=8+fastv", 0.5, "composition counts tokens"),
        ("full:tokens=8+fastv", 4, "reduces nothing"),
    ],
)
def test_what_does_not_compose_is_one_line(name: str, tokens: float, line: str) -> None:
    with pytest.raises(OptionError, match=line) as found:
        attach(CASES["llava"].build(), name, tokens=tokens)
    assert "\n" not in str(found.value)


def test_attention_of_a_block_that_merges_is_of_more_tokens_than_are_left() -> None:
    model = CASES["llava"].build()
    with pytest.raises(OptionError, match="ConsensusDrop behind ToMe: the block whose attention"):
        attach(model, "tome:tokens=12+consensusdrop", tokens=LEFT)
    with pytest.raises(OptionError, match="known on LLaVA and Qwen-VL, not on Mistral3"):
        attach(CASES["mistral_3"].build(), "resize:tokens=8+consensusdrop", tokens=LEFT)
    with attach(model, f"resize:tokens={SMALL}+divprune", tokens=LEFT):
        first, later = (prompts([1, 5, CASES["llava"].picture(number), 7]) for number in (0, 1))
        given = {"past_key_values": model(**first).past_key_values}
        given["attention_mask"] = torch.cat((first["attention_mask"], later["attention_mask"]), 1)
        with pytest.raises(OptionError, match="pass the whole conversation"):
            model(**later | given)


@pytest.mark.parametrize("case", [CASES["llava"], CASES["llava_next_video video"]])  # of 16 tokens each
def test_a_first_method_with_nothing_to_do_leaves_the_second_as_it_is(case: Any) -> None:
    model, rows = case.build(), [[1, 5, case.picture(0), 7, 8], [1, 5, 6, 6, case.picture(1), 9, 8, 7]]
    inputs, logits = prompts(*rows), []
    for name in ("fastv", "resize:tokens=16+fastv", "divprune:tokens=9+fastv"):
        with attach(model, name, tokens=LEFT):
            logits.append(model(**inputs).logits[:, -1])
            alone = [model(**prompts(row)).logits[:, -1] for row in rows]
        torch.testing.assert_close(logits[-1], torch.cat(alone), rtol=0, atol=1e-4)
    assert torch.equal(*logits[:2])
