"""The page's answers and examples, and the grids that drawings of answers lie on."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeHost, reduced
from PIL import Image

from llava_consensus.demo import app
from llava_consensus.demo.seen import card, counted, seen_by
from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.evaluation.media import Clip
from llava_consensus.evaluation.models import Loading, load
from llava_consensus.evaluation.models.base import Encoding
from llava_consensus.hosts.outcomes import ImageOutcome
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

ROOT = Path(__file__).parents[2]
MINI = ROOT / "playground" / "mini"


class SquareHost(FakeHost):
    """Refuses one method, and reports a reduction of every image."""

    visual_tokens = 16

    def attach(self, method: Any, budget: Any) -> Any:
        if type(method).__name__ == "FastV":
            raise OptionError("fastv: not here")
        return super().attach(method, budget)


def test_a_side_has_answer_tokens_times_and_the_drawing(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8), (7, 0, 0)).save(path)
    text, drawn = app.answered(SquareHost(), str(path), "consensusdrop", "What is <b>?", 4)
    assert text.startswith("consensusdrop: What is <b>?") and "of 16 visual tokens" in text
    assert "first token: " in text and drawn is not None and drawn.width > 3 * 120


def test_what_cannot_be_asked_is_said(tmp_path: Path) -> None:
    path = tmp_path / "notes.png"
    path.write_text("no image")
    for given, message in (
        ((None, "random", "What?"), "no image yet"),
        ((str(path), "random", " "), "no question yet"),
        ((str(path), "random", "What?"), "not an image"),
    ):
        with pytest.raises(ConsensusError, match=message):
            app.answered(SquareHost(), *given, 4)
    Image.new("RGB", (8, 8)).save(path)
    for method, question, message in (("fastv", "What?", "not here"), ("random", "What is <image>?", "holds <image>")):
        host = SquareHost() if method == "fastv" else load(str(ROOT / "checkpoints" / "llava-mini"), Loading("cpu"))
        with pytest.raises(ConsensusError, match=message):
            app.answered(host, str(path), method, question, 4)


def test_examples_are_images_with_a_question() -> None:
    found = app.examples(MINI)
    assert len(found) == 6 and all(Path(path).is_file() for path, _ in found)
    assert app.examples(ROOT / "nowhere") == []


def test_the_page_is_built_and_served() -> None:
    pytest.importorskip("gradio", reason="needs the extra demo")
    blocks = app.build(SquareHost(), "tiny", MINI)
    try:
        assert app.launch(blocks, "127.0.0.1", None).startswith("http://127.0.0.1:")
        assert "googleapis" not in json.dumps(blocks.get_config_file(), default=str)
    finally:
        blocks.close()


def seen(shown: Image.Image | Clip, side: int, size: tuple[int, int], kept: list[int], tiles: int, each: int) -> Any:
    """What the page draws of an answer about an image or clip of so many tiles with so many tokens each."""
    count, origin = tiles * each, (torch.arange(tiles * each) // each, torch.arange(tiles * each) % each)
    outcome = ImageOutcome(0, count, len(kept), 0, ((0, reduced(count, kept)),), origin=origin)
    encoded = Encoding(SimpleNamespace(side=side), False, size, make("random"), Budget(2))
    (found,) = seen_by(FakeHost(), [shown], [encoded], SimpleNamespace(outcomes=(outcome,)))  # type: ignore[arg-type]
    return found


def test_a_picture_of_any_shape_is_one_grid() -> None:
    """As Qwen-VL sees it: 3 rows of 5 tokens."""
    found = seen(Image.new("RGB", (150, 90)), 5, (150, 90), [1, 14], tiles=1, each=15)
    (grid,) = found.views
    assert (grid.rows, grid.columns) == (3, 5) and found.counts == (2, 0, 13)
    assert found.patches.vision is not None and not np.isnan(found.patches.vision).any()


def test_a_clip_is_a_strip_of_frames() -> None:
    clip = Clip(tuple(Image.new("RGB", (20, 20), colour) for colour in ("red", "green", "blue")), (0, 1, 2), 3)
    found = seen(clip, 2, (20, 20), [0, 5, 11], tiles=3, each=4)
    assert [grid.first for grid in found.views] == [0, 4, 8] and found.patches.kept == [0, 5, 11]
    drawn = card([found], "What happens?", ["answer: nothing", counted([found])])
    assert drawn.width > 3 * 120 and counted([found]).endswith("3 of 12 (3 kept; 9 patches dropped)")


def test_tokens_without_a_grid_are_refused() -> None:
    for side, message in ((0, "form no grid"), (2, "those of LLaVA-NeXT are drawn")):
        with pytest.raises(OptionError, match=message):
            seen(Image.new("RGB", (20, 20)), side, (20, 20), [0], tiles=2, each=4)
