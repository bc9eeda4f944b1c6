"""Which method works on which host as it was last tried (`matrix.py`), read without any model library.

read()["cells"]["qwen2.5-vl"]["visionzip"]   # why not; "" where it works
python -m llava_consensus.hosts.tried        # tries everything again and writes `tried.json`; a test holds them equal
"""

from pathlib import Path
from typing import Any

from llava_consensus.evaluation.files import read_json, replace, to_json

FILE = Path(__file__).with_suffix(".json")


def read() -> dict[str, Any]:
    """`cells` by host and method, and under `transformers` the version they were tried with.

    Raises:
        DataError: for a damaged file.
    """
    found: dict[str, Any] = read_json(FILE, "Install the package again", dict)
    return found


def main() -> None:
    """Tries everything and writes the file."""
    from importlib.metadata import version

    from llava_consensus.hosts.matrix import cells

    content = {"transformers": version("transformers"), "cells": cells()}
    replace(FILE, f"{to_json(content, indent=1)}\n".encode())


if __name__ == "__main__":
    main()
