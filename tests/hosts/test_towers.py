"""Which blocks of a vision tower a method reads, and the order in which modules are looked through."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from llava_consensus import make
from llava_consensus.errors import OptionError
from llava_consensus.hosts.derived.tap import modules_of
from llava_consensus.hosts.towers import earlier_block

QWEN = {"full": (7, 15, 23, 31)}  # blocks of Qwen2.5-VL that attend to the whole picture


@pytest.mark.parametrize(
    ("method", "blocks", "more", "block"),
    [
        ("hiprune", 24, {}, 8),  # the ninth, as in the authors' code
        ("vscan", 24, {}, 5),  # the sixth
        ("hiprune", 32, QWEN, 15),  # the sixteenth
        ("vscan", 32, QWEN, 7),  # the first that is not windowed
        ("hiprune", 4, {}, 1),
        ("vscan", 4, {}, 0),
    ],
)
def test_the_earlier_block_is_the_authors(method: str, blocks: int, more: dict[str, Any], block: int) -> None:
    tower: Any = SimpleNamespace(blocks=range(blocks), **more)
    assert earlier_block(tower, make(method)) == block
    assert earlier_block(tower, make(method, early_layer=-1)) == blocks - 1
    assert earlier_block(tower, make(method, early_layer=2)) == 2
    for wrong in (blocks, -blocks - 1):
        with pytest.raises(OptionError, match=f"early_layer={wrong} must be in {-blocks}..{blocks - 1}"):
            earlier_block(tower, make(method, early_layer=wrong))


def test_modules_come_in_torchs_order_and_once() -> None:
    twice = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    named = nn.ModuleDict({"first": twice, "second": nn.ReLU()})
    tree = nn.ModuleList([nn.Sequential(nn.ReLU(), twice), twice, named])
    tree.register_module("none", None)
    assert list(modules_of(tree)) == list(tree.modules())
