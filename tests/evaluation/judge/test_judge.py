"""The judge against a server that misbehaves on purpose: bounded, nothing lost, nothing asked twice, spend told."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import judged_data
import pytest
from judge_server import MODEL, Act, Server, error
from judged_data import SECRET, judge, judge_config, stored, write_answers

pytest.importorskip("openai")

from llava_consensus import cli
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.judge.client import NAME, JudgeError
from llava_consensus.evaluation.judge.run import run

YES = "{'pred': 'yes', 'score': 4}"


def command(place: Path, url: str, name: str = "mmvet") -> list[str]:
    files = ["--answers", str(place / "answers.jsonl"), "--data", str(place / "data"), "--out", str(place / "out")]
    return ["judge", name, *files, "--judge-model", MODEL, "--judge-url", url, "--no-progress"]


def test_mmvet_is_judged_and_a_rerun_asks_nothing(tmp_path: Path, good: Server) -> None:
    wanted = judge_config(tmp_path, good.url)
    first = run(wanted, progress=False)
    assert good.total == 5 and good.keys == {f"Bearer {SECRET}"}
    assert {(one["model"], one["max_tokens"], one["temperature"]) for one in good.bodies} == {(MODEL, 3, 0.0)}
    metrics = first.metrics
    assert metrics["score"] == metrics["total"] == 50.0 and metrics["complete"]
    assert metrics["capability"]["rec"] == 50.0 and metrics["runs"] == [50.0] and metrics["std"] == 0.0
    assert metrics["judge"]["reported"] == {MODEL: 5} and metrics["judge"]["prompt"]["origin"] == "own wording"
    assert metrics["spent"]["prompt_tokens"] == 500
    written = (first.path / "metrics.json").read_bytes()
    run(wanted, progress=False)
    assert good.total == 5 and (first.path / "metrics.json").read_bytes() == written


def test_video_is_judged(tmp_path: Path) -> None:
    replies = {"act 0": YES, "act 1": "{'pred': 'no', 'score': 1}", "act 2": "{'pred': 'maybe', 'score': 2}"}
    replies |= {"act 3": '{"pred": "Yes", "score": 4.8}', "act 4": "{'pred': 'yes'}", "act 5": YES}

    def behave(text: str, number: int) -> Act:
        return Act(text=next(reply for said, reply in replies.items() if f"Answer of the model: {said}\n" in text))

    with Server(behave) as server:
        metrics = judge(judge_config(tmp_path, server.url, "msvd"))
        assert set(server.bodies[0]) == {"model", "messages"}
        assert [one["role"] for one in server.bodies[0]["messages"]] == ["system", "user"]
    assert metrics["accuracy"] == metrics["score"] == 75.0 and metrics["average_score"] == (4 + 1 + 2 + 4 + 0 + 4) / 6
    assert metrics["runs"][0]["neither"] == 1 and metrics["runs"][0]["unsound"] == 1


def test_several_runs_are_several_draws(tmp_path: Path) -> None:
    with Server(lambda text, number: Act(text=("0.5", "0.7")[number])) as server:
        metrics = judge(judge_config(tmp_path, server.url, runs=2, concurrency=1))
        assert server.total == 10 and set(server.asked.values()) == {2}
    assert metrics["runs"] == [50.0, 70.0] and metrics["total"] == 60.0 and metrics["std"] == 10.0
    assert [one["correct"] for one in metrics["extracted"]] == [pytest.approx(0.6)] * 5


def test_only_what_is_new_is_asked(tmp_path: Path, good: Server) -> None:
    wanted = judge_config(tmp_path, good.url)
    judge(wanted)
    other = write_answers(tmp_path / "other.jsonl", {**{number: f"answer {number}" for number in range(4)}, 4: "new"})
    judge(replace(wanted, answers=other))
    assert good.total == 6, "the same answer is judged once, whoever gave it"
    judge(replace(wanted, runs=3))
    assert good.total == 16


def test_equal_requests_under_way_are_sent_once(tmp_path: Path, good: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged_data, "SAMPLES", judged_data.SAMPLES[:1] * 5)
    wanted = judge_config(tmp_path, good.url)
    write_answers(wanted.answers, dict.fromkeys(range(5), "the same"))
    assert judge(wanted)["complete"] and good.total == 1


RETRIED = {"rate limit": error(429, "slow down", Retry_After="0"), "server error": error(500)}
RETRIED |= {kind: Act(kind) for kind in ("hang", "cut", "drop")}
NO_COMPLETION = {
    "refused": error(400, "maximum context length"),
    "nonsense": Act("raw", "\udcff\udcfe not json"),
    "other json": Act("raw", '{"choices": []}'),
    "deep": Act("raw", "[" * 20_000),
    "content of another kind": Act("raw", '{"choices": [{"message": {"content": 5}}]}'),
}


@pytest.mark.parametrize("trouble", RETRIED)
def test_every_trouble_is_overcome_once(tmp_path: Path, trouble: str) -> None:
    with Server(lambda text, number: RETRIED[trouble] if number == 0 else Act()) as server:
        metrics = judge(judge_config(tmp_path, server.url, timeout=1.0 if trouble == "hang" else 10.0))
        assert set(server.asked.values()) == {2}
    assert metrics["total"] == 50.0 and metrics["complete"]
    assert metrics["replies"]["used"] == 5 and metrics["spent"]["prompt_tokens"] == 500


@pytest.mark.parametrize("trouble", NO_COMPLETION)
def test_an_answer_without_a_grade_says_why(tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    with Server(lambda text, number: NO_COMPLETION[trouble] if "answer 3" in text else Act()) as server:
        metrics = judge(judge_config(tmp_path, server.url, concurrency=1))
    assert metrics["score"] == 50.0 and metrics["counts"]["ungraded"] == 1 and not metrics["complete"]
    assert "v1_3, run 1: not graded: " in caplog.text
    assert trouble != "refused" or server.total == 5


def test_a_server_that_refuses_every_request_or_is_always_down_ends_the_run(tmp_path: Path) -> None:
    tokens = "'max_tokens' is not supported, use 'max_completion_tokens'"
    said = {"unknown field": "answers nobody: 3 requests", tokens: "--judge-option max_completion_tokens=1000"}
    for text, words in said.items():
        with Server(lambda *_, text=text: error(400, text)) as server, pytest.raises(JudgeError, match=words):
            judge(judge_config(tmp_path, server.url, concurrency=1))
    with Server(lambda text, number: error(503)) as server:
        with pytest.raises(JudgeError, match="answers nobody"):
            judge(judge_config(tmp_path, server.url, concurrency=1))
        assert server.total == 3 * 3
    with pytest.raises(JudgeError, match="answers nobody"):
        judge(judge_config(tmp_path, "http://127.0.0.1:9/v1", concurrency=1, tries=2))


def test_one_answer_without_a_grade_is_left_out_and_asked_again(tmp_path: Path) -> None:
    down = [True]

    def behave(text: str, number: int) -> Act:
        return error(500) if "answer 3" in text and down[0] else Act()

    with Server(behave) as server:
        wanted = judge_config(tmp_path, server.url)
        metrics = judge(wanted)
        assert metrics["counts"]["ungraded"] == 1 and not metrics["complete"]
        assert metrics["capability"] == dict.fromkeys(("rec", "ocr", "math", "spat", "gen", "know"), 50.0)
        assert server.total == 4 + wanted.tries
        down[0] = False
        assert judge(wanted)["complete"] and server.total == 4 + wanted.tries + 1


@pytest.mark.parametrize("status", [401, 404, 429])
def test_hopeless_errors_stop_and_hide_the_key(tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture) -> None:
    text = f"insufficient_quota for key {SECRET}"
    with Server(lambda *_: error(status, text)) as server:
        with pytest.raises(JudgeError, match=r"will not judge: .*\[key\]") as caught:
            judge(judge_config(tmp_path, server.url, concurrency=2))
        assert server.total <= 6
    assert SECRET not in str(caught.value) + caplog.text
    assert all(SECRET not in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_a_key_is_in_the_environment_only_and_openai_alone_needs_one(
    tmp_path: Path, good: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = judge_config(tmp_path, good.url)
    for name, value in (("api_key", "x"), ("Authorization", "x"), ("user", f"a {SECRET}")):
        with pytest.raises(OptionError, match="Set OPENAI_API_KEY instead") as caught:
            replace(wanted, options={name: value})
        assert SECRET not in str(caught.value)
    with pytest.raises(OptionError, match="no key in the URL"):
        replace(wanted, url="http://me:secret@localhost/v1")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(OptionError, match="OPENAI_API_KEY is not set"):
        judge(replace(wanted, url=None))
    assert judge(wanted)["complete"]


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with Server(lambda *_: Act()) as other:
        away = Act("status", "", 307, {"Location": f"{other.url}/chat/completions"})
        with Server(lambda *_: away) as server, pytest.raises(JudgeError, match="will not judge: 307"):
            judge(judge_config(tmp_path, server.url))
        assert other.total == 0 and not other.keys


def test_a_refusal_is_an_unreadable_reply(tmp_path: Path) -> None:
    def behave(text: str, number: int) -> Act:
        if "act 1\n" in text:
            return error(400, "content_filter: not this one")
        return Act(text=None, message={"refusal": "no"}) if "act 2\n" in text and number == 0 else Act(text=YES)

    with Server(behave) as server:
        metrics = judge(judge_config(tmp_path, server.url, "msvd"))
        assert server.total == 4 + 2 + 5
    assert metrics["replies"]["given_up"] == 1
    assert metrics["counts"]["ungraded"] == 1 and metrics["accuracy"] == 100.0
    assert judge(judge_config(tmp_path, server.url, "msvd")) == metrics  # given up is given up


@pytest.mark.parametrize("grade", ["NaN", "nan", "inf", "-Infinity", "1e999"])
def test_a_grade_that_is_no_number_is_an_unreadable_reply(tmp_path: Path, grade: str) -> None:
    odd = [grade]  # the first reply about one of the answers
    with Server(lambda text, _: Act(text=odd.pop() if odd and "answer 4" in text else "1")) as server:
        metrics = judge(judge_config(tmp_path, server.url))
    assert metrics["total"] == 100.0 and metrics["replies"]["used"] == 6 and metrics["complete"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_says_what_was_done_and_what_it_cost(tmp_path: Path, number: int) -> None:
    slow = {"answer 3", "answer 4"}

    def behave(text: str, _: int) -> Act:
        return Act("hang") if any(one in text for one in slow) else Act()

    with Server(behave) as server:
        wanted = judge_config(tmp_path, server.url)
        asked = [sys.executable, "-m", "llava_consensus.cli", *command(tmp_path, server.url)]
        child = subprocess.Popen(asked, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        limit = time.monotonic() + 60
        while server.total < 5 or sum(server.answered.values()) < 3:
            assert time.monotonic() < limit and child.poll() is None
            time.sleep(0.02)
        time.sleep(0.5)  # the replies are stored
        child.send_signal(number)
        _, said = child.communicate(timeout=30)
        assert child.returncode == 128 + number, said
        assert "stopped after 3 of 5 grades. The same command" in said and "Traceback" not in said
        assert len(stored(tmp_path)) == 3
        slow.clear()
        assert judge(wanted)["complete"] and server.total == 7, "the three that were heard are not asked again"


def test_killed_in_the_middle_nothing_is_lost_and_nothing_asked_twice(tmp_path: Path) -> None:
    with Server(lambda text, number: Act(text=YES, delay=0.15)) as server:
        wanted = judge_config(tmp_path, server.url, "msvd", concurrency=2)
        asked = [*command(tmp_path, server.url, "msvd"), "--concurrency", "2"]
        child = subprocess.Popen([sys.executable, "-m", "llava_consensus.cli", *asked], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while server.total < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        heard = {json.dumps(line["request"]["body"], sort_keys=True) for line in stored(tmp_path)}
        assert 1 <= len(heard) < 6
        metrics = judge(wanted)
        repeated = {json.dumps(json.loads(body), sort_keys=True) for body, count in server.asked.items() if count > 1}
        assert not repeated & heard and len(repeated) <= 2 and len(server.asked) == 6
    assert metrics["complete"] and metrics["accuracy"] == 100.0 and metrics["spent"]["prompt_tokens"] == 600


def test_a_cut_line_is_dropped_and_asked_again(tmp_path: Path, good: Server, caplog: pytest.LogCaptureFixture) -> None:
    wanted = judge_config(tmp_path, good.url)
    first = judge(wanted)
    path = tmp_path / "out" / NAME
    path.write_bytes(path.read_bytes()[:-20])
    assert judge(wanted) == first
    assert good.total == 6 and "cut in the middle" in caplog.text


@pytest.mark.parametrize("damage", ["{", "[]", '{"event": "reply", "key": "a"}', '{"key": "a", "text": 5}', "null"])
def test_a_damaged_line_is_named(tmp_path: Path, good: Server, damage: str) -> None:
    wanted = judge_config(tmp_path, good.url)
    judge(wanted)
    path = tmp_path / "out" / NAME
    rows = path.read_text().splitlines()
    path.write_text("\n".join([rows[0], damage, *rows[1:]]) + "\n")
    with pytest.raises(DataError, match=r"line 2: .*nothing was changed"):
        judge(wanted)
    assert good.total == 5


def test_the_command(tmp_path: Path, good: Server, capsys: pytest.CaptureFixture[str]) -> None:
    judge_config(tmp_path, good.url)
    asked = command(tmp_path, good.url)
    assert cli.main(asked) == 0
    output = capsys.readouterr()
    assert output.out.startswith("mmvet: total 50.00, 5 of 5 questions graded\nby capability: rec 50.0")
    assert f"judge: {MODEL} (5 replies); prompt: own wording" in output.out and "500 tokens in, 15 out" in output.out
    assert cli.main([*asked, "--judge-option", "max_tokens=null", "--judge-option", "max_completion_tokens=9"]) == 0
    assert "max_tokens" not in good.bodies[-1] and good.bodies[-1]["max_completion_tokens"] == 9
    assert cli.main(["judge", "mmvett", *asked[2:]]) == 2 and "Did you mean 'mmvet'" in capsys.readouterr().err
