"""Language models under a LLaVA of transformers: a method that reads their attention reads it right, or says that this
one is not adapted.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from hf_models import IMAGE, SQUARE, TEXT, prompts, ready, square

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.reduction.saliency import rotate

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="needs transformers >= 5.19")
READ = ["llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "olmo", "smollm3", "mixtral", "starcoder2", "arcee"]
REFUSED = [
    *("cohere", "cohere2", "hunyuan_v1_dense", "phi3", "phi", "olmo2", "glm4", "stablelm", "gemma2", "gemma3_text"),
    *("exaone4", "nemotron", "lfm2", "persimmon", "ernie4_5", "gpt_neox", "opt", "gpt2", "mpt", "qwen3_next"),
]


def llava(kind: str, **options: Any) -> Any:
    """LLaVA with a language model of this kind, tiny and random."""
    text = transformers.CONFIG_MAPPING[kind](**{**TEXT, "head_dim": 16})
    vision = transformers.CLIPVisionConfig(**SQUARE)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=16, **options
    )
    return ready(transformers.LlavaForConditionalGeneration, config)


def asked() -> dict[str, Any]:
    return prompts([1, 5, 6, square(0), 7, 8, 9], [1, square(1), 5])


@pytest.mark.parametrize("kind", READ)
def test_what_is_read_is_what_the_model_attends(kind: str) -> None:
    model = llava(kind, attn_implementation="eager")
    with attach(model, "consensusdrop", tokens=5) as attached:
        decoder: Any = attached.model.decoder
        embeds = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1))
        normed, positions = decoder.normed(0, embeds), torch.arange(9)[None]
        angles = decoder.rotary(normed, positions)
        query, key = rotate(decoder.query(0, normed), *angles), rotate(decoder.key(0, normed), *angles)
        logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2) * decoder.scale(0)
        expected = decoder.module(inputs_embeds=embeds, output_attentions=True).attentions[0]
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.allclose(logits.masked_fill(~seen, -torch.inf).softmax(-1), expected, atol=1e-5)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_named(kind: str) -> None:
    model = llava(kind)
    before = copy.deepcopy(model.state_dict())
    name = type(model.model.language_model).__name__
    for method in ("consensusdrop", "fastv"):
        with pytest.raises(OptionError, match=f"language model {name} is not adapted"):
            attach(model, method, tokens=5)
    if hasattr(model.model.language_model, "layers"):  # what asks nothing of it works
        with attach(model, "visionzip", tokens=5) as attached:
            model.generate(**asked(), max_new_tokens=2, do_sample=False)
            assert [outcome.after for outcome in attached.outcomes] == [5, 5]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_check_leaves_modes_and_random_numbers() -> None:
    model = llava("llama").train()
    model.model.language_model.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with attach(model, "consensusdrop", tokens=5):
        pass
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_that_are_mixed_by_a_convolution_cannot_be_cut() -> None:
    with pytest.raises(OptionError, match=r"FalconH1Model is not adapted to methods .* by a convolution"):
        attach(llava("falcon_h1"), "fastv", tokens=5)


def test_attention_with_sinks_is_refused_under_internvl() -> None:
    from hf_models import CASES

    config = copy.deepcopy(CASES["internvl"].build().config)
    config.text_config = transformers.GptOssConfig(**{**TEXT, "head_dim": 16})
    model = ready(transformers.InternVLForConditionalGeneration, config)
    with pytest.raises(OptionError, match="GptOssModel is not adapted"):
        attach(model, "consensusdrop", tokens=5)
