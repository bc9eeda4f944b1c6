"""The judge against a server that misbehaves on purpose: bounded, nothing lost, nothing asked twice, spend reported.

Everything runs on loopback. `pytest tests/test_judge.py`; needs the openai package (extra `judge`).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judge_server import MODEL, Act, Server, error
from judged_data import make_mmvet, make_msvd

pytest.importorskip("openai")

from llava_consensus import cli
from llava_consensus.errors import BusyError, DataError, MissingDependency, OptionError
from llava_consensus.evaluation.judge import summary
from llava_consensus.evaluation.judge.client import JudgeError
from llava_consensus.evaluation.judge.client import Server as Asked
from llava_consensus.evaluation.judge.cost import Cost, Prices
from llava_consensus.evaluation.judge.grading import JudgeConfig
from llava_consensus.evaluation.judge.run import run
from llava_consensus.evaluation.judge.store import NAME, Replies

SECRET = "sk-test-0123456789-secret"
YES = "{'pred': 'yes', 'score': 4}"
FAST = {"timeout": 10.0, "pause": 0.01, "tries": 4}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("OPENAI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)


@pytest.fixture
def good() -> Iterator[Server]:
    with Server(lambda text, number: Act()) as server:
        yield server


def answers(path: Path, texts: dict[Any, str]) -> Path:
    path.write_text("".join(json.dumps({"question_id": key, "text": text}) + "\n" for key, text in texts.items()))
    return path


def config(place: Path, url: str, name: str = "mmvet", **options: Any) -> JudgeConfig:
    """Five answers to MM-Vet, or six to MSVD, judged by the server at `url`."""
    data = place / "data"
    if not data.exists():
        if name == "mmvet":
            answers(place / "answers.jsonl", {number: f"answer {number}" for number in range(5)})
            make_mmvet(data)
        else:
            answers(place / "answers.jsonl", {f"v_clip{number % 3}_{number}": f"act {number}" for number in range(6)})
            make_msvd(data)
    server = Asked(MODEL, url, **{**FAST, **options.pop("server", {})})
    return JudgeConfig(name, place / "answers.jsonl", data, server, out=place / "out", **options)


def judge(wanted: JudgeConfig) -> dict[str, Any]:
    metrics = run(wanted, progress=False).metrics
    assert metrics is not None
    return metrics


def lines(place: Path, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (place / "out" / NAME).read_text().splitlines()]
    return [line for line in found if line["event"] == event]


# A server that behaves


def test_mmvet_is_judged_and_a_rerun_asks_nothing(tmp_path: Path, good: Server) -> None:
    wanted = config(tmp_path, good.url, prices=Prices(30, 60))
    first = run(wanted, progress=False)
    assert first.path is not None and first.metrics is not None
    assert good.total == 5 and good.keys == {f"Bearer {SECRET}"}
    assert {(one["model"], one["max_tokens"], one["temperature"]) for one in good.bodies} == {(MODEL, 3, 0.0)}
    metrics = first.metrics
    assert metrics["score"] == metrics["total"] == 50.0 and metrics["complete"]
    assert metrics["capability"]["rec"] == 50.0 and metrics["runs"] == [50.0] and metrics["std"] == 0.0
    assert metrics["judge"]["reported"] == {MODEL: 5} and metrics["judge"]["prompt"]["origin"] == "own wording"
    assert metrics["spent"]["prompt_tokens"] == 500 and metrics["spent"]["dollars"] == pytest.approx(0.0159)
    grades = json.loads((first.path / "grades.json").read_text())
    assert grades["v1_4"] == {"model": [MODEL], "content": ["0.5"], "score": [0.5]}
    stored = (first.path / "metrics.json").read_bytes()
    again = run(wanted, progress=False)
    assert good.total == 5 and again.spent.requests == 0 and again.expected.requests == 0
    assert (first.path / "metrics.json").read_bytes() == stored


def test_a_complete_run_needs_no_server_no_key_and_no_package(
    tmp_path: Path, good: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config(tmp_path, good.url)
    first = judge(wanted)
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setitem(sys.modules, "openai", None)
    assert judge(wanted) == first and good.total == 5


def test_video_is_judged(tmp_path: Path) -> None:
    replies = {"act 0": YES, "act 1": "{'pred': 'no', 'score': 1}", "act 2": "{'pred': 'maybe', 'score': 2}"}
    replies |= {"act 3": '{"pred": "Yes", "score": 4.8}', "act 4": "{'pred': 'yes'}", "act 5": YES}

    def behave(text: str, number: int) -> Act:
        return Act(text=next(reply for said, reply in replies.items() if f"Answer of the model: {said}\n" in text))

    with Server(behave) as server:
        result = run(config(tmp_path, server.url, "msvd"), progress=False)
        assert result.path is not None and result.metrics is not None
        assert set(server.bodies[0]) == {"model", "messages"}
        assert [one["role"] for one in server.bodies[0]["messages"]] == ["system", "user"]
    metrics = result.metrics
    assert metrics["accuracy"] == metrics["score"] == 75.0 and metrics["average_score"] == (4 + 1 + 2 + 4 + 0 + 4) / 6
    assert metrics["runs"][0]["neither"] == 1 and metrics["runs"][0]["unsound"] == 1
    assert metrics["exact"] == 100.0
    asked = {"q": "what does number 0 do?", "a": "act 0", "pred": "act 0"}
    assert json.loads((result.path / "grades.json").read_text())["v_clip0_0"] == [{"pred": "yes", "score": 4}, asked]


def test_several_runs_are_several_draws(tmp_path: Path) -> None:
    with Server(lambda text, number: Act(text=("0.5", "0.7")[number])) as server:
        metrics = judge(config(tmp_path, server.url, runs=2, server={"concurrency": 1}))
        assert server.total == 10 and set(server.asked.values()) == {2}
    assert metrics["runs"] == [50.0, 70.0] and metrics["total"] == 60.0 and metrics["std"] == 10.0
    assert [one["correct"] for one in metrics["extracted"]] == [pytest.approx(0.6)] * 5


def test_more_runs_later_ask_only_for_the_new_ones(tmp_path: Path, good: Server) -> None:
    wanted = config(tmp_path, good.url)
    judge(wanted)
    judge(replace(wanted, runs=3))
    assert good.total == 15


def test_the_same_answer_is_judged_once_whoever_gave_it(tmp_path: Path, good: Server) -> None:
    wanted = config(tmp_path, good.url)
    judge(wanted)
    other = answers(tmp_path / "other.jsonl", {**{number: f"answer {number}" for number in range(4)}, 4: "new"})
    second = run(replace(wanted, answers=other, full_answers=wanted.answers), progress=False)
    assert good.total == 6 and second.spent.requests == 1
    assert second.metrics is not None and second.metrics["agreement"] == 80.0


def test_equal_requests_are_draws_of_their_own(tmp_path: Path) -> None:
    make_msvd(tmp_path / "data")
    for name in ("test_q.json", "test_a.json"):
        path = tmp_path / "data/eval/GPT_Zero_Shot_QA/MSVD_Zero_Shot_QA" / name
        rows = json.loads(path.read_text())
        for row in rows:
            row["question" if name == "test_q.json" else "answer"] = "the same"
        path.write_text(json.dumps(rows))
    answers(tmp_path / "answers.jsonl", {f"v_clip{number % 3}_{number}": "same" for number in range(6)})
    with Server(lambda text, number: Act(text=YES, delay=0.05)) as server:
        metrics = judge(config(tmp_path, server.url, "msvd"))
        assert server.total == 6 and len(server.asked) == 1
        assert judge(config(tmp_path, server.url, "msvd")) == metrics and server.total == 6
    assert metrics["counts"]["graded"] == 6 and metrics["replies"]["used"] == 6


def test_no_more_requests_at_once_than_allowed(tmp_path: Path) -> None:
    with Server(lambda text, number: Act(text=YES, delay=0.05)) as server:
        judge(config(tmp_path, server.url, "msvd", server={"concurrency": 2}))
        assert server.busiest == 2


def test_partial_answers_are_judged_and_marked(tmp_path: Path, good: Server) -> None:
    wanted = config(tmp_path, good.url)
    answers(wanted.answers, {1: "dog", 2: "left"})
    metrics = judge(wanted)
    assert not metrics["complete"] and metrics["counts"]["missing"] == 3 and metrics["total"] == 50.0
    assert set(metrics["capability"]) == {"rec", "spat"}


def test_official_files_are_judged_too(tmp_path: Path, good: Server) -> None:
    wanted = config(tmp_path, good.url)
    (tmp_path / "model.json").write_text(json.dumps({f"v1_{number}": f"answer {number}" for number in range(5)}))
    assert judge(replace(wanted, answers=tmp_path / "model.json"))["counts"]["graded"] == 5


def test_no_answers_no_grades(tmp_path: Path, good: Server) -> None:
    wanted = config(tmp_path, good.url)
    answers(wanted.answers, {})
    metrics = judge(wanted)
    assert metrics["score"] is None and not metrics["complete"] and metrics["counts"]["graded"] == 0
    assert good.total == 0 and next(summary.lines(metrics)) == "mmvet: total none, 0 of 5 questions graded"


# A server that misbehaves

TROUBLES = {
    "rate limit": error(429, "slow down", Retry_After="0"),
    "rate limit with a date": error(429, "slow down", Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
    "rate limit, nonsense": error(429, "slow down", Retry_After="soon"),
    "server error": error(500),
    "bad gateway": Act("status", "<html>bad gateway</html>", 502),
    "hang": Act("hang"),
    "trickle": Act("trickle"),
    "cut": Act("cut"),
    "drop": Act("drop"),
    "nonsense": Act("raw", "\udcff\udcfe not json"),
    "empty": Act("raw", ""),
    "other json": Act("raw", '{"choices": []}'),
    "list": Act("raw", "[1, 2]"),
    "deep": Act("raw", "[" * 20_000),
    "content of another kind": Act("raw", '{"choices": [{"message": {"content": 5}}]}'),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_every_trouble_is_overcome_once(tmp_path: Path, trouble: str) -> None:
    patience = 1.0 if trouble in ("hang", "trickle") else 10.0
    with Server(lambda text, number: TROUBLES[trouble] if number == 0 else Act()) as server:
        metrics = judge(config(tmp_path, server.url, server={"timeout": patience}))
        assert set(server.asked.values()) == {2}
    assert metrics["total"] == 50.0 and metrics["complete"]
    assert metrics["replies"]["failed_tries"] == 5 and metrics["replies"]["used"] == 5
    assert len(lines(tmp_path, "failed")) == 5 and metrics["spent"]["prompt_tokens"] == 500


def test_waiting_is_as_long_as_the_server_wishes(tmp_path: Path) -> None:
    with Server(lambda text, number: error(429, "wait", Retry_After="0") if number == 0 else Act()) as server:
        start = time.monotonic()
        judge(config(tmp_path, server.url, server={"pause": 30.0}))
        assert time.monotonic() - start < 10


def test_a_server_that_is_always_down_ends_the_run(tmp_path: Path) -> None:
    with Server(lambda text, number: error(503)) as server:
        with pytest.raises(JudgeError, match="answers nobody"):
            judge(config(tmp_path, server.url, server={"concurrency": 1}))
        assert server.total == 3 * FAST["tries"]


def test_a_server_that_is_not_there(tmp_path: Path, good: Server) -> None:
    wanted = config(tmp_path, "http://127.0.0.1:9/v1", server={"concurrency": 1})
    with pytest.raises(JudgeError, match="answers nobody"):
        judge(wanted)


def test_one_answer_without_a_grade_is_left_out_and_asked_again(tmp_path: Path) -> None:
    down = [True]

    def behave(text: str, number: int) -> Act:
        return error(500) if "answer 3" in text and down[0] else Act()

    with Server(behave) as server:
        wanted = config(tmp_path, server.url)
        metrics = judge(wanted)
        assert metrics["counts"]["ungraded"] == 1 and not metrics["complete"]
        assert metrics["capability"] == {
            "rec": 50.0,
            "ocr": 50.0,
            "math": 50.0,
            "spat": 50.0,
            "gen": 50.0,
            "know": 50.0,
        }
        before = server.total
        assert before == 4 + FAST["tries"]
        down[0] = False
        metrics = judge(wanted)
        assert metrics["complete"] and server.total == before + 1
        assert metrics["replies"]["failed_tries"] == FAST["tries"]


@pytest.mark.parametrize("status", [401, 403, 404, 400, 429])
def test_hopeless_errors_stop_at_once_and_never_show_the_key(
    tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"insufficient_quota for key {SECRET}"
    with Server(lambda *_: error(status, text)) as server:
        with pytest.raises(JudgeError, match=r"will not judge: .*\[key\]") as caught:
            judge(config(tmp_path, server.url, server={"concurrency": 2}))
        assert server.total <= 4
    assert SECRET not in str(caught.value) + caplog.text
    assert nobody_holds(tmp_path)


def nobody_holds(place: Path) -> bool:
    return all(SECRET not in path.read_text() for path in place.rglob("*") if path.is_file())


def test_the_key_is_in_no_file_even_if_the_server_repeats_it(tmp_path: Path) -> None:
    def behave(text: str, number: int) -> Act:
        if number == 0:
            return error(500, f"Authorization: Bearer {SECRET}")
        return Act("raw", f"{SECRET}") if number == 1 else Act(text=f"0.5 {SECRET}", message={"note": SECRET})

    with Server(behave) as server:
        assert judge(config(tmp_path, server.url))["total"] == 50.0
    assert nobody_holds(tmp_path) and "[key]" in (tmp_path / "out" / NAME).read_text()


def test_unreadable_grades_follow_the_official_rounds(tmp_path: Path) -> None:
    with Server(lambda text, number: Act(text="I think it is good")) as server:
        metrics = judge(config(tmp_path, server.url))
        warmth = sorted(one["temperature"] for one in server.bodies)
        assert warmth == sorted([0.0, 0.0, 0.5, 1.0, 1.5, 2.0] * 5)
    assert metrics["total"] == 0.0 and metrics["complete"]
    assert metrics["replies"] == {
        "used": 30, "refused": 0, "unreadable": 30, "given_up": 5, "failed_tries": 0, "in_flight": 0
    }  # fmt: skip


def test_refusals_are_counted(tmp_path: Path) -> None:
    filtered = error(400, "content_filter: not this one")

    def behave(text: str, number: int) -> Act:
        if "act 1\n" in text:
            return filtered
        return Act(text=None, message={"refusal": "no"}) if "act 2\n" in text and number == 0 else Act(text=YES)

    with Server(behave) as server:
        metrics = judge(config(tmp_path, server.url, "msvd"))
        assert server.total == 4 + 2 + 5
    assert metrics["replies"]["refused"] == 6 and metrics["replies"]["given_up"] == 1
    assert metrics["counts"]["ungraded"] == 1 and metrics["accuracy"] == 100.0
    assert judge(config(tmp_path, server.url, "msvd")) == metrics  # given up is given up


def test_a_grade_that_is_no_number_in_every_round_is_a_grade_of_zero(tmp_path: Path) -> None:
    with Server(lambda text, number: Act(text="nan" if "answer 4" in text else "1")) as server:
        result = run(config(tmp_path, server.url), progress=False)
    assert result.metrics is not None and result.metrics["total"] == 80.0 and result.metrics["score"] == 80.0
    assert result.metrics["replies"]["given_up"] == 1 and result.path is not None
    json.loads((result.path / "metrics.json").read_text(), parse_constant=pytest.fail)


# Killed, cut, damaged

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_judge import config, judge
judge(config(Path({place!r}), {url!r}, "msvd", server={{"concurrency": 2}}))
"""


def test_killed_in_the_middle_nothing_is_lost_and_nothing_asked_twice(tmp_path: Path) -> None:
    with Server(lambda text, number: Act(text=YES, delay=0.15)) as server:
        wanted = config(tmp_path, server.url, "msvd", server={"concurrency": 2})
        code = CHILD.format(tests=str(Path(__file__).parents[1]), place=str(tmp_path), url=server.url)
        child = subprocess.Popen([sys.executable, "-c", code])
        deadline = time.monotonic() + 60
        while server.total < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        heard = {json.dumps(line["request"]["body"], sort_keys=True) for line in lines(tmp_path, "reply")}
        assert 1 <= len(heard) < 6
        result = run(wanted, progress=False)
        repeated = {json.dumps(json.loads(body), sort_keys=True) for body, count in server.asked.items() if count > 1}
        assert not repeated & heard and len(repeated) <= 2 and len(server.asked) == 6
    metrics = result.metrics
    assert metrics is not None and metrics["complete"] and metrics["accuracy"] == 100.0
    assert metrics["replies"]["in_flight"] == server.total - 6
    assert result.spent == Cost(6 - len(heard), 100 * (6 - len(heard)), 3 * (6 - len(heard)), None)
    assert metrics["spent"]["prompt_tokens"] == 600


def test_a_cut_last_line_is_dropped_and_asked_again(
    tmp_path: Path, good: Server, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = config(tmp_path, good.url)
    first = judge(wanted)
    path = tmp_path / "out" / NAME
    path.write_bytes(path.read_bytes()[:-20])
    assert judge(wanted) == {**first, "replies": {**first["replies"], "in_flight": 1}}
    assert good.total == 6 and "cut in the middle" in caplog.text


@pytest.mark.parametrize("damage", ["{", "[]", '{"event": "reply", "key": "a"}', "null"])
def test_a_damaged_line_is_named(tmp_path: Path, good: Server, damage: str) -> None:
    wanted = config(tmp_path, good.url)
    judge(wanted)
    path = tmp_path / "out" / NAME
    rows = path.read_text().splitlines()
    path.write_text("\n".join([rows[0], damage, *rows[1:]]) + "\n")
    with pytest.raises(DataError, match=r"line 2: .*nothing was changed"):
        judge(wanted)
    assert good.total == 5


def test_two_judges_do_not_share_a_folder(tmp_path: Path, good: Server) -> None:
    wanted = config(tmp_path, good.url)
    with Replies(wanted.out), pytest.raises(BusyError, match="another process"):
        judge(wanted)
    judge(wanted)


# What is checked before anything is sent


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"tries": 0}, "tries=0"),
        ({"timeout": 0.0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"url": "localhost:8000"}, "must be like http://"),
        ({"url": f"https://user:{SECRET}@host/v1"}, "no key in the URL"),
        ({"url": f"https://host/v1?key={SECRET}"}, "no key in the URL"),
        ({"model": ""}, "--judge-model"),
    ],
)
def test_a_server_is_checked_at_construction(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        Asked(**{"model": "m", **options})
    assert SECRET not in str(caught.value)


def test_runs_and_prices_are_checked(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--runs 0"):
        config(tmp_path, "http://localhost/v1", runs=0)
    with pytest.raises(OptionError, match="--judge-price OUT=-1"):
        Prices(1, -1)


def test_no_key_for_openai_and_none_needed_elsewhere(
    tmp_path: Path, good: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    wanted = config(tmp_path, good.url)
    with pytest.raises(OptionError, match="OPENAI_API_KEY is not set"):
        judge(replace(wanted, server=Asked("gpt-4-0613")))
    assert judge(wanted)["complete"]


def test_a_missing_package_names_the_line_to_type(
    tmp_path: Path, good: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingDependency, match=r"pip install 'llava-consensus\[judge\]'"):
        judge(config(tmp_path, good.url))
    assert good.total == 0


def test_the_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://here:1/v1/")
    assert Asked("m").place == "http://here:1/v1" and Asked("m", "http://there/v1").place == "http://there/v1"


# The command


def test_the_command(tmp_path: Path, good: Server, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path, good.url)
    place = ["--answers", str(tmp_path / "answers.jsonl"), "--data", str(tmp_path / "data"), "--no-progress"]
    asked = ["judge", "mmvet", *place, "--judge-model", MODEL, "--judge-url", good.url, "--out", str(tmp_path / "out")]
    assert cli.main([*asked, "--judge-dry-run", "--judge-price", "30", "60"]) == 0
    output = capsys.readouterr()
    assert (
        output.out.startswith("mmvet: nothing was sent. To be sent, by estimate: 5 requests")
        and "dollars" in output.out
    )
    assert good.total == 0
    assert cli.main(asked) == 0
    output = capsys.readouterr()
    assert output.out.startswith("mmvet: total 50.00, 5 of 5 questions graded\nby capability: rec 50.0")
    assert f"judge: {MODEL} (5 replies); prompt: own wording" in output.out
    assert "this call: 5 requests, 500 tokens in, 15 out" in output.out
    assert "0 of 5 grades are known; to be sent, by estimate: 5 requests" in output.err
    assert cli.main([*asked, "--judge-option", "max_tokens=null", "--judge-option", "max_completion_tokens=9"]) == 0
    assert "max_tokens" not in good.bodies[-1] and good.bodies[-1]["max_completion_tokens"] == 9
    assert cli.main(["judge", "mmvett", *asked[2:]]) == 2 and "Did you mean 'mmvet'" in capsys.readouterr().err


def test_the_command_says_what_lacks_a_grade(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(lambda text, number: error(400, "content_filter") if "act 1\n" in text else Act(text=YES)) as server:
        config(tmp_path, server.url, "msvd")
        place = ["--answers", str(tmp_path / "answers.jsonl"), "--data", str(tmp_path / "data"), "--no-progress"]
        asked = ["--judge-model", MODEL, "--judge-url", server.url, "--out", str(tmp_path / "out")]
        assert cli.main(["judge", "msvd", *place, *asked]) == 5
    output = capsys.readouterr()
    assert "accuracy 100.00, 5 of 6 questions graded" in output.out and "average score 4.00 of 5" in output.out
    assert "error: 1 answers have no grade" in output.err
