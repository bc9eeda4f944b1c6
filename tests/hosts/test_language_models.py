"""Language models under a LLaVA of transformers: a method that reads their attention reads it right, or says that this
one is not adapted; and what asks nothing of them works on all.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES, IMAGE, SQUARE, TEXT, prompts, ready, square
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import OptionError

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="needs transformers >= 5.19")
READ = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "smollm3", "mixtral", "cohere2", "hunyuan_v1_dense"),
    *("phi3", "olmo2", "glm4", "stablelm", "gemma2", "gpt_neox", "nanochat", "opt", "gpt2", "gpt_oss"),
]
REFUSED = ["mpt", "falcon", "diffllama", "bloom"]
UNREAD = "the attention of this language model is not"


def llava(kind: str, **options: Any) -> Any:
    text = {**TEXT, "head_dim": 16} if kind != "falcon" else {**TEXT, "num_kv_heads": 2}
    if kind == "granite":
        text |= {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SQUARE),
        text_config=transformers.CONFIG_MAPPING[kind](**text),
        image_token_index=IMAGE,
        image_seq_length=16,
        **options,
    )
    return ready(transformers.LlavaForConditionalGeneration, config)


def asked() -> dict[str, Any]:
    return prompts([1, 5, 6, square(0), 7, 8, 9])


PICTURE, TAIL = slice(3, 19), 19  # rows of the prompt


def maps(model: Any) -> tuple[Tensor, ...]:
    """Attention of every layer over the whole prompt, by the plain model itself, mean over heads: [S, S] each."""
    with torch.no_grad():
        return tuple(one[0].mean(0) for one in model(**asked(), output_attentions=True).attentions)


@pytest.mark.parametrize("kind", READ)
def test_the_probe_is_the_attention_of_the_plain_model(kind: str) -> None:
    model = llava(kind, attn_implementation="eager")
    model.get_input_embeddings().weight.data.mul_(0.003)  # so small that norms feel what embeddings are multiplied with
    rows = maps(model)[0][TAIL:, PICTURE]
    expected = (rows / (rows.sum(-1, keepdim=True) + 1e-6)).mean(0)
    with attach(model, "consensusdrop", tokens=5) as attached, torch.no_grad():
        model(**asked())
        ((_, reduction),) = attached.outcomes[0].reductions
    assert torch.allclose(reduction.cross[0], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("name", ["gemma3", "aya_vision"])
def test_layers_of_two_kinds_are_cut_by_the_attention_of_each(name: str, layer: int) -> None:
    """Some rotate in another way, or not at all; FastV reads the layer before, PyramidDrop its own."""
    case = CASES[name]
    model, inputs = case.build(), prompts([1, 5, 6, case.picture(1), 7, 8, 9])
    model.set_attn_implementation("eager")
    shown = (inputs["input_ids"][0] == IMAGE).nonzero()[:, 0]
    with torch.no_grad():
        maps = [one[0, :, -1].mean(0)[shown] for one in model(**inputs, output_attentions=True).attentions]
    ways = ("fastv", layer - 1, {"layer": layer}), ("pyramiddrop", layer, {"layers": str(layer)})
    for method, own, options in ways:
        with attach(model, method, tokens=7, **options) as attached, torch.no_grad():
            model(**inputs)
            ((_, reduction),) = attached.outcomes[0].reductions
        assert torch.equal(reduction.kept[0], maps[own].topk(7).indices.sort().values)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_named_and_what_asks_nothing_works(kind: str) -> None:
    model = llava(kind)
    before = copy.deepcopy(model.state_dict())
    with attach(model, "consensusdrop", tokens=5), pytest.raises(OptionError, match=UNREAD):
        model(**asked())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with attach(model, "visionzip", tokens=5) as attached, torch.no_grad():
        logits = model(**asked()).logits[0, -1]
        ((_, reduction),) = attached.outcomes[0].reductions
    words = model.get_input_embeddings()(torch.tensor([[1, 5, 6, 7, 8, 9]]))
    embeds = torch.cat((words[:, :3], reduction.tokens, words[:, 3:]), dim=1)
    with torch.no_grad():
        expected = model.lm_head(model.model.language_model(inputs_embeds=embeds).last_hidden_state)[0, -1]
    assert torch.allclose(logits, expected * getattr(model, "logit_scale", 1), atol=1e-4)


def test_weights_that_are_not_there_or_quantised_are_taken() -> None:
    from accelerate import cpu_offload

    model = llava("llama")
    with attach(model, "consensusdrop", tokens=5) as attached:
        expected = model.generate(**asked(), max_new_tokens=3, do_sample=False)
    cpu_offload(model)
    with attach(model, "consensusdrop", tokens=5) as attached:
        assert torch.equal(model.generate(**asked(), max_new_tokens=3, do_sample=False), expected)
        assert attached.outcomes[0].after == 5
    with torch.device("meta"):
        empty = transformers.LlavaForConditionalGeneration(copy.deepcopy(llava("llama").config))
    attach(empty, "consensusdrop", tokens=5).detach()
    quantised = llava("llama")
    inner = quantised.model.language_model
    torch.ao.quantization.quantize_dynamic(inner, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    for method in ("consensusdrop", "fastv"):
        with attach(quantised, method, tokens=5) as attached:
            quantised.generate(**asked(), max_new_tokens=2, do_sample=False)
            assert attached.outcomes[0].after == 5
