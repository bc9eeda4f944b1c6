"""`bench --serve`: servers take turns under requests."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import small
from loopback import Loopback, Silent

from llava_consensus.errors import ConsensusError
from llava_consensus.evaluation.bench import serving
from llava_consensus.evaluation.bench.serving import ServedCase, ServedQuestion


def test_a_table_gives_medians_and_ratios_within_a_round() -> None:
    def record(number: int, case: str, tokens: int | None, rate: float) -> dict[str, float | str | None]:
        found = {"round": number, "case": case, "tokens": tokens, "load": "2 at once", "per_token": 0.1}
        return found | {"requests_per_second": rate, "first_token_p50": 1 / rate, "first_token_p99": 2 / rate}

    records = []
    for number, (plain, own) in enumerate([(10, 20), (1, 3), (100, 500)]):  # ratios 2, 3 and 5
        records += [record(number, "plain", None, plain), record(number, "visionzip", 64, own)]
    *_, plain_line, line = serving.lines(records)
    assert plain_line == "| plain | all | 2 at once | 10.00 (1.00) | 100, 200 (1.00) | 100.0 (1.00) |"
    assert line == "| visionzip | 64 | 2 at once | 20.00 (3.00) | 50, 100 (0.33) | 100.0 (1.00) |"


def test_a_server_ends_with_its_engines_while_it_starts_too() -> None:
    engine = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    program = (
        "import subprocess, sys, time; engine = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=-1); "
        "engine.stdout.readline(); print(engine.pid, flush=True); time.sleep(60)"
    )
    with pytest.raises(KeyboardInterrupt), serving.server(lambda _: ["-c", program, engine]) as started:
        while not (said := started.log.read_text()):
            time.sleep(0.05)
        raise KeyboardInterrupt  # what SIGTERM is made
    assert_ended(int(said))


def test_a_server_and_its_engine_end_with_a_measurement_that_is_killed() -> None:
    engine = (
        "import os, time; from llava_consensus.serving.parent import end_with_parent; end_with_parent()\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    program = (
        "import os, subprocess, sys; from llava_consensus.evaluation.bench.serving import server\n"
        "one = 'import subprocess, sys; subprocess.run([sys.executable, \"-c\", sys.argv[1]])'\n"
        "with server(lambda _: ['-c', one, sys.argv[1]]) as started:\n"
        "    while not (said := started.log.read_text()): pass\n"
        "    print(started.process.pid, said, flush=True); os.kill(os.getpid(), 9)"
    )
    said = subprocess.run([sys.executable, "-c", program, engine], stdout=subprocess.PIPE, timeout=60).stdout
    for process in map(int, said.split()):
        assert_ended(process)


def assert_ended(process: int) -> None:
    """AssertionError where it still runs after ten seconds."""
    state, end = Path(f"/proc/{process}/stat"), time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < end, f"{process} lives on"
        time.sleep(0.05)


class Streaming(Silent):
    """Answers as vLLM does: a role, tokens 10 ms apart, and the end."""

    asked: ClassVar[list[dict[str, Any]]] = []
    fault = ""  # what is wrong with it

    def do_GET(self) -> None:
        self.send_response(503 if self.fault == "503" else 200)
        self.end_headers()

    def do_POST(self) -> None:
        end = time.monotonic() + 10
        while self.fault == "503" and time.monotonic() < end:
            time.sleep(0.05)
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        said = [{"role": "assistant"}, *[{"content": "w1 "}] * self.asked[-1]["max_tokens"]]
        for words in (*(json.dumps({"choices": [{"delta": one}]}) for one in said), "[DONE]"):
            time.sleep(0.01)
            self.wfile.write(f"data: {words}\n\n".encode())
            if self.fault == "broke off":
                return


@pytest.fixture
def there(tmp_path: Path) -> Iterator[serving.Server]:
    del Streaming.asked[:]
    (tmp_path / "log").write_text("the engine is out of memory")
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with Loopback(Streaming) as server:
        yield serving.Server(server.server_port, process, tmp_path / "log")
        serving.end_group(process)


def test_a_chat_goes_on_with_its_answers_and_a_third_of_them_show_two_images(there: serving.Server) -> None:
    asked = ServedQuestion("w9", [small.picture(1)], length=2, turns=3, system="w7")
    bodies = [serving._body("MODEL", asked, number, 5) for number in range(3)]
    found = serving.driven(there, bodies, 1, asked.turns)
    assert 1 / found["requests_per_second"] > 0.03 and found["per_token"] < 0.1
    first, *_, last = (one["messages"] for one in Streaming.asked[:3])
    assert len(Streaming.asked) == 9 and first[0] == {"role": "system", "content": "w7"} and last[:2] == first
    text = {"type": "text", "text": "w9"}
    turn = [{"role": "assistant", "content": "w1 w1 "}, {"role": "user", "content": [text]}]
    assert last[2:] == turn * 2 and first[1]["content"][-1] == text
    shown = [one["messages"][1]["content"][:-1] for one in Streaming.asked[::3]]
    assert [len(parts) for parts in shown] == [2, 1, 1]
    assert len({part["image_url"]["url"] for parts in shown for part in parts}) == 4


@pytest.mark.parametrize("fault", ["503", "broke off"])
def test_a_dead_engine_ends_the_measurement(there: serving.Server, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(Streaming, "fault", fault)
    monkeypatch.setattr(serving, "LOOK", 0.1)

    def end(process: Any) -> None:  # then its clients do not wait any more
        ended(process)
        Streaming.fault = "broke off"

    ended = serving.end_group
    monkeypatch.setattr(serving, "end_group", end)
    asked = [serving._body("MODEL", ServedQuestion("w9", [small.picture(1)], length=2), number, 5) for number in (1, 2)]
    with pytest.raises(ConsensusError, match=f"{fault}(?s:.*)the engine is out of memory"):
        serving.driven(there, asked, 1)
    assert there.process.poll() is not None


def test_servers_take_turns_over_http(there: serving.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, plugins = [], []

    @contextmanager
    def started(command: Any, environment: Any) -> Iterator[Any]:
        commands.append(command("--port 7"))
        plugins.append(environment)
        yield there

    monkeypatch.setattr(serving, "server", started)
    monkeypatch.setattr(serving, "SPIN", 0)
    cases = [ServedCase("plain"), ServedCase("visionzip", {"a": 1}, 5), ServedCase("visionzip", {"a": 1}, 3)]
    asked, loads = ServedQuestion("w9 w10", [small.picture(1)], length=4, requests=6), [3, 1]
    found = list(serving.measure("MODEL", cases, loads, asked, 1, "--dtype float32"))
    requests, starts = len(Streaming.asked), len(commands)
    again = list(serving.measure("MODEL", cases, loads, asked, 1, "--dtype float32", found[:-1]))
    assert [one["case"] for one in again] == ["visionzip"] and len(Streaming.asked) == requests + 3 * (6 + 6) + 6
    assert not list(serving.measure("MODEL", cases, loads, asked, 1, "--dtype float32", found))
    assert len(commands) == 2 * starts  # not where nothing is left to measure
    del Streaming.asked[requests:], commands[starts:]
    assert plugins[:2] == [{"VLLM_PLUGINS": ""}, None]
    plain = [*serving.PLAIN, "MODEL", "--dtype", "float32", "--port", "7"]
    assert commands == [plain, [*plain, "--hf-overrides", '{"a": 1}']]
    assert [(one["case"], one["tokens"]) for one in found] == [(case.name, case.tokens) for case in cases] * 2
    assert all(one["first_token_p99"] >= one["first_token_p50"] >= 0.01 <= one["per_token"] < 0.1 for one in found)
    urls = [one["messages"][0]["content"][0]["image_url"]["url"] for one in Streaming.asked]
    assert len(set(urls)) == len(urls) == 2 * 3 * (6 + 6)  # a round to warm up, and one that counts; no image twice
    assert {one.get("mm_processor_kwargs", {}).get("visual_tokens") for one in Streaming.asked} == {None, 5, 3}
