"""Benchmarks: one file each says where the data is, how it is asked, how it is scored, whose number it must match.

`BENCHMARKS` is the only list: a new benchmark is a new file and a line here. DATA is a folder in LLaVA's layout
(`playground/data`, or the small bundled `playground/mini`); everything lies under `DATA/eval/<folder>`.
"""

from dataclasses import fields
from typing import Any

from llava_consensus.errors import OptionError, unknown_name
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.benchmarks.gqa import GQA
from llava_consensus.evaluation.benchmarks.mmbench import MMBench, MMBenchCN
from llava_consensus.evaluation.benchmarks.mme import MME
from llava_consensus.evaluation.benchmarks.mmvet import MMVet
from llava_consensus.evaluation.benchmarks.msrvtt import MSRVTT
from llava_consensus.evaluation.benchmarks.msvd import MSVD
from llava_consensus.evaluation.benchmarks.pope import POPE
from llava_consensus.evaluation.benchmarks.seed import SEED
from llava_consensus.evaluation.benchmarks.sqa import ScienceQA
from llava_consensus.evaluation.benchmarks.textvqa import TextVQA
from llava_consensus.evaluation.benchmarks.tgif import TGIF
from llava_consensus.evaluation.benchmarks.vqav2 import VQAv2

BENCHMARKS: dict[str, type[Benchmark]] = {
    "vqav2": VQAv2,
    "gqa": GQA,
    "sqa": ScienceQA,
    "textvqa": TextVQA,
    "pope": POPE,
    "mme": MME,
    "mmbench": MMBench,
    "mmbench_cn": MMBenchCN,
    "mmvet": MMVet,
    "seed": SEED,
    "tgif": TGIF,
    "msvd": MSVD,
    "msrvtt": MSRVTT,
}

__all__ = ["BENCHMARKS", "Benchmark", "DataFile", "Question", "make"]


def make(name: str, /, **options: Any) -> Benchmark:
    """The benchmark called `name` with these options; a value counts as its text, so that 2017 is "2017".

    Raises:
        OptionError: for an unknown name, an unknown option or a value that is none of the option's.
    """
    if name not in BENCHMARKS:
        raise unknown_name("benchmark", name, BENCHMARKS)
    benchmark = BENCHMARKS[name]
    option_names = [field.name for field in fields(benchmark)]
    for option, value in options.items():
        if not option_names:
            raise OptionError(f"{option}={str(value)!r}: {name} has no options")
        if option not in option_names:
            raise unknown_name(f"option of {name}", option, option_names)
    return benchmark(**{option: str(value) for option, value in options.items()})
