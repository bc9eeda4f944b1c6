"""The figure of score against tokens, and what happens without matplotlib."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from llava_consensus.errors import DataError, MissingDependency
from llava_consensus.report.figures import score_against_tokens
from llava_consensus.report.table import Row


def row(method: str, tokens: int, score: float, after: int) -> Row:
    config = {"benchmark": "gqa", "method": method, "changed": {}, "merged": None, "tokens": tokens}
    extracted = [{"index": i, "correct": i % 2} for i in range(20)]
    metrics = {"score": score, "tokens": {"before": 576, "after": after}, "report": {"extracted": extracted}}
    return Row(config, metrics, 20)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row("full", 576, 80.0, 576), *(row("random", tokens, 50.0 + tokens / 10, tokens) for tokens in (32, 64))]
    score_against_tokens(rows, tmp_path / "figure.png")
    assert Image.open(tmp_path / "figure.png").size[0] > 300
    with pytest.raises(DataError, match="make tables"):
        score_against_tokens([], tmp_path / "none.png")


def test_without_matplotlib_the_pip_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"pip install 'llava-consensus\[plots\]'"):
        score_against_tokens([row("random", 32, 50.0, 32)], tmp_path / "figure.png")
