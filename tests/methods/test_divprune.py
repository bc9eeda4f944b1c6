"""DivPrune: the worked example, and the fast selection against the definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize
from units import at_angles

from llava_consensus.methods.divprune import spread_out


def test_worked_example_of_divprune() -> None:
    assert spread_out(at_angles(0, 20, 30, 100, 260), 4).tolist() == [[4, 3, 0, 2]]


@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 30), seed=st.integers(0, 999), data=st.data())
def test_every_pick_is_the_farthest_by_definition(size: int, seed: int, data: st.DataObject) -> None:
    """In double precision and with any length of the tokens: no other token is farther by more than rounding."""
    count = data.draw(st.integers(1, size))
    points = torch.randn(1, size, 7, generator=torch.Generator().manual_seed(seed)).double()
    distance = 1 - normalize(points[0], dim=-1) @ normalize(points[0], dim=-1).T
    length = torch.rand(1, size, 1, generator=torch.Generator().manual_seed(seed)) * 100 + 0.1
    chosen = spread_out(points * length, count)[0].tolist()
    first = distance.masked_fill(torch.eye(size, dtype=torch.bool), torch.inf).amin(1)
    assert first[chosen[0]] >= first.max() - 1e-6 and len(set(chosen)) == count
    for step in range(1, count):
        nearest = distance[chosen[:step]].amin(0)
        nearest[chosen[:step]] = -1
        assert nearest[chosen[step]] >= nearest.max() - 1e-6


def test_divprune_never_repeats_a_token() -> None:
    """The authors' loop picks token 0 again and again here, and LLaVA would receive copies of it."""
    assert spread_out(torch.ones(1, 6, 3), 4).tolist() == [[0, 1, 2, 3]]
    twice = torch.cat((at_angles(0, 90, 180), at_angles(0, 90, 180)), 1)
    assert set((spread_out(twice, 3) % 3).flatten().tolist()) == {0, 1, 2}
