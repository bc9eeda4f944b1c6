"""Methods at the image, inside the tower and behind it on tiny hosts: every branch of the official function."""

import math
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny_llava
from prompts import ANYRES, CASES, batch, row, tiles

from llava_consensus import attach
from llava_consensus.hosts.official_model import LlavaTower
from llava_consensus.methods.resize import smaller
from llava_consensus.reduction.budget import Budget

INSIDE = ("tome", "resize")


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
    seen: list[int] = []
    modules = [block.mlp for block in LlavaTower(llava_model.get_vision_tower()).blocks]
    modules.append(llava_model.get_model().mm_projector)
    with ExitStack() as hooks, attach(llava_model, name, tokens=6):
        for module in modules:
            hooks.enter_context(module.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1])))
        llava_model(prompt.ids, images=prompt.images)
    assert seen == [*([13, 10, 7] if name == "tome" else [7] * 3), 6]  # with the class token; nobody reads a fourth


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
def test_a_forward_that_was_replaced_before_comes_back(tower_folder: Path, prompt: SimpleNamespace) -> None:
    """As accelerate replaces `forward` of modules it spreads over devices."""
    model = tiny_llava(tower_folder)
    block = LlavaTower(model.get_vision_tower()).blocks[0]
    block.forward = theirs = lambda *args, **kwargs: type(block).forward(block, *args, **kwargs)
    with attach(model, "tome", tokens=5):
        model(prompt.ids, images=prompt.images)
    assert vars(block)["forward"] is theirs
