"""The pictures of the documentation, each made of what the model does now:

- front.jpg: what is kept of one scene for two questions, with the answers, narrow enough to be read on a phone
- methods.jpg: what every method keeps of it for one question

Run it: python eval_scripts/pictures.py [--only front --tokens 64 --out docs/images]
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL.Image import Image

from llava_consensus import METHODS, load, make
from llava_consensus.demo.seen import Seen, seen_by
from llava_consensus.errors import OptionError
from llava_consensus.evaluation.benchmarks.base import SHORT
from llava_consensus.evaluation.models import Host, Prompt
from llava_consensus.evaluation.report import overlay
from llava_consensus.evaluation.report.overlay import contact_sheet
from llava_consensus.evaluation.runs import DATA, MODEL
from llava_consensus.evaluation.runs.pictures import open_image
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method

NARROW = 240  # of a panel of the front picture in pixels, so that it can be read on a phone
WIDE = 300  # of one of the many


class Asked(NamedTuple):
    """A question answered from what was kept."""

    text: str
    answer: str
    seen: Seen


def scenes(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Questions of each picture of the mini GQA, in file order."""
    found: dict[str, list[dict[str, str]]] = {}
    for line in (folder / "llava_gqa_testdev_balanced.jsonl").read_text().splitlines():
        question = json.loads(line)
        found.setdefault(question["image"], []).append(question)
    return found


def asked(host: Host, image: Image, text: str, method: Method, tokens: int) -> Asked:
    """What a method keeps for a question, and the answer it leads to."""
    text = text.removesuffix(SHORT)
    with host.attach(method, Budget(tokens)):
        encoded = host.encode([image])
        (answer,) = host.answer([encoded], [Prompt(text + SHORT, max_new_tokens=16)])
    (seen,) = seen_by(host, [image], encoded, answer)
    return Asked(text, answer.text, seen)


def drawn(one: Asked, apart: bool = True) -> Image:
    """What was kept and merged; every merged token in a tint of its own, or all in one."""
    return overlay.selection(one.seen.views[0], one.seen.fates, apart=apart)


def panel(host: Host, image: Image, text: str, name: str, method: Method, tokens: int) -> tuple[str, Image]:
    """What a method keeps for a question, under name, question and answer."""
    one = asked(host, image, text, method, tokens)
    return f"{name}\n{one.text} {one.answer}", drawn(one)


def every_method(host: Host, image: Image, text: str, tokens: int) -> list[tuple[str, Image]]:
    """A panel for every method this model has the parts for."""
    panels = []
    for name in METHODS:
        try:
            panels.append(panel(host, image, text, name, make(name), tokens))
        except OptionError as error:
            print(f"{name}: left out, {error}")
    return panels


class Material(NamedTuple):
    """What the pictures are made of."""

    host: Host
    tokens: int
    image: Image
    texts: list[str]  # two questions about it


def front(made: Material) -> Image:
    """What is kept of a scene for two questions."""
    found = [asked(made.host, made.image, text, make("consensusdrop"), made.tokens) for text in made.texts]
    panels = [(f"Question: {one.text}\nAnswer: {one.answer}", drawn(one, apart=False)) for one in found]
    merged = sum(fate in found[0].seen.fates.heads for fate in set(found[0].seen.fates.owner.tolist()))
    head = (
        f"{found[0].seen.after} visual tokens in place of {found[0].seen.before}",
        f"In colour: patches kept as they are. Grey: patches merged into {merged} tokens.",
    )
    return contact_sheet(panels, 2, legend=False, head=head, width=NARROW)


def methods(made: Material) -> Image:
    """What every method keeps."""
    return contact_sheet(every_method(made.host, made.image, made.texts[0], made.tokens), 4, width=WIDE)


PAGES: dict[str, Callable[[Material], Image]] = {
    "front.jpg": front,
    "methods.jpg": methods,
}


def material(given: argparse.Namespace) -> Material:
    """Scene and questions as they were chosen."""
    folder = Path(given.data) / "eval" / "gqa"
    found = scenes(folder)
    name = list(found)[given.scene]
    texts = [found[name][number]["text"] for number in given.questions]
    return Material(load(given.model), given.tokens, open_image(folder / "data/images" / name), texts)


def main() -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", default=DATA)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--scene", type=int, default=2, help="which picture of the mini GQA (%(default)s)")
    parser.add_argument("--questions", type=int, nargs=2, default=[7, 2], help="which of its questions (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=[Path(name).stem for name in PAGES], help="some of them (all)")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    made = material(given)
    for name, page in PAGES.items():
        if given.only is None or Path(name).stem in given.only:
            page(made).save(given.out / name, quality=85)
            print(given.out / name)


if __name__ == "__main__":
    main()
