"""Examples show what was kept: they are found by disagreement, gains and losses, and drawn patch by patch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from llava_consensus import cli
from llava_consensus.evaluation.benchmarks import Question, make
from llava_consensus.paper import example_search as search
from llava_consensus.paper.examples import COLOURS, CROSS, VISION, Example, KeptPatches, rows
from llava_consensus.paper.figures import style
from llava_consensus.reduction.tokens import Reduction

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
MINI = ROOT / "playground" / "mini"


def reduction(vision: list[float], cross: list[float], kept: list[int]) -> Reduction:
    index = torch.tensor([kept])
    sides = torch.tensor([vision]), torch.tensor([cross])
    return Reduction(torch.zeros(1, len(kept), 2), index, index[:, :0], index, torch.zeros(1, len(vision)), *sides)


def surveyed(index: int, picture: str, disagreement: float, kept: set[int]) -> search.Surveyed:
    question = Question(index, index, (picture,), "What?")
    return search.Surveyed(question, disagreement, frozenset(kept))


def test_disagreement_is_what_the_best_of_both_sides_do_not_share() -> None:
    sides = [0.1, 0.4, 0.05, 0.2, 0.05, 0.2], [0.3, 0.05, 0.25, 0.1, 0.25, 0.05]
    assert search.disagreement(reduction(*sides, kept=[0, 1, 2, 3])) == 0.5  # {1, 3, 5, 0} and {0, 2, 4, 3}
    assert search.disagreement(reduction(sides[0], sides[0], kept=[1, 3])) == 0
    assert search.disagreement(reduction(*sides, kept=[1, 3])) == 1


def test_the_most_disagreeing_are_of_different_pictures() -> None:
    found = [
        surveyed(0, "a", 0.2, {1}),
        surveyed(1, "b", 0.9, {1}),
        surveyed(2, "b", 0.8, {2}),
        surveyed(3, "c", 0.5, {1}),
    ]
    assert [one.index for one in search.most_disagreeing(found, 2)] == [1, 3]


def test_a_pair_is_two_questions_about_one_picture() -> None:
    found = [
        surveyed(0, "a", 0, {1, 2}),
        surveyed(1, "a", 0, {1, 2}),
        surveyed(2, "b", 0, {1, 2}),
        surveyed(3, "b", 0, {3, 4}),
    ]
    assert [one.index for one in search.most_different_pair(found)] == [2, 3]
    assert search.most_different_pair(found[1:3]) == []


def test_what_both_signals_turned() -> None:
    vision, cross = {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}, {0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0}
    assert search.changed([vision, cross], {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}, gained=True) == [2, 0, 3]
    assert search.changed([vision, cross], {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0}, gained=False) == [1, 0]


def test_kept_patches_are_as_they_are_and_merged_ones_calm() -> None:
    """Three methods keep one patch and merge one of a red picture."""
    chosen = {label: [KeptPatches(2, [0], [5], "red")] for label in COLOURS}
    with style.sheet():
        figure = rows([Example(Image.new("RGB", (80, 80), (200, 40, 40)), 4, "What?", selections=chosen)], 2)
    pixels = np.asarray(figure.axes[1].images[-1].get_array()).astype(float)
    step = len(pixels) // 4
    kept, merged, dropped = (
        pixels[row * step + step // 2, column * step + step // 2] for row, column in ((0, 0), (1, 1), (3, 3))
    )
    assert np.allclose(kept, (200, 40, 40), atol=1)
    assert np.ptp(merged) < 40 and merged[2] > merged[0]  # grey, a little blue: nothing of the red
    assert dropped.min() > merged.max() and np.ptp(dropped) < 2


@pytest.mark.parametrize("size", [(80, 40), (40, 80)])
def test_the_padding_is_cut_off(size: tuple[int, int]) -> None:
    chosen = {label: [KeptPatches(1, [5])] for label in COLOURS}
    with style.sheet():
        figure = rows([Example(Image.new("RGB", size, "black"), 4, "What?", selections=chosen)], 1)
    height, width = figure.axes[0].images[0].get_array().shape[:2]
    assert width / height == pytest.approx(size[0] / size[1])


def test_captions_say_question_truth_answer_and_counts() -> None:
    chosen = {
        label: [KeptPatches(4, [0, 1, 2], [3], "a cat", right=label == CROSS)]
        for label in (VISION, CROSS, "ConsensusDrop")
    }
    example = Example(Image.new("RGB", (40, 40)), 2, "What is it?", "cat", "a dog", selections=chosen)
    with style.sheet():
        figure = rows([example], 4)
    words = [text for one in figure.axes for text in (one.get_title(), one.get_xlabel())]
    assert "What is it? Truth: cat. All tokens: a dog." in " ".join(words[1].split())
    assert f"{VISION}\n3 kept + 1 merged" in words and "a cat (wrong)" in words and "a cat (right)" in words


@pytest.mark.parametrize("name", ["gqa", "pope", "textvqa"])
def test_benchmarks_know_the_right_answer(name: str) -> None:
    questions = make(name).load(MINI)
    found = make(name).references(MINI)
    assert found.keys() == {question.index for question in questions} and all(found.values())
    records = [
        {"question_id": one.question_id, "prompt": one.text, "text": found[one.index], "metadata": {"index": one.index}}
        for one in questions
    ]
    rows = make(name).score(records, MINI)["extracted"]
    assert sum(row["correct"] for row in rows) / len(rows) > 0.95


def test_the_commands_draw_what_the_mini_model_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    shared = ["--tokens", "64", "--limit", "4", "--count", "1", "--budgets", "64 32", "--to", str(tmp_path)]
    assert cli.main(["paper", "examples", *shared]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        f"gqa-64-disagreement{number}.{kind}" for number in ("", "-1") for kind in style.KINDS
    }
    assert "disagreement" in capsys.readouterr().out
    photographs = tmp_path / "photographs"
    photographs.mkdir()
    for name in ("meadow.png", "meadow.jpg", "lawn.png"):
        Image.new("RGB", (60, 40), "green").save(photographs / name)
    (photographs / "cut.png").write_bytes((photographs / "meadow.png").read_bytes()[:50])
    capsys.readouterr()
    to = tmp_path / "gallery"
    command = ["paper", "gallery", str(photographs), "--methods", "consensusdrop random", "--to", str(to)]
    assert cli.main(command) == 3, "one picture cannot be read"
    said = capsys.readouterr()
    assert "1 of 4 pictures have no sheet" in said.err and "cut.png: damaged or cut off" in said.err
    assert said.out.count("gallery") == 3
    names = ("meadow-png", "meadow-jpg", "lawn-png")
    assert {path.name for path in to.iterdir()} == {f"{name}.{kind}" for name in names for kind in style.KINDS}
    (photographs / "cut.png").unlink()
    assert cli.main([*command, "--question", "How much is $\\frac$ of it?"]) == 0


def test_a_word_that_stands_for_a_picture_is_refused_in_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "photographs").mkdir()
    Image.new("RGB", (60, 40), "green").save(tmp_path / "photographs" / "meadow.png")
    asked = ["--question", "What is in <image>?", "--methods", "random", "--to", str(tmp_path / "gallery")]
    assert cli.main(["paper", "gallery", str(tmp_path / "photographs"), *asked]) == 2
    assert "holds <image>, which stands for a picture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["paper", "examples", "--count", "0"], "--count 0 must be at least 1"),
        (["paper", "examples", "--budgets", "0.5"], "must be whole numbers"),
        (["paper", "examples", "--tokens", "0"], "--tokens 0 must be at least 1"),
        (["paper", "gallery", "{pictures}", "--tokens", "0"], "--tokens 0 must be at least 1"),
        (["paper", "gallery", "{pictures}", "--methods", "none"], "unknown method"),
        (["paper", "gallery", "/nowhere"], "no such folder of photographs"),
        (["paper", "gallery", "{empty}"], "no .png"),
        (["paper", "gallery", "{pictures}", "--to", "{pictures}/../pictures"], "is the folder of the photographs"),
    ],
)
def test_bad_arguments_end_before_weights_load(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llava_consensus.evaluation.models.load", lambda *_: pytest.fail("weights were loaded"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "one.png").touch()
    monkeypatch.chdir(tmp_path)
    folders = {name: str(tmp_path / name) for name in ("empty", "pictures")}
    assert cli.main([word.format(**folders) for word in words]) in (2, 3)
    assert message in capsys.readouterr().err
