"""What the judge is asked: the official prompt, read out of the official script, or one in our own words.

The official texts are not ours to ship. `from_script(FILE, kind)` finds them in the user's own checkout of
yuweihao/MM-Vet (`mm-vet_evaluator.py`), PKU-YuanGroup/Video-LLaVA (`videollava/eval/video/eval_video_qa.py`) or
mbzuai-oryx/Video-ChatGPT; the file is parsed by `ast`, nothing in it is executed. `Prompt.describe()` goes into the
record of a judged run, with the hash of the exact text and, where that is a known one, its name.
"""

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llava_consensus.errors import DataError
from llava_consensus.judge import wording

MM_VET, VIDEO_QA = "mm_vet", "video_qa"
SLOTS = {"question": "question", "answer": "answer", "pred": "prediction", "prediction": "prediction"}
SCRIPTS = {
    MM_VET: "mm-vet_evaluator.py of github.com/yuweihao/MM-Vet",
    VIDEO_QA: "videollava/eval/video/eval_video_qa.py of github.com/PKU-YuanGroup/Video-LLaVA",
}
VERDICT = "'pred'"  # what the wanted prompt asks for, and those of Video-ChatGPT's other benchmarks do not
KNOWN = {  # hashes of official texts
    "854799be14be8bf599ac96179e8f8edd3b5325ea29731d7d1fb850e7877d4591": "MM-Vet at acde843",
    "383aa99b2501da0859ec9a3dd4e07ad22f197fbf82255712da941645c65ba1d5": "Video-LLaVA at 984e65b",
}

Pieces = tuple[str, ...]  # text, slot, text, slot, ...
Messages = tuple[tuple[str, Pieces], ...]  # role and pieces


@dataclass(frozen=True)
class Prompt:
    """Messages with slots for question, answer and prediction."""

    messages: Messages
    reminder: str  # added to the last message after a reply that could not be read
    origin: str  # `own wording`, or the file it was read from

    @property
    def sha256(self) -> str:
        """Hash of every character that is sent, slots apart."""
        return hashlib.sha256(json.dumps([self.messages, self.reminder]).encode()).hexdigest()

    def describe(self) -> dict[str, str | None]:
        """Which prompt this is, for the record; `official` names the version where its text is a known one."""
        return {"origin": self.origin, "sha256": self.sha256, "official": KNOWN.get(self.sha256)}

    def fill(self, fields: Mapping[str, str], again: bool = False) -> list[dict[str, str]]:
        """The messages about one answer, `again` with the reminder. Half characters, which no server takes, become ?"""
        filled = []
        for role, pieces in self.messages:
            text = "".join(fields[piece] if at % 2 else piece for at, piece in enumerate(pieces))
            filled.append({"role": role, "content": text.encode("utf-8", "replace").decode()})
        filled[-1]["content"] += self.reminder if again else ""
        return filled


def own(kind: str) -> Prompt:
    """The prompt in our own words."""
    if kind == MM_VET:
        return Prompt(wording.MM_VET, wording.MM_VET_REMINDER, "own wording")
    return Prompt(wording.VIDEO_QA, "", "own wording")


def from_script(path: Path, kind: str) -> Prompt:
    """The official prompt out of the official script.

    Raises:
        DataError: the file cannot be read, is no Python, or holds no prompt of this kind.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise DataError(f"--judge-prompt-from {path}: cannot be read ({error.strerror})") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"--judge-prompt-from {path}: not a Python script ({error}). {_wanted(kind)}") from None
    found = _mm_vet(tree) if kind == MM_VET else _video_qa(tree)
    if found is None:
        raise DataError(f"--judge-prompt-from {path}: no such prompt in it. {_wanted(kind)}")
    return Prompt(*found, origin=path.name)


def _wanted(kind: str) -> str:
    return f"Wanted: {SCRIPTS[kind]}"


def _mm_vet(tree: ast.Module) -> tuple[Messages, str] | None:
    """The constant named `prompt`, and the text added behind the joined cells after an unreadable reply."""
    tables = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if any(isinstance(target, ast.Name) and target.id == "prompt" for target in node.targets)
    ]
    reminders = [
        node.right.value
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _joins(node.left)
        if isinstance(node.right, ast.Constant) and isinstance(node.right.value, str)
    ]
    if not tables or not reminders:
        return None
    pieces = (tables[-1] + "\n", "question", " | ", "answer", " | ", "prediction", " | ")
    return (("user", pieces),), reminders[0]


def _joins(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "join" for one in ast.walk(node))


def _video_qa(tree: ast.Module) -> tuple[Messages, str] | None:
    """The first list of messages that has a slot for each field."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.List):
            continue
        messages = tuple(_messages(node))
        slots = {piece for _, pieces in messages for piece in pieces[1::2]}
        if slots == set(SLOTS.values()) and any(VERDICT in text for _, pieces in messages for text in pieces[::2]):
            return messages, ""
    return None


def _messages(node: ast.List) -> Iterator[tuple[str, Pieces]]:
    for one in node.elts:
        if isinstance(one, ast.Dict):
            pairs = zip(one.keys, one.values, strict=True)
            fields = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
            role, content = fields.get("role"), fields.get("content")
            pieces = _pieces(content)
            if isinstance(role, ast.Constant) and pieces:
                yield str(role.value), pieces


def _pieces(node: ast.AST | None) -> Pieces:
    """A string constant or an f-string as text and slots in turn; nothing where it holds anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    if not isinstance(node, ast.JoinedStr):
        return ()
    pieces = [""]
    for one in node.values:
        if isinstance(one, ast.Constant):
            pieces[-1] += str(one.value)
        elif isinstance(one, ast.FormattedValue) and isinstance(one.value, ast.Name) and one.value.id in SLOTS:
            pieces += [SLOTS[one.value.id], ""]
        else:
            return ()
    return tuple(pieces)
