"""One file from the network: what a cut left is gone on with, and nothing counts as fetched that is not whole.

    fetch(source.url, Path("downloads/val2014.zip"), md5=source.md5)

What has come so far is `<file>.part`; the same call, or another process after a kill, asks for the rest of it. A file
is whole when it is as long as its server says, and of the hash that is known.
"""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llava_consensus.errors import ConsensusError, DataError
from llava_consensus.evaluation.files import digest, replace
from llava_consensus.evaluation.progress import counted

SUFFIX = ".part"
TRIES = 5  # in a row in which nothing came
TIMEOUT = 30.0  # seconds in which a server must begin to answer, and then send something
SLOWEST, PATIENCE = 1000, 60.0  # bytes a second that are too few, measured over so many seconds
AT_ONCE = 1 << 20  # bytes
RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")  # Content-Range: where a part begins, and how long the file is
PAGE, SPACE = (b"<!doctype html", b"<html"), b"\xef\xbb\xbf \t\r\n"  # how a page begins, after what
LOOKED_AT = 64  # bytes


class TransferError(ConsensusError):
    """The network or a server did not give a file: the same command goes on where this one stopped."""

    exit_code = 5


def fetch(url: str, target: Path, md5: str = "") -> None:
    """Brings `target` here unless it is.

    Raises:
        TransferError: the server cannot be reached, refuses, is too slow or does not say how long the file is, or the
            connection breaks again and again.
        DataError: what came is a page in place of a file, or not of this hash.
    """
    if target.exists():
        return
    import requests
    from urllib3.exceptions import HTTPError  # some of which requests lets through

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + SUFFIX)
    failed, whole = 0, False
    while not whole:
        before = _size(part)
        try:
            _receive(requests.get, url, part, target)
            whole = True
        except (requests.RequestException, HTTPError, ValueError, _Broken) as error:
            failed = 0 if _size(part) >= before + AT_ONCE else failed + 1
            if failed == TRIES or isinstance(error, _Refused | ValueError):  # ValueError: no address
                raise TransferError(f"{url}: {error}. The same command goes on from {_size(part):,} bytes") from error
            time.sleep(1)
    if md5 and digest(part, "md5") != md5:
        part.unlink()
        raise DataError(f"{target.name}: its md5 is not {md5}, so it is damaged or another version. Fetch it again")
    os.replace(part, target)


class _Broken(Exception):
    """A connection that may be better the next time."""


class _Refused(_Broken):
    """An answer that will be the same the next time."""


def _receive(get: Any, url: str, part: Path, target: Path) -> None:
    """Adds to `part` what is missing of it; when this returns it is as long as the file."""
    here = _size(part)
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={here}-"} if here else {})}
    with get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        begin, length = _place(answer, here)
        if begin == length == here:
            part.touch()  # of an empty file there is none yet
            return
        if begin > here:
            part.unlink(missing_ok=True)
            raise _Broken(f"the {here:,} bytes that were here are no part of the file")
        page = "text/html" in answer.headers.get("Content-Type", "")
        with (
            open(part, "r+b" if part.exists() else "wb") as file,
            counted(total=length, initial=begin, unit="B", unit_scale=True, desc=target.name) as bar,
        ):
            file.seek(begin)
            for piece in _pieces(answer):
                if page or (bar.n == begin and piece.lstrip(SPACE).lower().startswith(PAGE)):
                    raise DataError(
                        f"{target.name}: the server sent a page in place of the file, as Google Drive does when a file "
                        f"was asked for too often. Fetch it in a browser, put it at {target}, and give the same command"
                    )
                file.write(piece)
                file.truncate()
                bar.update(len(piece))
            file.truncate(int(bar.n))
    if length is not None and _size(part) != length:
        raise _Broken(f"the connection ended after {_size(part):,} of {length:,} bytes")


def _place(answer: Any, here: int) -> tuple[int, int | None]:
    """Where in the file an answer begins, and how long the file is; None where a body in chunks will tell. Of a server
    that has nothing from `here` on: `here`, or more where it does not say that this is the whole file.
    """
    found = RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if answer.status_code == 416:
        whole = found is not None and int(found[2]) == here
        return (here, here) if whole else (here + 1, None)
    if answer.status_code not in (200, 206):
        again = answer.status_code in (408, 429) or answer.status_code >= 500
        raise (_Broken if again else _Refused)(f"{answer.status_code} {answer.reason}")
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise _Refused("the server compresses the file, so that nobody knows how long it is")
    if answer.status_code == 206:
        if not (found and found[1] == str(here)):
            raise _Refused("the server sent another part of the file than was asked for")
        return here, int(found[2])
    said = answer.headers.get("Content-Length", "")
    if said.isdecimal() or answer.raw.chunked:
        return 0, int(said) if said.isdecimal() else None
    raise _Refused("the server does not say how long the file is, so nobody would know a part from a whole")


def _pieces(answer: Any) -> Iterator[bytes]:
    """The body of an answer as it comes, the first piece long enough to be told from a page. _Broken where it comes too
    slowly, or a body in chunks ends before its end.
    """
    from urllib3.exceptions import HTTPError

    since, came, held = time.monotonic(), 0, b""
    while True:
        try:
            piece = answer.raw.read1(AT_ONCE)
        except (HTTPError, OSError) as error:
            raise _Broken(f"the connection broke ({error.args[-1] if error.args else type(error).__name__})") from error
        held += piece
        if held and (len(held) >= LOOKED_AT or not piece):
            yield held
            held = b""
        if not piece:
            return
        came += len(piece)
        seconds = time.monotonic() - since
        if seconds > PATIENCE:
            if came < SLOWEST * seconds:
                raise _Refused(f"the server sends {came / seconds:.0f} bytes a second, fewer than {SLOWEST:,}")
            since, came = time.monotonic(), 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def mark(path: Path, text: str) -> None:
    """Says that a file was unpacked, so that it need not stay."""
    replace(path, text.encode())
