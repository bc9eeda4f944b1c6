"""Which benchmarks have a judge: `PANELS` is the only list. A new one is a class like `mmvet.MMVet` and a line here."""

from llava_consensus.errors import unknown_name
from llava_consensus.judge.mmbench import MMBench
from llava_consensus.judge.mmvet import MMVet
from llava_consensus.judge.panel import Panel
from llava_consensus.judge.video import VideoQA

PANELS: dict[str, Panel] = {
    "mmvet": MMVet(),
    **{name: VideoQA(name) for name in ("tgif", "msvd", "msrvtt")},
    **{name: MMBench(name) for name in ("mmbench", "mmbench_cn")},
}


def get(name: str) -> Panel:
    """The panel of a benchmark, or an error with near misses."""
    if name not in PANELS:
        raise unknown_name("judged benchmark", name, PANELS)
    return PANELS[name]
