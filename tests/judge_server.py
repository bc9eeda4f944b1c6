"""An OpenAI-compatible server on loopback that misbehaves on purpose.

`with Server(behave) as server:` serves at `server.url`. `behave(text, number)` is told the last message and how often
that very request has come before, and returns an Act; `server.asked` counts requests by their content.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

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


class Server:
    """Runs in a thread; everything it was asked is counted."""

    def __init__(self, behave: Callable[[str, int], Act]) -> None:
        self.behave = behave
        self.asked: Counter[str] = Counter()  # by whole body
        self.answered: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self._lock = threading.Lock()
        self.stopping = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server._serve(self)

            def log_message(self, *_: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    @property
    def total(self) -> int:
        return sum(self.asked.values())

    def __enter__(self) -> "Server":
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"])).decode()
        with self._lock:
            number = self.asked[body]
            self.asked[body] += 1
            self.bodies.append(json.loads(body))
            self.keys.add(handler.headers["Authorization"])
        act = self.behave(json.loads(body)["messages"][-1]["content"], number)
        time.sleep(act.delay)
        self._act(handler, act)
        if act.kind == "ok":
            with self._lock:
                self.answered[body] += 1

    def _act(self, handler: BaseHTTPRequestHandler, act: Act) -> None:
        message = {"role": "assistant", "content": act.text, **act.message}
        usage = {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103}
        whole = {"id": "1", "object": "chat.completion", "created": 1, "model": MODEL, "usage": usage}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        data = json.dumps({**whole, "choices": [choice]}).encode()
        if act.kind in ("status", "raw"):
            data = (act.text or "").encode("utf-8", "surrogateescape")
        if act.kind == "hang":
            self.stopping.wait(5)
            return
        if act.kind == "drop":
            handler.close_connection = True
            return
        handler.send_response(act.status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        for name, value in act.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if act.kind == "cut":
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True
            return
        handler.wfile.write(data)
