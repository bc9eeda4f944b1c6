"""`eval --url`: a server answers, and nothing of a model is loaded here."""

import base64
import io
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Fake, make_data
from loopback import Loopback, Silent
from PIL import Image

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.runs.by_url import PROBES, UNTOLD, ServerError, UrlConfig, run
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.user_files import read_answers

pytest.importorskip("openai")
QUIET = Execution(4, progress=False)


class Chat(Loopback):
    """A server of OpenAI's chat API; answers with the question's length, and waits until `together` have come."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.asked: list[dict[str, Any]] = []
        self.statuses = Counter[str]()  # what questions get in place of an answer, by their text
        self.dies_after = 10**9
        self.tells: dict[str, Any] = {"prompt_tokens_details": {"multimodal_tokens": {"image": 5}}}
        self.gate = threading.Barrier(1)
        self.words = " {} words\n"  # what it answers
        self.told: dict[str, Any] | None = None  # which reduction it says it runs
        self.body: bytes | None = None  # sent in place of an answer

    @property
    def url(self) -> str:
        return f"{super().url}/v1"


class Handler(Silent):
    server: Chat

    def do_GET(self) -> None:
        told = {} if self.server.told is None else {"visual_reduction": self.server.told}
        self.send(200, {"object": "list", "data": [{"id": "small", "object": "model", **told}]})

    def do_POST(self) -> None:
        body, own = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        text = body["messages"][0]["content"][-1]["text"]
        if len(own.asked) >= own.dies_after:
            self.close_connection = True
            return
        own.asked.append(body)
        own.gate.wait(timeout=20)
        if status := own.statuses[text]:
            self.send(status, {"error": {"message": "no such thing", "type": "BadRequestError"}})
            return
        message = {"role": "assistant", "content": own.words.format(len(text))}
        self.send(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": own.tells})

    def send(self, status: int, content: Any) -> None:
        data, told = self.server.body or json.dumps(content).encode(), self.server.told
        headers = {"Content-Type": "application/json" if self.server.body is None else "text/html"}
        headers |= {} if told is None else {"visual-reduction": json.dumps(told)}
        self.head(status, headers | {"Content-Length": str(len(data))})
        self.wfile.write(data)


@pytest.fixture
def chat() -> Iterator[Chat]:
    with Chat() as server:
        yield server


@pytest.fixture
def config(chat: Chat, tmp_path: Path) -> UrlConfig:
    return UrlConfig(Fake(), chat.url, data=make_data(tmp_path / "data", 4, 5))


def test_several_are_asked_at_once_and_a_stopped_run_goes_on(chat: Chat, config: UrlConfig, tmp_path: Path) -> None:
    config, questions = replace(config, tokens=0.25), {one.text: one for one in Fake().load(config.data)}
    chat.gate, chat.dies_after = threading.Barrier(4), 8  # a request that has three beside it, or a timeout
    with pytest.raises(ServerError, match="the same command resumes"):
        run(config, tmp_path / "out", QUIET)
    chat.gate, chat.dies_after = threading.Barrier(1), 10**9
    result = run(config, tmp_path / "out", QUIET)
    assert result.asked == 20 - 8 and len(chat.asked) == 20 + PROBES
    texts = [body["messages"][0]["content"][-1]["text"] for body in chat.asked]
    assert set(texts) == questions.keys() and result.metrics["answered"] == 20
    body, text = chat.asked[0], texts[0]
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    shown = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert shown.tobytes() == open_image(config.data / "eval/fake/images" / questions[text].images[0]).tobytes()
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("small", 8, 0)
    assert body["mm_processor_kwargs"] == {"visual_tokens": 0.25, "question": text}
    answers = read_answers(result.path / "answers.jsonl")
    assert [one["metadata"]["index"] for one in answers] == list(range(20))
    assert {one["metadata"]["after"] for one in answers} == {5} and answers[0]["text"].endswith("words")
    assert run(config, tmp_path / "out", QUIET).asked == 0
    assert run(replace(config, tokens=None), tmp_path / "out", QUIET).path != result.path


def test_a_question_that_fails_is_recorded_and_asked_again(chat: Chat, config: UrlConfig, tmp_path: Path) -> None:
    questions = Fake().load(config.data)
    chat.statuses[questions[3].text] = 400
    chat.tells = {}
    (config.data / "eval" / "fake" / "images" / questions[19].images[0]).write_bytes(b"no image")
    result = run(config, tmp_path / "out", QUIET)
    broken = sum(one.images == questions[19].images for one in questions)
    assert result.metrics["errors"] == 1 + broken and result.metrics["notes"] == {UNTOLD: 19 - broken}
    assert "mm_processor_kwargs" not in chat.asked[0]
    chat.statuses.clear()
    again = run(config, tmp_path / "out", replace(QUIET, retry_errors=True))
    assert again.asked == 1 + broken and again.metrics["errors"] == broken


TOLD = {"method": "visionzip", "options": {}, "tokens": 64, "largest": None, "total": None, "positions": "renumber"}


def test_another_server_behind_the_same_address_is_noticed(chat: Chat, config: UrlConfig, tmp_path: Path) -> None:
    run(config, tmp_path / "out", QUIET)
    chat.words = "no"
    with pytest.raises(ServerError, match=r"3 of 3 questions .* answered otherwise now.*--out"):
        run(config, tmp_path / "out", QUIET)


def test_a_run_is_named_after_the_reduction_of_its_server(chat: Chat, config: UrlConfig, tmp_path: Path) -> None:
    chat.told = TOLD
    first = run(config, tmp_path / "out", QUIET)
    assert first.path.name.startswith("fake-visionzip-64-")
    chat.told = {**TOLD, "method": "divprune"}
    assert run(config, tmp_path / "out", QUIET).path.name.startswith("fake-divprune-64-")
    chat.told = {**TOLD, "positions": "keep"}
    second = run(config, tmp_path / "out", QUIET)
    assert second.path != first.path and len(chat.asked) == 60

    # half-way another server takes the address
    chat.told, count = {**TOLD, "tokens": 32}, len(chat.asked)
    original = Handler.do_POST

    def do_POST(self: Handler) -> None:
        if len(chat.asked) >= count + 6:
            chat.told = {**TOLD, "tokens": 16}
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "do_POST", do_POST)
        with pytest.raises(ServerError, match=r'an answer comes from .*"tokens": 16'):
            run(config, tmp_path / "out", QUIET)


@pytest.mark.parametrize("kind", [502, 429, "html"])
def test_a_gateway_that_fails_ends_the_run(
    chat: Chat, config: UrlConfig, tmp_path: Path, kind: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("openai._base_client.BaseClient._calculate_retry_timeout", lambda *_: 0.0)
    questions = Fake().load(config.data)
    chat.body = b"<html>hello</html>" if kind == "html" else None
    chat.statuses.update({} if kind == "html" else {one.text: kind for one in questions[5:]})
    with pytest.raises(ServerError, match="" if kind == "html" else "the same command resumes"):
        run(config, tmp_path / "out", QUIET)
    chat.body = None
    chat.statuses.clear()
    assert run(config, tmp_path / "out", QUIET).metrics["answered"] == 20

    chat.statuses[questions[3].text] = 500  # one question that the server cannot answer stops nothing
    assert run(config, tmp_path / "other", QUIET).metrics["errors"] == 1


def test_a_server_that_is_gone_later_ends_the_run(chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last question fails four times, which is no fault of the question if nothing is answered after it."""
    monkeypatch.setattr("openai._base_client.BaseClient._calculate_retry_timeout", lambda *_: 0.0)
    config = UrlConfig(Fake(), chat.url, data=make_data(tmp_path / "data", 2, 2))
    questions = Fake().load(config.data)
    chat.statuses[questions[-1].text], chat.dies_after = 500, len(questions) - 1 + 4
    with pytest.raises(ServerError, match="the same command resumes"):
        run(config, tmp_path / "out", Execution(1, progress=False))


def test_what_cannot_be_asked_is_refused_in_a_line(chat: Chat, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"unknown model of .*'large'.*small"):
        run(UrlConfig(Fake(), chat.url, "large"), tmp_path, QUIET)
    for url, tokens, reason in (("localhost:8000", None, "must be like"), (chat.url, 0, "tokens=0 must be at least 1")):
        with pytest.raises(OptionError, match=reason):
            UrlConfig(Fake(), url, tokens=tokens)
    with pytest.raises(OptionError, match="Leave --workers out"):
        run(UrlConfig(Fake(), chat.url), tmp_path, Execution(4, 2))
    chat.server_close()
    with pytest.raises(ServerError, match=r"--url http://127.0.0.1:\d+/v1: Connection error"):
        run(UrlConfig(Fake(), chat.url), tmp_path, QUIET)


def test_the_command_loads_no_torch(chat: Chat, tmp_path: Path) -> None:
    program = (
        "import sys; from llava_consensus.cli import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'torch', 'transformers', 'vllm'} & sys.modules.keys()))"
    )
    words = ["eval", "pope", "--url", chat.url, "--limit", "2", "--no-progress", "--out", str(tmp_path)]
    said = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "0 []" and "visual tokens per question, as the server says: 5" in said
