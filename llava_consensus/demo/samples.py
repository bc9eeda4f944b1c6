"""Pictures to try: scenes of the mini playground, with questions whose answers are known."""

from pathlib import Path

from llava_consensus.demo.page import Sample
from llava_consensus.errors import ConsensusError
from llava_consensus.evaluation.benchmarks import make
from llava_consensus.evaluation.benchmarks.base import SHORT

EACH = 8  # questions of a picture
DULL = ("yes", "no", "0")  # answers that show little
OF = {"gqa": 4, "textvqa": 2}  # pictures of each benchmark


def samples(data: Path) -> list[Sample]:
    """Some pictures of the benchmarks in a folder; none of those that are not there."""
    return [sample for name, count in OF.items() for sample in _of(name, count, data)]


def _of(name: str, count: int, data: Path) -> list[Sample]:
    benchmark = make(name)
    try:
        questions, truths = benchmark.load(data), benchmark.references(data)
    except ConsensusError:
        return []
    found: dict[str, dict[str, str]] = {}
    for question in questions:
        if len(question.images) == 1:
            text = " ".join(question.text.removesuffix(SHORT).split("\n")[0].split())
            found.setdefault(question.images[0], {}).setdefault(text, truths.get(question.index, ""))
    folder = benchmark.place(data) / benchmark.images
    best = sorted(found.items(), key=lambda one: -len(one[1]))[:count]
    return [Sample(folder / picture, _mixed(asked)) for picture, asked in best]


def _mixed(asked: dict[str, str]) -> dict[str, str]:
    """A few questions of a picture whose answers differ, those that name something first."""
    ranked = sorted(asked, key=lambda text: (asked[text] in DULL, len(text)))
    chosen: list[str] = []
    for text in ranked:
        if sum(asked[one] == asked[text] for one in chosen) < 2:
            chosen.append(text)
    return {text: asked[text] for text in chosen[:EACH]}
