"""Memory of each of a server's processes, every 300 requests with ever new images, too long for the tests.

PYTHONPATH=.:tests:tests/serving python tests/serving/many.py --count 3000 --vllm "--mm-processor-cache-gb 0.05"
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import small
from strangers import Server, png, serving

ARGUMENTS = "--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 16"


def memory(server: Server, count: int) -> Iterator[dict[str, int]]:
    """MiB of each process before the first and after every 300 requests."""

    def ask(number: int) -> None:
        sides = random.Random(number).choices([70, 120, 200, 336], k=2)
        status, answer = server.ask(png(number, (sides[0], sides[1])), max_tokens=1)
        assert status == 200, answer

    with ThreadPoolExecutor(4) as pool:
        for done in range(0, count, 300):
            yield server.memory()
            list(pool.map(ask, range(done, done + 300)))
    yield server.memory()


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--count", type=int, default=3000, help="requests")
    reader.add_argument("--serve", default="--tokens 6 --largest 0.9", help="arguments of `llava-consensus serve`")
    reader.add_argument("--vllm", default="", help="further arguments of vLLM")
    given = reader.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small.llava(Path(folder))
        with serving(Path(folder), given.serve, f"{ARGUMENTS} {given.vllm}") as server:
            for number, one in enumerate(memory(server, given.count)):
                print(300 * number, one, flush=True)


if __name__ == "__main__":
    main()
