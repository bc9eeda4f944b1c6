"""Answers of a fixed length, stages of a reduction, and the script that prints the account.

Run: `pytest tests/evaluation/test_efficiency.py`.
"""

import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from models import runnable
from PIL import Image

from llava_consensus import METHODS, load, make
from llava_consensus.evaluation.models import Loading, Prompt
from llava_consensus.reduction.budget import Budget

ROOT = Path(__file__).parents[2]
PICTURE = Image.new("RGB", (4, 4), (7, 0, 0))


def test_a_lower_bound_forces_a_long_answer() -> None:
    host = load(str(ROOT / "checkpoints" / "llava-mini"), Loading("cpu"))
    with host.attach(make("consensusdrop"), Budget(64)):
        (answer,) = host.answer([host.encode([PICTURE])], [Prompt("Is it?", max_new_tokens=7, min_new_tokens=7)])
    assert len(host.tokenizer(answer.text).input_ids) > 3


@pytest.mark.parametrize("name", ["random", "consensusdrop"])
def test_a_method_s_own_work_is_timed_whether_or_not_it_has_stages(name: str) -> None:
    host = load(str(ROOT / "checkpoints" / "llava-mini"), Loading("cpu"))
    with host.attach(make(name), Budget(64)) as attached:
        host.answer([host.encode([PICTURE])], [Prompt("Is it?", max_new_tokens=1)])
        spent = attached.milliseconds()
    assert ("method" in spent) != ("scap" in spent) and {"probe", "gather", "splice"} < spent.keys()


def script(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The JSON a script ends with."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "eval_scripts" / name), run_name="__main__")
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_account_script_agrees_with_the_model_and_the_paper(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = script("account.py", monkeypatch, capsys, "--device", "cpu")
    assert {row["method"] for row in found["model"]["rows"]} == set(METHODS)
    apart = {row["method"] for row in found["model"]["rows"] if "unmeasured" in row}
    assert apart == set(METHODS) - set(runnable()) - {"cdpruner", "mfpruner"}, "the mini model has a text tower"
    assert all(row["measured"]["equal"] for row in found["model"]["rows"] if row["method"] not in apart)
    assert {row["tokens"] for row in found["llava-next-7b"]} == {2880, 640, 320, 160}
    cells = {(one["table"], one["column"], one["method"], one["tokens"]): one for one in found["paper"]}
    assert len(found["paper"]) == len(cells) == 105
    unlike = Counter(
        (one["column"], one["method"]) for one in cells.values() if not one["verdict"].startswith("matches")
    )
    assert unlike == {
        ("flops_t", "VisPruner"): 10,
        ("flops_t", "SparseVLM"): 10,
        ("kv_mb", "SparseVLM"): 13,
        ("kv_mb", "FastV"): 4,
    }
    assert cells["llava_1_5_7b", "kv_mb", "ConsensusDrop", 128]["verdict"] == "matches to rounding"
    assert cells["efficiency_llava_1_5_7b", "flops_t", "VisionZip", 432]["verdict"] == "matches within 0.01 T"
    assert "vision tower" in cells["efficiency_llava_1_5_13b", "flops_t", "VisPruner", 144]["verdict"]
    assert cells["llava_1_5_7b", "kv_mb", "FastV", 192]["verdict"].startswith("cannot: no one rule")
