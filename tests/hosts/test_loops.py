"""Models of transformers with a method attached, outside of a plain `generate`: caches, lengths, training, wrappers,
arguments of calls, words behind several images, and positions of three axes.
"""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_models import CASES, END, TAG, prompts
from torch import Tensor

from llava_consensus import attach, cli, make
from llava_consensus.errors import NonFiniteError, OptionError
from llava_consensus.hosts.inputs import Inputs
from llava_consensus.methods import METHODS
from llava_consensus.reduction.saliency import EPSILON

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")
NEW = 5


class Tiny:
    """One host of the tests, with prompts of its own."""

    def __init__(self, name: str) -> None:
        self.name, self.case, self.model = name, CASES[name], CASES[name].build()

    def attach(self, method: str, **options: Any) -> Any:
        if "tile_budget" in METHODS[method].__dataclass_fields__:
            options = {"tile_budget": self.case.tile_budget, **options}
        return attach(self.model, method, self.case.tokens, **options)

    def inputs(self, kind: str) -> dict[str, Any]:
        a, b, c = (self.case.picture(number) for number in range(3))
        if kind == "batch":  # so that the padding differs before and after a reduction
            return prompts([1, 5, a, 6, b, 7, 8], [1, c, 9])
        return prompts([1, 5, 6, 7, 8, 9, a] if kind == "picture last" else [1, 5, 6, a, 7, 8, 9, 10])


@pytest.fixture(scope="module")
def llava() -> Tiny:
    return Tiny("llava")


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    given = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **{**given, **options})


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4)


def kept(attached: Any) -> list[tuple[int, int]]:
    return [(one.before, one.after) for one in attached.outcomes]


def forked(cache: Any, change: Any) -> Any:
    change(cache)
    return cache


CHANGES: dict[str, Any] = {  # of a cache of two prompts, and which rows it holds then
    "none": (lambda cache: cache, [0, 1]),
    "copied": (copy.deepcopy, [0, 1]),
    "copied shallowly": (copy.copy, [0, 1]),
    "reordered": (lambda cache: forked(cache, lambda own: own.reorder_cache(torch.tensor([1, 0]))), [1, 0]),
    "selected": (lambda cache: forked(cache, lambda own: own.batch_select_indices(torch.tensor([1]))), [1]),
    "repeated": (lambda cache: forked(cache, lambda own: own.batch_repeat_interleave(2)), [0, 0, 1, 1]),
}


@pytest.mark.parametrize("method", ["consensusdrop", "consensusdrop+", "fastv"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "mistral_3"])
@torch.no_grad()
def test_a_cache_is_continued_after_detach_and_under_another_method(name: str, method: str) -> None:
    """Also its copies when it is gone, and after rows were reordered, selected, repeated or removed."""
    tiny = Tiny(name)
    inputs, words = tiny.inputs("batch"), torch.tensor([[7], [8]])
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(words)), 1)

    def filled(cache: Any = None) -> Any:
        with tiny.attach(method):
            return tiny.model(**inputs, use_cache=True, past_key_values=cache).past_key_values

    def answer(cache: Any, rows: list[int]) -> Tensor:
        given = {"input_ids": words[rows], "attention_mask": mask[rows], "past_key_values": cache}
        if tiny.case.kind.startswith("qwen"):  # the plain model needs them too
            given["position_ids"] = (mask.sum(1, keepdim=True) - 1 + deltas)[rows].expand(3, -1, -1)
        return tiny.model(**given).logits

    with tiny.attach(method):
        cache = tiny.model(**inputs, use_cache=True).past_key_values
        deltas = getattr(tiny.model.model, "rope_deltas", None)
        expected = answer(cache, [0, 1])
    for change, rows in CHANGES.values():
        cache = change(filled())
        assert close(answer(cache, rows), expected[rows])
    cache = filled(transformers.StaticCache(tiny.model.config.get_text_config(), max_cache_len=128))
    assert close(answer(cache, [0, 1]), expected)
    cache = filled()
    with attach(tiny.model, "divprune", tiny.case.tokens):
        assert close(answer(cache, [0, 1]), expected)
    cache.crop(-1)
    assert close(answer(cache, [0, 1]), expected)
    with pytest.raises(OptionError, match="crop: the last 9 rows"):
        cache.crop(-10)
    whole, tiny.model = tiny.model, CASES[name].build()
    with pytest.raises(OptionError, match="only by the model that filled it"):
        answer(cache, [0, 1])
    del cache
    assert not whole.get_decoder()._forward_pre_hooks


@torch.no_grad()
def test_a_static_cache_is_used_again(llava: Tiny) -> None:
    inputs, word = llava.inputs("one"), torch.tensor([[7]])
    with llava.attach("consensusdrop+"):
        cache = transformers.StaticCache(llava.model.config.get_text_config(), max_cache_len=64)
        first = llava.model(**inputs, past_key_values=cache).logits
        expected = llava.model(input_ids=word, past_key_values=cache).logits
        cache.reset()
        text = torch.arange(5, 12)[None]
        llava.model(input_ids=text, past_key_values=cache)
        plain = llava.model(input_ids=word, past_key_values=cache).logits
        assert close(plain[:, -1], llava.model(input_ids=torch.cat((text, word), 1)).logits[:, -1])
        cache.reset()
        assert close(llava.model(**inputs, past_key_values=cache).logits, first)
        assert close(llava.model(input_ids=word, past_key_values=cache).logits, expected)
    with llava.attach("restore_calibrated"), pytest.raises(OptionError, match="a static cache"):
        generate(llava.model, inputs, cache_implementation="static")


def test_guidance_reads_prompts_of_its_own(llava: Tiny) -> None:
    inputs = llava.inputs("one")
    longer = torch.arange(5, 99)[None]  # than the image's prompt
    for method in ("consensusdrop+", "fastv"):
        with llava.attach(method) as attached:
            generate(llava.model, inputs)
            reduced = kept(attached)
            for given in ({}, {"negative_prompt_ids": longer}):
                with attached.call():
                    generate(llava.model, inputs, guidance_scale=1.5, **given)
                    assert kept(attached) == reduced


# ---- whoever reads the ids, and lengths


@pytest.mark.parametrize("method", ["full", "consensusdrop", "consensusdrop+", "fastv"])
def test_lengths_count_the_full_prompt_wherever_they_are_set(llava: Tiny, method: str) -> None:
    inputs = llava.inputs("one")
    size = inputs["input_ids"].shape[1]
    with llava.attach(method):

        def count(**options: Any) -> int:
            return llava.model.generate(**inputs, do_sample=False, **options).shape[1] - size

        assert count(max_length=size + 4) == 4
        assert count(generation_config=transformers.GenerationConfig(max_length=size + 4)) == 4
        assert count() == 20
        given = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(max_length=size + 3)])
        assert count(stopping_criteria=given) == 3
        assert count(max_length=size + 9, max_new_tokens=2) == 2
        config, llava.model.generation_config = llava.model.generation_config, transformers.GenerationConfig()
        try:
            llava.model.generation_config.max_length = size + 6
            assert count() == 6
        finally:
            llava.model.generation_config = config


def test_features_that_were_encoded_before_are_named(llava: Tiny) -> None:
    inputs = llava.inputs("one")
    features = {"image": llava.model.get_image_features(inputs.pop("pixel_values"), return_dict=True)}
    with llava.attach("consensusdrop"), pytest.warns(UserWarning, match="mm_encoder_outputs"):
        llava.model(**inputs, mm_encoder_outputs=features)
    with llava.attach("full"):
        assert llava.model(**inputs, mm_encoder_outputs=features).logits.shape[1] == inputs["input_ids"].shape[1]


# ---- training, and wrappers


@pytest.mark.parametrize("method", ["fastv", "sparsevlm"])
def test_labels_of_every_row_leave_the_last_row_of_the_picture_to_ask(llava: Tiny, method: str) -> None:
    inputs = llava.inputs("one")
    labels = inputs["input_ids"].clone()
    with llava.attach(method) as attached:
        loss = llava.model(**inputs, labels=labels).loss
        assert torch.isfinite(loss) and all(after < before for before, after in kept(attached))
        labels[inputs["input_ids"] == 500] = -100  # as many recipes have it: the same rows ask
        llava.model(**inputs, labels=labels)
        assert all(after < before for before, after in kept(attached))


@pytest.mark.parametrize(("name", "method"), [("llava", "fastv"), ("qwen3_vl", "dart")])
def test_checkpoints_compute_the_same_gradients(name: str, method: str) -> None:
    tiny = Tiny(name)
    model, inputs = tiny.model.train(), tiny.inputs("one")
    labels = inputs["input_ids"].clone()
    labels[:, :-3] = -100
    found = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad(set_to_none=True)
        with tiny.attach(method):
            model(**inputs, labels=labels, use_cache=False).loss.backward()
        found.append([one.grad.clone() for one in model.model.language_model.parameters() if one.grad is not None])
    assert found[0] and all(map(torch.allclose, *found))


@torch.no_grad()
def test_a_placeholder_outside_the_vocabulary() -> None:
    """As Gemma 3 has it, which reads another word in its place."""
    tiny = Tiny("gemma3")
    inputs = tiny.inputs("one")
    expected: list[Tensor] = []
    for number in (500, 600):
        tiny.model.config.image_token_id = tiny.model.model.config.image_token_id = number
        ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == 500, number)
        with tiny.attach("consensusdrop"):
            expected.append(generate(tiny.model, {**inputs, "input_ids": ids}).logits[0])
    assert close(*expected)


def test_an_attached_model_says_that_it_cannot_be_pickled() -> None:
    tiny = Tiny("llava")  # transformers leaves hooks on a model that has run, which cannot be pickled either
    with tiny.attach("consensusdrop") as attached:
        with pytest.raises(OptionError, match="detach first"):
            pickle.dumps(tiny.model)
        assert kept(copy.deepcopy(attached)) == []
    assert pickle.dumps(tiny.model)


def test_wrappers_are_refused_by_the_name_of_the_inner_model(llava: Tiny) -> None:
    class Adapted(torch.nn.Module):
        """As PEFT wraps a model."""

        def get_base_model(self) -> Any:
            return llava.model

    with pytest.raises(OptionError, match=r"Adapted.*attach to.*model\.get_base_model\(\)"):
        attach(Adapted(), "consensusdrop", 5)
    wrapper, inputs = torch.nn.DataParallel(llava.model), llava.inputs("one")
    with pytest.raises(OptionError, match=r"DataParallel.*attach to.*model\.module"):
        attach(wrapper, "consensusdrop", 5)
    with attach(wrapper.module, "consensusdrop", 5) as attached:
        assert wrapper(**inputs).logits.shape[1] == inputs["input_ids"].shape[1]
        assert kept(attached) == [(16, 5)]


# ---- arguments and inputs that the plain model takes: followed, or refused in one line that names them


def one(name: str, *numbers: int) -> dict[str, Any]:
    pictures = [part for number in numbers for part in (6, CASES[name].picture(number))]
    return prompts([1, 5, *pictures, 7, 8, 9])


@pytest.mark.parametrize("name", ["llava", "llava_next", "pixtral", "mistral_3"])
@torch.no_grad()
def test_another_layer_of_the_tower_is_read_if_a_call_names_it(name: str) -> None:
    model, case = CASES[name].build(), CASES[name]
    other = {"vision_feature_layer": -3 if name.startswith("llava") else -2}
    same = {"vision_feature_layer": model.config.vision_feature_layer}
    plain = model(**one(name, 0), **other).logits
    with attach(model, "consensusdrop", case.tokens):
        assert torch.allclose(model(**one(name, 0), **same).logits, model(**one(name, 0)).logits, atol=1e-5)
        found = model(**one(name, 0), **other).logits
    model.config.vision_feature_layer = model.model.config.vision_feature_layer = other["vision_feature_layer"]
    with attach(model, "consensusdrop", case.tokens):
        assert torch.allclose(model(**one(name, 0)).logits, found, atol=1e-5)
    with attach(model, "fastv", 4096):
        assert torch.allclose(model(**one(name, 0)).logits, plain, atol=1e-5)


@pytest.mark.parametrize("name", ["pixtral", "mistral_3", "qwen2_5_vl", "smolvlm", "internvl"])
def test_the_question_is_words(name: str) -> None:
    """Breaks, tags and markers of a later image are no part of the question about an earlier one."""
    inputs, case = one(name, 0, 2), CASES[name]
    model = case.build()
    with attach(model, "consensusdrop", case.tokens) as attached, torch.no_grad():
        read: list[Any] = []
        budgets = attached._budgets
        attached._budgets = lambda stage, prompt: read.append(prompt) or budgets(stage, prompt)  # type: ignore[method-assign,func-returns-value]
        model(**inputs)
    asked, later = (inputs["input_ids"][0][text].tolist() for text in read[-1].text)
    assert [word for word in asked if word < 10] == [6, 7, 8, 9] and TAG not in asked
    assert len(asked) <= 1 + len(later) + 1 and asked.count(END) <= 1  # that of the first image itself


@torch.no_grad()
def test_logits_of_any_rows_and_states_of_the_inner_model() -> None:
    model, inputs = CASES["llava"].build(), one("llava", 0)
    with attach(model, "consensusdrop", 5):
        whole = model(**inputs).logits
        few = model(**inputs, logits_to_keep=torch.tensor([0, 3])).logits
        assert torch.allclose(few, whole[:, [0, 3]], atol=1e-5)
        states = model.model(**inputs).last_hidden_state
        assert torch.allclose(model.lm_head(states), whole, atol=1e-5)


@torch.no_grad()
def test_a_picture_that_is_not_finite_is_named() -> None:
    model = CASES["llava"].build()
    inputs = prompts(*([1, CASES["llava"].picture(number), 7, 8] for number in range(3)))
    inputs["pixel_values"][1] = torch.nan
    with attach(model, "consensusdrop", 5), pytest.raises(NonFiniteError, match=r"^image 1 of prompt 1: "):
        model(**inputs)


@pytest.mark.parametrize("tokens", [np.int64(8), np.float32(0.5), torch.tensor(8), torch.tensor(0.5)], ids=repr)
@torch.no_grad()
def test_numbers_of_numpy_and_torch_are_budgets(tokens: Any) -> None:
    model = CASES["llava"].build()
    with attach(model, "visionzip", tokens) as attached:
        model(**one("llava", 0))
    assert attached.outcomes[0].after == 8


@pytest.mark.parametrize("aggregate", ["all", "last", "max"])
@torch.no_grad()
def test_words_ask_about_the_pictures_before_them(aggregate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are taken once for each prompt, so that many images cost what one of their length does; each
    image is asked about by the eager first layer's rows behind it.
    """
    import hf_models

    case = hf_models.CASES["llava"]
    model, (first, second, third) = case.build(), map(case.picture, range(3))
    words = [1, first, 5, 6, second, 7, 9, third, 8], [3, 4, first, 5]
    inputs, made = hf_models.prompts(*words), []
    probe = Inputs.probe_of
    monkeypatch.setattr(Inputs, "probe_of", lambda *given: made.append(probe(*given)) or made[0])
    with attach(model, "consensusdrop", tokens=case.tokens, alpha=0.0, aggregate=aggregate) as attached:
        model(**inputs)
        found = [one.reductions[0][1].cross[0] for one in attached.outcomes]
    assert (*made[0].query.shape[:3:2], len(made[0].key)) == (2, 5, 2)  # sequences, words behind images, sequences
    model.set_attn_implementation("eager")
    attention = model(**inputs, output_attentions=True).attentions[0].mean(1)  # [R, S, S]
    picture = inputs["input_ids"] == hf_models.IMAGE
    starts = picture & ~picture.roll(1, 1)
    for cross, (row, start) in zip(found, starts.nonzero().tolist(), strict=True):
        end = start + len(first.ids)
        rows = attention[row, end:][~picture[row, end:]][:, start:end]
        rows = {"all": rows, "last": rows[-1:], "max": rows.amax(0, keepdim=True)}[aggregate]
        assert torch.allclose(cross, (rows / (rows.sum(-1, keepdim=True) + EPSILON)).mean(0), atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_new_positions_are_refused_and_a_default_is_said(family: str) -> None:
    case = CASES[family]
    model = case.build()
    for method in ("consensusdrop", "random", "fastv", "pyramiddrop"):
        with pytest.raises(OptionError, match=r"positions=renumber: Qwen\w+ has positions of three axes"):
            attach(model, method, tokens=5, positions="renumber")
    inputs = prompts([1, 7, case.picture(0), 8, 9])
    for method, options, notes in (
        ("consensusdrop", {}, ("positions of three axes are kept",)),
        ("consensusdrop+", {}, ()),
        ("consensusdrop", {"positions": "keep"}, ()),
    ):
        with attach(model, method, tokens=5, **options) as attached:
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
            assert attached.notes == notes


def test_the_list_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--host", "qwen2.5-vl"]) == 0
    assert "positions: kept, as they have three axes" in capsys.readouterr().out
    assert cli.main(["list", "--host", "llava"]) == 0
    assert "positions:" not in capsys.readouterr().out


def test_a_method_knows_what_it_was_asked() -> None:
    assert make("consensusdrop", positions="renumber") == make("consensusdrop")
    assert make("consensusdrop", positions="renumber").asked == {"positions"}
    assert make("consensusdrop").asked == set()


@torch.no_grad()
def test_padding_behind_a_prompt_is_no_row_of_the_cache(llava: Tiny) -> None:
    """Two images leave one prompt and one leaves another, after which both have as many rows: none is padding."""
    a, b, c = (llava.case.picture(number) for number in range(3))
    long, short = [1, a, b, 7], [1, c, *range(20, 26)]
    both, alone = prompts(long, [*short, *[0] * (len(a.ids) - llava.case.tokens)]), prompts(short)
    both["attention_mask"][1, alone["input_ids"].shape[1] :] = 0

    def step(inputs: dict[str, Any]) -> Tensor:
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        given = {"input_ids": mask[:, -1:] * 15, "attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
        return llava.model(**given, past_key_values=llava.model(**inputs).past_key_values).logits[:, -1]

    with llava.attach("divprune"):
        assert close(step(both)[1:], step(alone))
