"""Downloads: a cut connection is resumed, and a part of a file is never taken for the whole."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Loopback, Silent

from llava_consensus.errors import DataError
from llava_consensus.evaluation.data.transfer import TransferError, fetch

BYTES = os.urandom(3_000_000)
CUT = 1_200_000  # bytes after which a connection is cut
RESUMES = "The same command resumes from 1,234 bytes"
HTML = b"<!DOCTYPE html><html>too many people asked for this file today, try again tomorrow</html>"


class Server(Loopback):
    """Serves BYTES in one way, cuts the connection in the middle of so many answers, and remembers what was asked."""

    way = "well"
    cuts = 0
    tag = '"1"'
    asked: list[str | None]


class Handler(Silent):
    server: Server

    def do_GET(self) -> None:
        wanted, way = self.headers.get("Range"), self.server.way
        self.server.asked.append(wanted)
        same = self.headers.get("If-Range") in (None, self.server.tag)
        parts = wanted and same and way != "from the beginning"
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if parts else 0
        if way in ("404", "416", "503"):
            self.send_error(int(way))
        elif first >= len(BYTES):
            self.head(416, {"Content-Range": f"bytes */{len(BYTES)}", "Content-Length": "0"})
        else:
            body = HTML if way == "page" else BYTES[first:]
            begin = 0 if way == "another part" else first
            lengths = {"chunks": {"Transfer-Encoding": "chunked"}}
            part = {"Content-Range": f"bytes {begin}-{len(BYTES) - 1}/{len(BYTES)}"} if first else {}
            kind = {"Content-Type": "text/html"} if way == "page" else {"ETag": self.server.tag}
            self.head(206 if first else 200, part | kind | lengths.get(way, {"Content-Length": str(len(body))}))
            self._body(body, way)

    def _body(self, body: bytes, way: str) -> None:
        cut = self.server.cuts > 0
        self.server.cuts -= cut
        body = body[:CUT] if cut else body
        if way == "chunks":
            self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n" + (b"" if cut else b"0\r\n\r\n"))
        else:
            self.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on this machine, which nobody waits for."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server(Handler) as one:
        one.asked = []
        yield one


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "a.bin"


def begun(target: Path, content: bytes, tag: str = Server.tag) -> Path:
    """The part of a file that a process left."""
    part = target.with_suffix(".bin.part")
    part.write_bytes(content)
    part.with_suffix(".tag").write_text(tag)
    return part


@pytest.mark.parametrize("way", ["well", "chunks"])
def test_a_cut_connection_is_resumed(server: Server, target: Path, way: str) -> None:
    server.cuts, server.way = 2, way
    fetch(f"{server.url}/a.bin", target, hashlib.md5(BYTES).hexdigest())
    assert target.read_bytes() == BYTES and [path.name for path in target.parent.iterdir()] == ["a.bin"]
    assert len(server.asked) == 3 and server.asked[0] is None and None not in server.asked[1:]


@pytest.mark.parametrize(
    ("content", "tag", "asked"),
    [(BYTES[:1234], Server.tag, "bytes=1234-"), (b"older", '"another"', "bytes=5-"), (b"older", "", None)],
)
def test_what_a_killed_process_left_is_resumed_unless_the_file_changed_on_the_server(
    server: Server, target: Path, content: bytes, tag: str, asked: str | None
) -> None:
    begun(target, content, tag)
    fetch(f"{server.url}/a.bin", target)
    assert target.read_bytes() == BYTES and server.asked == [asked]


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("another part", f"another part of the file.*{RESUMES}"),
        ("404", f"404 Client Error.*{RESUMES}"),
        ("503", f"503 Server Error.*{RESUMES}"),
        ("page", "a page in place of the file.*put it at .*a.bin"),
    ],
)
def test_a_part_is_never_taken_for_the_whole(server: Server, target: Path, way: str, why: str) -> None:
    part = begun(target, BYTES[:1234])
    server.way = way
    with pytest.raises(DataError if way == "page" else TransferError, match=why):
        fetch(f"{server.url}/a.bin", target)
    assert not target.exists() and part.read_bytes() == BYTES[:1234]


def test_another_content_than_is_known_is_refused(server: Server, target: Path) -> None:
    with pytest.raises(DataError, match="its md5 is not"):
        fetch(f"{server.url}/a.bin", target, "0" * 32)
    assert not target.exists() and not target.with_suffix(".bin.part").exists()
