"""The mini twins: one file each writes a benchmark in its official layout, from test scenes only.

`BUILDERS` says which folder under `eval/` each makes; `python -m playground.mini.build` calls them all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playground.mini.benchmarks.gqa import build_gqa
from playground.mini.benchmarks.mmbench import build_mmbench, build_mmbench_cn
from playground.mini.benchmarks.mme import build_mme
from playground.mini.benchmarks.mmvet import build_mmvet
from playground.mini.benchmarks.pope import build_pope
from playground.mini.benchmarks.seed import build_seed
from playground.mini.benchmarks.sqa import build_sqa
from playground.mini.benchmarks.textvqa import build_textvqa
from playground.mini.benchmarks.videos import build_brief, build_videos
from playground.mini.benchmarks.vqav2 import build_vqav2

BUILDERS: dict[str, Callable[[Path], None]] = {
    "gqa": build_gqa,
    "pope": build_pope,
    "textvqa": build_textvqa,
    "vqav2": build_vqav2,
    "scienceqa": build_sqa,
    "MME": build_mme,
    "mmbench": build_mmbench,
    "mmbench_cn": build_mmbench_cn,
    "mm-vet": build_mmvet,
    "seed_bench": build_seed,
    "GPT_Zero_Shot_QA": build_videos,
}

WITH_SPLIT: dict[str, dict[str, Callable[[Path, str], None]]] = {
    "val": {"gqa": build_gqa, "pope": build_pope, "textvqa": build_textvqa},
    "large": {"gqa": build_gqa, "pope": build_pope, "textvqa": build_textvqa, "vqav2": build_vqav2},
    "brief": {"GPT_Zero_Shot_QA": build_brief},
}
