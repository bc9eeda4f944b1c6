"""Benchmarks: one file each says where the data is, how it is asked, how it is scored, whose number it must match.

`BENCHMARKS` is the only list: a new benchmark is a new file and a line here, or a class that another package registers
(docs/adding.md). DATA is a folder in LLaVA's layout (`playground/data`, or the small bundled `playground/mini`);
everything lies under `DATA/eval/<folder>`.
"""

from dataclasses import fields, is_dataclass
from inspect import isclass
from typing import Any

from llava_consensus.entry_points import Registry, load_registered, registered
from llava_consensus.errors import OptionError, any_case, unknown_name
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question

__all__ = ["BENCHMARKS", "Benchmark", "DataFile", "Question", "benchmark_class", "known_benchmarks", "make"]

GROUP = "llava_consensus.benchmarks"  # entry points of other packages

BENCHMARKS = Registry(
    __name__,
    {
        "vqav2": "vqav2:VQAv2",
        "gqa": "gqa:GQA",
        "sqa": "sqa:ScienceQA",
        "textvqa": "textvqa:TextVQA",
        "pope": "pope:POPE",
        "mme": "mme:MME",
        "mmbench": "mmbench:MMBench",
        "mmbench_cn": "mmbench:MMBenchCN",
        "mmvet": "mmvet:MMVet",
        "seed": "seed:SEED",
        "refcoco": "refcoco:RefCOCO",
        "tgif": "video_qa:TGIF",
        "msvd": "video_qa:MSVD",
        "msrvtt": "video_qa:MSRVTT",
    },
)


def benchmark_class(name: str) -> type[Benchmark]:
    """The class of a benchmark: one of BENCHMARKS, or one that an installed package registers under the entry point
    `llava_consensus.benchmarks`.

    Raises:
        OptionError: for a name that is neither, or a registered one that is no benchmark or cannot be imported.
    """
    name = name if name in BENCHMARKS else any_case(name, (*BENCHMARKS, *registered(GROUP)))
    if name in BENCHMARKS:
        ours: type[Benchmark] = BENCHMARKS[name]
        return ours
    found, where = load_registered(GROUP, "benchmark", name, BENCHMARKS)
    if not (isclass(found) and issubclass(found, Benchmark) and is_dataclass(found)):
        raise OptionError(f"{where}: must be a dataclass that derives from Benchmark (docs/adding.md)")
    fixed = ("title", "line", "folder", "metric", "max_new_tokens")
    missing = sorted({*found.__abstractmethods__, *(one for one in fixed if not hasattr(found, one))})
    if found.grade is Benchmark.grade and found.score is Benchmark.score:
        missing.insert(0, "grade")
    if missing:
        raise OptionError(f"{where}: is not whole yet, give it `{'` and `'.join(missing)}` (docs/adding.md)")
    if getattr(found, "name", None) != name:
        raise OptionError(f"{where}: its `name` must be {name!r}, under which it is registered and its runs are read")
    benchmark: type[Benchmark] = found
    return benchmark


def known_benchmarks() -> dict[str, str]:
    """Every benchmark by name with its one line: ours, then those of other packages, or why one cannot be used."""
    lines = {name: benchmark.line for name, benchmark in BENCHMARKS.items()}
    for name in registered(GROUP):
        if name not in lines:
            try:
                lines[name] = benchmark_class(name).line
            except OptionError as error:
                lines[name] = str(error)
    return lines


def make(name: str, /, **options: Any) -> Benchmark:
    """The benchmark called `name` with these options; a value counts as its text, so that 2017 is "2017".

    Raises:
        OptionError: for an unknown name, an unknown option or a value that is none of the option's.
    """
    benchmark = benchmark_class(name)
    option_names = [field.name for field in fields(benchmark)]
    for option, value in options.items():
        if not option_names:
            raise OptionError(f"{option}={str(value)!r}: {name} has no options")
        if option not in option_names:
            raise unknown_name(f"option of {name}", option, option_names)
    return benchmark(**{option: str(value) for option, value in options.items()})
