"""Benchmarks: one file each says where the data is, how it is asked, how it is scored, whose number it must match.

`BENCHMARKS` is the only list: a new benchmark is a new file and a line here. DATA is a folder in LLaVA's layout
(`playground/data`, or the small bundled `playground/mini`); everything lies under `DATA/eval/<folder>`.
"""

from collections.abc import Mapping
from typing import Any

from llava_consensus.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.benchmarks.gqa import GQA
from llava_consensus.benchmarks.mmbench import MMBENCH, MMBENCH_CN
from llava_consensus.benchmarks.mme import MME
from llava_consensus.benchmarks.mmvet import MMVET
from llava_consensus.benchmarks.msrvtt import MSRVTT
from llava_consensus.benchmarks.msvd import MSVD
from llava_consensus.benchmarks.pope import POPE
from llava_consensus.benchmarks.seed import SEED
from llava_consensus.benchmarks.sqa import SQA
from llava_consensus.benchmarks.textvqa import TEXTVQA
from llava_consensus.benchmarks.tgif import TGIF
from llava_consensus.benchmarks.vqav2 import VQAV2
from llava_consensus.errors import unknown_name

BENCHMARKS: dict[str, Benchmark] = {
    one.name: one for one in (VQAV2, GQA, SQA, TEXTVQA, POPE, MME, MMBENCH, MMBENCH_CN, MMVET, SEED, TGIF, MSVD, MSRVTT)
}

__all__ = ["BENCHMARKS", "Benchmark", "DataFile", "Question", "get"]


def get(name: str, options: Mapping[str, Any] | None = None) -> Benchmark:
    """The benchmark of that name with its options (`choices`) set, or an error with near misses."""
    if name not in BENCHMARKS:
        raise unknown_name("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name].choose(options or {})
