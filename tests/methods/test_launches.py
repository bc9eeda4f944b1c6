"""Operations of each method at the size of LLaVA-1.5, which on a GPU cost more than the arithmetic in them.

Views are not counted, and tables that are made once for a device have been made.
"""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from units import WATCH, unit, view_of

from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Place

VIEWS = {
    *("_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "expand", "permute", "reshape", "select"),
    *("slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
}
MOST = {
    "consensusdrop": 113,
    "consensusdrop+": 113,
    "prumerge": 48,
    "prumerge_plus": 77,
    "visionzip": 44,
    "vispruner": 287,
    "divprune": 155,
    "cdpruner": 503,
    "scope": 344,
    "holov": 101,
    "idpruner": 167,
    "mfpruner": 89,
    "restore": 362,
    "otprune": 469,
    "hiprune": 63,
    "hydart": 215,
    "scorer": 14,
    "anchorprune": 189,
    "mmtok": 293,
    "eadp": 335,
    "vscan": 72,
    "random": 24,
    "uniform_grid": 10,
    "pool": 25,
    "vidcom2": 107,
    "evs": 39,
    "flashvid": 225,
    "fastv": 24,
    "sparsevlm": 74,
    "pyramiddrop": 24,
    "dart": 67,
    "ivcprune": 33,
}


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().split("::")[1].split(".")[0]
        self.count[name] += name not in VIEWS
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="counted with torch 2.13, which is pinned")
@pytest.mark.parametrize("name", MOST)
@torch.no_grad()
def test_operations_of_a_method_are_few(name: str) -> None:
    method = make(name)
    if method.place is Place.DECODER:
        view = view_of([1 / 1024] * 576, 64, cut=method.cuts(Budget(64), 576, 32)[0])
        work = partial(method.select, view, WATCH)
    else:
        work = partial(method.reduce, unit(576, batch=1, text=31)._replace(side=24), Budget(64))
    work()  # makes the tables
    with Operations() as operations:
        work()
    assert operations.count.total() <= MOST[name], +operations.count


def test_every_method_that_chooses_tokens_is_counted() -> None:
    elsewhere = {"full", "resize", "pixelprune", "tome", "restore_calibrated"}  # the last one is restore in a decoder
    assert MOST.keys() == METHODS.keys() - elsewhere
