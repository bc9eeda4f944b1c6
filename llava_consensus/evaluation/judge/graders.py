"""Which graders there are: `GRADERS` is the only list. A new one is a file like `mmvet.py` and a line here.

A benchmark says by its `judge` which of them grades its answers.
"""

from llava_consensus.errors import unknown_name
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.judge.grader import Grader
from llava_consensus.evaluation.judge.mmbench import MMBenchGrader
from llava_consensus.evaluation.judge.mmvet import MMVetGrader
from llava_consensus.evaluation.judge.video_qa import VideoQAGrader

GRADERS: dict[str, type[Grader]] = {"mmvet": MMVetGrader, "video_qa": VideoQAGrader, "mmbench": MMBenchGrader}


def get(name: str) -> Grader:
    """The grader of a benchmark.

    Raises:
        OptionError: for a benchmark that has none or does not exist, with near misses.
    """
    able = {one: benchmark.judge for one, benchmark in benchmarks.BENCHMARKS.items() if benchmark.judge}
    if name not in able:
        raise unknown_name("judged benchmark", name, able)
    return GRADERS[able[name]](benchmarks.make(name))
