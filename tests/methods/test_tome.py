"""ToMe inside the vision tower and behind it: bipartite merging by hand, schedules, and the tower against a slow one in
double precision.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import CASES, decoder_given, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_llava
from prompts import tiles
from units import at_angles

from llava_consensus import attach
from llava_consensus.errors import NonFiniteError, OptionError
from llava_consensus.hosts.open_tower import EncoderRun
from llava_consensus.methods import make
from llava_consensus.reduction.merging import fresh, match, merge
from llava_consensus.reduction.selection import regroup


@settings(max_examples=40)
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
        bag = merge(bag, match(bag.values, count, protected), count)
        assert bag.values.shape[1] == left - count
    assert bag.size.sum(1).tolist() == [length, length]
    for image in range(2):
        for slot in range(bag.values.shape[1]):
            own = bag.place[image] == slot
            assert own.sum() == bag.size[image, slot]
            assert torch.allclose(bag.values[image, slot], start[image, own].mean(0), atol=1e-5)
    assert not protected or (torch.equal(bag.values[:, 0], start[:, 0]) and (bag.place[:, 0] == 0).all())


def test_merging_constant_tokens_changes_nothing_and_ties_go_to_the_lower_place() -> None:
    same = torch.full((1, 9, 4), 0.3)
    place = match(same, 4, False)
    assert place.tolist() == [[1, 1, 1, 2, 1, 3, 1, 4, 0]]
    bag = merge(fresh(same), place, 4)
    assert torch.allclose(bag.values, torch.tensor(0.3)) and bag.size.tolist() == [[1, 5, 1, 1, 1]]
    assert match(same, 3, True).tolist() == [[0, 2, 2, 3, 2, 4, 2, 5, 1]]
    assert match(torch.zeros(1, 1100, 4), 549, True)[0, -3:].tolist() == [549, 1, 550]


def test_pairs_by_hand() -> None:
    """Unit vectors at angles of which the best pairs are (0, 1), (2, 3) and, far behind, (4, 3)."""
    points, start = at_angles(0, 10, 90, 80, 180, 45), fresh(torch.arange(6.0)[None, :, None] * 10)
    for count, protected, values, sizes in (
        (2, False, [40, 5, 25, 50], [1, 2, 2, 1]),
        (3, False, [5, 30, 50], [2, 3, 1]),
        (1, True, [0, 40, 10, 25, 50], [1, 1, 1, 2, 1]),
        (2, True, [0, 10, 30, 50], [1, 1, 3, 1]),
    ):
        bag = merge(start, match(points, count, protected), count)
        assert torch.allclose(bag.values.flatten(), torch.tensor(values, dtype=torch.float32))
        assert bag.size[0].tolist() == sizes


@torch.no_grad()
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_key_that_is_no_number_is_an_error(tower_folder: Path, prompt: Any, number: float) -> None:
    model = tiny_llava(tower_folder)
    block = model.get_vision_tower().vision_tower
    getattr(block, "vision_model", block).encoder.layers[1].self_attn.k_proj.bias[0] = number
    with attach(model, "tome", tokens=4), pytest.raises(NonFiniteError, match="reduced tokens"):
        model.generate(prompt.ids, images=prompt.images, max_new_tokens=1)


@settings(max_examples=80)
@given(size=st.integers(2, 700), blocks=st.integers(1, 26), data=st.data())
def test_schedules_respect_the_halving_limit(size: int, blocks: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, size - 1))
    if tokens < -(-size // 2**blocks):
        with pytest.raises(OptionError, match=f"give at least {-(-size // 2**blocks)}, or take"):
            make("tome").schedule(tokens, size, blocks)
        return
    left = size
    counts = make("tome").schedule(tokens, size, blocks)
    assert counts == sorted(counts, reverse=True)
    for count in counts:
        assert 0 <= count <= left // 2
        left -= count
    assert left == tokens


def test_regroup_gives_one_row_for_each_token_in_order_of_first_patches() -> None:
    """And fills up where unpadding took tokens away: four tokens were left of the second tile, two of them have patches
    here, and the count stays what the budget says.
    """
    slot = torch.tensor([[2, 0, 2, 1, 0, 1]])
    result = regroup(torch.tensor([[[2.0], [0.0], [2.0], [1.0], [0.0], [1.0]]]), slot, 3)
    assert result.tokens.flatten().tolist() == [2.0, 0.0, 1.0]
    assert result.anchors.tolist() == [[0, 1, 3]] and result.owner.tolist() == [[0, 1, 0, 2, 1, 2]]
    slot = torch.tensor([[3, 3, 1, 3, 1]])
    result = regroup(torch.tensor([[[3.0], [3.0], [1.0], [3.0], [1.0]]]), slot, 4)
    assert result.tokens.flatten().tolist() == [3.0, 3.0, 1.0, 3.0] and result.anchors.tolist() == [[0, 1, 2, 3]]
    assert result.owner.tolist() == [[0, 1, 2, 3, 2]]


def test_budgets_the_tower_cannot_reach_are_refused_when_attaching(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder)
    with pytest.raises(OptionError, match="tokens=1: merging in 3 vision blocks halves 16 patches 3 times at most"):
        attach(model, "tome", tokens=1)
    attach(model, "tome", tokens=2).detach()
    model.get_vision_tower().vision_tower.config._attn_implementation = "flash_attention_2"
    with pytest.raises(OptionError, match=r"takes no additive mask: load it with sdpa, or proportional=false"):
        attach(model, "tome", tokens=4)
    attach(model, "tome", tokens=4, proportional=False).detach()


def slow_tome(tower: Any, images: torch.Tensor, counts: list[int]) -> tuple[list[Any], list[Any]]:
    """Tokens and their patches by explicit loops over one image, in double precision, with a written-out softmax; of
    a tower without a class token all patches may leave, and those that stay stand by falling similarity.
    """
    inner = getattr(tower, "vision_model", tower)
    hidden, classes = inner.embeddings(images), hasattr(inner, "pre_layrnorm")
    hidden = (inner.pre_layrnorm(hidden) if classes else hidden)[0]
    groups = [[index] for index in range(len(hidden))]
    for block, count in zip(inner.encoder.layers, counts, strict=False):
        normed, attention = block.layer_norm1(hidden), block.self_attn
        query, key, value = (
            layer(normed).unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        size = torch.tensor([float(len(own)) for own in groups], dtype=hidden.dtype)
        logits = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5 + size.log()
        mixed = (logits.softmax(-1) @ value).transpose(0, 1).flatten(1)
        hidden = hidden + attention.out_proj(mixed)
        metric = torch.nn.functional.normalize(key.mean(0), dim=-1)
        similar = {}
        for source in range(2 if classes else 0, len(groups), 2):
            cosines = [float(metric[source] @ metric[target]) for target in range(1, len(groups), 2)]
            best = max(range(len(cosines)), key=lambda target: (cosines[target], -target))
            similar[source] = (cosines[best], 2 * best + 1)
        leaving = sorted(similar, key=lambda source: (-similar[source][0], source))[:count]
        order = [place for place in range(0, len(groups), 2) if place not in leaving]
        order = order if classes else sorted(order, key=lambda source: (-similar[source][0], source))
        order = [*order, *range(1, len(groups), 2)] if count else list(range(len(groups)))
        members = {place: [place, *(source for source in leaving if similar[source][1] == place)] for place in order}
        hidden = torch.stack(
            [sum(hidden[i] * size[i] for i in members[place]) / sum(size[i] for i in members[place]) for place in order]
        )
        groups = [[patch for i in members[place] for patch in groups[i]] for place in order]
        hidden = hidden + block.mlp(block.layer_norm2(hidden))
    return list(hidden), groups


@torch.no_grad()
def test_tome_on_a_siglip_tower_equals_a_slow_one() -> None:
    model, images = CASES["llava_onevision"].build().double(), tiles(2).double()
    run = EncoderRun([15, 5], (4, 4), False)
    with attach(model, "tome", tokens=10) as attached, attached.entrance.before.towers["image"].running(run):
        model.model.multi_modal_projector(model.model.vision_tower(images).hidden_states[-1])
        with pytest.raises(RuntimeError, match="ran twice"):
            model.model.vision_tower(images)
    for index, counts in enumerate(([1, 0, 0, 0], [3, 3, 3, 2])):
        values, groups = slow_tome(model.model.vision_tower, images[index : index + 1], counts)
        assert len(groups) == run.shares[index]
        for slot, own in enumerate(groups):
            assert (run.slot[index] == slot).nonzero().flatten().tolist() == sorted(own)
            expected = model.model.multi_modal_projector(values[slot])
            assert torch.allclose(run.projected[index, sorted(own)], expected, atol=1e-6)  # log sizes are float32


@torch.no_grad()
def test_tome_on_frames_keeps_their_class_tokens() -> None:
    """Which the prompt of Video-LLaVA holds, each in front of its frame."""
    model, clip = CASES["video_llava"].build().double(), CASES["video_llava video"].picture(0)
    inputs = prompts([1, 5, clip, 7])
    inputs["pixel_values_videos"] = inputs["pixel_values_videos"].double()
    with attach(model, "tome", tokens=20) as attached:
        tokens = decoder_given(model, inputs)["inputs_embeds"][0, 2:-1]
    assert (attached.outcomes[0].after, attached.outcomes[0].structural) == (20, 4) and len(tokens) == 24
    for index, frame in enumerate(tokens.split(6)):
        image = inputs["pixel_values_videos"][0, index : index + 1]
        values, groups = slow_tome(model.model.video_tower, image, [4, 4, 3])
        order = sorted(range(6), key=lambda slot: min(groups[slot]))
        expected = model.model.multi_modal_projector(torch.stack([values[slot] for slot in order]))
        assert torch.allclose(frame, expected, atol=1e-5)  # log sizes are float32


def test_decreasing_schedules_by_hand() -> None:
    """The authors' list of r = 4 in five blocks is 8, 6, 4, 2, 0; what is left over goes to the first blocks."""
    decreasing = make("tome", rate="decreasing")
    assert decreasing.schedule(10, 30, 5) == [8, 6, 4, 2, 0]
    assert decreasing.schedule(8, 30, 5) == [9, 7, 4, 2, 0]
    assert decreasing.schedule(2, 12, 3) == [6, 3, 1]  # 7, 3 and 0 wanted, and 12, 6 and 3 are halved at most
    assert decreasing.schedule(5, 8, 1) == [3]
    for tokens in (192, 128, 64, 32):
        counts = decreasing.schedule(tokens, 576, 23)
        assert 576 - sum(counts) == tokens and counts == sorted(counts, reverse=True)
    with pytest.raises(OptionError, match="rate=constant"):
        decreasing.schedule(1, 30, 3)
    with pytest.raises(OptionError, match="rate='linear' must be one of constant, decreasing"):
        make("tome", rate="linear")
