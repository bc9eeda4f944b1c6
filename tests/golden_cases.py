"""Cases scored by the official code, and real files of benchmarks, in `tests/data`: read, compared, counted. Arrays
that authors' own code gave, in `tests/golden`.
"""

import atexit
import gzip
import json
import lzma
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from llava_consensus.reduction.tokens import VisionAttention, VisualTokens, WholeImages

GOLDEN = Path(__file__).parent / "golden"
DATA = Path(__file__).parent / "data"
UNSHIPPED = Path(__file__).resolve().parents[2] / "shared" / "data" / "samples"  # files that may not be passed on


def golden(name: str) -> list[dict[str, Any]]:
    return json.loads(lzma.decompress((DATA / "scorers" / f"{name}.json.xz").read_bytes()))


@cache
def arrays(name: str) -> dict[str, torch.Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as found:
        return {key: torch.from_numpy(found[key]) for key in found.files}


def seen(tokens: torch.Tensor, attention: torch.Tensor | None = None) -> VisualTokens:
    """Units whose features are the projected tokens [B, N, D] and whose class attention is in proportion to [B, N]."""
    units, size = tokens.shape[:2]
    level = torch.zeros(units, size) if attention is None else attention.float().log()
    key = pad(level, (1, 0), value=-1e4)[:, None, :, None]  # one head; the class token does not look at itself
    return VisualTokens(
        projected=tokens.float(),
        tile=torch.arange(units)[:, None].expand(-1, size),
        patch=torch.arange(size).expand(units, -1),
        attention=VisionAttention(torch.ones_like(key), key, 1.0, 1),
        features=tokens.float(),
        whole=WholeImages(torch.arange(units), torch.ones(units, size, dtype=torch.bool)),
    )


def sample(name: str) -> Path:
    """A real file of a benchmark, or a folder of them. Files that may not be passed on are read beside the checkout;
    a test of them is skipped where they are absent.
    """
    path = DATA / "samples" / name
    if path.exists():
        return _unpacked(path) if any(path.rglob("*.gz")) else path
    path = UNSHIPPED / name
    if not path.exists():
        pytest.skip(f"{name} may not be passed on with this repository, and it is not at {path}")
    return path


@cache
def _unpacked(folder: Path) -> Path:
    """A copy of a folder with its packed files unpacked, for as long as the tests run."""
    target = Path(tempfile.mkdtemp(prefix="samples-"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    for path in folder.rglob("*.gz"):
        plain = target / path.relative_to(folder).with_suffix("")
        plain.parent.mkdir(parents=True, exist_ok=True)
        plain.write_bytes(gzip.decompress(path.read_bytes()))
    return target


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
