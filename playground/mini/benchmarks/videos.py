"""Mini TGIF-QA, MSVD-QA and MSRVTT-QA: short questions about clips, in the layout of Video-LLaVA's zero-shot QA files.

Questions are asked bare and answered in a word. They are about what stays the same in a clip (what there is, how many,
what colour, what a sign says): the embedded model sees eight pictures and knows nothing of motion. In these sets
everything is seen in every frame, so that a few random patches of each are enough; the split `brief` asks about what is
seen in one frame alone (`clips.py`), in MSVD's files.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from playground.mini.benchmarks.choices import choose
from playground.mini.benchmarks.files import TEST, write_json
from playground.mini.catalogue import VARIANTS, plural
from playground.mini.clips import Clip, brief_clip, clip, write_video
from playground.mini.questions import View
from playground.mini.styles import READ

SETS = {"TGIF": "mp4", "MSVD": "videos", "MSRVTT": "videos/all"}  # where the videos of a set lie
QUESTIONS, PER_CLIP = 150, 5
BRIEF_PER_CLIP = 2
TYPES = {"object": 0, "number": 1, "color": 2, "text": 4}  # as TGIF-QA numbers them, less places; text is ours


def object_questions(view: View) -> list[tuple[str, str, str]]:
    """What kind of fruit do you see?"""
    single = [i for i in view.items if i.category != "shape" and view.categories[i.category] == 1]
    return [("object", f"What kind of {i.category} do you see?", i.name) for i in single]


def questions(view: View, rng: random.Random) -> list[tuple[str, str, str]]:
    """Type, question and answer of all that can be asked about a clip, in random order."""
    found = object_questions(view)
    found += [("number", f"How many {plural(name)} do you see?", str(count)) for name, count in view.names.items()]
    large = [i.name for i in view.items if i.large]
    if len(large) == 1:
        found.append(("object", "What is the large object?", large[0]))
    for _ in range(4):
        made = choose(view, "colour", rng)
        found += [("color", made.question, made.options[made.right])] if made else []
    if view.scene.sign:
        found.append(("text", rng.choice(READ), view.scene.sign.text))
    unique = list(dict.fromkeys(found))
    rng.shuffle(unique)
    unique.sort(key=lambda one: one[0] == "number")  # counts last: of those there are always enough
    return unique


def brief_questions(shown: Clip, rng: random.Random) -> list[tuple[str, str, str]]:
    """Type, question and answer of what can be asked about the things that are seen in one frame, in random order."""
    view = View(shown.scene)
    brief = [item for item, frame in zip(view.items, shown.only, strict=False) if frame is not None]
    found = [one for one in object_questions(view) if one[2] in {item.name for item in brief}]
    found += [("color", f"What color is the {i.name}?", i.colour) for i in brief if i.name in VARIANTS]
    found += [("text", rng.choice(READ), view.scene.sign.text)] if view.scene.sign else []
    rng.shuffle(found)
    return found


def build_set(folder: Path, name: str) -> None:
    """One set: `test_q.json`, `test_a.json` and its videos."""
    shown = ((index, clip("test", index)) for index in TEST[name])
    made = ((index, one, questions(View(one.scene), random.Random(index))[:PER_CLIP]) for index, one in shown)
    _write(folder, name, made, QUESTIONS)


def build_brief(folder: Path, split: str) -> None:
    """MSVD's files about the clips of which most things are seen in one frame."""
    shown = ((index, brief_clip("test", index)) for index in TEST[split])
    made = ((index, one, brief_questions(one, random.Random(index))[:BRIEF_PER_CLIP]) for index, one in shown)
    _write(folder / "MSVD_Zero_Shot_QA", "MSVD", made)


def _write(
    folder: Path, name: str, made: Iterable[tuple[int, Clip, list[tuple[str, str, str]]]], most: int | None = None
) -> None:
    """Clips with their numbers and questions, until there are so many questions."""
    asked: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for index, shown, about in made:
        if most is not None and len(asked) >= most:
            break
        video = f"{name.lower()}_{index}"
        write_video(folder / SETS[name] / f"{video}.mp4", shown)
        for number, (kind, question, answer) in enumerate(about):
            question_id = f"v_{video}_{number}"
            asked.append({"video_name": video, "question_id": question_id, "question": question})
            answers.append({"answer": answer, "type": TYPES[kind], "question_id": question_id})
    write_json(folder / "test_q.json", asked, indent=2)
    write_json(folder / "test_a.json", answers, indent=2)


def build_videos(folder: Path) -> None:
    """All three sets, each in its `<NAME>_Zero_Shot_QA`."""
    for name in SETS:
        build_set(folder / f"{name}_Zero_Shot_QA", name)
