"""Methods that cut between decoder layers, in official LLaVA: caches, exceptions, kernels and tiled images.
test_attached_answers.py and methods/test_golden_decoder.py hold the answers, test_llava_host.py the rest.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from models import PATCHES, tiny_llava
from prompts import ANYRES, batch, row, tiles

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Place

MAJOR = int(transformers.__version__.split(".")[0])
DECODER = [  # a cut before the first layer is refused on transformers 4
    name for name, one in METHODS.items() if one.place is Place.DECODER and (MAJOR >= 5 or one.attention != "none")
]
WAYS = ("fastv", "sparsevlm")  # that drop rows, and that make new ones
TOKENS = 6
GENERATION = dict(do_sample=False, return_dict_in_generate=True, output_scores=True, min_new_tokens=5, max_new_tokens=5)


@pytest.fixture(scope="module")
def deep(tower_folder: Path) -> Any:
    return tiny_llava(tower_folder, num_hidden_layers=8, tokenizer_padding_side="left")


@pytest.mark.parametrize("name", DECODER)
@torch.no_grad()
def test_the_cache_holds_what_each_layer_saw_and_no_more(deep: Any, prompt: SimpleNamespace, name: str) -> None:
    with attach(deep, name, tokens=TOKENS) as attached:
        cache = deep(prompt.ids, images=prompt.images, use_cache=True).past_key_values
        entering = attached.outcomes[0].entering
    lengths = [cache[i][0].shape[2] if MAJOR < 5 else cache.layers[i].keys.shape[2] for i in range(8)]
    assert lengths == [12 + count for count in entering]


@torch.no_grad()
def test_after_an_exception_the_same_attachment_works_again(deep: Any, prompt: SimpleNamespace) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("boom")

    with attach(deep, "fastv", tokens=TOKENS):
        fine = deep(prompt.ids, images=prompt.images).logits
        handle = deep.get_model().layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="boom"):
            deep(prompt.ids, images=prompt.images)
        handle.remove()
        text = torch.tensor([[1, 5, 6, 7]])
        plain = deep(text).logits
        assert torch.equal(deep(prompt.ids, images=prompt.images).logits, fine)
    assert torch.equal(deep(text).logits, plain)


@pytest.mark.parametrize("name", WAYS)
@torch.no_grad()
def test_text_alone_and_a_prepared_sequence_that_is_never_read_are_left_alone(
    deep: Any, prompt: SimpleNamespace, name: str
) -> None:
    text = torch.arange(1, 1 + prompt.ids.shape[1] - 1 + PATCHES)[None]
    dense = deep(text).logits
    with attach(deep, name, tokens=TOKENS):
        deep.prepare_inputs_labels_for_multimodal(prompt.ids, None, None, None, None, prompt.images)
        assert torch.equal(deep(text).logits, dense)


@torch.no_grad()
def test_a_prompt_of_embeddings_on_a_cache_is_refused(deep: Any, prompt: SimpleNamespace) -> None:
    with attach(deep, "fastv", tokens=TOKENS):
        cache = deep(prompt.ids, images=prompt.images, use_cache=True).past_key_values
        embeds = deep.prepare_inputs_labels_for_multimodal(prompt.ids, None, None, None, None, prompt.images)[4]
        with pytest.raises(OptionError, match="pass the whole conversation"):
            deep(inputs_embeds=embeds, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("name", WAYS)
@torch.no_grad()
def test_eager_attention_gives_the_same(tower_folder: Path, prompt: SimpleNamespace, name: str) -> None:
    sdpa = tiny_llava(tower_folder, num_hidden_layers=8, _attn_implementation="sdpa")
    eager = tiny_llava(tower_folder, num_hidden_layers=8, _attn_implementation="eager")
    said = []
    for model in (sdpa, eager):
        with attach(model, name, tokens=TOKENS):
            said.append(model.generate(prompt.ids, images=prompt.images, **GENERATION))
    for one, other in zip(said[0].scores, said[1].scores, strict=True):
        assert torch.allclose(one, other, atol=2e-5)


@torch.no_grad()
def test_tiled_pictures_are_ranked_as_a_whole_and_keep_their_newlines(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder, num_hidden_layers=5, **ANYRES, mm_patch_merge_type="spatial_unpad")
    ids, mask = batch(row(5), row(6, 7))
    sizes = [(100, 60), (110, 30)]
    for name in DECODER:
        with attach(model, name, tokens=20) as attached:
            model(ids, images=[tiles(5), tiles(3, 1)], image_sizes=sizes, attention_mask=mask)
        for one in attached.outcomes:
            assert one.structural > 0 and one.after < one.before
            assert one.entering == tuple(make(name).entering(Budget(20), one.before, 5))


def test_models_and_kernels_that_cannot_be_cut_say_why(tower_folder: Path, prompt: SimpleNamespace) -> None:
    one = tiny_llava(tower_folder, num_hidden_layers=1)
    with attach(one, "fastv", tokens=TOKENS), pytest.raises(OptionError, match="only 1"):
        one(prompt.ids, images=prompt.images)
    if MAJOR < 5:
        one.config._attn_implementation = "flash_attention_2"
        with pytest.raises(OptionError, match="needs sdpa or eager"):
            attach(one, "fastv", tokens=TOKENS)
        narrow = tiny_llava(tower_folder, "mistral", sliding_window=20)
        with attach(narrow, "fastv", tokens=TOKENS), pytest.raises(OptionError, match="sliding_window=20 is narrower"):
            narrow(prompt.ids, images=prompt.images)
