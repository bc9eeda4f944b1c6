"""Stages of a reduction, and the account beside a prefill and the paper."""

from pathlib import Path

import pytest
from PIL import Image

from llava_consensus import load, make
from llava_consensus.evaluation.models import Loading, Prompt
from llava_consensus.evaluation.report.paper import printed_tables
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import SHAPES, kv_bytes, paper_flops

ROOT = Path(__file__).parents[2]
PICTURE = Image.new("RGB", (4, 4), (7, 0, 0))


@pytest.mark.parametrize("name", ["random", "consensusdrop"])
def test_a_method_s_own_work_is_timed_whether_or_not_it_has_stages(name: str) -> None:
    host = load(ROOT / "checkpoints" / "llava-mini", Loading("cpu"))
    with host.attach(make(name), Budget(64)) as attached:
        host.answer([host.encode([PICTURE])], [Prompt("Is it?", max_new_tokens=1)])
        spent = attached.milliseconds()
    assert ("method" in spent) != ("scap" in spent) and {"gather", "splice"} < spent.keys()
    assert ("probe" in spent) == (name != "random")  # nothing is probed for a method that reads nothing


@pytest.mark.parametrize(
    ("table", "model", "text"),
    [  # sizes and rows of text that the columns of the paper mean (docs/accounting.md)
        ("llava_1_5_7b", "llava-1.5-7b", 66),
        ("efficiency_llava_1_5_7b", "llava-1.5-7b", 50),
        ("efficiency_llava_1_5_13b", "llava-1.5-13b", 50),
    ],
)
def test_the_papers_cache_and_flops_follow_from_the_formulas(table: str, model: str, text: int) -> None:
    shape, compared = SHAPES[model]._replace(text=text), 0
    for row in printed_tables()[table]:
        layers = (int(row["tokens"]),) * shape.layers
        if row["method"] in ("FastV", "SparseVLM"):  # no rule fits these columns
            continue
        if row.get("kv_mb") is not None:
            assert abs(kv_bytes(shape, layers) / 2**20 - row["kv_mb"]) <= 0.5
            compared += 1
        if row.get("flops_t") is not None and row["method"] != "VisPruner":  # whose column holds the tower too
            assert abs(paper_flops(shape, layers) / 1e12 - row["flops_t"]) <= 0.0101
            compared += 1
    assert compared >= 10
