"""What a judge may cost and what its server may do to this machine is bounded. `pytest tests/test_judge_limits.py`."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from judge_server import Act, Server
from test_judge import config, environment, judge

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.judge.client import JudgeError
from llava_consensus.evaluation.judge.cost import Prices
from llava_consensus.evaluation.judge.limits import Limits
from llava_consensus.evaluation.judge.store import NAME
from llava_consensus.evaluation.judge.wire import LARGEST

__all__ = ["environment"]


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        (Limits(requests=2), 2),
        (Limits(tokens=500), 4),
        (Limits(dollars=0.0155, prices=Prices(30, 60)), 4),
        (Limits(requests=0), 0),
    ],
)
def test_a_limit_ends_the_asking_and_a_higher_one_goes_on(tmp_path: Path, limits: Limits, most: int) -> None:
    with Server(lambda *_: Act(text="0.5")) as server:
        wanted = config(tmp_path, server.url, limits=limits, server={"concurrency": 1})
        with pytest.raises(JudgeError, match="the limit is reached"):
            judge(wanted)
        assert server.total <= most and (most == 0 or server.total >= 1)
        assert judge(config(tmp_path, server.url))["complete"] and server.total == 5, "nothing is asked twice"


def test_the_limit_holds_however_many_are_asked_at_once(tmp_path: Path) -> None:
    with Server(lambda *_: Act(text="0.5", delay=0.1)) as server:
        with pytest.raises(JudgeError, match="the limit is reached"):
            judge(config(tmp_path, server.url, limits=Limits(requests=3), server={"concurrency": 8}))
        assert server.total <= 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dollars": 1.0}, "--judge-price"),
        ({"requests": -1}, "--max-requests -1"),
        ({"dollars": float("nan"), "prices": Prices(1, 1)}, "--max-cost nan"),
        ({"tokens": float("inf")}, "--max-judge-tokens inf"),
    ],
)
def test_limits_are_checked(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Limits(**given)


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with Server(lambda *_: Act()) as other:
        away = Act("status", "", 307, {"Location": f"{other.url}/chat/completions"})
        with Server(lambda *_: away) as server, pytest.raises(JudgeError, match="a redirect, and none is followed"):
            judge(config(tmp_path, server.url))
        assert other.total == 0 and not other.keys


def test_a_reply_without_end_is_not_read(tmp_path: Path) -> None:
    huge = Act("status", json.dumps({"choices": [], "more": "x" * (LARGEST + 1)}))
    with Server(lambda text, number: Act() if number else huge) as server:
        judge(config(tmp_path, server.url, server={"concurrency": 1}))
    assert f"longer than {LARGEST:,} bytes" in (tmp_path / "out" / NAME).read_text()
    assert (tmp_path / "out" / NAME).stat().st_size < 100_000


def test_a_compressed_bomb_is_not_opened(tmp_path: Path) -> None:
    bomb = gzip.compress(b"0" * 50_000_000).decode("utf-8", "surrogateescape")
    packed = Act("status", bomb, 200, {"Content-Encoding": "gzip"})
    start = time.monotonic()
    with Server(lambda text, number: Act() if number else packed) as server:
        judge(config(tmp_path, server.url, server={"concurrency": 1}))
    assert "compressed" in (tmp_path / "out" / NAME).read_text() and time.monotonic() - start < 20


@pytest.mark.parametrize("grade", ["NaN", "nan", "inf", "-Infinity", "1e999"])
def test_a_grade_that_is_no_number_is_an_unreadable_reply(tmp_path: Path, grade: str) -> None:
    odd = [grade]  # the first reply about one of the answers
    with Server(lambda text, _: Act(text=odd.pop() if odd and "answer 4" in text else "1")) as server:
        metrics = judge(config(tmp_path, server.url))
    assert metrics["total"] == 100.0 and metrics["replies"]["unreadable"] == 1 and metrics["complete"]


def test_no_nan_reaches_a_file(tmp_path: Path) -> None:
    raw = '{"choices": [{"message": {"content": "0.5"}}], "usage": {"prompt_tokens": NaN}}'
    with Server(lambda text, number: Act() if number else Act("raw", raw)) as server:
        assert judge(config(tmp_path, server.url))["total"] == 50.0
    for path in (one for one in (tmp_path / "out").rglob("*.json*") if one.is_file()):
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(line, parse_constant=pytest.fail)
