"""Methods at the image, inside the tower and behind it on tiny hosts: every branch of the official function."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import PATCHES, tiny_llava
from prompts import ANYRES, CASES, batch, row, tiles

from llava_consensus import attach
from llava_consensus.hosts.official_model import LlavaTower
from llava_consensus.methods.resize import smaller
from llava_consensus.reduction.budget import Budget

INSIDE = ("tome", "resize")
ALL = ("uniform_grid", "pool", "resize", "divprune", "tome")


@pytest.mark.parametrize("name", ["pool", *INSIDE])
@torch.no_grad()
def test_full_budget_and_detach_are_bit_identical(tower_folder: Path, prompt: SimpleNamespace, name: str) -> None:
    model = tiny_llava(tower_folder)
    dense = model(prompt.ids, images=prompt.images).logits
    keys = {key: set(vars(module)) for key, module in model.named_modules()}
    with attach(model, name, tokens=PATCHES):
        assert torch.equal(model(prompt.ids, images=prompt.images).logits, dense)
    with attach(model, name, tokens=6) as attached:
        assert model(prompt.ids, images=prompt.images).logits.shape[1] == dense.shape[1] - PATCHES + 6
        assert attached.outcomes[0][:4] == (0, PATCHES, 6, 0)
    assert {key: set(vars(module)) for key, module in model.named_modules()} == keys
    assert torch.equal(model(prompt.ids, images=prompt.images).logits, dense)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_every_branch_holds_the_tokens_of_the_tower_in_raster_order(tower_folder: Path, name: str, case: str) -> None:
    """Rebuilt the slow way from the official rows: for each image and tile the first row of each token, in order."""
    spec = CASES[case]
    model = tiny_llava(tower_folder, **spec.get("config", {}))
    left = spec.get("left", False)
    if left:
        model.config.tokenizer_padding_side = "left"
    ids, mask = batch(*spec["rows"], left=left)
    arguments = dict(position_ids=None, attention_mask=mask, past_key_values=None, labels=None, images=spec["images"])
    arguments["image_sizes"] = spec.get("sizes")
    anyres = "image_grid_pinpoints" in spec.get("config", {})
    tokens = 20 if anyres or max(len(one) for one in spec["ranges"]) > 1 else 6
    if case == "spatial_unpad, single tile":
        tokens = 10  # attaching makes sure of images of five tiles too
    with attach(model, name, tokens=tokens) as attached:
        _, _, out_mask, _, embeds, _ = model.prepare_inputs_labels_for_multimodal(ids, **arguments)
        outcomes = list(attached.outcomes)
    for outcome in outcomes:
        rows = embeds[outcome.row][out_mask[outcome.row].bool()]
        for _, reduction in outcome.reductions:
            place = [(rows == token).all(-1).nonzero().flatten().tolist() for token in reduction.tokens[0]]
            last = -1
            for found in place[: None if case != "truncated" else 0]:  # each after the one before
                last = min(one for one in found if one > last)
            assert torch.equal(reduction.source[0], reduction.source[0].sort().values)
            assert reduction.owner[0].unique().tolist() == list(range(reduction.tokens.shape[1]))
    limit = getattr(model.config, "tokenizer_model_max_length", None) or 10**6
    for outcome, own in zip(outcomes, spec["ranges"], strict=True):
        shares = Budget(tokens).share(len(own))
        most = [math.prod(smaller(share.tokens)) if name == "resize" else share.tokens for share in shares]
        counts = [reduction.tokens.shape[1] for _, reduction in outcome.reductions]
        assert counts == most and outcome.after == sum(counts)
    lengths = [
        len(one) - one.count(-200) + sum(o.after + o.structural for o in outcomes if o.row == index)
        for index, one in enumerate(spec["rows"])
    ]
    assert out_mask.sum(1).tolist() == [min(limit, length) for length in lengths]


@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_projector_and_blocks_see_only_the_merged_tokens(llava_model: Any, prompt: SimpleNamespace, name: str) -> None:
    seen: dict[str, list[int]] = {"projector": [], "blocks": []}
    blocks = LlavaTower(llava_model.get_vision_tower()).blocks
    handles = [
        llava_model.get_model().mm_projector.register_forward_hook(
            lambda module, inputs, output: seen["projector"].append(inputs[0].shape[1])
        ),
        *(
            b.mlp.register_forward_hook(lambda module, inputs, output: seen["blocks"].append(inputs[0].shape[1]))
            for b in blocks
        ),
    ]
    with attach(llava_model, name, tokens=6):
        llava_model(prompt.ids, images=prompt.images)
    for handle in handles:
        handle.remove()
    assert seen["projector"] == [6]
    assert seen["blocks"] == ([13, 10, 7] if name == "tome" else [7] * 3)  # with the class token; nobody reads a fourth


@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_batch_equals_singles(tower_folder: Path, name: str) -> None:
    model = tiny_llava(tower_folder, tokenizer_padding_side="left")
    rows = [row(5, 6), row(5, after=9), row(7, 8, 9, after=2)]
    images = tiles(3)
    ids, mask = batch(*rows, left=True)
    with attach(model, name, tokens=6) as attached:
        together = model.generate(ids, images=images, attention_mask=mask, max_new_tokens=6, do_sample=False)
        found = list(attached.outcomes)
        for index, one in enumerate(rows):
            alone = model.generate(
                torch.tensor([one]), images=images[index : index + 1], max_new_tokens=6, do_sample=False
            )
            assert together[index].tolist() == alone[0].tolist()
            assert torch.equal(attached.outcomes[0].reductions[0][1].owner, found[index].reductions[0][1].owner)


@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_tiles_have_their_own_budgets(tower_folder: Path, name: str) -> None:
    """22 tokens are 5, 5, 4, 4, 4 for five tiles and 8, 7, 7 for three; an image of one tile keeps all its 16."""
    model = tiny_llava(tower_folder, **ANYRES, mm_patch_merge_type="spatial")
    ids, mask = batch(row(5), row(6, 7), row(8))
    images = [tiles(5), tiles(3, 1), tiles(1, 2)]
    arguments = dict(images=images, image_sizes=[(100, 100), (110, 50), (50, 50)], attention_mask=mask)
    with attach(model, name, tokens=22) as attached:
        model(ids, **arguments)
        counts = [[one.tokens.shape[1] for _, one in outcome.reductions] for outcome in attached.outcomes]
    assert counts == ([[5, 5, 4, 4, 4], [8, 7, 7], []] if name == "tome" else [[4] * 5, [6] * 3, []])
    assert attached.outcomes[2][:3] == (2, 16, 16)


@torch.no_grad()
def test_an_exception_inside_the_tower_leaves_nothing_behind(tower_folder: Path, prompt: SimpleNamespace) -> None:
    model = tiny_llava(tower_folder)
    dense = model(prompt.ids, images=prompt.images).logits

    def state() -> dict[str, Any]:
        return {key: (set(vars(module)), len(module._forward_hooks)) for key, module in model.named_modules()}

    before = state()
    blocks = LlavaTower(model.get_vision_tower()).blocks
    handle = blocks[1].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
    for name in INSIDE:
        with pytest.raises(RuntimeError, match="boom"), attach(model, name, tokens=5):
            model(prompt.ids, images=prompt.images)
    handle.remove()
    assert state() == before and torch.equal(model(prompt.ids, images=prompt.images).logits, dense)


@torch.no_grad()
def test_a_forward_that_was_replaced_before_comes_back(tower_folder: Path, prompt: SimpleNamespace) -> None:
    """As accelerate replaces `forward` of modules it spreads over devices."""
    model = tiny_llava(tower_folder)
    block = LlavaTower(model.get_vision_tower()).blocks[0]
    block.forward = theirs = lambda *args, **kwargs: type(block).forward(block, *args, **kwargs)
    with attach(model, "tome", tokens=5):
        model(prompt.ids, images=prompt.images)
    assert vars(block)["forward"] is theirs


@torch.no_grad()
def test_half_precision_and_beams_run(tower_folder: Path, prompt: SimpleNamespace) -> None:
    model = tiny_llava(tower_folder).bfloat16()
    for name in ALL:
        with attach(model, name, tokens=6):
            out = model.generate(
                prompt.ids, images=prompt.images.bfloat16(), max_new_tokens=3, num_beams=2, do_sample=False
            )
        assert out.shape[0] == 1
