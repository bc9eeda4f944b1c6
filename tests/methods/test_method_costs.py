"""What methods say their own work costs, against a count of the matrix products they do.

Each method runs at the size of LLaVA-1.5-7B on tensors without numbers while torch counts; one that waits for the
device, by `int(tensor)`, `if tensor` or `nonzero`, ends in an error there. The counter does not see what is done for a
method by its host, nor distances taken element by element; `ELSEWHERE` says what that is.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from units import work

from llava_consensus.methods import METHODS, make, sparsevlm
from llava_consensus.reduction import costs
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import SHAPES
from llava_consensus.reduction.method import Shape
from llava_consensus.reduction.saliency import class_flops

SEVEN = SHAPES["llava-1.5-7b"]


def consensusdrop(method: Any, shape: Shape, tokens: int) -> float:
    """The probe's two projections in the host, and sampling, which is elementwise."""
    kept, merged = Budget(tokens).split(shape.patches)
    heads, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    probe = shape.width * ((shape.patches + shape.text) * keys + shape.known("question") * heads)
    return 2.0 * (probe + merged * (shape.patches - kept) * shape.vision_width)


def pyramiddrop(method: Any, shape: Shape, tokens: int) -> float:
    """The projections of the layer that is cut before: keys of all rows, the query of the last."""
    keys, heads = shape.kv_heads * shape.head_width, shape.heads * shape.head_width
    entering = method.entering(Budget(tokens), shape.patches, shape.layers)
    before = [entering[cut.layer - 1] for cut in method.cuts(Budget(tokens), shape.patches, shape.layers)]
    return sum(2.0 * shape.width * ((visual + shape.text) * keys + heads) for visual in before)


def recycling(method: Any, shape: Shape, tokens: int) -> float:
    """Distances between the recycled tokens, which are no matrix product."""
    total, left = 0.0, shape.patches
    for cut in method.cuts(Budget(tokens), shape.patches, shape.layers):
        total += 2.0 * shape.width * sparsevlm.recycled(left - cut.kept)[0] ** 2 if cut.merged else 0.0
        left = cut.left
    return total


ELSEWHERE: dict[str, Callable[[Any, Shape, int], float]] = {
    **dict.fromkeys(("consensusdrop", "consensusdrop+"), consensusdrop),
    **dict.fromkeys(
        ("cdpruner", "mfpruner", "anchorprune"),  # the text tower, and the patches in CLIP's joint space
        lambda _, shape, __: shape.text_tower + 2.0 * shape.patches * shape.joint * shape.vision_width,
    ),
    **{"pyramiddrop": pyramiddrop, "sparsevlm": recycling},
    # the decay of every pair of rows, which the host computes
    "restore_calibrated": lambda _, shape, tokens: 4.0 * (tokens + shape.text) ** 2 * shape.head_width,
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in METHODS if name != "flashvid"),  # its work follows from values
        ("consensusdrop", {"vision_score": "tokens"}),
        ("consensusdrop", {"fps_start": "mean", "aggregate": "last"}),
        ("consensusdrop", {"select": "diverse", "fps_start": "salient"}),
        ("visionzip", {"class_token": False}),
        ("restore", {"selector": "divprune"}),
        ("restore", {"selector": "holov"}),
        ("sparsevlm", {"version": "2.0"}),
    ],
)
@torch.no_grad()
def test_formulas_are_what_the_counter_counts(name: str, options: dict[str, Any]) -> None:
    method = make(name, **options)
    for tokens in (64, 33):
        with FlopCounterMode(display=False) as counter:
            work(method, SEVEN, tokens)
        elsewhere = ELSEWHERE.get(name, lambda *_: 0.0)(method, SEVEN, tokens)
        counted = pytest.approx(counter.get_total_flops() + elsewhere, rel=1e-5)  # but for EADP's smoothing of a grid
        assert method.flops(SEVEN, Budget(tokens)) == counted
        assert (counter.get_total_flops() == 0) == method.multiplies_nothing


def test_costs_of_a_method_are_declared_and_a_small_part_of_a_prefill() -> None:
    budget, prefill = Budget(64), costs.llm_flops(SEVEN, [576] * 32)
    for name in METHODS:
        method = make(name)
        assert method.flops(SEVEN, Budget(576)) == 0, f"{name}: where all tokens stay, nothing is done"
        assert len(method.vision_tokens(budget, SEVEN)) == 24, name
        entering = method.entering(budget, 576, 32)
        assert len(entering) == 32 and entering[0] in (64, 576), name
        assert (method.flops(SEVEN, budget) == 0) == method.multiplies_nothing, name
        assert 0 <= method.flops(SEVEN, budget) < 0.01 * prefill, name


@pytest.mark.parametrize(("tokens", "blocks"), [(64, 23), (192, 23), (64, 5)])
@torch.no_grad()
def test_costs_of_tome_at_any_depth(tokens: int, blocks: int) -> None:
    shape = SEVEN._replace(feature_blocks=blocks)
    with FlopCounterMode(display=False) as counter:
        work(make("tome"), shape, tokens)
    assert make("tome").flops(shape, Budget(tokens)) == counter.get_total_flops()


def test_costs_where_the_counter_sees_one_tile() -> None:
    """By hand: of five tiles, each with its own class row, of a tower whose feature block nobody names, and of merging
    after a projector that joins patches.
    """
    five, budget = SEVEN._replace(tiles=5), Budget(640, 0)
    assert make("random").units(five, Budget(640)) == [(Budget(128), 576)] * 5
    assert make("random").units(five, Budget(4)) == [(Budget(4), five.available)]
    length = 5 * 576 + five.text
    probe = length * 4096 * 4096 + 31 * 4096 * (4096 + length)
    assert make("consensusdrop").flops(five, budget) == 2.0 * (probe + 5 * 577 * 1024)
    assert class_flops(five._replace(classes=0)) == 2.0 * 5 * 576 * 576 * 1024
    received = make("consensusdrop", vision_score="tokens").flops(five, budget)
    assert received == 2.0 * (probe + 5 * 576 * 577 * 1024)
    tome, unnamed = make("tome"), SEVEN._replace(feature_blocks=0)
    assert tome.flops(unnamed, Budget(64)) == tome.flops(SEVEN, Budget(64))
    assert tome.vision_tokens(Budget(64), SEVEN._replace(feature_blocks=20))[19:] == [89, 64, 64, 64, 64]
    assert tome.vision_tokens(Budget(64), unnamed) == tome.vision_tokens(Budget(64), SEVEN)
    own = 2.0 * 576 * 576 * (4096 + 576)
    assert make("otprune").flops(SEVEN, Budget(3)) == own
    kernel = 2.0 * 576 * (768 * 1025 + 576 * 4096)
    assert make("cdpruner").flops(SEVEN, Budget(3)) == SEVEN.text_tower + kernel
    words = 2.0 * 576 * (31 + 576) * 4096
    assert make("cdpruner").flops(SEVEN._replace(text_tower=0.0), Budget(3)) == words
    joined = SEVEN._replace(patches=144, merged=4, single=False)
    merging = 2.0 * (577 * 1024 + 144 * (32 * 1024 + 33 * 4096))
    assert make("prumerge").flops(joined, Budget(33)) == merging
    before = 2.0 * (577 * 1024 + 65 * 576 * 1024 + 33 * (1024 + 4096) * 4096)  # the projector
    assert make("prumerge").flops(SEVEN._replace(classes=0), Budget(33)) == before
