"""A judge that is told to stop says what was done, what it cost and what may be charged.

Run: `pytest tests/test_judge_signals.py`; needs the openai package (extra `judge`).
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from judge_server import MODEL, Act, Server
from test_judge import config, environment, judge, lines

__all__ = ["environment"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_says_what_was_done_and_what_it_cost(tmp_path: Path, number: int) -> None:
    slow = {"answer 3", "answer 4"}

    def behave(text: str, _: int) -> Act:
        return Act("hang") if any(one in text for one in slow) else Act()

    with Server(behave) as server:
        wanted = config(tmp_path, server.url)
        given = ["judge", "mmvet", "--answers", str(wanted.answers), "--data", str(wanted.data), "--judge-model", MODEL]
        given += ["--judge-url", server.url, "--out", str(wanted.out), "--judge-price", "30", "60", "--no-progress"]
        command = [sys.executable, "-m", "llava_consensus.cli", *given]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        limit = time.monotonic() + 60
        while server.total < 5 or sum(server.answered.values()) < 3:
            assert time.monotonic() < limit and child.poll() is None
            time.sleep(0.02)
        time.sleep(0.5)  # the replies are stored
        child.send_signal(number)
        _, said = child.communicate(timeout=30)
        assert child.returncode == 128 + number, said
        assert "3 requests, 300 tokens in, 9 out, 0.0095 dollars" in said, said
        assert "stopped after 3 of 5 grades. 2 requests were under way and may be charged. The same command" in said
        assert "Traceback" not in said
        assert len(lines(tmp_path, "reply")) == 3
        slow.clear()
        assert judge(wanted)["complete"] and server.total == 7, "the three that were heard are not asked again"
