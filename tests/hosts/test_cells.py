"""`pixelprune` on Qwen3-VL: bit for bit the plain model where all cells differ, and elsewhere its own tower on the
cells that stay, at their own places.
"""

import math
from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES, END, IMAGE, START, Picture, decoder_given, noise, prompts
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.methods.divprune import spread_out

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 23), reason="the tower of Qwen3-VL is given places since 5.23")
ROWS, COLUMNS = 4, 6  # of cells


def picture(cells: Tensor) -> dict[str, Any]:
    """A prompt about an image of cells [rows, columns, V / 2], whose two frames are the same."""
    rows, columns, values = cells.shape
    pixels = cells.view(rows * columns * 4, 3, 1, values // 12).expand(-1, -1, 2, -1).reshape(rows * columns * 4, -1)
    given = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns]])}
    return prompts([1, 5, Picture([START, *[IMAGE] * rows * columns, END], given), 7, 8])


@pytest.fixture(scope="module")
def model() -> Any:
    return CASES["qwen3_vl"].build()


@torch.no_grad()
def test_a_picture_of_different_cells_is_read_bit_for_bit(model: Any) -> None:
    inputs = picture(noise(ROWS, COLUMNS, 12 * 256, seed=1))
    plain, logits = (
        model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]),
        model(**inputs).logits,
    )
    with attach(model, "pixelprune", tokens=1) as attached:
        given = decoder_given(model, inputs)
        assert torch.equal(given["inputs_embeds"][0, 3:-3], torch.cat(list(plain.pooler_output)))
        for one, other in zip(given["deepstack_visual_embeds"], plain.deepstack_features, strict=True):
            assert torch.equal(one, torch.cat(list(other)))
        assert torch.equal(model(**inputs).logits, logits) and attached.outcomes[0].after == ROWS * COLUMNS


@torch.no_grad()
def test_cells_that_stay_go_through_the_tower_alone(model: Any) -> None:
    cells = noise(ROWS, COLUMNS, 12 * 256, seed=2)
    cells[1:, 2:] = cells[0, 1]  # the first of each row is predicted by the one left of it, which differs
    cells[0, 3] = cells[0, 2]
    inputs, visual = picture(cells), model.model.visual
    stays = torch.ones(ROWS * COLUMNS, dtype=torch.bool)
    stays[3] = False
    stays.view(ROWS, COLUMNS)[1:, 2:] = False
    stays.view(ROWS, COLUMNS)[1:, 2] = True
    patches = stays.repeat_interleave(4)
    states: dict[str, Any] = {}
    hook = visual.blocks[0].register_forward_pre_hook(
        lambda block, args, given: states.update(given, hidden=args[0]), with_kwargs=True
    )
    visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    hook.remove()
    hidden = states["hidden"][patches]
    turned = tuple(one[patches] for one in states["position_embeddings"])
    ends = torch.tensor([0, len(hidden)], dtype=torch.int32)
    for block in visual.blocks:
        hidden = block(hidden, cu_seqlens=ends, position_embeddings=turned)
    full = decoder_given(model, inputs)["position_ids"][-3:]
    with attach(model, "pixelprune", tokens=1) as attached:
        given = decoder_given(model, inputs)
        assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] == inputs["input_ids"].shape[1] + 3
    found = given["inputs_embeds"][0, 3:-3]
    assert torch.allclose(found, visual.merger(hidden), atol=1e-5)
    rows = torch.ones(inputs["input_ids"].shape[1], dtype=torch.bool)
    rows[inputs["input_ids"][0] == IMAGE] = stays
    assert torch.equal(given["position_ids"][-3:], full[..., rows])
    assert attached.outcomes[0].after == int(stays.sum()) == math.prod(found.shape[:1])


def test_a_video_and_another_model_are_refused(model: Any) -> None:
    with pytest.raises(OptionError, match="tower of Qwen3-VL"):
        attach(CASES["qwen2_5_vl"].build(), "pixelprune", tokens=1)


@torch.no_grad()
def test_the_next_method_of_a_composition_is_given_the_cells_that_stay(model: Any) -> None:
    """DivPrune by its own function on the rows that PixelPrune has left; ConsensusDrop as alone where none leaves."""
    cells = noise(ROWS, COLUMNS, 12 * 256, seed=4)
    plain = picture(cells.clone())
    cells[1:3] = cells[0]
    inputs, caught = picture(cells), list[Tensor]()
    hook = model.model.language_model.layers[0].register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    for name, tokens in (("pixelprune", 1), ("pixelprune+divprune:positions=keep", 5)):
        with attach(model, name, tokens=tokens) as attached:
            model(**inputs)
    assert [one[:3] for one in attached.outcomes] == [(0, ROWS * COLUMNS, 5)]
    first, last = 3, caught[0].shape[1] - 3
    kept = spread_out(caught[0][:, first:last], 5)[0].sort().values
    assert last - first == 2 * COLUMNS, "two rows of cells repeat the first"
    assert torch.equal(caught[1][0, first:-3], caught[0][0, first:last][kept])
    hook.remove()
    logits = []
    for name in ("consensusdrop", "pixelprune+consensusdrop:positions=keep"):
        with attach(model, name, tokens=5):
            logits.append(model(**plain).logits[:, -1])
    assert torch.equal(*logits)
