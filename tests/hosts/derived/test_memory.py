"""What was proved of a language model is proved anew where something has changed that it depends on, and only there."""

import copy
import gc
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES, prompts, square
from torch import nn

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.derived import memory
from llava_consensus.hosts.derived.decoder import TapDecoder

LAYER = "model.language_model.layers.0"
LLAMA = transformers.models.llama.modeling_llama


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The language models that were proved, in order."""
    found: list[nn.Module] = []
    plain = TapDecoder._try_layers

    def noted(self: Any, *args: Any) -> None:
        found.append(self.module)
        plain(self, *args)

    monkeypatch.setattr(TapDecoder, "_try_layers", noted)
    return found


def asked() -> dict[str, Any]:
    return prompts([1, 5, 6, square(0), 7, 8, 9])


def attached_and_detached(model: Any, *methods: str) -> None:
    for method in methods or ("consensusdrop",):
        attach(model, method, tokens=5).detach()


class Added(nn.Module):
    """A layer with something added to it, as an adapter is."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own, self.down = own, nn.Linear(own.in_features, 2)
        self.up = nn.Linear(2, own.out_features)

    def forward(self, hidden: Any) -> Any:
        return self.own(hidden) + self.up(self.down(hidden))


def layer_of(model: Any) -> Any:
    return model.get_submodule(LAYER)


def raise_weight(model: Any, patch: Any) -> None:
    with torch.no_grad():
        layer_of(model).self_attn.q_proj.weight.mul_(2)


def replace_numbers(model: Any, patch: Any) -> None:
    weight = layer_of(model).input_layernorm.weight
    weight.data = weight.data * 2


def replace_weight(model: Any, patch: Any) -> None:
    norm = layer_of(model).input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach().clone())


def replace_buffer(model: Any, patch: Any) -> None:
    rotary = model.model.language_model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 0.5


def add_adapter(model: Any, patch: Any) -> None:
    attention = layer_of(model).self_attn
    attention.q_proj = Added(attention.q_proj)


def replace_forward(model: Any, patch: Any) -> None:
    attention = layer_of(model).self_attn
    attention.forward = partial(type(attention).forward, attention)


def replace_layer(model: Any, patch: Any) -> None:
    layers = model.model.language_model.layers
    layers[0] = copy.deepcopy(layers[0])


def replace_class(model: Any, patch: Any) -> None:
    norm = layer_of(model).input_layernorm
    norm.__class__ = type("Other", (type(norm),), {})


def hook(model: Any, patch: Any) -> None:
    layer_of(model).self_attn.register_forward_hook(lambda *_: None)


def set_number(model: Any, patch: Any) -> None:
    layer_of(model).self_attn.scaling *= 2


def configure(model: Any, patch: Any) -> None:
    model.model.language_model.config.rope_parameters["rope_theta"] = 500.0


def implement(model: Any, patch: Any) -> None:
    model.set_attn_implementation("eager")


def copied(function: Any) -> Any:
    """Another function that does the same."""
    made = types.FunctionType(
        function.__code__, function.__globals__, argdefs=function.__defaults__, closure=function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def register(model: Any, patch: Any) -> None:
    kernels = transformers.AttentionInterface._global_mapping
    patch.setitem(kernels, "sdpa", copied(kernels["sdpa"]))


def patch_class(model: Any, patch: Any) -> None:
    patch.setattr(LLAMA.LlamaAttention, "forward", copied(LLAMA.LlamaAttention.forward))


def patch_file(model: Any, patch: Any) -> None:
    patch.setattr(LLAMA, "apply_rotary_pos_emb", copied(LLAMA.apply_rotary_pos_emb))


def patch_method(model: Any, patch: Any) -> None:
    patch.setattr(LLAMA.LlamaRMSNorm, "forward", lambda self, hidden: self.scaled(hidden))
    patch.setattr(LLAMA.LlamaRMSNorm, "scaled", lambda self, hidden: self.weight * hidden, raising=False)
    attached_and_detached(model)
    patch.setattr(LLAMA.LlamaRMSNorm, "scaled", lambda self, hidden: 2 * self.weight * hidden)


CHANGES: list[tuple[Callable[[Any, Any], None], int]] = [
    (raise_weight, 1), (replace_numbers, 1), (replace_weight, 1), (replace_buffer, 1), (add_adapter, 1),
    (replace_forward, 1), (replace_layer, 1), (replace_class, 1), (hook, 1), (set_number, 1), (configure, 1),
    (implement, 1), (register, 1), (patch_class, 1), (patch_file, 1), (patch_method, 2),
]  # fmt: skip


@pytest.mark.parametrize(("change", "times"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_what_has_changed_is_proved_anew(
    proved: list[nn.Module], monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None], times: int
) -> None:
    model = CASES["llava"].build()
    attached_and_detached(model)
    attached_and_detached(model)
    assert len(proved) == 1
    change(model, monkeypatch)
    attached_and_detached(model)
    attached_and_detached(model)
    assert len(proved) == 1 + times


def test_a_model_that_was_used_is_proved_once_for_what_is_read_of_it(proved: list[nn.Module]) -> None:
    model, rows = CASES["llava"].build(), list[list[int]]()
    for _ in range(2):
        with attach(model, "consensusdrop", tokens=5):
            own: list[int] = []
            taken = layer_of(model).self_attn.v_proj.register_forward_pre_hook(
                lambda _, args, own=own: own.append(args[0].shape[1])
            )
            model.generate(**asked(), max_new_tokens=2, do_sample=False)
            taken.remove()
        rows.append(own)
        attached_and_detached(model, "fastv", "visionzip")
    assert proved == [model.model.language_model] * 2  # queries of some rows, and of all
    assert rows[0] == rows[1] and rows[0][0] == 3  # of the words that ask: a second proof found what idles too


def test_what_is_refused_is_tried_each_time(proved: list[nn.Module]) -> None:
    model = CASES["llava"].build()
    inner = model.model.language_model
    attached_and_detached(model)
    plain = type(inner)

    class Scaled(plain):  # type: ignore[misc]
        def forward(self, *args: Any, inputs_embeds: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, inputs_embeds=3 * inputs_embeds, **kwargs)

    inner.__class__ = Scaled
    for _ in range(2):
        with pytest.raises(OptionError, match="Scaled is not adapted"):
            attached_and_detached(model)
    inner.__class__ = plain
    attached_and_detached(model)
    assert len(proved) == 3


def test_models_of_several_threads_have_a_proof_each(proved: list[nn.Module]) -> None:
    models = [CASES["llava"].build() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda model: [attached_and_detached(model) for _ in range(5)], models))
    assert {id(one) for one in proved} == {id(model.model.language_model) for model in models}
    assert len(proved) == len(models)


def test_a_model_is_freed_with_what_was_proved_of_it() -> None:
    gc.collect()
    before = len(memory._PROVED)
    model = CASES["llava"].build()
    replace_forward(model, None)
    attached_and_detached(model, "consensusdrop", "fastv")
    assert len(memory._PROVED) == before + 1
    freed = weakref.ref(model.model.language_model)
    del model
    gc.collect()
    assert freed() is None and len(memory._PROVED) == before


def test_what_does_not_tell_what_it_is_is_proved_each_time(proved: list[nn.Module]) -> None:
    with torch.inference_mode():
        model = CASES["llava"].build()
    attached_and_detached(model)
    attached_and_detached(model)
    assert len(proved) == 2


def test_ids_are_no_proof_once_what_had_them_is_gone() -> None:
    module = nn.Linear(2, 2)
    state = memory.state_of([module])
    assert state is not None and state.lasts(memory.State(list(state.told), []))
    gone = nn.Linear(2, 2)
    gone.adapter = lambda: None
    state = memory.state_of([gone])
    del gone.adapter
    assert state is not None and not state.lasts(memory.State(list(state.told), []))
