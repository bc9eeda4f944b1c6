"""Every request that was sent and every reply to it, in one file that is only ever appended to.

`replies.jsonl` holds lines of three kinds: `sent` (before a request goes out), `failed` (a try that got no usable
reply) and `reply`. A request is known by the hash of all that can change its reply: server, model, messages, options,
and which of several draws it is. A reply is on the disk before anything is made of it, so a killed judge goes on where
it was, and answers that were judged before, under any method, are not asked again. Only the last line can be cut by a
kill; it is dropped and reported. The file is locked while a process works with it.
"""

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import BusyError, DataError

NAME = "replies.jsonl"


class Reply(NamedTuple):
    """What a server said to one request."""

    text: str | None
    refused: bool  # by its content filter, or in the field for refusals
    model: str | None  # as the server reports it
    prompt_tokens: int | None
    completion_tokens: int | None
    limited: bool  # the server had refused the request before, for its rate limit


def key_of(request: Mapping[str, Any]) -> str:
    """The hash of a whole request."""
    text = json.dumps(request, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Replies:
    """The open file: what was heard so far, and the only way to add to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.known: dict[str, Reply] = {}
        self.failed: Counter[str] = Counter()  # tries without a usable reply, by request
        self.in_flight: Counter[str] = Counter()  # sent, and never heard of again: their process was stopped
        self.repairs: list[str] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written ({error.strerror}). Choose another --out") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._load()
        except BlockingIOError:
            os.close(self._file)
            raise BusyError(f"{self.path}: another judge is at work here. Wait for it, or give another --out") from None
        except BaseException:
            os.close(self._file)
            raise

    def sent(self, key: str) -> None:
        """Notes that a request goes out; if nothing follows, its process was stopped and it may have been charged."""
        self._append({"event": "sent", "key": key}, sync=False)

    def fail(self, key: str, reason: str) -> None:
        """Notes a try that got no usable reply."""
        self._append({"event": "failed", "key": key, "reason": reason}, sync=False)
        self.failed[key] += 1

    def add(self, key: str, request: Mapping[str, Any], reply: Reply, raw: Any, at: str) -> None:
        """Stores a reply; when this returns it is on the disk."""
        line = {"event": "reply", "key": key, "at": at, "request": request, **reply._asdict(), "raw": raw}
        self._append(line, sync=True)
        self.known[key] = reply

    def close(self) -> None:
        """Lets the next process have the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "Replies":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: Mapping[str, Any], sync: bool) -> None:
        data = (json.dumps(line) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
            if sync:
                os.fsync(self._file)
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot write ({error.strerror}). Make room; the same command goes on"
            ) from None

    def _load(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        cut = lines.pop()
        for number, line in enumerate(lines, start=1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(
                    f"{self.path}, line {number}: damaged. Mend or remove the line; nothing was changed"
                ) from None
        if cut:
            os.truncate(self.path, self.path.stat().st_size - len(cut))
            self.repairs.append(f"{self.path}: the last line was cut in the middle of a write; dropped it")

    def _take(self, line: dict[str, Any]) -> None:
        event, key = line["event"], line["key"]
        if event == "sent":
            self.in_flight[key] += 1
            return
        self.in_flight[key] -= 1
        if event == "failed":
            self.failed[key] += 1
        else:
            self.known[key] = Reply(**{name: line[name] for name in Reply._fields})
