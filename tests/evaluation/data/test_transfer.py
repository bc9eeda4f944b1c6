"""What comes from the network: a cut connection is gone on with, and what is not the whole file is never taken for it.

Run: `pytest tests/evaluation/data/test_transfer.py`.
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llava_consensus.errors import DataError
from llava_consensus.evaluation.data import transfer
from llava_consensus.evaluation.data.transfer import TransferError, fetch

BYTES = os.urandom(3_000_000)
CUT = 1_200_000  # bytes after which a connection is cut
HTML = b"<!DOCTYPE html><html>too many people asked for this file today, try again tomorrow</html>"


class Server(ThreadingHTTPServer):
    """Serves BYTES in one way, cuts the connection in the middle of so many answers, and remembers what was asked."""

    way = "well"
    cuts = 0
    asked: list[str | None]
    pause: threading.Event

    def handle_error(self, *_: Any) -> None:
        """Nothing: who asks may go before the end."""

    def url(self, name: str = "a.bin") -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    """One answer, in the way of the server."""

    server: Server

    def do_GET(self) -> None:
        wanted, way = self.headers.get("Range"), self.server.way
        self.server.asked.append(wanted)
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and way != "from the beginning" else 0
        if way in ("404", "416", "503"):
            self.send_error(int(way))
        elif first >= len(BYTES):
            known = {"Content-Range": f"bytes */{len(BYTES)}"} if way != "416 without a length" else {}
            self._head(416, {**known, "Content-Length": "0"})
        else:
            body = HTML if way == "page" else BYTES[first:]
            begin = 0 if way == "another part" else first
            lengths = {"chunks": {"Transfer-Encoding": "chunked"}, "no length": {}, "odd": {"Content-Length": "many"}}
            part = {"Content-Range": f"bytes {begin}-{len(BYTES) - 1}/{len(BYTES)}"} if first else {}
            self._head(206 if first else 200, part | lengths.get(way, {"Content-Length": str(len(body))}))
            self._body(body, way)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True

    def _body(self, body: bytes, way: str) -> None:
        cut = self.server.cuts > 0
        self.server.cuts -= cut
        body = body[:CUT] if cut else body
        if way == "slow":
            for place in range(40):
                self.wfile.write(body[place : place + 1])
                self.server.pause.wait(0.05)
        elif way == "chunks":
            self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n" + (b"" if cut else b"0\r\n\r\n"))
        else:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on this machine, which nobody waits for."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    one = Server(("127.0.0.1", 0), Handler)
    one.asked, one.pause = [], threading.Event()
    threading.Thread(target=one.serve_forever, daemon=True).start()
    yield one
    one.shutdown()
    one.server_close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "a.bin"


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "a.bin.part"


@pytest.mark.parametrize("way", ["well", "chunks"])
def test_a_cut_connection_is_gone_on_with(server: Server, target: Path, part: Path, way: str) -> None:
    server.cuts, server.way = 2, way
    fetch(server.url(), target, hashlib.md5(BYTES).hexdigest())
    assert target.read_bytes() == BYTES and not part.exists()
    assert server.asked == [None, f"bytes={CUT}-", f"bytes={2 * CUT}-"]


def test_what_a_killed_process_left_is_gone_on_with(server: Server, target: Path, part: Path) -> None:
    part.write_bytes(BYTES[:1234])
    fetch(server.url(), target)
    assert target.read_bytes() == BYTES and server.asked == ["bytes=1234-"]


def test_a_server_that_knows_no_parts_is_asked_for_the_whole(server: Server, target: Path, part: Path) -> None:
    part.write_bytes(b"something older" * 1_000_000)
    server.way = "from the beginning"
    fetch(server.url(), target)
    assert target.read_bytes() == BYTES


@pytest.mark.parametrize("way", ["well", "416 without a length"])
@pytest.mark.parametrize("more", [b"", b"more"])
def test_a_whole_part_is_taken_and_a_longer_one_fetched_anew(
    server: Server, target: Path, part: Path, way: str, more: bytes
) -> None:
    part.write_bytes(BYTES + more)
    server.way = way
    fetch(server.url(), target)
    assert target.read_bytes() == BYTES and len(server.asked) == (1 if way == "well" and not more else 2)


@pytest.mark.parametrize("name", ["416.bin", "a.bin?size=416"])
def test_an_address_that_holds_416_costs_nothing(server: Server, target: Path, part: Path, name: str) -> None:
    part.write_bytes(BYTES[:1234])
    server.way = "503"
    with pytest.raises(TransferError, match="goes on from 1,234 bytes"):
        fetch(server.url(name), target)
    assert part.read_bytes() == BYTES[:1234] and not target.exists()


@pytest.mark.parametrize("begun", [0, 1234])
def test_a_page_is_not_taken_for_a_file_or_its_rest(server: Server, target: Path, part: Path, begun: int) -> None:
    part.write_bytes(BYTES[:begun])
    server.way = "page"
    with pytest.raises(DataError, match="a page in place of the file"):
        fetch(server.url(), target)
    assert not target.exists() and part.read_bytes() == BYTES[:begun]
    server.way = "well"
    fetch(server.url(), target)
    assert target.read_bytes() == BYTES


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("no length", "does not say how long"),
        ("odd", "does not say how long"),
        ("another part", "another part of the file"),
        ("404", "404 Not Found"),
        ("503", "503 Service Unavailable"),
        ("416", "are no part of the file"),
    ],
)
def test_what_may_be_a_part_is_never_taken_for_the_whole(
    server: Server, target: Path, part: Path, way: str, why: str
) -> None:
    part.write_bytes(BYTES[:1234] if way == "another part" else b"")
    server.way = way
    with pytest.raises(TransferError, match=f"{why}.*The same command goes on from"):
        fetch(server.url(), target)
    assert not target.exists()


def test_a_connection_that_always_breaks_ends_with_what_came(server: Server, target: Path, part: Path) -> None:
    server.cuts, server.way = 99, "from the beginning"
    with pytest.raises(
        TransferError, match=r"the connection broke \(.*1800000 more.*\)\. .*goes on from 1,200,000 bytes"
    ):
        fetch(server.url(), target)
    assert part.read_bytes() == BYTES[:CUT] and not target.exists()


def test_a_server_that_hardly_sends_is_given_up(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PATIENCE", 0.5)
    server.way = "slow"
    with pytest.raises(TransferError, match="bytes a second"):
        fetch(server.url(), target)
    assert not target.exists()


def test_another_content_than_is_known_is_refused(server: Server, target: Path, part: Path) -> None:
    with pytest.raises(DataError, match="its md5 is not"):
        fetch(server.url(), target, "0" * 32)
    assert not target.exists() and not part.exists()


@pytest.mark.parametrize("url", ["nonsense", "http://", "file:///etc/passwd", "http://127.0.0.1:1/a"])
def test_an_address_that_leads_nowhere_is_a_line(server: Server, target: Path, url: str) -> None:
    with pytest.raises(TransferError, match="goes on from 0 bytes"):
        fetch(url, target)
