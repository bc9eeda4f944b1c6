"""An OpenAI-compatible server on loopback that misbehaves on purpose.
`with Server(behave) as server:` serves at `server.url`. `behave(text, number)` is told the last message and how often
that very request has come before, and returns an Act; `server.asked` counts requests by their content.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from loopback import Loopback, Silent

MODEL = "judge-0613"


class Act(NamedTuple):
    """What the server does with one request."""

    kind: str = "ok"  # ok status hang cut drop raw
    text: str | None = "0.5"  # of the reply, or the body of another kind
    status: int = 200
    headers: Mapping[str, str] = {}
    message: Mapping[str, Any] = {}  # further fields of the message
    delay: float = 0.0


def error(status: int, text: str = "sorry", **headers: str) -> Act:
    """An HTTP error in OpenAI's form; unless headers are given, one that lets itself be asked again at once."""
    body = json.dumps({"error": {"message": text, "code": text}})
    headers = headers or {"Retry_After_Ms": "10"}
    return Act("status", body, status, {name.replace("_", "-"): value for name, value in headers.items()})


class Server(Loopback):
    """Everything it was asked is counted."""

    def __init__(self, behave: Callable[[str, int], Act]) -> None:
        super().__init__(Handler)
        self.behave = behave
        self.asked: Counter[str] = Counter()  # by whole body
        self.answered: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()
        self.stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    @property
    def total(self) -> int:
        return sum(self.asked.values())

    def __exit__(self, *error: object) -> None:
        self.stopping.set()
        super().__exit__(*error)


class Handler(Silent):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"])).decode()
        with server.lock:
            number = server.asked[body]
            server.asked[body] += 1
            server.bodies.append(json.loads(body))
            server.keys.add(self.headers["Authorization"])
        act = server.behave(json.loads(body)["messages"][-1]["content"], number)
        time.sleep(act.delay)
        self.act(act)
        if act.kind == "ok":
            with server.lock:
                server.answered[body] += 1

    def act(self, act: Act) -> None:
        message = {"role": "assistant", "content": act.text, **act.message}
        usage = {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103}
        whole = {"id": "1", "object": "chat.completion", "created": 1, "model": MODEL, "usage": usage}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        data = json.dumps({**whole, "choices": [choice]}).encode()
        if act.kind in ("status", "raw"):
            data = (act.text or "").encode("utf-8", "surrogateescape")
        if act.kind == "hang":
            self.server.stopping.wait(5)
            return
        if act.kind == "drop":
            self.close_connection = True
            return
        self.head(act.status, {"Content-Type": "application/json", "Content-Length": str(len(data)), **act.headers})
        if act.kind == "cut":
            data = data[: len(data) // 2]
            self.close_connection = True
        self.wfile.write(data)
