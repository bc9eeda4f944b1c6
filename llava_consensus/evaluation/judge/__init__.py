"""The judge: a model that grades answers no rule can. `run.py` is one judged run, `client.py` asks the server,
`grader.py` and a file per benchmark hold prompt and numbers.
"""

from llava_consensus.entry_points import load_place
from llava_consensus.errors import unknown_name
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.judge.grader import Grader


def grader_of(name: str) -> Grader:
    """The grader of a benchmark. OptionError, with near misses, for one that has none."""
    benchmark = benchmarks.make(name)
    if benchmark.judge is None:
        judged = [one for one, other in benchmarks.BENCHMARKS.items() if other.judge]
        raise unknown_name("judged benchmark", name, judged)
    grader: Grader = load_place(benchmark.judge)(benchmark)
    return grader
