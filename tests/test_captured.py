"""Greedy loops as one launch: captured once for each shape, with the results of the plain loop. CUDA is stood in for by
a recorder that runs the loop again on its own copies of the inputs, as a replayed graph does.

Run: `pytest tests/test_captured.py`.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from units import unit

from llava_consensus import make
from llava_consensus.methods.cdpruner import greedy_map
from llava_consensus.methods.divprune import spread_out
from llava_consensus.methods.vispruner import thin
from llava_consensus.reduction import captured, egtm
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.captured import Recorded, capturing


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def anchors(values: torch.Tensor) -> Any:
    return egtm.group(values, values.flip(2), 7)


def salient(values: torch.Tensor) -> Any:
    return egtm.group(values, values, 7, "salient", values[..., 0].abs())


def tokens(values: torch.Tensor) -> Any:
    return greedy_map(values @ values.transpose(1, 2), 5)


def survivors(values: torch.Tensor) -> Any:
    return thin(values @ values.transpose(1, 2), 5)


def far(values: torch.Tensor) -> Any:
    return spread_out(values, 5)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A list that grows with each loop that is captured on the CPU."""
    log: list[Any] = []

    def record(loop: Callable[..., Any], args: tuple[Any, ...]) -> Recorded:
        own, given = captured.copied(args)
        result = loop(*own)
        log.append(args)

        def replay() -> None:
            found = loop(*own)
            for static, new in zip(*((x,) if torch.is_tensor(x) else x for x in (result, found)), strict=True):
                static.copy_(new)

        return Recorded(replay, given, result)

    monkeypatch.setitem(captured.RECORDERS, "cpu", record)
    yield log


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if torch.is_tensor(one) else all(map(torch.equal, one, other))


@pytest.mark.parametrize("loop", [anchors, salient, tokens, survivors, far])
@torch.no_grad()
def test_a_captured_loop_chooses_what_the_loop_chooses(recorded: list[Any], loop: Callable[..., Any]) -> None:
    size = 40 + [anchors, salient, tokens, survivors, far].index(loop)  # a shape that no other test has
    inputs = [numbers(2, size, 48, seed=seed) for seed in range(3)]
    plain = [loop(values.clone()) for values in inputs]
    assert recorded == []
    with capturing():
        found = [loop(values.clone()) for values in inputs]
        again = loop(inputs[0].clone())
    assert len(recorded) == 1, "one graph for each shape"
    assert all(map(equal, plain, found)) and equal(plain[0], again)
    with capturing():
        assert equal(loop(inputs[0][:1].clone()), loop(inputs[0][:1].clone())) and len(recorded) == 2


def test_nothing_is_captured_that_needs_gradients_or_is_large(
    recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with capturing():
        far(numbers(1, 51, 8))
        monkeypatch.setattr(captured, "LARGEST", 8)
        with torch.no_grad():
            far(numbers(1, 51, 8))
    assert recorded == []


@torch.no_grad()
def test_threads_and_many_shapes(recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take turns at a graph, and the oldest graphs go."""
    inputs = [numbers(1, 60 + seed % 2, 8, seed=seed) for seed in range(24)]
    plain = [far(values) for values in inputs]

    @torch.no_grad()
    def inside(values: torch.Tensor) -> Any:
        with capturing():
            return far(values)

    with ThreadPoolExecutor(4) as pool:
        assert all(map(equal, plain, pool.map(inside, inputs)))
    assert len(recorded) == 2
    monkeypatch.setattr(captured, "MOST", 1)
    inside(numbers(1, 62, 8))
    inside(inputs[0])
    assert len(recorded) == 4


def test_a_whole_reduction_is_the_same(recorded: list[Any]) -> None:
    given = unit(37)
    plain = make("consensusdrop").reduce(given, Budget(12, 5))
    with capturing():
        found = make("consensusdrop").reduce(given, Budget(12, 5))
    assert len(recorded) == 1 and torch.equal(plain.tokens, found.tokens) and torch.equal(plain.owner, found.owner)
