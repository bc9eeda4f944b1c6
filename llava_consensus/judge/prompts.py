"""What the judge is asked: the official prompt, read out of the official script, or one in our own words.

The official texts are not ours to ship. `from_script(FILE, kind)` finds them in the user's own checkout of
yuweihao/MM-Vet (`mm-vet_evaluator.py`), PKU-YuanGroup/Video-LLaVA (`videollava/eval/video/eval_video_qa.py`),
mbzuai-oryx/Video-ChatGPT or open-compass/VLMEvalKit (`vlmeval/dataset/utils/multiple_choice.py`); the file is parsed by
`ast`, nothing in it is executed. `Prompt.describe()` goes into the record of a judged run, with the hash of the exact
text and, where that is a known one, its name.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llava_consensus.errors import DataError
from llava_consensus.judge import wording

MM_VET, VIDEO_QA, MMBENCH = "mm_vet", "video_qa", "mmbench"
SLOTS = {"question": "question", "answer": "answer", "pred": "prediction", "prediction": "prediction"}
SCRIPTS = {
    MM_VET: "mm-vet_evaluator.py of github.com/yuweihao/MM-Vet",
    VIDEO_QA: "videollava/eval/video/eval_video_qa.py of github.com/PKU-YuanGroup/Video-LLaVA",
    MMBENCH: "vlmeval/dataset/utils/multiple_choice.py of github.com/open-compass/VLMEvalKit",
}
CHINESE = re.compile("[\u4e00-\u9fff]")  # one of these in the question, and it is asked in Chinese
MATCHING = ("question", "options", "prediction")  # of MMBench
VERDICT = "'pred'"  # what the wanted prompt asks for, and those of Video-ChatGPT's other benchmarks do not
KNOWN = {  # hashes of official texts
    "854799be14be8bf599ac96179e8f8edd3b5325ea29731d7d1fb850e7877d4591": "MM-Vet at acde843",
    "383aa99b2501da0859ec9a3dd4e07ad22f197fbf82255712da941645c65ba1d5": "Video-LLaVA at 984e65b",
    "d89f709f371ee46d37d435d006c8c3576dc7fe24df7f52d2ee50c18858afbb83": "VLMEvalKit at e4e0263",
}

Pieces = tuple[str, ...]  # text, slot, text, slot, ...
Messages = tuple[tuple[str, Pieces], ...]  # role and pieces


@dataclass(frozen=True)
class Prompt:
    """Messages with slots: question, prediction, and answer or options."""

    messages: Messages
    reminder: str  # added to the last message after a reply that could not be read
    origin: str  # `own wording`, or the file it was read from
    chinese: Messages = ()  # instead, where the question is Chinese and there are any

    @property
    def sha256(self) -> str:
        """Hash of every character that is sent, slots apart."""
        texts = [self.messages, self.reminder, self.chinese] if self.chinese else [self.messages, self.reminder]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()

    def describe(self) -> dict[str, str | None]:
        """Which prompt this is, for the record; `official` names the version where its text is a known one."""
        return {"origin": self.origin, "sha256": self.sha256, "official": KNOWN.get(self.sha256)}

    def fill(self, fields: Mapping[str, str], again: bool = False) -> list[dict[str, str]]:
        """The messages about one answer, `again` with the reminder. Half characters, which no server takes, become ?"""
        messages = self.chinese if self.chinese and CHINESE.search(fields["question"]) else self.messages
        filled = []
        for role, pieces in messages:
            text = "".join(fields[piece] if at % 2 else piece for at, piece in enumerate(pieces))
            filled.append({"role": role, "content": text.encode("utf-8", "replace").decode()})
        filled[-1]["content"] += self.reminder if again else ""
        return filled


def own(kind: str) -> Prompt:
    """The prompt in our own words."""
    if kind == MM_VET:
        return Prompt(wording.MM_VET, wording.MM_VET_REMINDER, "own wording")
    if kind == MMBENCH:
        return Prompt(wording.MMBENCH, "", "own wording", wording.MMBENCH_CN)
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
    found = {MM_VET: _mm_vet, VIDEO_QA: _video_qa, MMBENCH: _mmbench}[kind](tree, path.name)
    if found is None:
        raise DataError(f"--judge-prompt-from {path}: no such prompt in it. {_wanted(kind)}")
    return found


def _wanted(kind: str) -> str:
    return f"Wanted: {SCRIPTS[kind]}"


def _mm_vet(tree: ast.Module, origin: str) -> Prompt | None:
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
    return Prompt((("user", pieces),), reminders[0], origin)


def _joins(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "join" for one in ast.walk(node))


def _video_qa(tree: ast.Module, origin: str) -> Prompt | None:
    """The first list of messages that has a slot for each field."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.List):
            continue
        messages = tuple(_messages(node))
        slots = {piece for _, pieces in messages for piece in pieces[1::2]}
        if slots == set(SLOTS.values()) and any(VERDICT in text for _, pieces in messages for text in pieces[::2]):
            return Prompt(messages, "", origin)
    return None


def _mmbench(tree: ast.Module, origin: str) -> Prompt | None:
    """The templates in the functions `build_prompt` and `build_prompt_cn`: three empty slots each."""
    templates = {
        function.name: _template(function)
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name in ("build_prompt", "build_prompt_cn")
    }
    english, chinese = templates.get("build_prompt"), templates.get("build_prompt_cn")
    return Prompt((("user", english),), "", origin, (("user", chinese),)) if english and chinese else None


def _template(function: ast.FunctionDef) -> Pieces:
    """The first text with three slots, in the order in which they are filled: question, options, prediction."""
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("{}") == len(MATCHING):
            head, *tail = node.value.split("{}")
            return (head, *(piece for pair in zip(MATCHING, tail, strict=True) for piece in pair))
    return ()


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
