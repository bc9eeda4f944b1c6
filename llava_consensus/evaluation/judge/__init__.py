"""The judge: a model that grades answers no rule can, asked once about each, within limits, every reply kept.

    grader.py   what a benchmark needs to be judged        mmvet.py, video_qa.py, mmbench.py   one grader each, whole:
    client.py   asks an OpenAI-compatible server           prompt, dialogue, what is read out of a reply, the numbers
    run.py      one judged run, start to end

`llava-consensus judge mmvet --answers FILE --data DIR --judge-model M` does it all; a rerun asks nothing again. A
benchmark names its grader by its `judge`, so there is no list of graders.
"""

from llava_consensus.entry_points import load_place
from llava_consensus.errors import unknown_name
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.judge.grader import Grader


def grader_of(name: str) -> Grader:
    """The grader of a benchmark.

    Raises:
        OptionError: for a benchmark that has none or does not exist, with near misses.
    """
    benchmark = benchmarks.make(name)
    if benchmark.judge is None:
        judged = [one for one, other in benchmarks.BENCHMARKS.items() if other.judge]
        raise unknown_name("judged benchmark", name, judged)
    grader: Grader = load_place(benchmark.judge)(benchmark)
    return grader
