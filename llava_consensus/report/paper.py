"""The numbers the paper prints, as data (`paper.json`, copied digit for digit), and its blocks beside our tables.

    tables()["llava_1_5_7b"][0]["gqa"]      # 62.0

They belong to the paper's checkpoints and complete benchmarks. FastV, ToMe and other peers' rows were copied from paper
to paper and are disputed; faithful implementations beat them (docs/results.md says more).
"""

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

PRINTED = {  # our name of a benchmark: the key in the paper's tables
    "vqav2": "vqav2",
    "gqa": "gqa",
    "sqa": "sqa_img",
    "textvqa": "textvqa",
    "pope": "pope_f1",
    "mme": "mme_perception",
    "mmbench": "mmb",
    "mmbench_cn": "mmb_cn",
    "mmvet": "mmvet",
    "tgif": "tgif_acc",
    "msvd": "msvd_acc",
    "msrvtt": "msrvtt_acc",
}
MODELS = {"llava_1_5_7b": "LLaVA-1.5-7B", "llava_next_7b": "LLaVA-NeXT-7B", "video_llava": "Video-LLaVA"}
VIDEO = ("tgif", "msvd", "msrvtt")


@cache
def tables() -> dict[str, list[dict[str, Any]]]:
    """Every table of the paper by its name, one dict per printed row; None where the paper prints nothing."""
    text = (resources.files("llava_consensus.report") / "paper.json").read_text(encoding="utf-8")
    found: dict[str, list[dict[str, Any]]] = json.loads(text)["tables"]
    return found


def printed(names: Sequence[str], tokens: int) -> list[str]:
    """The paper's tables that belong beside a section: by the tokens of its full model, and the video one."""
    pictures = "llava_next_7b" if tokens > 2000 else "llava_1_5_7b"
    return [pictures] * (not set(names) <= set(VIDEO)) + ["video_llava"] * bool(set(names) & set(VIDEO))
