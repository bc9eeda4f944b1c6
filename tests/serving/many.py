"""Memory of each of a server's processes, every 500 requests with ever new images, too long for the tests.

PYTHONPATH=.:tests:tests/serving python tests/serving/many.py --count 3000 --vllm "--mm-processor-cache-gb 1"
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from strangers import Server, png, serving

STEP = 500
ARGUMENTS = "--max-model-len 1024 --enforce-eager --max-num-seqs 16"


def memory(server: Server, count: int) -> Iterator[dict[str, int]]:
    """MiB of each process before the first request and after every STEP."""

    def ask(number: int) -> None:
        status, answer = server.ask(png(number, (200, 200)), max_tokens=1)
        assert status == 200, answer

    with ThreadPoolExecutor(4) as pool:
        for done in range(0, count, STEP):
            yield server.memory()
            list(pool.map(ask, range(done, done + STEP)))
    yield server.memory()


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--model", type=Path, default=Path("checkpoints/llava-mini-hf"))
    reader.add_argument("--count", type=int, default=3000, help="requests")
    reader.add_argument("--serve", default="--tokens 64", help="arguments of `llava-consensus serve`")
    reader.add_argument("--vllm", default="", help="further arguments of vLLM")
    given = reader.parse_args()
    with serving(given.model, given.serve, f"{ARGUMENTS} {given.vllm}") as server:
        for number, one in enumerate(memory(server, given.count)):
            print(STEP * number, one, flush=True)


if __name__ == "__main__":
    main()
