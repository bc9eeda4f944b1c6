"""Derived hosts in the harness: an image goes through the tower once, and what is answered is what a user's own
`generate` answers with the same method attached.
"""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.19")

import hf_models  # noqa: E402
from families import FAMILIES, build  # noqa: E402
from hf_checkpoints import PROCESSORS  # noqa: E402
from PIL import Image  # noqa: E402

from llava_consensus import make  # noqa: E402
from llava_consensus.evaluation.models import Prompt  # noqa: E402
from llava_consensus.evaluation.models.hf import HfRunner  # noqa: E402
from llava_consensus.hosts.facts import Facts  # noqa: E402
from llava_consensus.reduction.budget import Budget  # noqa: E402

NEW, TEXTS = 4, ("What is on the table?", "How many?")


def hosted(name: str) -> HfRunner:
    """A model in the harness by its derived view; two have a file too, which is left aside here."""
    if name == "qwen3_5":
        family = FAMILIES[name]
        own = family.config()
        text = {**own["text_config"], "vocab_size": 512, "max_position_embeddings": 4096}
        config = {**own, "text_config": text, **hf_models.ALL}
        model = build(type(family)(name, lambda: config, family.pixels, family.rows), torch.float32)
        processor = PROCESSORS["qwen3_vl"]()
    else:
        model, processor = hf_models.CASES[name].build(), PROCESSORS[name]()
    model.generation_config.eos_token_id = None
    host = HfRunner(Facts(model, {}), processor)
    host.check_prompts()
    return host


@pytest.mark.parametrize("name", ["qwen3_5", "llava_next", "internvl"])
def test_the_harness_answers_as_the_users_own_call(name: str) -> None:
    host = hosted(name)
    generator = torch.Generator().manual_seed(0)
    sizes = ((120, 220), (224, 224))
    images = [Image.fromarray(torch.randint(0, 256, (*size, 3), generator=generator).byte().numpy()) for size in sizes]
    with host.attach(make("consensusdrop", tile_budget="global"), Budget(5)) as attached:
        encoded = host.encode(images)
        prompts = [Prompt(text, max_new_tokens=NEW) for text in TEXTS]
        together = host.answer([[one] for one in encoded], prompts)
        for image, text, answer in zip(images, TEXTS, together, strict=True):
            assert answer.text == users_own(host, image, text)
            (outcome,) = attached.outcomes
            assert (outcome.before, outcome.after) == (answer.before, answer.after) and answer.after < answer.before


def users_own(host: Any, image: Image.Image, text: str) -> str:
    turns = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
    inputs = host.processor.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    output = host.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    answer: str = host.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer.strip()
