"""The pictures of the documentation: three scenes, and what three variants keep of one scene for two questions.

Run it: python eval_scripts/pictures.py [--tokens 64 --scene 3 --out docs/images]
"""

import argparse
import json
from pathlib import Path

from PIL.Image import Image

from llava_consensus import load, make
from llava_consensus.ask import picture
from llava_consensus.hosts import Host, Prompt
from llava_consensus.images import open_image
from llava_consensus.report.overlay import contact_sheet
from llava_consensus.tokens import Budget

VARIANTS = {"vision-only": {"alpha": 1.0}, "cross-only": {"alpha": 0.0}, "ConsensusDrop": {}}


def scenes(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Questions of each picture of the mini GQA, in file order."""
    found: dict[str, list[dict[str, str]]] = {}
    for line in (folder / "llava_gqa_testdev_balanced.jsonl").read_text().splitlines():
        question = json.loads(line)
        found.setdefault(question["image"], []).append(question)
    return found


def overlays(host: Host, path: Path, questions: list[str], tokens: int) -> list[tuple[str, Image]]:
    """A panel for every question and variant."""
    image, panels = open_image(path), []
    for text in questions:
        for name, options in VARIANTS.items():
            with host.attach(make("consensusdrop", **options), Budget(tokens)):
                (answer,) = host.answer([host.encode([image])], [Prompt(text, max_new_tokens=16)])
            asked = text.split("\n")[0]
            panels.append((f"{name}: {asked} {answer.text}", picture(host, image, answer)))
    return panels


def main() -> None:
    """Writes scenes.png and kept.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="checkpoints/llava-mini")
    parser.add_argument("--data", default="playground/mini")
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
    contact_sheet(shown, 3, legend=False).save(given.out / "scenes.png")
    texts = [found[names[0]][number]["text"] for number in given.questions]
    panels = overlays(load(given.model), folder / "data/images" / names[0], texts, given.tokens)
    contact_sheet(panels, 3).save(given.out / "kept.png")


if __name__ == "__main__":
    main()
