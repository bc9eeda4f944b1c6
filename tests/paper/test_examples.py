"""Examples show what was kept: they are found by disagreement, and drawn patch by patch."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_data import said

from llava_consensus import cli
from llava_consensus.evaluation.benchmarks import make
from llava_consensus.evaluation.report.patches import Patches
from llava_consensus.paper import examples
from llava_consensus.paper.examples import COLOURS, Example

ROOT = Path(__file__).parents[2]
MINI = ROOT / "playground" / "mini"


def example(image: Image.Image, side: int, kept: list[int], merged: list[int]) -> Example:
    """Three methods that keep and merge the same patches at two budgets."""
    owner = [0 if place in kept + merged else -1 for place in range(side * side)]
    saliency = [1.0 / (1 + place) for place in range(side * side)]
    found = Patches(kept, [], owner, saliency, saliency[::-1], saliency)
    budgets = (len(kept) + 1, len(kept))
    kept = {(t, label): (found, "a cow") for t in budgets for label in COLOURS}
    return Example(image, side, "What is $it$?", "cat", "a dog", kept)


def test_disagreement_is_what_the_best_of_both_sides_do_not_share() -> None:
    vision, cross = [0.1, 0.4, 0.05, 0.2, 0.05, 0.2], [0.3, 0.05, 0.25, 0.1, 0.25, 0.05]
    most = [0.1, 0.9, 0.2, 0.8, 0.2, 0.1]  # shares its two best with vision, and no other order
    cases = (([0, 1, 2, 3], cross, 0.5), ([1, 3], vision, 0), ([1, 3], cross, 1), ([1, 3], most, 0))
    for kept, other, wanted in cases:
        assert examples.disagreement(Patches(kept, [], [], vision, other)) == wanted


def test_kept_patches_are_as_they_are_and_merged_ones_calm() -> None:
    panels = examples.panels(example(Image.new("RGB", (80, 80), (200, 40, 40)), 4, [0], [5]))
    assert len(panels) == 12, "original and saliencies, then a row for each budget"
    pixels = np.asarray(panels[4][1]).astype(float)
    step = len(pixels) // 4
    kept, merged, dropped = (pixels[place * step + step // 2, place * step + step // 2] for place in (0, 1, 3))
    assert np.allclose(kept, (200, 40, 40), atol=1)
    assert np.ptp(merged) < 40 and merged[2] > merged[0]  # grey, a little blue: nothing of the red
    assert dropped.min() > merged.max() and np.ptp(dropped) < 2


def test_captions_say_answers_and_counts() -> None:
    captions = [caption for caption, _ in examples.panels(example(Image.new("RGB", (80, 40)), 4, [0, 5, 6], [7]))]
    assert captions[0] == "original\nall tokens: a dog"
    assert captions[4] == "vision-only\n3 kept + 1 merged\nanswer: a cow"
    assert captions[7] == "both sets, consensus framed\ndisagreement 100 %"


@pytest.mark.parametrize("name", ["gqa", "pope", "textvqa"])
def test_benchmarks_know_the_right_answer(name: str) -> None:
    questions = make(name).load(MINI)
    found = make(name).references(MINI)
    assert found.keys() == {question.index for question in questions} and all(found.values())
    rows = make(name).score(said(questions, lambda one: found[one.index]), MINI)["extracted"]
    assert sum(row["correct"] for row in rows) / len(rows) > 0.95


def test_the_command_draws_what_the_mini_model_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    chosen = ["--examples", "gqa", "--limit", "4", "--count", "1", "--budgets", "64"]
    assert cli.main(["paper", "figures", *chosen, "--to", str(tmp_path / "to")]) == 0
    assert "disagreement" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "to").iterdir()} == {"gqa-64-1.png"}
