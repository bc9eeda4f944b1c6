"""The judge: a model that grades answers no rule can, asked once about each, within limits, every reply kept.

    grader.py   what a benchmark needs to be judged        mmvet.py, video_qa.py, mmbench.py   one grader each, whole:
    client.py   asks an OpenAI-compatible server           prompt, dialogue, what is read out of a reply, the numbers
    secret.py   keeps the server's key out of every text   run.py   one judged run, start to end

`llava-consensus judge mmvet --answers FILE --data DIR --judge-model M` does it all; a rerun asks nothing again.
GRADERS is the only list: a new grader is a file like `mmvet.py` and a line here. A benchmark says by its `judge` which
of them grades its answers.
"""

from llava_consensus.errors import unknown_name
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.judge.grader import Grader
from llava_consensus.evaluation.judge.mmbench import MMBenchGrader
from llava_consensus.evaluation.judge.mmvet import MMVetGrader
from llava_consensus.evaluation.judge.video_qa import VideoQAGrader

GRADERS: dict[str, type[Grader]] = {"mmvet": MMVetGrader, "video_qa": VideoQAGrader, "mmbench": MMBenchGrader}


def grader_of(name: str) -> Grader:
    """The grader of a benchmark.

    Raises:
        OptionError: for a benchmark that has none or does not exist, with near misses.
    """
    able = {one: benchmark.judge for one, benchmark in benchmarks.BENCHMARKS.items() if benchmark.judge}
    if name not in able:
        raise unknown_name("judged benchmark", name, able)
    return GRADERS[able[name]](benchmarks.make(name))
