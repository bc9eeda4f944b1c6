"""From how many visual tokens does reduction pay?"""

import json
from pathlib import Path

import pytest
from PIL import Image

from llava_consensus import cli
from llava_consensus.evaluation.bench.break_even import Point, break_even, sentence

MINI = str(Path(__file__).parents[3] / "checkpoints" / "llava-mini")


def point(tokens: int, gain: float) -> Point:
    return Point(tokens // 100, tokens, 1.0, 50.0, 5.0, 10.0, 100.0, 100.0 - gain)


@pytest.mark.parametrize(
    ("gains", "expected", "said"),
    [
        ([-10, 10], 150, "pays from about 150 visual tokens; your request has 100: expect no gain"),
        ([-10, 5, -5, 15], 325, "pays from about 325 visual tokens"),  # the last crossing counts
        ([20, 40], 0, "pays at 100 visual tokens already; your request has 100: expect the first token 1.25 times"),
        ([-10, -1], None, "does not pay up to 200 visual tokens"),
    ],
)
def test_the_sentence_says_where_both_times_are_equal(gains: list[float], expected: int | None, said: str) -> None:
    points = [point(100 * number, gain) for number, gain in enumerate(gains, 1)]
    assert break_even(points) == expected and said in sentence(points)


def test_the_command_writes_numbers_and_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "pays.json"
    words = ["bench", "--break-even", "1 2", "--model", MINI, "--tokens", "64", "--repeats", "1", "--out", str(out)]
    assert cli.main([*words, "--methods", "uniform_grid"]) == 0
    assert "On this machine reduction" in capsys.readouterr().out
    points = [Point(**row) for row in json.loads(out.read_text())["rows"]]
    assert [(one.images, one.tokens) for one in points] == [(1, 576), (2, 1152)]
    assert all(0 < one.tower_ms + one.prefill_ms <= one.full_ms and one.reduction_ms > 0 for one in points)
    assert Image.open(out.with_suffix(".png")).size == (720, 384)
