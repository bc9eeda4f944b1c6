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


def outcome(count: int, kept: list[int], tile: torch.Tensor, token: torch.Tensor) -> ImageOutcome:
    return ImageOutcome(0, count, len(kept), 0, ((0, reduced(count, kept)),), origin=(tile, token))


def encoded(side: int | None, size: tuple[int, int]) -> Encoding:
    return Encoding(SimpleNamespace(side=side), False, size, make("random"), Budget(2))


def test_a_picture_of_any_shape_is_one_grid() -> None:
    """As Qwen-VL sees it: 3 rows of 5 tokens."""
    image = Image.new("RGB", (150, 90))
    answer = SimpleNamespace(outcomes=(outcome(15, [1, 14], torch.zeros(15).long(), torch.arange(15)),))
    (seen,) = seen_by(FakeHost(), [image], [encoded(5, image.size)], answer)  # type: ignore[arg-type]
    (grid,) = seen.views
    assert (grid.rows, grid.columns) == (3, 5) and seen.counts == (2, 0, 13)
    assert seen.patches.vision is not None and not np.isnan(seen.patches.vision).any()


def test_a_clip_is_a_strip_of_frames(tmp_path: Path) -> None:
    clip = Clip(tuple(Image.new("RGB", (20, 20), colour) for colour in ("red", "green", "blue")), (0, 1, 2), 3)
    tile, token = torch.arange(12) // 4, torch.arange(12) % 4
    answer = SimpleNamespace(outcomes=(outcome(12, [0, 5, 11], tile, token),))
    (seen,) = seen_by(FakeHost(), [clip], [encoded(2, (20, 20))], answer)  # type: ignore[arg-type]
    assert [grid.first for grid in seen.views] == [0, 4, 8] and seen.patches.kept == [0, 5, 11]
    drawn = card([seen], "What happens?", ["answer: nothing", counted([seen])])
    assert drawn.width > 3 * 120 and counted([seen]).endswith("3 of 12 (3 kept; 9 patches dropped)")


def test_tokens_without_a_grid_are_refused() -> None:
    image = Image.new("RGB", (20, 20))
    tile, token = torch.arange(8) // 4, torch.arange(8) % 4
    answer = SimpleNamespace(outcomes=(outcome(8, [0], tile, token),))
    for side, message in ((0, "form no grid"), (2, "those of LLaVA-NeXT are drawn")):
        with pytest.raises(OptionError, match=message):
            seen_by(FakeHost(), [image], [encoded(side, image.size)], answer)  # type: ignore[arg-type]
