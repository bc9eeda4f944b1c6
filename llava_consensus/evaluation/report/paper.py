"""The numbers the paper prints, as data (`paper.json`, copied digit for digit), and its blocks beside our tables.

    printed_tables()["llava_1_5_7b"][0]["gqa"]      # 62.0

Rows of FastV, ToMe and other peers were copied from paper to paper and are disputed (docs/results.md).
"""

import json
from functools import cache
from importlib import resources
from typing import Any

MODELS = {"llava_1_5_7b": "LLaVA-1.5-7B", "llava_next_7b": "LLaVA-NeXT-7B", "video_llava": "Video-LLaVA"}
LLAVA, NEXT, VIDEO = MODELS  # names of the tables


@cache
def printed_tables() -> dict[str, list[dict[str, Any]]]:
    """Every table of the paper by its name, one dict per printed row; None if the paper prints nothing."""
    text = (resources.files("llava_consensus.evaluation.report") / "paper.json").read_text(encoding="utf-8")
    found: dict[str, list[dict[str, Any]]] = json.loads(text)["tables"]
    return found


def columns(table: str) -> list[str]:
    """The benchmarks of a table by their keys: the columns before the mean, without a judge's average scores."""
    keys = list(printed_tables()[table][0])
    mean = next(place for place, key in enumerate(keys) if key in ("acc", "avg_acc"))
    return [key for key in keys[:mean] if key not in ("tokens", "method") and not key.endswith("_score")]


def averaged() -> list[str]:
    """The benchmarks whose mean is the paper's Acc (its Table 1)."""
    return columns(LLAVA)
