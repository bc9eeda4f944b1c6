"""vLLM's own server as `llava-consensus serve` starts it, asked over HTTP and by OpenAI's client."""

import base64
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asking
import pytest
import small
from asking import reference

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PATIENCE = 600  # seconds until a server counts as not coming up, on a machine that does something else too
ARGUMENTS = "--host 127.0.0.1 --dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 4"


def content_of(picture: bytes) -> dict[str, Any]:
    """A picture as a part of a message."""
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def png(number: int) -> bytes:
    file = io.BytesIO()
    small.picture(number).save(file, "PNG")
    return file.getvalue()


class Server:
    """A server that is up."""

    def __init__(self, url: str, name: str, made: Any) -> None:
        self.url, self.name, self.made = url, name, made

    def body(self, picture: bytes, **more: Any) -> dict[str, Any]:
        """One question about a picture."""
        parts = [content_of(picture), {"type": "text", "text": "w7 w8 w9"}]
        own = {"model": self.name, "messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}
        return {**own, "ignore_eos": True, **more}

    def ask(self, picture: bytes, **more: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer over HTTP."""
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(self.body(picture, **more)).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("llava")
    made = small.llava(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = shlex.split("-m llava_consensus.cli serve --method visionzip --tokens 5 --largest 9 --vllm")
    command = [sys.executable, *words, f"{ARGUMENTS} --port {port}", str(folder)]
    environment = {**os.environ, **small.ENVIRONMENT}
    log = Path(tmp_path_factory.mktemp("log")) / "server.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
        try:
            while True:
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.5)
            yield Server(url, str(folder), made)
        finally:
            process.terminate()


def test_a_server_answers_from_the_tokens_it_was_told_and_refuses_bad_requests(server: Server) -> None:
    openai = pytest.importorskip("openai")
    (asked,) = [asking.Request("<image> w7 w8 w9", [small.picture(1)])]
    expected = {
        k: server.made[1].tokenizer.decode(reference(server.made, [asked], "visionzip", k)[0].ids) for k in (5, 9)
    }
    words = len(server.made[1].tokenizer("w7 w8 w9").input_ids)

    status, answer = server.ask(png(1))
    assert status == 200 and answer["choices"][0]["message"]["content"].strip() == expected[5]
    assert answer["usage"]["prompt_tokens"] == words + 5

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    body = server.body(png(1))
    own = {"ignore_eos": body.pop("ignore_eos"), "mm_processor_kwargs": {"visual_tokens": 9}}
    said = client.chat.completions.create(**body, extra_body=own)
    assert said.choices[0].message.content.strip() == expected[9] and said.usage.prompt_tokens == words + 9

    for tokens, reason in [(0, "at least 1"), ("many", "whole number"), (10, "more than this server allows, 9")]:
        status, answer = server.ask(png(1), mm_processor_kwargs={"visual_tokens": tokens})
        message = answer["error"]["message"]
        assert status == 400 and f"visual_tokens={tokens!r}" in message and reason in message and "\n" not in message, (
            answer
        )
    status, answer = server.ask(b"no picture")
    assert status == 400 and "image" in answer["error"]["message"] and "\n" not in answer["error"]["message"]

    assert server.ask(png(1))[1]["choices"][0]["message"]["content"].strip() == expected[5]
