"""Methods that act at the picture, inside the vision tower, or without looking: maths by hand, then on tiny hosts every
branch of the official function, and the tower against a slow double-precision one.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import IMAGE, PATCHES, tiny_llava
from hypothesis import given, settings
from hypothesis import strategies as st
from test_llava_host import ANYRES, CASES, batch, row, tiles
from test_method import unit

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.tower import blocks as vision_seam
from llava_consensus.methods import make
from llava_consensus.methods.divprune import spread_out
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.checks import NonFiniteError
from llava_consensus.reduction.grid import divide, near_square
from llava_consensus.reduction.merging import average, fresh, merge, pair
from llava_consensus.reduction.output import regroup
from llava_consensus.reduction.shape import Shape
from llava_consensus.reduction.tokens import VisualTokens

MAJOR = int(transformers.__version__.split(".")[0])
INSIDE = ("tome", "downsample")
ALL = ("uniform_grid", "pool", "downsample", "divprune", "tome", "tome_post")
LLAVA_7B = Shape(32, 4096, 32, 32, 128, 11008, 32000, 24, 1024, 16, 4096, 576, 588, 66)


def at_angles(*degrees: float) -> torch.Tensor:
    angles = torch.tensor(degrees) * math.pi / 180
    return torch.stack((angles.cos(), angles.sin()), -1)[None]


def patches(height: int, width: int, side: int, corner: int = 0) -> VisualTokens:
    """Projected tokens of a rectangle of patches of a tile, each its own number."""
    places = (torch.arange(height)[:, None] * side + torch.arange(width)).flatten()[None] + corner
    projected = torch.arange(height * width, dtype=torch.float32)[None, :, None]
    return VisualTokens(projected, torch.zeros_like(places), places, side=side)


# ---- bipartite merging: baselines.md 1.G


@pytest.mark.parametrize(
    ("protected", "count", "values", "sizes"),
    [
        (False, 2, [40, 5, 25, 50], [1, 2, 2, 1]),
        (False, 3, [5, 30, 50], [2, 3, 1]),
        (True, 1, [0, 40, 10, 25, 50], [1, 1, 1, 2, 1]),
        (True, 2, [0, 10, 30, 50], [1, 1, 3, 1]),
        (False, 0, [0, 20, 40, 10, 30, 50], [1] * 6),
    ],
)
def test_worked_example_of_tome(protected: bool, count: int, values: list[float], sizes: list[int]) -> None:
    bag = fresh(torch.arange(0.0, 60, 10)[None, :, None])
    pairing = pair(at_angles(0, 10, 90, 80, 180, 45), count, protected)
    after = merge(bag, pairing)
    assert after.values.flatten().tolist() == values and after.size.flatten().tolist() == sizes
    members = [[i for i in range(6) if after.place[0, i] == slot] for slot in range(6 - count)]
    assert [10 * sum(own) / len(own) for own in members] == values  # the bookkeeping says who is where


@settings(max_examples=40, deadline=None)
@given(length=st.integers(2, 40), protected=st.booleans(), seed=st.integers(0, 99), rounds=st.integers(1, 4))
def test_invariants_of_merging(length: int, protected: bool, seed: int, rounds: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(2, length, 3, generator=generator)
    bag = fresh(start)
    for _ in range(rounds):
        left = bag.values.shape[1]
        if left < 2:
            break
        count = int(torch.randint(0, (left - protected) // 2 + 1, (1,), generator=generator))
        bag = merge(bag, pair(bag.values, count, protected))
        assert bag.values.shape[1] == left - count
    assert bag.size.sum(1).tolist() == [length, length]
    for image in range(2):
        for slot in range(bag.values.shape[1]):
            own = bag.place[image] == slot
            assert own.sum() == bag.size[image, slot]
            assert torch.allclose(bag.values[image, slot], start[image, own].mean(0), atol=1e-5)
    assert not protected or (torch.equal(bag.values[:, 0], start[:, 0]) and (bag.place[:, 0] == 0).all())


def test_merging_constant_tokens_changes_nothing_and_nan_is_an_error() -> None:
    same = torch.full((1, 9, 4), 0.3)
    assert torch.allclose(merge(fresh(same), pair(same, 4)).values, torch.tensor(0.3))
    assert average(same, torch.rand(1, 9), pair(same, 4)).shape == (1, 5, 4)
    with pytest.raises(NonFiniteError, match="values tokens are matched by"):
        pair(same * float("nan"), 2)


@pytest.mark.parametrize(
    ("tokens", "first", "times", "then"),
    [(192, 17, 16, 16), (128, 20, 11, 19), (64, 23, 6, 22), (32, 24, 15, 23)],
)
def test_schedules_land_on_the_budget(tokens: int, first: int, times: int, then: int) -> None:
    """baselines.md 1.D."""
    counts = make("tome").schedule(tokens, 576, 23)
    assert counts == [first] * times + [then] * (23 - times) and 576 - sum(counts) == tokens
    entering = make("tome").vision_tokens(Budget(tokens), LLAVA_7B)
    assert entering[0] == 576 and entering[22] == tokens + then and entering[23] == tokens and len(entering) == 24


@settings(max_examples=80, deadline=None)
@given(size=st.integers(2, 700), blocks=st.integers(1, 26), data=st.data())
def test_schedules_respect_the_halving_limit(size: int, blocks: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, size - 1))
    if tokens < -(-size // 2**blocks):
        with pytest.raises(OptionError, match=f"give at least {-(-size // 2**blocks)}, or use tome_post"):
            make("tome").schedule(tokens, size, blocks)
        return
    left = size
    counts = make("tome").schedule(tokens, size, blocks)
    assert counts == sorted(counts, reverse=True)
    for count in counts:
        assert 0 <= count <= left // 2
        left -= count
    assert left == tokens


def test_tome_post_by_hand() -> None:
    """Six tokens to two, at most half at a time: three in the first round (1.G), one in the second."""
    tokens = VisualTokens(
        torch.arange(0.0, 60, 10)[None, :, None], torch.zeros(1, 6).long(), torch.arange(6)[None]
    )._replace(projected=torch.cat((at_angles(0, 10, 90, 80, 180, 45), torch.arange(0.0, 60, 10)[None, :, None]), -1))
    scaled = tokens._replace(projected=tokens.projected * torch.tensor([1e6, 1e6, 1.0]))  # the angles are the metric
    result = make("tome_post", similarity="projected").reduce(scaled, Budget(3))
    assert result.tokens[0, :, 2].tolist() == [5, 30, 50]
    assert result.owner.tolist() == [[0, 0, 1, 1, 1, 2]] and result.anchors.tolist() == [[0, 2, 5]]
    assert make("tome_post", similarity="projected").reduce(scaled, Budget(2)).tokens.shape == (1, 2, 3)


@pytest.mark.parametrize("similarity", ["key", "feature", "projected"])
def test_tome_post_partitions_the_tokens(similarity: str) -> None:
    tokens = unit(size=24)
    result = make("tome_post", similarity=similarity).reduce(tokens, Budget(5))
    for image in range(2):
        for slot in range(5):
            own = result.owner[image] == slot
            assert torch.allclose(result.tokens[image, slot], tokens.projected[image, own].mean(0), atol=1e-5)
            assert int(result.source[image, slot]) == int(own.nonzero()[0])


# ---- a row for each token of the tower


def test_regroup_gives_one_row_for_each_token_in_order_of_first_patches() -> None:
    slot = torch.tensor([[2, 0, 2, 1, 0, 1]])
    result = regroup(torch.tensor([[[2.0], [0.0], [2.0], [1.0], [0.0], [1.0]]]), slot, 3, "raster")
    assert result.tokens.flatten().tolist() == [2.0, 0.0, 1.0]
    assert result.anchors.tolist() == [[0, 1, 3]] and result.owner.tolist() == [[0, 1, 0, 2, 1, 2]]


def test_regroup_fills_up_where_unpadding_took_tokens_away() -> None:
    """Four tokens were left of the tile; two of them have patches here. The count stays what the budget says."""
    slot = torch.tensor([[3, 3, 1, 3, 1]])
    result = regroup(torch.tensor([[[3.0], [3.0], [1.0], [3.0], [1.0]]]), slot, 4, "raster")
    assert result.tokens.flatten().tolist() == [3.0, 3.0, 1.0, 3.0] and result.anchors.tolist() == [[0, 1, 2, 3]]
    assert result.owner.tolist() == [[0, 1, 2, 3, 2]]


# ---- methods that look at nothing


def test_sixty_four_cells_of_llava_are_three_by_three() -> None:
    tokens = patches(24, 24, 24)
    kept = make("uniform_grid").reduce(tokens, Budget(64)).kept[0]
    assert kept.tolist() == [24 * y + x for y in range(1, 24, 3) for x in range(1, 24, 3)]
    pooled = make("pool").reduce(tokens, Budget(64))
    own = torch.nn.functional.avg_pool2d(tokens.projected.view(1, 1, 24, 24), 3).flatten()
    assert torch.allclose(pooled.tokens.flatten(), own) and torch.equal(pooled.anchors[0], kept)
    assert pooled.owner.unique().tolist() == list(range(64))


@settings(max_examples=80, deadline=None)
@given(height=st.integers(1, 24), width=st.integers(1, 24), data=st.data())
def test_cells_divide_any_rectangle_into_any_number(height: int, width: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, height * width))
    tokens = patches(height, width, 24, corner=24 * (24 - height) + 24 - width)
    cells = divide(tokens, count)
    centre, group = cells.centre[0], cells.group[0]
    assert centre.tolist() == sorted(set(centre.tolist())) and group.unique().tolist() == list(range(count))
    assert torch.equal(group[centre], torch.arange(count))  # a centre lies in its own cell
    many = make("pool").reduce(tokens, Budget(count))
    assert many.tokens.shape[1] == count
    alone = divide(VisualTokens(*(torch.cat((v, v)) for v in tokens[:3]), side=24), count)
    assert torch.equal(alone.centre[1], centre) and torch.equal(alone.group[1], group)


def test_without_a_grid_the_tokens_are_one_row() -> None:
    tokens = patches(1, 10, 10)._replace(side=0)
    assert make("uniform_grid").reduce(tokens, Budget(5)).kept.tolist() == [[0, 2, 4, 6, 8]]


@pytest.mark.parametrize(
    ("tokens", "grid"), [(192, (13, 14)), (128, (11, 11)), (64, (8, 8)), (32, (5, 6)), (1, (1, 1))]
)
def test_small_pictures_never_have_more_than_the_budget(tokens: int, grid: tuple[int, int]) -> None:
    assert near_square(tokens) == grid
    count = grid[0] * grid[1]
    assert make("downsample").entering(Budget(tokens), 576, 3) == [count] * 3
    assert make("downsample").vision_tokens(Budget(tokens), LLAVA_7B) == [count] * 24
    assert make("downsample").entering(Budget(600), 576, 2) == [576] * 2


@pytest.mark.parametrize("name", ["uniform_grid", "pool", "downsample", "tome"])
def test_one_ranking_over_all_tiles_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} ranks nothing across tiles"):
        make(name, tile_budget="global")


# ---- divprune: baselines.md 7


def test_worked_example_of_divprune() -> None:
    assert spread_out(at_angles(0, 20, 30, 100, 260), 4).tolist() == [[4, 3, 0, 2]]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(2, 30), seed=st.integers(0, 99), data=st.data())
def test_divprune_equals_the_quadratic_loop(size: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, size))
    points = torch.randn(1, size, 7, generator=torch.Generator().manual_seed(seed)).double()
    unit_length = points[0] / points[0].norm(dim=-1, keepdim=True)
    distance = 1 - unit_length @ unit_length.T
    chosen = [int(distance.sort(1).values[:, 1].argmax())]
    while len(chosen) < count:
        nearest = distance[chosen].amin(0)
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    assert spread_out(points, count).tolist() == [chosen]
    assert spread_out(points * 100, count).tolist() == [chosen]


def test_divprune_never_repeats_a_token() -> None:
    """The authors' loop picks token 0 again and again here, and LLaVA would receive copies of it (baselines.md 15)."""
    assert spread_out(torch.ones(1, 6, 3), 4).tolist() == [[0, 1, 2, 3]]
    twice = torch.cat((at_angles(0, 90, 180), at_angles(0, 90, 180)), 1)
    assert set((spread_out(twice, 3) % 3).flatten().tolist()) == {0, 1, 2}


# ---- costs


@pytest.mark.parametrize("name", ALL)
def test_costs_of_a_method_are_declared(name: str) -> None:
    method, budget = make(name), Budget(64)
    assert method.entering(budget, 576, 32) == [64] * 32
    assert len(method.vision_tokens(budget, LLAVA_7B)) == 24
    assert method.flops(LLAVA_7B, Budget(576)) == 0 or name == "pool"
    assert method.flops(LLAVA_7B, budget) >= 0 and (name in ("uniform_grid", "downsample")) == (
        method.flops(LLAVA_7B, budget) == 0
    )


@pytest.mark.parametrize("name", ["divprune", "tome_post", "pool"])
def test_costs_agree_with_a_count_of_the_operations(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    tokens = unit(size=200, batch=1)
    shape = LLAVA_7B._replace(patches=200, width=6, vision_width=32, vision_heads=4)
    with FlopCounterMode(display=False) as counter:
        make(name).reduce(tokens, Budget(30))
    counted = counter.get_total_flops()
    rounds = 3 * 200 * 100 if name == "tome_post" else 0  # the sums of sizes, twice a round, are left out
    assert counted > 0 and counted - 2 * rounds <= make(name).flops(shape, Budget(30)) <= counted * 1.01


@pytest.mark.parametrize(("tokens", "blocks"), [(64, 23), (192, 23), (64, 5)])
def test_costs_of_tome_agree_with_a_count_of_the_operations(tokens: int, blocks: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    method = make("tome")
    shape = LLAVA_7B._replace(vision_width=48, vision_heads=4, blocks=24, feature_blocks=blocks)
    bag = fresh(torch.randn(1, 577, 48))
    with FlopCounterMode(display=False) as counter:
        for count in method.schedule(tokens, 576, blocks):
            bag = method.fold(bag, torch.randn(1, 4, bag.values.shape[1], 12), count)
    assert bag.values.shape[1] == tokens + 1
    sizes = 2 * 2 * 288 * 576  # the sums of sizes, at most, which the formula leaves out
    assert counter.get_total_flops() - sizes <= method.flops(shape, Budget(tokens)) <= counter.get_total_flops()


def test_costs_of_cdpruner_agree_with_a_count_of_the_operations() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    shape = LLAVA_7B._replace(patches=200, width=6, vision_width=32, vision_heads=4)
    with FlopCounterMode(display=False) as counter:
        make("cdpruner").reduce(unit(size=200, batch=1), Budget(30))
    own = make("cdpruner").flops(shape, Budget(30)) - shape.text_tower - 2 * 200 * shape.joint * 33
    assert (
        own == counter.get_total_flops() - 2 * 200 * 7 * 2 + 30 * 29 * 200
    )  # cosines are counted, T (T - 1) / 2 rows not


# ---- on hosts


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_full_budget_and_detach_are_bit_identical(
    tower_folder: Path, prompt: SimpleNamespace, name: str, family: str
) -> None:
    model = tiny_llava(tower_folder, family)
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
    """Rebuilt the slow way from the official rows: for each picture and tile the first row of each token, in order."""
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
        tokens = 10  # attaching makes sure of pictures of five tiles too
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
        shares = Budget(tokens).share(5 if anyres and len(own) > 1 else len(own))[: len(own)]
        most = [math.prod(near_square(share.tokens)) if name == "downsample" else share.tokens for share in shares]
        counts = [reduction.tokens.shape[1] for _, reduction in outcome.reductions]
        assert counts == most and outcome.after == sum(counts)
    lengths = [
        len(one) - one.count(-200) + sum(o.after + o.structural for o in outcomes if o.row == index)
        for index, one in enumerate(spec["rows"])
    ]
    assert out_mask.sum(1).tolist() == [min(limit, length) for length in lengths]


@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_projector_and_last_blocks_see_only_the_merged_tokens(
    llava_model: Any, prompt: SimpleNamespace, name: str
) -> None:
    seen: dict[str, list[int]] = {"projector": [], "blocks": []}
    blocks = vision_seam.capture.vision_blocks(llava_model.get_vision_tower().vision_tower)
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
    assert seen["blocks"] == ([13, 10, 7, 7] if name == "tome" else [7] * 4)  # with the class token


@pytest.mark.parametrize("name", ALL)
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
    """22 tokens for five tiles are 5, 5, 4, 4, 4; a picture of one tile has all 22 and so all its 16 patches."""
    model = tiny_llava(tower_folder, **ANYRES, mm_patch_merge_type="spatial")
    ids, mask = batch(row(5), row(6, 7), row(8))
    images = [tiles(5), tiles(3, 1), tiles(1, 2)]
    arguments = dict(images=images, image_sizes=[(100, 100), (110, 50), (50, 50)], attention_mask=mask)
    with attach(model, name, tokens=22) as attached:
        model(ids, **arguments)
        counts = [[one.tokens.shape[1] for _, one in outcome.reductions] for outcome in attached.outcomes]
    assert counts == ([[5, 5, 4, 4, 4], [5, 5, 4], []] if name == "tome" else [[4] * 5, [4] * 3, []])
    assert attached.outcomes[2][:3] == (2, 16, 16)


@torch.no_grad()
def test_an_exception_inside_the_tower_leaves_nothing_behind(tower_folder: Path, prompt: SimpleNamespace) -> None:
    model = tiny_llava(tower_folder)
    dense = model(prompt.ids, images=prompt.images).logits

    def state() -> dict[str, Any]:
        return {key: (set(vars(module)), len(module._forward_hooks)) for key, module in model.named_modules()}

    before = state()
    blocks = vision_seam.capture.vision_blocks(model.get_vision_tower().vision_tower)
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
    block = vision_seam.capture.vision_blocks(model.get_vision_tower().vision_tower)[0]
    block.forward = theirs = lambda *args, **kwargs: type(block).forward(block, *args, **kwargs)
    with attach(model, "tome", tokens=5):
        model(prompt.ids, images=prompt.images)
    assert vars(block)["forward"] is theirs


def test_budgets_the_tower_cannot_reach_are_refused_when_attaching(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder)
    with pytest.raises(OptionError, match="tokens=1: merging in 3 vision blocks halves 16 patches 3 times at most"):
        attach(model, "tome", tokens=1)
    attach(model, "tome", tokens=2).detach()
    model.get_vision_tower().vision_tower.config._attn_implementation = "flash_attention_2"
    with pytest.raises(OptionError, match=r"takes no additive mask: load it with sdpa, or proportional=false"):
        attach(model, "tome", tokens=4)
    attach(model, "tome", tokens=4, proportional=False).detach()


# ---- the tower, merged the slow way


def slow_tome(tower: Any, images: torch.Tensor, counts: list[int], proportional: bool) -> tuple[list[Any], list[Any]]:
    """Tokens and their patches by explicit loops over one picture, in double precision, with a written-out softmax."""
    inner = getattr(tower, "vision_model", tower)
    hidden = inner.pre_layrnorm(inner.embeddings(images))[0]
    groups = [[index] for index in range(len(hidden))]
    for number, count in enumerate(counts):
        block = inner.encoder.layers[number]
        normed, attention = block.layer_norm1(hidden), block.self_attn
        query, key, value = (
            layer(normed).unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        size = torch.tensor([float(len(own)) for own in groups], dtype=hidden.dtype)
        logits = query @ key.transpose(1, 2) * attention.scale + (size.log() if proportional else 0)
        mixed = (logits.softmax(-1) @ value).transpose(0, 1).flatten(1)
        hidden = hidden + attention.out_proj(mixed)
        metric = torch.nn.functional.normalize(key.mean(0), dim=-1)
        similar = {}
        for source in range(2, len(groups), 2):
            cosines = [float(metric[source] @ metric[target]) for target in range(1, len(groups), 2)]
            best = max(range(len(cosines)), key=lambda target: (cosines[target], -target))
            similar[source] = (cosines[best], 2 * best + 1)
        leaving = sorted(similar, key=lambda source: (-similar[source][0], source))[:count]
        order = [place for place in range(0, len(groups), 2) if place not in leaving] + list(range(1, len(groups), 2))
        members = {place: [place, *(source for source in leaving if similar[source][1] == place)] for place in order}
        hidden = torch.stack(
            [sum(hidden[i] * size[i] for i in members[place]) / sum(size[i] for i in members[place]) for place in order]
        )
        groups = [[patch for i in members[place] for patch in groups[i]] for place in order]
        hidden = hidden + block.mlp(block.layer_norm2(hidden))
    return list(hidden), groups


@pytest.mark.parametrize("proportional", [True, False])
@torch.no_grad()
def test_tome_equals_a_slow_tower_in_double_precision(tower_folder: Path, proportional: bool) -> None:
    model = tiny_llava(tower_folder).double()
    tower, images = model.get_vision_tower(), tiles(2).double()
    with attach(model, "tome", tokens=5, proportional=proportional) as attached:
        taps = attached.taps(images, [1, 1])
    for index in range(2):
        values, groups = slow_tome(tower.vision_tower, images[index : index + 1], [4, 4, 3], proportional)
        for slot, own in enumerate(groups[1:]):  # the class token is alone in front
            places = sorted(patch - 1 for patch in own)
            assert (taps.slot[index] == slot).nonzero().flatten().tolist() == places
            expected = model.get_model().mm_projector(values[slot + 1])
            assert torch.allclose(taps.projected[index, places], expected, atol=1e-10)
    other = make("tome", proportional=not proportional)
    assert not torch.allclose(taps.projected, vision_seam.encode(model, images, other, [5, 5])[0])


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4.37 cannot interpolate the positions of a CLIP tower")
@pytest.mark.parametrize("tokens", [4, 6, 9, 12])
@torch.no_grad()
def test_downsample_equals_transformers_own_interpolation(llava_model: Any, tokens: int) -> None:
    images, tower = tiles(2), llava_model.get_vision_tower()
    rows, columns = near_square(tokens)
    with attach(llava_model, "downsample", tokens=tokens) as attached:
        taps = attached.taps(images, [1, 1])
    size = (14 * rows, 14 * columns)
    small = torch.nn.functional.interpolate(images, size=size, mode="bicubic", antialias=True)
    out = tower.vision_tower(small, interpolate_pos_encoding=True, output_hidden_states=True)
    expected = llava_model.get_model().mm_projector(out.hidden_states[-2][:, 1:])  # [2, rows x columns, D]
    side = IMAGE // 14
    for y in range(side):
        for x in range(side):
            cell = (y * rows // side) * columns + x * columns // side
            assert torch.allclose(taps.projected[:, y * side + x], expected[:, cell], atol=1e-5)
            assert (taps.slot[:, y * side + x] == cell).all()


@torch.no_grad()
def test_half_precision_and_beams_run(tower_folder: Path, prompt: SimpleNamespace) -> None:
    model = tiny_llava(tower_folder).bfloat16()
    for name in ALL:
        with attach(model, name, tokens=6):
            out = model.generate(
                prompt.ids, images=prompt.images.bfloat16(), max_new_tokens=3, num_beams=2, do_sample=False
            )
        assert out.shape[0] == 1
