"""Rows of a prompt that two methods reduce, and the causal mask of a layer with a sliding window."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from llava_consensus.hosts.layers import Layers
from llava_consensus.hosts.rows import Rows, joined_rows


def rows(size: int, index: list[int]) -> Rows:
    real = np.ones((1, len(index)), dtype=bool)
    gone = torch.tensor([[size - len(index)]])
    return Rows(size, torch.tensor([index]), None, real, torch.from_numpy(real), gone, len(index) < size)


def test_joined_rows_count_what_both_methods_removed() -> None:
    joined = joined_rows(rows(6, [0, 2, 3, 5]), rows(4, [0, 3]))
    assert (joined.size, joined.index.tolist(), joined.removed.tolist()) == (6, [[0, 5]], [[4]])
    assert joined.at is not None and joined.at.tolist() == [[0, 5]] and joined.shrinks


def test_a_sliding_window_hides_rows_further_back_than_its_size() -> None:
    layers = cast(
        Layers, SimpleNamespace(kinds=["sliding_attention", "full_attention"], config=SimpleNamespace(sliding_window=2))
    )
    real = torch.tensor([[False, True, True, True]])
    window, whole = (Layers.dense(layers, index, real, 3)[0, 0].long().tolist() for index in (0, 1))
    assert window == [[0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert whole == [[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
