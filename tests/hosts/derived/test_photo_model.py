"""The photograph model, pretrained tower and language model, in float64 against transformers' own language model: runs
where `make checkpoint-photo` has been, on a drawn image of 336 x 336 pixels.
"""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.19")

from PIL import Image, ImageDraw  # noqa: E402
from reference import answer, cross, kernel_calls, probabilities  # noqa: E402

from llava_consensus import attach  # noqa: E402
from playground.photo.paths import CHECKPOINT  # noqa: E402

FEEDS = 10  # block whose states feed the projector: the last but one of twelve
pytestmark = pytest.mark.skipif(not (CHECKPOINT / "config.json").exists(), reason="make checkpoint-photo was not run")


@pytest.fixture(scope="module")
def asked() -> tuple[Any, dict[str, Any]]:
    """The model in float64, and a question about a picture."""
    model = (
        transformers.AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.float64)
        .eval()
        .requires_grad_(False)
    )
    processor = transformers.AutoProcessor.from_pretrained(CHECKPOINT)
    picture = Image.new("RGB", (336, 336), (90, 140, 60))
    ImageDraw.Draw(picture).ellipse((40, 200, 140, 300), (200, 60, 40), (0, 0, 0), 6)
    turn = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is there an apple in the picture?"}]}
    ]
    prompt = processor.apply_chat_template(turn, add_generation_prompt=True)
    inputs = dict(processor(images=picture, text=prompt, return_tensors="pt"))
    return model, {**inputs, "pixel_values": inputs["pixel_values"].double()}


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("positions", ["renumber", "keep"])
@pytest.mark.parametrize("method", ["consensusdrop", "vispruner", "divprune", "scope", "hiprune"])
def test_methods_answer_as_the_language_model_given_their_rows(method: str, positions: str, asked: Any) -> None:
    model, inputs = asked
    order = {"order": "raster"} if method == "consensusdrop" else {}  # as the reference puts rows
    with attach(model, method, tokens=64, positions=positions, **order) as attached, torch.no_grad():
        logits, outcomes = model(**inputs).logits[0, -1], attached.outcomes
    assert [(one.before, one.after) for one in outcomes] == [(576, 64)]
    near(logits, answer(model, inputs, outcomes, positions == "keep", model.config.image_token_id))


def test_both_saliencies_are_those_of_the_kernels(asked: Any) -> None:
    model, inputs = asked
    with attach(model, "consensusdrop", tokens=64) as attached, torch.no_grad():
        model(**inputs)
        reduction = attached.outcomes[0].reductions[0][1]
    near(reduction.cross[0].double(), cross(model, inputs, 0, model.config.image_token_id)[0])
    with kernel_calls() as calls, torch.no_grad():
        model(**inputs)
    _, query, key, scale = calls[FEEDS]
    seen = probabilities(query[0], key[0], scale, causal=False)[0, 1:]
    found = reduction.vision[0].double()
    near(found / found.sum(), seen / seen.sum())
