"""LLaVA's data format: a JSON list of conversations about pictures in a folder. Everything that would stop or spoil a
training is found before the first step, and said with the entry it is in.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import Record, read_json

IMAGE = "<image>"
SHOWN = 3  # examples in a message
MEND = "Mend the file or take it out of the list; nothing was trained"
HUMAN, MODEL = "human", "gpt"


class Conversations(NamedTuple):
    """What a file of conversations holds."""

    path: Path
    entries: list[Record]
    pictures: list[str]  # names in the folder, each once, sorted
    fingerprint: str  # of the file, and of names and sizes of its pictures

    @property
    def without_picture(self) -> int:
        """Conversations about no picture."""
        return sum("image" not in entry for entry in self.entries)

    @property
    def description(self) -> Record:
        """What belongs on record."""
        numbers = {"conversations": len(self.entries), "pictures": len(self.pictures)}
        return {"file": self.path.name, "fingerprint": self.fingerprint, **numbers}


def read(path: Path, images: Path) -> Conversations:
    """The conversations of a file, checked.

    Args:
        path: JSON list of entries with `conversations` and, about a picture, `image`.
        images: folder that the names of pictures are relative to.
    Raises:
        DataError: for a file that is none, a conversation without an answer, a placeholder without its picture or a
            picture without its placeholder, a name that leads out of the folder, or a picture that is not there.
    """
    entries: list[Record] = read_json(path, MEND, list)
    if not entries:
        raise DataError(f"{path}: an empty list: there is nothing to train on. {MEND}")
    problems = [
        f"entry {number} ({_name(entry)}): {problem}"
        for number, entry in enumerate(entries)
        for problem in _problems(entry)
    ]
    _refuse(path, problems, "cannot be trained on")
    pictures = sorted({entry["image"] for entry in entries if "image" in entry})
    if not images.is_dir() and pictures:
        raise DataError(f"{images}: no such folder of pictures. Name it with --images")
    missing = [name for name in pictures if not _is_there(images / name)]
    _refuse(path, [f"{images / name}: no such picture, or an empty file" for name in missing], "are missing")
    return Conversations(path, entries, pictures, _fingerprint(path, images, pictures))


def _is_there(picture: Path) -> bool:
    return picture.is_file() and picture.stat().st_size > 0


def _refuse(path: Path, problems: list[str], what: str) -> None:
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise DataError(f"{path}: {len(problems)} {what}: {'; '.join(problems[:SHOWN])}{more}. {MEND}")


def _name(entry: Any) -> str:
    return f"id {entry.get('id')!r}" if isinstance(entry, dict) else type(entry).__name__


def _problems(entry: Any) -> Iterator[str]:
    """What is wrong with one entry."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not all(_is_turn(turn) for turn in turns):
        yield f'`conversations` must be a list of {{"from": "{HUMAN}" or "{MODEL}", "value": text}}'
        return
    speakers = [turn["from"] for turn in turns]
    if speakers != [HUMAN, MODEL] * (len(turns) // 2) or not turns:
        yield f"turns must be {HUMAN}, {MODEL}, {HUMAN}, {MODEL} ...: found {', '.join(speakers[:4]) or 'none'}"
    elif any(not turn["value"].strip() for turn in turns if turn["from"] == MODEL):
        yield "an answer is empty, so nothing would be learned from it"
    if isinstance(entry.get("image", ""), str):
        yield from _picture_problems(entry.get("image"), sum(turn["value"].count(IMAGE) for turn in turns))
    else:
        yield f"`image` must be the name of one picture, found {type(entry['image']).__name__}"


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)


def _picture_problems(name: str | None, placeholders: int) -> Iterator[str]:
    if placeholders != (name is not None):
        yield f"{placeholders} placeholders {IMAGE} for {int(name is not None)} picture"
    if name is not None and (Path(name).is_absolute() or ".." in Path(name).parts):
        yield f"the picture {name!r} leads out of the folder of pictures"


def _fingerprint(path: Path, images: Path, pictures: list[str]) -> str:
    """One hash of the file, and of names and sizes of the pictures."""
    digest = hashlib.sha256(path.read_bytes())
    for name in pictures:
        digest.update(f"{name}\0{(images / name).stat().st_size}\n".encode())
    return digest.hexdigest()
