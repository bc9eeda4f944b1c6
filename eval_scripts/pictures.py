"""The pictures of the documentation: three scenes, what three variants keep of one scene for two questions, and what
every method keeps of it for one.

Run it: python eval_scripts/pictures.py [--tokens 64 --scene 3 --out docs/images]
"""

import argparse
import json
from pathlib import Path

from PIL.Image import Image

from llava_consensus import METHODS, load, make
from llava_consensus.cli.ask import draw_kept
from llava_consensus.errors import OptionError
from llava_consensus.hosts import Host, Prompt
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.report.sheet import contact_sheet
from llava_consensus.runs import DATA, MODEL
from llava_consensus.runs.pictures import open_image

VARIANTS = {"vision-only": {"alpha": 1.0}, "cross-only": {"alpha": 0.0}, "ConsensusDrop": {}}


def scenes(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Questions of each picture of the mini GQA, in file order."""
    found: dict[str, list[dict[str, str]]] = {}
    for line in (folder / "llava_gqa_testdev_balanced.jsonl").read_text().splitlines():
        question = json.loads(line)
        found.setdefault(question["image"], []).append(question)
    return found


def panel(host: Host, image: Image, text: str, name: str, method: Method, tokens: int) -> tuple[str, Image]:
    """What a method keeps for a question, and the answer it leads to."""
    with host.attach(method, Budget(tokens)):
        (answer,) = host.answer([host.encode([image])], [Prompt(text, max_new_tokens=16)])
    return f"{name}: {text.split(chr(10))[0]} {answer.text}", draw_kept(host, image, answer)


def every_method(host: Host, image: Image, text: str, tokens: int) -> list[tuple[str, Image]]:
    """A panel for every method this model has the parts for."""
    panels = []
    for name in METHODS:
        try:
            panels.append(panel(host, image, text, name, make(name), tokens))
        except OptionError as error:
            print(f"{name}: left out, {error}")
    return panels


def main() -> None:
    """Writes scenes.png, kept.png and methods.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", default=DATA)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--scene", type=int, default=3, help="which picture of the mini GQA (%(default)s)")
    parser.add_argument("--questions", type=int, nargs=2, default=[3, 15], help="which of its questions (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    folder = Path(given.data) / "eval" / "gqa"
    found = scenes(folder)
    names = list(found)[given.scene : given.scene + 3]
    shown = [(found[name][-1]["text"].split("\n")[0], open_image(folder / "data/images" / name)) for name in names]
    contact_sheet(shown, 3, legend=False).quantize(255).save(given.out / "scenes.png")
    texts = [found[names[0]][number]["text"] for number in given.questions]
    host, image = load(given.model), open_image(folder / "data/images" / names[0])
    panels = [
        panel(host, image, text, name, make("consensusdrop", **options), given.tokens)
        for text in texts
        for name, options in VARIANTS.items()
    ]
    contact_sheet(panels, 3).quantize(255).save(given.out / "kept.png")
    contact_sheet(every_method(host, image, texts[0], given.tokens), 4).quantize(255).save(given.out / "methods.png")


if __name__ == "__main__":
    main()
