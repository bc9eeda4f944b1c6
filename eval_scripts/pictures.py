"""The pictures of the documentation, each made of what the model does now:

- front.jpg: a photograph and a scene with two questions each, original beside what is kept, with tokens and the time to
  the first token as this machine measures it
- scenes.png: three scenes
- kept.png: what vision alone, the question alone and both keep of one scene, for two questions
- methods.png: what every method keeps of it for one question

Run it: python eval_scripts/pictures.py [--only front --tokens 64 --out docs/images]
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL.Image import Image, Quantize

from llava_consensus import METHODS, load, make
from llava_consensus.demo.seen import Seen, seen_by
from llava_consensus.errors import OptionError
from llava_consensus.evaluation.bench.timing import first_token
from llava_consensus.evaluation.benchmarks.base import SHORT
from llava_consensus.evaluation.models import Host, Prompt
from llava_consensus.evaluation.report import overlay
from llava_consensus.evaluation.report.overlay import contact_sheet
from llava_consensus.evaluation.runs import DATA, MODEL
from llava_consensus.evaluation.runs.pictures import open_image
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method

VARIANTS = {"the vision tower alone": {"alpha": 1.0}, "the question alone": {"alpha": 0.0}, "ConsensusDrop, both": {}}
PHOTOGRAPH = Path("docs/images/photograph.jpg")
OF_PHOTOGRAPH = ("What color is the cup?", "Is there a cat in the picture?")
NEVER_SAW = "a photograph (the model never saw one)"
NARROW = 340  # of a panel of the front picture in pixels, so that it can be read in a narrow column
COLOURS = 128  # of a committed .png


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


def row(host: Host, image: Image, title: str, texts: Sequence[str], tokens: int) -> list[tuple[str, Image]]:
    """A picture, and beside it what ConsensusDrop keeps for each question; times are medians of interleaved repeats."""
    ours, full = make("consensusdrop"), make("full")
    panels = []
    for text in texts:
        one, whole = (asked(host, image, text, method, tokens) for method in (ours, full))
        budget = Budget(tokens)
        reduced, all_tokens = first_token(host, image, Prompt(one.text + SHORT), [(ours, budget), (full, budget)])
        caption = (
            f"{one.text} {one.answer}\n{one.seen.after} tokens, {reduced:.0f} ms\n"
            f"(all {one.seen.before}: {whole.answer}, {all_tokens:.0f} ms)"
        )
        panels.append((caption, drawn(one, apart=False)))
    return [(title, overlay.picture(overlay.view(image, (1, 1)))), *panels]


def machine() -> str:
    """The processor of this machine, as far as it tells, and how busy it is, which its times depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def save(page: Image, file: Path) -> None:
    """One picture, small enough to be committed."""
    if file.suffix == ".jpg":
        page.save(file, quality=90)
    else:
        page.quantize(COLOURS, Quantize.MAXCOVERAGE).save(file)
    print(file)


class Material(NamedTuple):
    """What the pictures are made of."""

    host: Host
    tokens: int
    titles: list[str]  # of three scenes
    images: list[Image]
    texts: list[str]  # two questions about the first scene


def front(made: Material) -> Image:
    """A scene and a photograph with two questions each."""
    panels = row(made.host, made.images[0], "a scene of the mini playground", made.texts, made.tokens)
    if PHOTOGRAPH.exists():
        panels += row(made.host, open_image(PHOTOGRAPH), NEVER_SAW, OF_PHOTOGRAPH, made.tokens)
    head = (
        f"One picture, two questions: what ConsensusDrop keeps at {made.tokens} tokens, in colour",
        f"Times: to the first token of the embedded llava-mini, medians of 5 on {machine()}.",
    )
    return contact_sheet(panels, 3, legend=False, head=head, width=NARROW)


def scenes_alone(made: Material) -> Image:
    """Three scenes."""
    return contact_sheet(list(zip(made.titles, made.images, strict=True)), 3, legend=False)


def kept(made: Material) -> Image:
    """What vision alone, the question alone and both keep, for two questions."""
    panels = [
        panel(made.host, made.images[0], text, name, make("consensusdrop", **options), made.tokens)
        for text in made.texts
        for name, options in VARIANTS.items()
    ]
    return contact_sheet(panels, 3)


def methods(made: Material) -> Image:
    """What every method keeps."""
    return contact_sheet(every_method(made.host, made.images[0], made.texts[0], made.tokens), 4)


PAGES: dict[str, Callable[[Material], Image]] = {
    "front.jpg": front,  # a photograph needs more colours than a small .png has
    "scenes.png": scenes_alone,
    "kept.png": kept,
    "methods.png": methods,
}


def material(given: argparse.Namespace) -> Material:
    """Scenes and questions as they were chosen."""
    folder = Path(given.data) / "eval" / "gqa"
    found = scenes(folder)
    names = list(found)[given.scene : given.scene + 3]
    titles = [found[name][-1]["text"].removesuffix(SHORT) for name in names]
    images = [open_image(folder / "data/images" / name) for name in names]
    texts = [found[names[0]][number]["text"] for number in given.questions]
    return Material(load(given.model), given.tokens, titles, images, texts)


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
            save(page(made), given.out / name)


if __name__ == "__main__":
    main()
