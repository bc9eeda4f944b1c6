"""Selections of 2025 and 2026 where no official code says what is right: by hand, and by what they promise."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize
from units import at_angles, unit

from llava_consensus.hosts.inputs import fingerprint
from llava_consensus.hosts.units import prompt_hash
from llava_consensus.methods import make
from llava_consensus.methods.divprune import spread_out
from llava_consensus.methods.flashvid import lengths
from llava_consensus.methods.holov import Crops
from llava_consensus.methods.mfpruner import elect
from llava_consensus.methods.random import draw
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.saliency import class_saliency
from llava_consensus.reduction.selection import seated, topped_up
from llava_consensus.reduction.tokens import Stopwatch, VisualTokens


def test_random_numbers_are_the_same_on_every_machine_and_differ_by_seed() -> None:
    numbers = draw(torch.tensor([0, 1]), 20_000)
    assert (numbers[:, :2] * 2**24).tolist() == [[771458.0, 11717804.0], [1697900.0, 11548674.0]]  # of 24 bits
    assert (numbers.mean(1) - 0.5).abs().max() < 0.01 and ((numbers < 0.25).float().mean(1) - 0.25).abs().max() < 0.01
    one, other = (make("random", seed=seed).reduce(unit(), Budget(8)).kept for seed in (0, 1))
    assert not torch.equal(one, other) and not torch.equal(one[0], one[1])


def test_fingerprints_are_the_same_on_every_machine() -> None:
    pixels = torch.tensor([[1.0, -2.0], [0.0, 1.0]])
    assert fingerprint(pixels).tolist() == [1874295759138979840, 1743226879432720384]
    prompt: Any = np.array([[0, 5, 9, 9, 7]])
    image: Any = SimpleNamespace(row=0, places=np.array([2, 3]))
    assert prompt_hash(prompt, prompt > 0, [image]).tolist() == [-8373120013074892894]


def test_times_of_a_stage_add_up_to_milliseconds() -> None:
    marks = [("select", 0.0, 0.25), ("merge", 0.25, 0.75), ("select", 2.0, 3.0)]
    assert Stopwatch(torch.device("cpu"), marks).milliseconds() == {"select": 1250.0, "merge": 500.0}


def test_means_of_prumerge_weigh_one_in_all() -> None:
    method, saliency = make("prumerge", weights="mean", neighbours=2), torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    weights = method._weights(saliency, at_angles(0, 10, 20, 90), torch.tensor([[0, 1]]))
    assert torch.allclose(weights.sum(-1), torch.ones(1, 2))
    assert torch.allclose(weights[0], torch.tensor([[0, 0.6, 0.4, 0], [4 / 6, 0, 2 / 6, 0]]))


def test_votes_come_before_the_sum() -> None:
    """0 and 1 have two votes each and small sums, 3 has one vote and the largest."""
    cues = torch.tensor([[[5.0, 1, 0, 2]], [[0.5, 5, 0, 0]], [[5.0, 5, 0, 90]]])
    fused = torch.tensor([[1.0, 2, 3, 100]])
    assert sorted(elect(cues, fused, 2)[0].tolist()) == [0, 3]
    assert sorted(elect(cues[[0, 1, 1]], fused, 2)[0].tolist()) == [0, 1]


def test_seats_that_nobody_takes_go_to_the_next() -> None:
    order, group = torch.tensor([[3, 0, 1, 2, 4]]), torch.tensor([[0, 0, 0, 1, 1]])
    assert seated(order, group, torch.tensor([[1, 2]]), 3).tolist() == [[3, 0, 4]]
    assert seated(order, group, torch.tensor([[1, 5]]), 4).tolist() == [[3, 0, 4, 1]]
    assert topped_up(torch.tensor([[1, 0, 2]]), torch.tensor([[0.1, 0.5, 0.5]]), 4).tolist() == [[1, 1, 2]]


def test_segments_of_a_video_and_scores_of_crops_by_hand() -> None:
    assert lengths(at_angles(0, 10, 100, 112, 115, 200)[0], 0.5, 4) == [2, 1, 2, 1]
    saliency = torch.tensor([[0.1, 0.3, 0.2, 0.4, 0.6]])
    scores = Crops(5, 2, saliency.device).scores(saliency, at_angles(0, 60, 90, 0, 180), 0.5)
    assert scores[0].tolist() == pytest.approx([300, 750], rel=1e-4)  # the variance cancels if it is not tiny


def clip(frames: int, size: int) -> VisualTokens:
    """A video that stands still, but for one place in its last frame."""
    still = torch.randn(1, size, 5, generator=torch.Generator().manual_seed(0)).repeat(1, frames, 1)
    still[0, -2] *= -1
    frame = torch.arange(frames).repeat_interleave(size)[None]
    return VisualTokens(still, frame + 3, torch.arange(size).repeat(frames)[None], tiles_per_unit=frames)


def test_evs_keeps_the_first_frame_and_what_changes() -> None:
    video = clip(3, 6)
    assert make("evs").reduce(video, Budget(7)).kept.tolist() == [[0, 1, 2, 3, 4, 5, 16]]
    assert make("evs").reduce(video, Budget(3)).kept.tolist() == [[1, 3, 5]]  # less than a frame: at even distances
    assert make("evs").reduce(unit(size=24, batch=1), Budget(6)).kept.tolist() == [[3, 7, 11, 15, 19, 23]]
    assert make("evs").reduce(video, Budget(3)).fused[0, :6].tolist() == [3, 4, 3, 4, 3, 4]  # above any cosine distance


def test_restore_halves_the_budget_unless_it_says_otherwise() -> None:
    method, tokens = make("restore"), unit(size=24)
    assert method.counts(Budget(9), 24) == (4, 5) and method.counts(Budget(8, 2), 24) == (6, 2)
    for budget, kept, merged in ((Budget(9), 4, 5), (Budget(8, 2), 6, 2), (Budget(8, 0), 8, 0), (Budget(1), 0, 1)):
        result = method.reduce(tokens, budget)
        assert (result.kept.shape[1], result.anchors.shape[1]) == (kept, merged)
        assert bool((result.owner >= 0).all()) == (merged > 0)  # what is not kept is merged, not dropped


@pytest.mark.parametrize("count", [10, 16, 34])
def test_vscan_has_windows_in_every_tile(count: int) -> None:
    """Two tiles of 6 x 4 in one unit: no window keeps more than its share, whichever tile it is in."""
    tiles = unit(24, batch=2)
    whole = tiles._replace(
        projected=tiles.projected.flatten(0, 1)[None],
        tile=torch.arange(2).repeat_interleave(24)[None],
        patch=torch.arange(24).repeat(2)[None],
        tiles_per_unit=2,
    )
    early, last = (class_saliency(one, own=True).flatten().tolist() for one in (whole.earlier, whole.attention))
    window = [(token // 24, token % 24 // 6 // 2, token % 6 // 3) for token in range(48)]
    each, local = max(count // 2 // 8, 1), list[int]()  # half of the tokens, as many from each of 2 x 4 windows
    for token in sorted(range(48), key=lambda place: -early[place]):
        if [window[other] for other in local].count(window[token]) < each and len(local) < min(count // 2, 8 * each):
            local.append(token)
    others = sorted(set(range(48)) - set(local), key=lambda place: -last[place])
    assert len(local) == {10: 5, 16: 8, 34: 16}[count]
    result = make("vscan", windows=2).reduce(whole, Budget(count))
    assert result.anchors.tolist() == [sorted(local + others[: count - len(local)])]


@pytest.mark.parametrize("last", [None, 1, 2])
def test_hydart_chooses_what_is_unlike_if_all_is_looked_at_alike(last: int | None) -> None:
    """Also if the last token is the second or third that is chosen."""
    tokens = unit(24, batch=1)
    even = tokens.earlier._replace(query=torch.zeros_like(tokens.earlier.query))

    def by_hand() -> list[int]:
        points = normalize(tokens.projected[0], dim=-1)
        cosine, chosen = (points @ points.T).clamp(0, 1), [0]
        while len(chosen) < 6:
            chosen.append(cosine[chosen].amax(0).index_fill(0, torch.tensor(chosen), 2.0).argmin().item())
        return chosen

    if last is not None:
        tokens, order = tokens._replace(projected=tokens.projected.abs()), torch.arange(24)
        order[[by_hand()[last], 23]] = order[[23, by_hand()[last]]]
        tokens = tokens._replace(projected=tokens.projected[:, order])
        assert by_hand()[last] == 23
    result = make("hydart", alpha=0).reduce(tokens._replace(earlier=even), Budget(6))
    assert result.kept.tolist() == [sorted(by_hand())]


@pytest.mark.parametrize("name", ["vidcom2", "evs"])
def test_a_video_is_ranked_as_a_whole(name: str) -> None:
    """Whatever the frames are numbered, and never more than T."""
    video = clip(3, 8)
    shifted = video._replace(tile=video.tile - 3)
    for tokens in range(1, 24):
        one, other = (make(name).reduce(given, Budget(tokens)).kept for given in (video, shifted))
        assert one.shape[1] == tokens and torch.equal(one, other)
    assert make(name).tile_budget == "global"


@settings(max_examples=60)
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
    """As the authors' loop does here with token 0."""
    assert spread_out(torch.ones(1, 6, 3), 4).tolist() == [[0, 1, 2, 3]]
    twice = torch.cat((at_angles(0, 90, 180), at_angles(0, 90, 180)), 1)
    assert set((spread_out(twice, 3) % 3).flatten().tolist()) == {0, 1, 2}
