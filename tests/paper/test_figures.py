"""The figures of score against tokens, and what happens without matplotlib."""

import sys
from pathlib import Path

import pytest
from PIL import Image
from run_folders import store

from llava_consensus.errors import DataError, MissingDependency
from llava_consensus.evaluation.report.results import in_sections
from llava_consensus.evaluation.report.rows import read_rows
from llava_consensus.evaluation.report.section import Section
from llava_consensus.paper.figures import accuracy as figures


@pytest.fixture
def sections(tmp_path: Path) -> list[Section]:
    """Nine methods at two budgets on two benchmarks."""
    out = tmp_path / "results"
    for name in ("gqa", "seed"):
        store(out, [1] * 9 + [0], method="full", tokens=576, benchmark=name)
        for place in range(9):
            method = ("consensusdrop", "random", "tome")[place] if place < 3 else f"method{place}"
            for tokens in (32, 64):
                right = min(9, place + tokens // 32)
                store(out, [1] * right + [0] * (10 - right), method=method, tokens=tokens, benchmark=name)
    return in_sections(read_rows(out))


def test_pictures_are_drawn(sections: list[Section], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for draw in (figures.score_against_tokens, figures.methods_apart):
        draw(sections, tmp_path / "figure.png")
        assert Image.open(tmp_path / "figure.png").size[0] > 300
        with pytest.raises(DataError, match="make tables"):
            draw([], tmp_path / "none.png")


def test_few_methods_stand_out(sections: list[Section]) -> None:
    styles = figures._styles(sections[0], ["gqa", "seed"])
    assert next(iter(styles)) == "ConsensusDrop" and list(styles)[-1] == "random"
    assert len(styles) == len(set(styles.values())) == len(figures.STYLES) + 1
    assert "method8" in styles and "ToMe" not in styles  # the best others, by score


def test_points_are_scores_with_intervals_fewest_tokens_first(sections: list[Section]) -> None:
    points = figures._curves(sections[0], "gqa")["method5"]
    assert [(one.tokens, one.score) for one in points] == [(32, 60.0), (64, 70.0)]
    assert all(one.low < one.score < one.high for one in points)
    mean = figures._curves(sections[0], None)["method5"]
    assert [one.score for one in mean] == [60.0, 70.0]  # Acc: of the paper's benchmarks, SEED is not one


def test_without_matplotlib_the_pip_line_is_named(
    sections: list[Section], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"pip install 'llava-consensus\[plots\]'"):
        figures.score_against_tokens(sections, tmp_path / "figure.png")
