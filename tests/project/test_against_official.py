"""The script that measures official implementations beside ours: its arithmetic, and one side on the embedded model.

Run: `pytest tests/project/test_against_official.py`.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # where eval_scripts is
from eval_scripts import against_official, official_side  # noqa: E402


def row(number: int, times: list[float], layers: list[int]) -> dict[str, Any]:
    return {"round": number, "ttft_ms": times, "layers": layers}


def test_a_ratio_is_made_within_a_round_and_only_of_equal_budgets() -> None:
    rows: against_official.Rows = {
        ("full", 576): [row(0, [40.0, 42.0, 90.0], [576, 576]), row(1, [80.0], [576, 576])],
        ("tower", 576): [row(0, [15.0], []), row(1, [36.0], [])],
        ("official/visionzip", 64): [row(0, [20.0], [64, 64]), row(1, [40.0], [64, 64])],
        ("official/fastv", 64): [row(0, [20.0], [576, 64])],
        ("ours/consensusdrop", 64): [row(0, [10.0, 11.0, 99.0], [64, 64]), row(1, [30.0], [64, 64])],
        ("ours/fastv", 64): [row(0, [20.0], [576, 65])],
    }
    found = {(one.side, one.other): one for one in against_official.ratios(rows)}
    assert found["ours/consensusdrop", "official/visionzip"].rounds == (11 / 20, 30 / 40)
    assert found["ours/consensusdrop", "full"].rounds == (11 / 42, 30 / 80)
    assert found["ours/consensusdrop", "full"].text().endswith("at 64: 0.32 (0.26 to 0.38)")
    assert found["tower", "official/visionzip"].rounds == (15 / 20, 36 / 40), "of every budget"
    refused = found["ours/fastv", "official/fastv"]
    assert refused.rounds == () and "[576, 65] and [576, 64]" in refused.text()
    assert found["ours/fastv", "full"].rounds == (20 / 42,), "round 1 has one of both, so it does not count"


def test_what_is_not_given_is_left_out_and_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = against_official.Given("python", "", {"fastv": "x"}, "mini", tmp_path, (64,), 1)
    names = against_official.sides(given)
    assert names == ["full", "tower", "official/fastv", "ours/fastv", "ours/consensusdrop"]
    said = capsys.readouterr().out
    assert "official/visionzip (no --visionzip)" in said and "no --current" in said
    assert against_official.steps([576, 64, 64]) == "1 x 576, 2 x 64"


def test_a_side_says_what_every_layer_reads_and_what_it_took(tmp_path: Path) -> None:
    model = ROOT / "checkpoints" / "llava-mini"
    task = official_side.Task("ours/consensusdrop", str(model), str(model / "vision_tower"))
    side = official_side.prepare(task)
    found = official_side.measure(side, 64, warmup=1, repeats=2)
    assert found["layers"] == [64] * 4 and found["text_rows"] == 56
    assert len(found["ttft_ms"]) == len(found["processor_ms"]) == 2 and min(found["ttft_ms"]) > 0
    assert found["how"] == "attach(model, 'consensusdrop', tokens=64)"


def test_the_tower_alone_gives_the_features_of_every_side() -> None:
    from llava.mm_utils import process_images

    model = ROOT / "checkpoints" / "llava-mini"
    task = official_side.Task("tower", str(model), str(model / "vision_tower"))
    side, (whole, _, processor) = official_side.prepare(task), official_side.stock(task)
    pixels = process_images([official_side.picture()], processor, whole.config)
    assert torch.equal(side.answer()[:, 1:], whole.get_vision_tower()(pixels))
    assert side.budget(576) == "5 blocks of the vision tower"


def test_a_side_that_does_not_run_is_named_with_its_last_words(tmp_path: Path) -> None:
    given = against_official.Given(sys.executable, "", {"visionzip": str(tmp_path)}, "mini", tmp_path, (64,), 1)
    workers = [against_official.Worker("official/visionzip", given, against_official.models(given))]
    failed: dict[str, str] = {}
    against_official.one_round(0, workers, False, {}, failed)
    assert failed == {"official/visionzip": "ModuleNotFoundError: No module named 'visionzip'"}
