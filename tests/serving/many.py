"""Runs of many requests against a server, too long for the tests (docs/serving.md has what they gave).

    PYTHONPATH=.:tests:tests/serving python tests/serving/many.py memory --out memory.json
    PYTHONPATH=.:tests:tests/serving python tests/serving/many.py order --family llava_next --out order.json

`memory`: memory of a server's processes, every 100 of 5,000 requests about 500 images, each shown ten times.
`order`: requests in random order, 24 at once, some of which leave before their answer, against each asked alone.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import small
from strangers import BOUND, Server, content_of, png, serving

ARGUMENTS = "--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 16"


def memory(server: Server, count: int, pictures: int) -> Iterator[int]:
    """MiB after each 100 requests. Every image is shown once before any is shown again."""
    dice, numbers = random.Random(0), list(range(pictures))

    def ask(number: int, question: int) -> None:
        sides = random.Random(number).choices([200, 336, 500, 640], k=2)
        words = f"Is there a thing {question} in the picture?"
        status, answer = server.ask(png(number, (sides[0], sides[1])), words=words, max_tokens=2)
        assert status == 200, answer

    with ThreadPoolExecutor(4) as pool:
        for done in range(0, count, 100):
            if done % pictures == 0:
                dice.shuffle(numbers)
            group = numbers[done % pictures :][:100]
            list(pool.map(ask, group, [done // pictures] * len(group)))
            yield server.memory()


def questions(count: int) -> list[dict[str, Any]]:
    """Requests of words with no to three images between them, and budgets of their own."""
    dice, found = random.Random(0), []
    for _ in range(count):
        parts: list[dict[str, Any]] = [{"type": "text", "text": words(dice)}]
        for _ in range(dice.randrange(4)):
            size = dice.choice([(70, 60), (120, 70), (60, 130)])
            parts += [content_of(png(dice.randrange(40), size)), {"type": "text", "text": words(dice)}]
        more = {"mm_processor_kwargs": {"visual_tokens": dice.choice([4, 5, 6, 0.5])}, "logprobs": True}
        found.append({"messages": [{"role": "user", "content": parts}], "max_tokens": dice.choice([1, 4, 12]), **more})
    return found


def words(dice: random.Random) -> str:
    """Words of the tiny tokenizer."""
    return " ".join(f"w{dice.randrange(3, 400)}" for _ in range(dice.choice([2, 6, 20])))


def order(server: Server, count: int) -> dict[str, Any]:
    """Asks all of them, a tenth by clients that leave, and then each alone. AssertionError where they differ."""
    asked = [{**server.body(), **one} for one in questions(count)]
    mixed, dice = list(range(count)), random.Random(1)
    dice.shuffle(mixed)
    patience = {number: dice.choice([0.01, 0.05, 0.2]) for number in dice.sample(mixed, count // 10)}

    def ask(number: int) -> list[tuple[str, float]] | None:
        try:
            status, answer = server.post(asked[number], timeout=patience.get(number, 600))
        except OSError:
            return None
        assert status == 200, answer
        return [(one["token"], one["logprob"]) for one in answer["choices"][0]["logprobs"]["content"]]

    with ThreadPoolExecutor(24) as pool:
        together = dict(zip(mixed, pool.map(ask, mixed), strict=True))
    patience.clear()
    worst, left = 0.0, sum(one is None for one in together.values())
    for number, found in together.items():
        alone = ask(number)
        if found is not None and alone is not None:
            assert [token for token, _ in found] == [token for token, _ in alone], number
            worst = max(worst, *(abs(a - b) for (_, a), (_, b) in zip(found, alone, strict=True)))
    assert worst < BOUND, worst
    return {"requests": count, "left": left, "worst": worst}


def main() -> None:
    """One of the two."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("run", choices=["memory", "order"])
    reader.add_argument("--model", default="", help="folder of a checkpoint; without it a tiny one of --family")
    reader.add_argument("--family", default="llava", choices=["llava", "llava_next", "llava_onevision"])
    reader.add_argument("--method", default="consensusdrop")
    reader.add_argument("--tokens", default="6")
    reader.add_argument("--count", type=int, default=0, help="requests (5000; order: 1000)")
    reader.add_argument("--pictures", type=int, default=500)
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(given.model or made)
        if not given.model:
            small.FAMILIES[given.family](folder)
        with serving(folder, f"--method {given.method} --tokens {given.tokens} --largest 0.9", ARGUMENTS) as server:
            if given.run == "order":
                given.out.write_text(json.dumps(order(server, given.count or 1000)))
                return
            found = [server.memory()]
            for one in memory(server, given.count or 5000, given.pictures):
                found.append(one)
                given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
