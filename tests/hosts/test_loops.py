"""Models of transformers with a method attached, outside of a plain `generate`: caches, training, packed
prompts, positions, and every argument of a call, which is rewritten, passed on, or refused by name.
"""

import copy
import inspect
from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES, END, IMAGE, TAG, decoder_given, double, prompts
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as TYPES
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils.generic import TransformersKwargs

from llava_consensus import attach, make
from llava_consensus.errors import NonFiniteError, OptionError
from llava_consensus.hosts.attachment import OWN_GENERATE
from llava_consensus.hosts.inputs import Inputs
from llava_consensus.hosts.prompts import ARGUMENTS
from llava_consensus.reduction.saliency import EPSILON


@pytest.fixture(scope="module")
def llava() -> Any:
    return CASES["llava"].build()


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    given = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **{**given, **options})


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4)


def counts(attached: Any) -> list[tuple[int, int]]:
    return [(one.before, one.after) for one in attached.outcomes]


# ---- caches


CHANGES: list[tuple[Any, list[int]]] = [  # of a cache of two prompts in place, or copies, and which rows are then in it
    (lambda cache: None, [0, 1]),
    (copy.deepcopy, [0, 1]),
    (copy.copy, [0, 1]),
    (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
]


@pytest.mark.parametrize("method", ["consensusdrop", "consensusdrop+", "fastv"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "mistral_3"])
def test_a_cache_is_continued_after_detach_and_under_another_method(name: str, method: str) -> None:
    """Also its copies when it is gone, and after rows were reordered, selected, repeated or removed."""
    case = CASES[name]
    model, (a, b, c) = case.build(), map(case.picture, range(3))
    # padded in another way when cut
    inputs, words = prompts([1, 5, a, 6, b, 7, 8], [1, c, 9, 3]), torch.tensor([[7], [8]])
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(words)), 1)

    def filled(cache: Any = None) -> Any:
        with attach(model, method, case.tokens):
            return model(**inputs, use_cache=True, past_key_values=cache).past_key_values

    def answer(cache: Any, rows: list[int], words: Tensor = words) -> Tensor:
        given = {"input_ids": words[rows], "attention_mask": mask[rows], "past_key_values": cache}
        if case.kind.startswith("qwen"):  # the plain model needs them too
            given["position_ids"] = (mask.cumsum(1) - 1 + deltas)[rows, -words.shape[1] :].expand(3, -1, -1)
        return model(**given).logits[:, -1]

    with attach(model, method, case.tokens):
        cache = model(**inputs, use_cache=True).past_key_values
        deltas = getattr(model.model, "rope_deltas", None)
        expected = answer(cache, [0, 1])
    for change, rows in CHANGES:
        cache = filled()
        copied = change(cache)
        if copied is not None:
            cache = copied  # and the original is gone
        assert close(answer(cache, rows), expected[rows])
    cache = filled(transformers.StaticCache(model.config.get_text_config(), max_cache_len=128))
    assert close(answer(cache, [0, 1]), expected)
    cache = filled()
    with attach(model, "divprune", case.tokens):
        assert close(answer(cache, [0, 1]), expected)
    cache.crop(-1)
    assert close(answer(cache, [0, 1]), expected)
    cache.crop(cache.get_seq_length() - 3)  # the word and two of the prompt
    assert close(answer(cache, [0, 1], torch.cat((inputs["input_ids"][:, -2:], words), 1)), expected)
    with pytest.raises(OptionError, match="crop: the last 7 rows"):
        cache.crop(-10)
    whole, cache, model = model, filled(), case.build()
    with pytest.raises(OptionError, match="only by the model that filled it"):
        answer(cache, [0, 1])
    del cache
    assert not whole.get_decoder()._forward_pre_hooks


def test_a_static_cache_is_used_again(llava: Any) -> None:
    inputs, word = CASES["llava"].inputs(), torch.tensor([[7]])
    with attach(llava, "consensusdrop+", 5):
        cache = transformers.StaticCache(llava.config.get_text_config(), max_cache_len=64)
        first = llava(**inputs, past_key_values=cache).logits
        expected = llava(input_ids=word, past_key_values=cache).logits
        cache.reset()
        text = torch.arange(5, 12)[None]
        llava(input_ids=text, past_key_values=cache)
        plain = llava(input_ids=word, past_key_values=cache).logits
        assert close(plain[:, -1], llava(input_ids=torch.cat((text, word), 1)).logits[:, -1])
        cache.reset()
        assert close(llava(**inputs, past_key_values=cache).logits, first)
        assert close(llava(input_ids=word, past_key_values=cache).logits, expected)
    with attach(llava, "restore_calibrated", 5), pytest.raises(OptionError, match="a static cache"):
        generate(llava, inputs, cache_implementation="static")


def test_padding_behind_a_prompt_is_no_row_of_the_cache(llava: Any) -> None:
    """Two images leave one prompt and one leaves another, after which both have as many rows: none is padding."""
    a, b, c = map(CASES["llava"].picture, range(3))
    long, short = [1, a, b, 7], [1, c, *range(20, 26)]
    both, alone = prompts(long, [*short, *[0] * (len(a.ids) - 5)]), prompts(short)
    both["attention_mask"][1, alone["input_ids"].shape[1] :] = 0

    def step(inputs: dict[str, Any]) -> Tensor:
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        given = {"input_ids": mask[:, -1:] * 15, "attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
        return llava(**given, past_key_values=llava(**inputs).past_key_values).logits[:, -1]

    with attach(llava, "divprune", 5):
        assert close(step(both)[1:], step(alone))


def test_steps_have_masks_though_those_of_an_earlier_prompt_needed_none(llava: Any) -> None:
    """Of a prompt, of two that differ in length behind the cut only, and of two that do in front of it only."""
    a, b = CASES["llava"].picture(0), CASES["llava"].picture(1)
    rows = [[1, a, *range(11, 11 + count)] for count in (3, 19, 8)]
    with attach(llava, "fastv", 5):
        for batch in (rows[:1], [rows[1], [1, a, b, 3, 4, 5]], [rows[2], [1, a, b, 3, 4, 5]]):
            together, *alone = (generate(llava, prompts(*given)) for given in (batch, *zip(batch, strict=True)))
            assert close(together.logits[-1], torch.cat([one.logits[-1] for one in alone]))


def test_guidance_reads_prompts_of_its_own(llava: Any) -> None:
    inputs = CASES["llava"].inputs()
    longer = torch.arange(5, 99)[None]  # than the image's prompt
    for method in ("consensusdrop+", "fastv"):
        with attach(llava, method, 5) as attached:
            generate(llava, inputs)
            reduced = counts(attached)
            for given in ({}, {"negative_prompt_ids": longer}):
                with attached.call():
                    generate(llava, inputs, guidance_scale=1.5, **given)
                    assert counts(attached) == reduced


# ---- training


@pytest.mark.parametrize("method", ["consensusdrop", "fastv", "sparsevlm"])
@torch.enable_grad()
def test_labels_on_the_whole_prompt_leave_something_to_ask(llava: Any, method: str, recwarn: Any) -> None:
    """Methods read the text, or the last row of the image, as if there were no labels, on all rows or on words."""
    inputs = CASES["llava"].inputs()
    words = inputs["input_ids"]
    with attach(llava, method, 5) as attached:
        wanted = llava(**inputs).logits
        for labels in (words, words.where(words < 400, -100)):
            output = llava(**inputs, labels=labels)
            assert torch.isfinite(output.loss) and counts(attached) == [(16, 5)] and not attached.notes
            assert method != "consensusdrop" or torch.equal(output.logits, wanted)
    assert not [warning for warning in recwarn if "no text" in str(warning.message)]


@pytest.mark.parametrize(("name", "method"), [("llava", "fastv"), ("qwen3_vl", "dart")])
@torch.enable_grad()
def test_checkpoints_compute_the_same_gradients(name: str, method: str) -> None:
    model, inputs, found = CASES[name].build().train(), CASES[name].inputs(), []
    labels = inputs["input_ids"].clone()
    labels[:, :-3] = -100
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad(set_to_none=True)
        with attach(model, method, CASES[name].tokens):
            model(**inputs, labels=labels, use_cache=False).loss.backward()
        found.append([one.grad.clone() for one in model.model.language_model.parameters() if one.grad is not None])
    assert found[0] and all(map(torch.allclose, *found))


@pytest.mark.parametrize("checkpoints", [None, {"use_reentrant": True}, {"use_reentrant": False}])
@pytest.mark.parametrize("name", ["qwen3_vl", "mistral_3"])
@torch.enable_grad()
def test_a_frozen_tower_is_read_in_training(name: str, checkpoints: dict[str, bool] | None) -> None:
    """Its first call already: no call without gradients has told which patches make which token."""
    model = CASES[name].build().train()
    for name_of, weight in model.named_parameters():
        weight.requires_grad_("language_model" in name_of)
    if checkpoints:
        model.gradient_checkpointing_enable(checkpoints)
        model.enable_input_require_grads()
    inputs, gradients = CASES[name].inputs(), []
    with attach(model, "consensusdrop", CASES[name].tokens) as attached:
        for _ in range(2):
            model.zero_grad()
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            gradients.append([weight.grad for weight in model.parameters() if weight.grad is not None])
        assert attached.outcomes[0].after == CASES[name].tokens
    assert all(map(torch.equal, *gradients)) and any(map(torch.any, gradients[0]))


# ---- packed prompts

PACKED = ("llava", "llava_next", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm", "gemma3", "mistral_3")


def parts_of(name: str) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """A model in double precision, three prompts as calls of their own without masks, and the images of all of them."""
    model, (a, b, c, d) = CASES[name].build().double(), map(CASES[name].picture, range(4))
    rows = [[1, a, 7, 8, 9], [1, 5, b, 9, c, 10, 11], [1, d, 12, 13, 14]]

    def call(*rows: Any) -> dict[str, Any]:
        return {key: value for key, value in double(prompts(*rows)).items() if key != "attention_mask"}

    apart = []
    for row in rows:
        inputs = call(row)
        words = inputs["input_ids"]
        labels = words.where(words < 400, -100)
        labels[:, :-2] = -100  # the answer
        positions = decoder_given(model, inputs)["position_ids"]
        text = torch.arange(words.shape[1])[None]
        several = positions is not None and positions.ndim == 3
        positions = torch.cat((text[None], positions[-3:])) if several else text
        apart.append({**inputs, "labels": labels, "position_ids": positions, "use_cache": False})
    return model, apart, call(*rows)


def packed(apart: list[dict[str, Any]], images: dict[str, Any], fill: int = 0) -> dict[str, Any]:
    """These prompts in one row, with more rows that fill it up."""
    found = {**images, "use_cache": False}
    for name, value in apart[0].items():
        if isinstance(value, Tensor) and value.shape[-2:] == apart[0]["input_ids"].shape:
            row = torch.cat([part[name] for part in apart], -1)
            found[name] = torch.nn.functional.pad(row, (0, fill), value=-100 if name == "labels" else 0)
    return found


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """In double precision, which the models' own loss is not."""
    return torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])


@pytest.mark.parametrize("name", PACKED)
@torch.enable_grad()
def test_packed_prompts_are_reduced_as_if_each_were_alone(name: str) -> None:
    """Logits, loss and gradients; rows that fill up a pack have no part in them."""
    model, apart, images = parts_of(name)
    weights, together = list(model.parameters()), packed(apart, images, fill=3)
    with attach(model, "consensusdrop", CASES[name].tokens) as attached:
        outputs = [model(**part) for part in apart]
        losses = [loss_of(output.logits, part["labels"]) for output, part in zip(outputs, apart, strict=True)]
        loss = sum(losses) / 3  # each prompt has two targets
        wanted = torch.autograd.grad(loss, weights, allow_unused=True)
        output = model(**together)
        rows = [outcome.row for outcome in attached.outcomes]
        mine = loss_of(output.logits, together["labels"])
        found = torch.autograd.grad(mine, weights, allow_unused=True)
    logits = torch.cat([output.logits for output in outputs], 1)
    assert rows == [0, 1, 1, 2]
    assert (output.logits[:, : logits.shape[1]] - logits).abs().max() < 1e-9
    assert abs(mine - loss) < 1e-9 and abs(output.loss - loss) < 1e-5
    bound = 1e-7 if name == "gemma3" else 1e-9  # its norms compute in single precision
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None) and (one is None or (one - other).abs().max() < bound)


@pytest.mark.parametrize("method", ["visionzip", "fastv"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_prompts_in_several_rows_of_different_length(name: str, method: str) -> None:
    """Also of methods between layers, and with positions that are kept."""
    model, apart, images = parts_of(name)
    size = apart[2]["input_ids"].shape[1]
    first = packed(apart[:2], images)
    whole = first["input_ids"].shape[1]
    second = packed(apart[2:], images, fill=whole - size)
    both = {
        key: torch.cat((value, second[key]), value.ndim - 2)
        if key not in images or value.shape[1:] == (whole,)
        else value
        for key, value in first.items()
        if isinstance(value, Tensor)
    }
    options = {"positions": "keep"} if method == "visionzip" else {}
    with attach(model, method, CASES[name].tokens, **options):
        wanted = [model(**part).logits[0] for part in apart]
        found = model(**both, use_cache=False).logits
    assert (found[0] - torch.cat(wanted[:2])).abs().max() < 1e-9
    assert (found[1, :size] - wanted[2]).abs().max() < 1e-9


def test_packed_prompts_may_count_on_with_a_gap() -> None:
    model, apart, images = parts_of("llava")
    for number, part in enumerate(apart):
        part["position_ids"] = part["position_ids"] + 100 * number
    with attach(model, "divprune", 5):
        wanted = torch.cat([model(**part).logits for part in apart], 1)
        together = packed(apart, images)
        assert close(model(**together).logits, wanted)
        together["inputs_embeds"] = model.get_input_embeddings()(together.pop("input_ids"))
        assert close(model(**together).logits, wanted)


def test_packed_prompts_that_the_plain_model_mixes_are_refused() -> None:
    model, apart, images = parts_of("llava")
    inputs = packed(apart, images)
    size = inputs["input_ids"].shape[1]
    with attach(model, "consensusdrop", 4):
        with pytest.raises(OptionError, match="use_cache=False"):
            model(**inputs | {"use_cache": True})
        with pytest.raises(OptionError, match="position_ids alone"):
            model(**inputs, attention_mask=torch.ones(1, 1, size, size, dtype=torch.bool).tril())


# ---- arguments and inputs that the plain model takes: followed, or refused in one line that names them


def accepted(kind: str, name: str) -> set[str]:
    """Arguments of a type's model, of the part that encodes images, and of its decoder; none if it attaches to none."""
    model = getattr(transformers, name)
    config = transformers.CONFIG_MAPPING[kind]
    own = [
        value
        for value in vars(inspect.getmodule(model)).values()
        if inspect.isclass(value) and value.__module__ == model.__module__ and hasattr(value, "forward")
    ]
    parts = [part for part in own if hasattr(part, "get_image_features")]
    if not parts or kind in (*OWN_GENERATE, "blip"):
        return set()
    text = config().get_text_config()
    decoders = [MODEL_MAPPING[type(text)]] if type(text) in MODEL_MAPPING else []
    decoders += [part for part in own if part.__name__.endswith(("TextModel", "LanguageModel"))]
    signatures = [inspect.signature(part.forward).parameters.values() for part in (model, *parts, *decoders)]
    return {
        parameter.name
        for parameters in signatures
        for parameter in list(parameters)[1:]
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def test_every_argument_of_transformers_has_a_treatment() -> None:
    given = {"TransformersKwargs": set(TransformersKwargs.__annotations__)}
    given["GenerationConfig"] = {name for name in vars(transformers.GenerationConfig()) if name[0] != "_"}
    given["generate"] = set(inspect.signature(transformers.GenerationMixin.generate).parameters) - {"self", "kwargs"}
    for kind, names in TYPES.items():
        for name in [names] if isinstance(names, str) else names:
            given[f"{kind} {name}"] = accepted(kind, name)
    assert sum(map(bool, given.values())) > 70
    unknown = {where: names - ARGUMENTS.keys() for where, names in given.items() if names - ARGUMENTS.keys()}
    assert not unknown, "put these into ARGUMENTS of hosts/prompts.py"


def test_arguments_that_no_method_can_carry_are_refused_by_name(llava: Any) -> None:
    inputs = CASES["llava"].inputs()
    size = inputs["input_ids"].shape[1]
    wrong = {"is_causal": False, "decoder_input_ids": inputs["input_ids"], "row_weights": torch.ones(1, size)}
    for method in ("consensusdrop", "fastv"):
        with attach(llava, method, 4):
            for name, value in wrong.items():
                with pytest.raises(OptionError, match=f"^{name}: .*detach the method"):
                    llava(**inputs, **{name: value})
            with pytest.raises(OptionError, match="prefill_chunk_size"):
                generate(llava, inputs, prefill_chunk_size=5)
            llava(**inputs, output_router_logits=False, seed=torch.ones(3))


@torch.enable_grad()
def test_features_that_were_encoded_before_are_named(llava: Any) -> None:
    inputs = CASES["llava"].inputs()
    features = {"image": llava.get_image_features(inputs.pop("pixel_values"), return_dict=True)}
    with attach(llava, "consensusdrop", 5), pytest.warns(UserWarning, match="mm_encoder_outputs"):
        llava(**inputs, mm_encoder_outputs=features)
    with attach(llava, "full", 5):
        assert llava(**inputs, mm_encoder_outputs=features).logits.shape[1] == inputs["input_ids"].shape[1]


def test_a_placeholder_outside_the_vocabulary() -> None:
    """As Gemma 3 has it, which reads another word in its place."""
    model, inputs, found = CASES["gemma3"].build(), CASES["gemma3"].inputs(), []
    for number in (IMAGE, 600):
        model.config.image_token_id = model.model.config.image_token_id = number
        ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, number)
        with attach(model, "consensusdrop", 5):
            found.append(model(**{**inputs, "input_ids": ids}).logits[:, -1])
    assert close(*found)


def test_embeddings_are_read_as_ids_and_logits_of_any_rows_and_states_are_given(llava: Any) -> None:
    text, inputs = torch.arange(5, 9)[None], CASES["llava"].inputs()
    embeds = llava.get_input_embeddings()(text)
    with attach(llava, "consensusdrop", 5):
        whole = llava(**inputs).logits
        few = llava(**inputs, logits_to_keep=torch.tensor([0, 3])).logits
        assert torch.allclose(few, whole[:, [0, 3]], atol=1e-5)
        assert torch.allclose(llava.lm_head(llava.model(**inputs).last_hidden_state), whole, atol=1e-5)
        assert close(llava(inputs_embeds=embeds).logits, llava(input_ids=text).logits)
        given = {**inputs, "input_ids": None, "inputs_embeds": llava.get_input_embeddings()(inputs["input_ids"])}
        assert torch.equal(llava(**given).logits, whole)
        steps = []
        for given in ({"inputs_embeds": embeds}, {"input_ids": text}):
            read = llava(**inputs, use_cache=True)
            steps.append(llava(**given, past_key_values=read.past_key_values).logits)
        assert close(*steps)


@pytest.mark.parametrize("name", ["llava", "llava_next", "pixtral", "mistral_3"])
def test_another_layer_of_the_tower_is_read_if_a_call_names_it(name: str) -> None:
    model, inputs, tokens = CASES[name].build(), CASES[name].inputs(), CASES[name].tokens
    other = {"vision_feature_layer": -3 if name.startswith("llava") else -2}
    same = {"vision_feature_layer": model.config.vision_feature_layer}
    plain = model(**inputs, **other).logits
    with attach(model, "consensusdrop", tokens):
        assert torch.allclose(model(**inputs, **same).logits, model(**inputs).logits, atol=1e-5)
        found = model(**inputs, **other).logits
    model.config.vision_feature_layer = model.model.config.vision_feature_layer = other["vision_feature_layer"]
    for method, budget, wanted in (("consensusdrop", tokens, found), ("fastv", 4096, plain)):
        with attach(model, method, budget):
            assert torch.allclose(model(**inputs).logits, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["pixtral", "mistral_3", "qwen2_5_vl", "smolvlm", "internvl"])
def test_the_question_is_words(name: str) -> None:
    """Breaks, tags and markers of a later image are no part of the question about an earlier one."""
    model, inputs = CASES[name].build(), CASES[name].inputs(0, 2)
    with attach(model, "consensusdrop", CASES[name].tokens) as attached:
        read: list[Any] = []
        budgets = attached._budgets
        attached._budgets = lambda stage, prompt: read.append(prompt) or budgets(stage, prompt)  # type: ignore[method-assign,func-returns-value]
        model(**inputs)
    asked, later = (inputs["input_ids"][0][text].tolist() for text in read[-1].text)
    assert [word for word in asked if word < 10] == [6, 7, 8, 9] and TAG not in asked
    assert len(asked) <= 1 + len(later) + 1 and asked.count(END) <= 1  # that of the first image itself


def test_a_picture_that_is_not_finite_is_named(llava: Any) -> None:
    inputs = prompts(*([1, CASES["llava"].picture(number), 7, 8] for number in range(3)))
    inputs["pixel_values"][1] = torch.nan
    with attach(llava, "consensusdrop", 5), pytest.raises(NonFiniteError, match=r"^image 1 of prompt 1: "):
        llava(**inputs)


@pytest.mark.parametrize("aggregate", ["all", "last", "max"])
def test_words_ask_about_the_pictures_before_them(aggregate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are taken once for each prompt; the eager first layer's rows behind an image ask about it."""
    case = CASES["llava"]
    model, (first, second, third) = case.build(), map(case.picture, range(3))
    inputs, made = prompts([1, first, 5, 6, second, 7, 9, third, 8], [3, 4, first, 5]), []
    probe = Inputs.probe_of
    monkeypatch.setattr(Inputs, "probe_of", lambda *given: made.append(probe(*given)) or made[0])
    with attach(model, "consensusdrop", tokens=case.tokens, alpha=0.0, aggregate=aggregate) as attached:
        model(**inputs)
        found = [one.reductions[0][1].cross[0] for one in attached.outcomes]
    assert (*made[0].query.shape[:3:2], len(made[0].key)) == (2, 5, 2)  # sequences, words behind images, sequences
    model.set_attn_implementation("eager")
    attention = model(**inputs, output_attentions=True).attentions[0].mean(1)  # [R, S, S]
    picture = inputs["input_ids"] == IMAGE
    starts = picture & ~picture.roll(1, 1)
    for cross, (row, start) in zip(found, starts.nonzero().tolist(), strict=True):
        end = start + len(first.ids)
        rows = attention[row, end:][~picture[row, end:]][:, start:end]
        rows = {"all": rows, "last": rows[-1:], "max": rows.amax(0, keepdim=True)}[aggregate]
        assert torch.allclose(cross, (rows / (rows.sum(-1, keepdim=True) + EPSILON)).mean(0), atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_new_positions_are_refused_and_a_default_is_said(family: str) -> None:
    model, inputs = CASES[family].build(), CASES[family].inputs()
    for method, positions in (("random", "renumber"), ("fastv", "renumber"), ("divprune", "spread")):
        with pytest.raises(OptionError, match=rf"positions={positions}: Qwen\w+ has positions of three axes"):
            attach(model, method, tokens=5, positions=positions)
    for method, options in (("consensusdrop", {}), ("consensusdrop+", {}), ("consensusdrop", {"positions": "keep"})):
        with attach(model, method, tokens=5, **options) as attached:
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
            unasked = method == "consensusdrop" and not options
            assert attached.notes == (("positions of three axes are kept",) if unasked else ())
    assert make("consensusdrop", positions="renumber") == make("consensusdrop"), "what was asked makes no difference"


def test_spread_tokens_are_evenly_over_the_span_of_their_image(llava: Any) -> None:
    """Of two prompts, one padded on the left; decode steps continue behind the span."""
    seen: list[Tensor] = []
    inputs = prompts([1, 5, CASES["llava"].picture(0), 7, 8], [1, CASES["llava"].picture(1), 9])
    rotary = llava.model.language_model.rotary_emb

    def note(_: Any, given: Any, named: Any) -> None:
        seen.append((*given, *named.values())[-1])

    with attach(llava, "divprune", 6, positions="spread"), rotary.register_forward_pre_hook(note, with_kwargs=True):
        llava.generate(**inputs, max_new_tokens=3, do_sample=False)
    first, second, third = seen[:3]
    assert first[0].tolist() == [0, 1, 2, 5, 8, 11, 14, 17, 18, 19]  # 2 to 17 in steps of three
    assert first[1].tolist()[-8:] == [0, 1, 4, 7, 10, 13, 16, 17]
    assert second[:, 0].tolist() == [20, 18] and third[:, 0].tolist() == [21, 19]
