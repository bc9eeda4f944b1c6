"""What a judge is asked: messages with slots for the question, the answer and so on.

The official texts are not ours to ship. Each grader reads them out of the user's own copy of the official script, by
`ast` and without executing anything in it, or has a prompt in our own words. Such a prompt has the official structure,
so that replies are read the same way, but grades given under it are not those of the official prompt:
`Prompt.describe()` goes into the record of a judged run, with the hash of the exact text and, where that is a known
one, its name.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

OWN = "own wording"
CHINESE = re.compile("[\u4e00-\u9fff]")  # one of these in the question, and it is asked in Chinese

Pieces = tuple[str, ...]  # text, slot, text, slot, ...
Messages = tuple[tuple[str, Pieces], ...]  # role and pieces


@dataclass(frozen=True)
class Prompt:
    """Messages with slots: question, prediction, and answer or options."""

    messages: Messages
    reminder: str = ""  # added to the last message after a reply that could not be read
    origin: str = OWN  # or the file it was read from
    chinese: Messages = ()  # instead, where the question is Chinese and there are any
    version: str | None = None  # name of the official version, where the text is a known one

    @property
    def sha256(self) -> str:
        """Hash of every character that is sent, slots apart."""
        texts = [self.messages, self.reminder, self.chinese] if self.chinese else [self.messages, self.reminder]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()

    def describe(self) -> dict[str, str | None]:
        """Which prompt this is, for the record; `official` names the version where its text is a known one."""
        return {"origin": self.origin, "sha256": self.sha256, "official": self.version}

    def fill(self, fields: Mapping[str, str], again: bool = False) -> list[dict[str, str]]:
        """The messages about one answer, `again` with the reminder. Half characters, which no server takes, become ?"""
        messages = self.chinese if self.chinese and CHINESE.search(fields["question"]) else self.messages
        filled = []
        for role, pieces in messages:
            text = "".join(fields[piece] if at % 2 else piece for at, piece in enumerate(pieces))
            filled.append({"role": role, "content": text.encode("utf-8", "replace").decode()})
        filled[-1]["content"] += self.reminder if again else ""
        return filled
