"""Write questions about whole photographs of animals, which the scenes of training never show, in GQA's own files.

    python -m playground.photo.whole [--out playground/photo-whole]
    llava-consensus eval gqa --data playground/photo-whole --model checkpoints/llava-photo --tokens 64

The photographs come with GCompris (Debian package gcompris-qt-data, most of them under Creative Commons licences that
its copyright file names) and are not to be committed. Every animal has a name that the model was trained to say. Four
questions are asked about each: is it there, is another animal of its category there, what is it, which of four is it.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from playground.mini.benchmarks.files import line, write_json, write_lines
from playground.mini.questions import SHORT
from playground.mini.styles import LETTER
from playground.photo.catalogue import CATEGORY
from playground.photo.parts import POOL, fetch_photographs
from playground.photo.paths import ROOT
from playground.photo.questions import a
from playground.photo.scenes import shown_in

PACKAGE = f"{POOL}/g/gcompris-qt/gcompris-qt-data_3.1-2_all.deb"
DIGEST = "e9cf06ab2105529068df73085784e835d2ff03f870d2a8091f09125d40abac9f"
TABLE = {  # resource file: name=photograph+photograph
    "erase": "bee=bee cow=calf camel=camels dolphin=dolphin giraffe=giraffe goat=goat gorilla=gorilla heron=heron "
    "horse=horse monkey=gibbon+long_nosed_monkey+macaque penguin=penguin rhino=rhinoceros squirrel=squirrel "
    "toucan=toucan",
    "explore_farm_animals": "chicken=chicken cow=cow dog=dog duck=duck horse=horse owl=owl pig=pig sheep=sheep",
    "explore_world_animals": "bison=bison giraffe=giraffe kangaroo=kangaroo koala=koala bear=polar_bear "
    "parrot=scarlet_macaw",
}


def resources(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Files of a Qt resource file by their paths: a tree of 22-byte nodes, names and data, all big-endian."""
    tree, data, names = struct.unpack(">3I", content[8:20])

    def word(offset: int) -> str:
        (length,) = struct.unpack_from(">H", content, names + offset)
        return content[names + offset + 6 :][: 2 * length].decode("utf-16-be")

    def walk(index: int, above: str) -> Iterator[tuple[str, bytes]]:
        node = tree + 22 * index
        offset, flags = struct.unpack_from(">IH", content, node)
        path = f"{above}/{word(offset)}" if index else ""
        if flags & 2:  # a folder
            count, first = struct.unpack_from(">2I", content, node + 6)
            for child in range(first, first + count):
                yield from walk(child, path)
            return
        (at,) = struct.unpack_from(">I", content, node + 10)
        (length,) = struct.unpack_from(">I", content, data + at)
        found = content[data + at + 4 :][:length]
        yield path, zlib.decompress(found[4:]) if flags & 1 else found

    return walk(0, "")


def photographs() -> Iterator[tuple[str, str, Image.Image]]:
    """Stem, animal and photograph, fetched once."""
    folder = fetch_photographs("gcompris", {PACKAGE: DIGEST})
    for file, words in TABLE.items():
        found = dict(resources((folder / "usr/share/gcompris-qt/rcc" / f"{file}.rcc").read_bytes()))
        by_stem = {Path(path).stem: content for path, content in found.items() if path.endswith(".webp")}
        for animal, stems in (word.split("=") for word in words.split()):
            for stem in stems.split("+"):
                yield f"{file}-{stem}", animal, Image.open(io.BytesIO(by_stem[stem])).convert("RGB")


def questions(animal: str, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Kind, question with its instruction, and answer."""
    category = CATEGORY[animal]
    others = [name for name in shown_in("train") if CATEGORY[name] == category and name != animal]
    absent = rng.choice(others)
    yield "existence, present", f"Is there {a(animal)} in the picture?\n{SHORT}", "yes"
    yield "existence, absent", f"Is there {a(absent)} in the picture?\n{SHORT}", "no"
    yield "name", f"What {category} is in the picture?\n{SHORT}", animal
    options = [*rng.sample(others, 3), animal]
    rng.shuffle(options)
    listed = "\n".join(f"{letter}. {name}" for letter, name in zip("ABCD", options, strict=True))
    yield "one of four", f"Which object is in the picture?\n{listed}\n{LETTER}", "ABCD"[options.index(animal)]


def build(out: Path) -> None:
    """GQA's files: `llava_gqa_testdev_balanced.jsonl`, `data/testdev_balanced_questions.json`, `data/images`."""
    folder = out / "eval" / "gqa"
    (folder / "data" / "images").mkdir(parents=True, exist_ok=True)
    records: dict[str, Any] = {}
    lines = []
    for stem, animal, image in photographs():
        image.save(folder / "data" / "images" / f"{stem}.jpg", quality=92)
        for kind, question, answer in questions(animal, random.Random(stem)):
            key = str(30_000_000 + len(records))
            records[key] = {
                "question": question.splitlines()[0],
                "imageId": stem,
                "isBalanced": True,
                "answer": answer,
                "groups": {"global": kind, "local": kind},
                "types": {"detailed": kind, "semantic": kind, "structural": kind},
            }
            lines.append(line(key, f"{stem}.jpg", question))
    write_json(folder / "data" / "testdev_balanced_questions.json", records)
    write_lines(folder / "llava_gqa_testdev_balanced.jsonl", lines)


def counts(results: Path, out: Path) -> dict[str, dict[str, list[int]]]:
    """Right answers and questions of each kind, by method, of the complete runs in a folder of results."""
    records = json.loads((out / "eval/gqa/data/testdev_balanced_questions.json").read_text("utf-8"))
    found: dict[str, dict[str, list[int]]] = {}
    for metrics in sorted(results.glob("*/metrics.json")):
        config = json.loads((metrics.parent / "config.json").read_text("utf-8"))
        name = " ".join([config["method"], *(f"{key}={value}" for key, value in config["changed"].items())])
        own = found.setdefault(name, {})
        for text in (metrics.parent / "answers.jsonl").read_text("utf-8").splitlines():
            answer = json.loads(text)
            record = records[str(answer["question_id"])]
            kind = own.setdefault(record["types"]["detailed"], [0, 0])
            kind[0] += answer["text"].strip().rstrip(".").lower() == record["answer"].lower()
            kind[1] += 1
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "playground" / "photo-whole")
    parser.add_argument("--count", type=Path, metavar="RESULTS", help="count right answers, for docs/results.md")
    given = parser.parse_args()
    if given.count:
        write_json(ROOT / "docs" / "paper" / "photo-whole.json", counts(given.count, given.out))
    else:
        build(given.out)
