"""Time to first token with and without the reduction, and the share the reduction itself takes.

Run it: python eval_scripts/first_token.py --tokens 64 [--model DIR --data DIR --pictures 4 --repeats 10 --options
alpha=1]
Everything is measured in this process, side by side; the last line of standard output is JSON.
"""

import argparse
import json
from pathlib import Path

from llava_consensus import load, make
from llava_consensus.hosts import Prompt
from llava_consensus.reduction.budget import Budget
from llava_consensus.runs.pictures import open_image
from llava_consensus.runs.timing import first_token

QUESTION = "Is there a dog in the image?\nAnswer the question using a single word or phrase."


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="checkpoints/llava-mini")
    parser.add_argument("--images", default="playground/mini/eval/gqa/data/images")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64])
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    host = load(given.model, given.device)
    pictures = [open_image(path) for path in sorted(Path(given.images).glob("*.jpg"))[: given.pictures]]
    sides = [(make("full"), Budget(1)), *((make("consensusdrop"), Budget(tokens)) for tokens in given.tokens)]
    full, *reduced = first_token(host, pictures, Prompt(QUESTION), sides, given.repeats)
    print(f"full      {full.total:8.1f} ms to the first token")
    rows = []
    for tokens, one in zip(given.tokens, reduced, strict=True):
        spent = ", ".join(f"{name} {value:.1f}" for name, value in one.stages.items())
        print(f"{tokens:4} left {one.total:8.1f} ms, of which the reduction takes {100 * one.share():.1f} % ({spent})")
        rows.append({"tokens": tokens, "ms": one.total, "share": one.share(), "stages_ms": one.stages})
    print(json.dumps({"full_ms": full.total, "reduced": rows}))


if __name__ == "__main__":
    main()
