"""One question about one mini picture, answered from a few visual tokens, with a picture of what was kept.

Run: `make demo`, or `python eval_scripts/demo.py --tokens 64 --method random` (any option of `llava-consensus ask`).
"""

import sys
from pathlib import Path

from llava_consensus import cli
from llava_consensus.benchmarks import BENCHMARKS
from llava_consensus.runs import DATA, OUT


def main() -> int:
    """Asks the first question of the mini GQA."""
    gqa = BENCHMARKS["gqa"]
    data = Path(DATA)
    question = next(one for one in gqa.load(data) if one.images)
    picture = data / "eval" / gqa.folder / gqa.images / question.images[0]
    print(f"{picture}\n{question.text}\n", flush=True)
    overlay = Path(OUT) / "demo.png"
    overlay.parent.mkdir(exist_ok=True)
    return cli.main(["ask", str(picture), question.text, "--overlay", str(overlay), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
