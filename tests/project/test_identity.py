"""The script that compares two hosts counts what is alike, and tells of a difference what it is."""

import runpy
from pathlib import Path

from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.runs.configuration import RunConfig
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

identity = runpy.run_path(str(Path(__file__).parents[2] / "eval_scripts" / "identity.py"))


def config(tokens: int) -> RunConfig:
    return RunConfig(benchmarks.make("textvqa"), make("visionzip"), Budget(tokens), limit=3)


def test_a_run_is_like_itself(tmp_path: Path) -> None:
    row, differences = identity["compare"]([config(64), config(64)], tmp_path)
    assert row.startswith("| VisionZip | TextVQA | 3 | 3 |") and differences == []


def test_a_difference_is_told_with_what_was_kept_in_both_precisions(tmp_path: Path) -> None:
    row, differences = identity["compare"]([config(64), config(8)], tmp_path)
    assert row.startswith("| VisionZip | TextVQA | 3 | 0 |") and len(differences) == 3
    assert all("torch.float32" in line and "torch.float64" in line for line in differences)
    assert "question 0" in differences[0] and "kept only by one [(0, " in differences[0]
