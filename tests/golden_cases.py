"""Cases scored by the official code, in ../shared/data (not part of the repository): read, compared, counted."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def golden(name: str) -> list[dict[str, Any]]:
    """All cases of a file; the test is skipped where it is absent."""
    path = SHARED / "scorers" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"golden cases are not here: {path}")
    return json.loads(path.read_text())


def sample(name: str) -> Path:
    """A real file of a benchmark; the test is skipped where it is absent."""
    path = SHARED / "samples" / name
    if not path.exists():
        pytest.skip(f"sample data is not here: {path}")
    return path


def compare(name: str, check: Callable[[dict[str, Any], Any], bool], kinds: set[str] | None = None) -> None:
    """Every case of a file; the counts are printed, all differences are shown at once."""
    counts: Counter[str] = Counter()
    wrong = []
    for case in golden(name):
        kind = case["inputs"]["kind"]
        if kinds is None or kind in kinds:
            counts[kind] += 1
            if not check(case["inputs"], case["official_score"]):
                wrong.append(case)
    print(f"{name}: {dict(counts)}, {len(wrong)} differ")
    assert counts and not wrong, wrong[:3]
