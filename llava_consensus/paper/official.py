"""`llava-consensus paper verify`: prompts and pixels against those that official LLaVA made, and scores with all tokens
against published ones, within the sampling error of these questions.

`official_prompts.json` is written by LLaVA's own evaluation scripts (tools/official_prompts.py): for ten questions of
each benchmark the first sixteen digits of the SHA-256 of the prompt's text, of its ids (int64, little endian, -200 for
the image) and of the pixels (float16) for CLIP's published preprocessing at 336 pixels and the embedded model's 192.
The set `eval.zip` is of the real question files, with Vicuna's tokenizer; it has no pixels, because the real images
cannot be had here. The set `mini` is of the bundled benchmarks.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Benchmark, Question
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.report.rows import Row
from llava_consensus.evaluation.report.section import half
from llava_consensus.evaluation.report.table import ABSENT, Table, decimal

if TYPE_CHECKING:
    from llava_consensus.evaluation.models.llava import LlavaRunner
    from llava_consensus.evaluation.runs.configuration import RunPlan

PROMPTS = "official_prompts.json"
AGAIN = "Install llava-consensus again"
FIELDS = ("prompt", "ids", "pixels")
HEAD = ("benchmark", "questions (images)", "ours", "published", "± at all questions", "verdict")
ROUNDED = 0.05  # a published score has one decimal


@cache
def _shipped() -> dict[str, Any]:
    return read_json(Path(str(resources.files("llava_consensus.paper") / PROMPTS)), AGAIN, dict)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def prompts_table(plans: Iterable["RunPlan"], runner: "LlavaRunner", folder: Path) -> Table:
    """A line for each benchmark: how many of its recorded prompts, ids and pixels this model and data give too.
    DataError for one that differs; the message names the first of each benchmark.
    """
    tokenizer = _checksum(folder / "tokenizer.model")
    lines: list[tuple[str, ...]] = []
    wrong: list[str] = []
    for plan in plans:
        found = _recorded(plan.benchmark, plan.data)
        if found is None:
            lines.append((plan.benchmark.title, ABSENT, ABSENT, ABSENT, "other questions than official ones"))
            continue
        name, recorded = found
        questions = plan.benchmark.load(plan.data)
        with_ids = _shipped()[name]["tokenizer"] == tokenizer
        equal, count = dict.fromkeys(FIELDS, 0), dict.fromkeys(FIELDS, 0)
        for sample in recorded["samples"]:
            question = questions[sample["index"]]
            for field, own, theirs in _compared(sample, question, plan, runner, with_ids):
                count[field] += 1
                equal[field] += own == theirs
                if own != theirs and not any(plan.benchmark.name in one for one in wrong):
                    wrong.append(f"{plan.benchmark.name}, question {question.question_id}: other {field}")
        cells = [f"{equal[field]} of {count[field]}" if count[field] else ABSENT for field in FIELDS]
        why = [] if with_ids else ["another tokenizer"]
        lines.append((plan.benchmark.title, *cells, ", ".join([f"set {name}", *why])))
    if wrong:
        raise DataError(f"not asked as official LLaVA does: {'; '.join(wrong)}")
    note = "Equal ones of those that LLaVA's own scripts made; -: not recorded, or not comparable."
    return Table("Prompts against official LLaVA", ("benchmark", *FIELDS, "compared with"), {"": lines}, note)


def _recorded(benchmark: Benchmark, data: Path) -> tuple[str, dict[str, Any]] | None:
    """The set and record of a benchmark whose question file is the very one that was recorded."""
    own = _checksum(benchmark.place(data) / benchmark.question_file)
    for name, content in _shipped().items():
        recorded: dict[str, Any] | None = content["benchmarks"].get(benchmark.name)
        if recorded is not None and recorded["questions"] == own:
            return name, recorded
    return None


def _compared(
    sample: Mapping[str, Any], question: Question, plan: "RunPlan", runner: "LlavaRunner", with_ids: bool
) -> Iterator[tuple[str, str, str]]:
    """Each recorded field of a sample with its digits here and there."""
    import numpy as np

    from llava_consensus.evaluation.models.llava import to_text

    prompt, images = plan.prompt(question), plan.images(question)
    yield "prompt", digest(to_text(prompt, len(images)).encode()), sample["prompt"]
    if with_ids:
        yield "ids", digest(runner.prompt_ids(prompt, len(images)).numpy().astype("<i8").tobytes()), sample["ids"]
    side = str(runner.model.get_vision_tower().config.image_size)
    if images and sample["pixels"] and side in sample["pixels"]:
        pixels = runner.pixels(plan.open(images[0]))[None].float().cpu().numpy().astype("<f2")
        yield "pixels", digest(np.ascontiguousarray(pixels).tobytes()), sample["pixels"][side]


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


# ---- scores


def expected(benchmark: Benchmark) -> str:
    """Half of the 95 % interval of the published score at all questions, 1,000 and 300, if they are independent."""
    assert benchmark.paper is not None and benchmark.count
    share, unit = benchmark.paper / benchmark.scale / 100, 100 * benchmark.scale
    halves = (1.96 * unit * sqrt(share * (1 - share) / count) for count in (benchmark.count, 1000, 300))
    return ", ".join(f"{half:.1f}" for half in halves)


def verify_table(runs: Sequence[Row], published: Mapping[str, float], counts: Mapping[str, int | None]) -> Table:
    """A line for each run with all tokens; `counts`: questions of each whole benchmark. DataError, with the table, if a
    published score is outside the interval of its run.
    """
    lines, wrong = [], []
    for run in runs:
        name, wanted, score = run.benchmark, published.get(run.benchmark), run.score
        verdict, at_all = "nothing published", ABSENT
        if wanted is not None and score is not None and run.bounds is not None:
            low, high = run.bounds
            same = low - ROUNDED <= wanted <= high + ROUNDED
            verdict = "as published" if same else "differs"
            wrong += [] if same else [f"{name} {score:.1f}{half(run.bounds)}, published {wanted:.1f}"]
            asked = (run.metrics or {})["questions"]
            if count := counts.get(name):
                at_all = f"{(high - low) / 2 * sqrt(asked / max(count, asked)):.1f}"
        elif wanted is not None:
            verdict = "no interval: too few images, or not scored here"
        ours = decimal(score) + half(run.bounds)
        asked = f"{(run.metrics or {}).get('questions')} ({run.images})"
        lines.append((run.facts.title, asked, ours, decimal(wanted), at_all, verdict))
    note = "Ours ± half of the 95 % interval from resampled images; as published: within it."
    table = Table("All tokens against published scores", HEAD, {"": lines}, note)
    if wrong:
        raise DataError(
            f"{'; '.join(wrong)}: judge no method by this model before prompts, files and weights are the published "
            "ones (llava-consensus data check, model check)"
        )
    return table
