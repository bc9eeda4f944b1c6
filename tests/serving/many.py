"""Memory of each of a server's processes, every 300 of 3,000 requests, too long for the tests (docs/serving.md has what
it gave). Every image is new, or with --pictures 300 shown ten times.

    PYTHONPATH=.:tests:tests/serving python tests/serving/many.py --out memory.json
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import small
from strangers import Server, png, serving

ARGUMENTS = "--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 16"


def memory(server: Server, count: int, pictures: int) -> Iterator[dict[str, int]]:
    """MiB of each process after every 300 requests. Every image is shown once before any is shown again."""
    dice, numbers = random.Random(0), list(range(pictures))

    def ask(number: int, question: int) -> None:
        sides = random.Random(number).choices([70, 120, 200, 336], k=2)
        words = f"Is there a thing {question} in the picture?"
        status, answer = server.ask(png(number, (sides[0], sides[1])), words=words, max_tokens=2)
        assert status == 200, answer

    with ThreadPoolExecutor(4) as pool:
        for done in range(0, count, 300):
            if done % pictures == 0:
                dice.shuffle(numbers)
            group = numbers[done % pictures :][:300]
            list(pool.map(ask, group, [done // pictures] * len(group)))
            yield server.memory()


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--model", default="", help="folder of a checkpoint; without it a tiny LLaVA")
    reader.add_argument("--count", type=int, default=3000, help="requests")
    reader.add_argument("--pictures", type=int, default=3000)
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(given.model or made)
        if not given.model:
            small.llava(folder)
        with serving(folder, "--tokens 6 --largest 0.9", ARGUMENTS) as server:
            found = [server.memory()]
            for one in memory(server, given.count, given.pictures):
                found.append(one)
                given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
