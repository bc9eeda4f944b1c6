"""Tables of the embedded models beside each other: what changes with their seed, first weights and depth.

    llava-consensus paper table eval_scripts/beds.json --tokens 64 --model checkpoints/NAME --out results/beds
    python -m eval_scripts.beds checkpoints/NAME results/beds    # where SCAP looks

The committed model's runs are those of the grid. All differences of a table are paired by question, and Holm's
correction is over all of them: every model, benchmark and policy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llava_consensus import cli
from llava_consensus.cli import arguments, paper
from llava_consensus.cli.evaluate import loaded_once
from llava_consensus.cli.report import known
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.files import read_json, write_out
from llava_consensus.evaluation.report.rows import Row, read_rows
from llava_consensus.evaluation.report.section import half, signed
from llava_consensus.evaluation.report.stats import Comparison, MeanDifference, compare, holm, mark
from llava_consensus.evaluation.report.table import ABSENT, Group, Table, markdown
from llava_consensus.methods import make
from llava_consensus.paper.study import results
from llava_consensus.reduction.budget import Share

CLOSED, KEPT = "renumber", "keep"
FULL = "all tokens"
BENCHMARKS = ("textvqa", "gqa", "pope", "vqav2")
BEDS = {  # the folder of a checkpoint, and the head of its column
    "llava-mini": "committed: 4 layers, matchers",
    "llava-mini-seed-1": "4 layers, seed 1, matchers",
    "llava-mini-seed-2": "4 layers, seed 2, matchers",
    "llava-mini-seed-1-no-matchers": "4 layers, seed 1, no matchers",
    "llava-mini-theta-1e4": "4 layers, trained on with rope theta 1e4",
    "llava-mini-12-layers": "12 layers, grown from the committed one",
}
METHODS = (
    "ConsensusDrop",
    "vision-only (alpha 1)",
    "cross-only (alpha 0)",
    "VisPruner",
    "CDPruner, relevance=cosine",
    "DivPrune",
    "VisionZip",
    "SCOPE",
    "VidCom2",
    "VScan's scans",
    "HiPrune",
    "HoloV",
    "IDPruner, untrained",
    "ID-Selection",
    "MFPruner, relevance=cosine",
    "OTPrune, gamma=4.55",
    "RESTORE merging",
    "EVS",
    "FastV",
    "FastV, layer=2",
    "DART",
    "DART, layer=2",
    "PyramidDrop",
    "SparseVLM",
    "random",
)
PAIRS = (  # under each policy, first less second
    ("ConsensusDrop", "vision-only (alpha 1)"),
    ("ConsensusDrop", "cross-only (alpha 0)"),
    ("vision-only (alpha 1)", "cross-only (alpha 0)"),
    ("ConsensusDrop", "VisPruner"),
    ("ConsensusDrop", "SCOPE"),
    ("ConsensusDrop", "VidCom2"),
    ("ConsensusDrop", "CDPruner, relevance=cosine"),
    ("ConsensusDrop", "FastV"),
)
MOVED = ("ConsensusDrop", "vision-only (alpha 1)", "cross-only (alpha 0)", "FastV", "random")  # kept less closed up
WORDS = {CLOSED: "closed up", KEPT: "kept"}

Key = tuple[str, str, str, str]  # checkpoint, benchmark, label without positions, policy


def runs(grid: Path, beds: Path) -> dict[Key, Row]:
    """The complete runs at 64 tokens and of all tokens; of a method that draws, that of seed 0."""
    found = {}
    for row in (*read_rows(grid, known()), *read_rows(beds, known())):
        options = row.config["options"]
        if row.complete and (row.full or row.tokens == 64) and not options.get("seed"):
            label = FULL if row.config["method"] == "full" else row.variant
            found[Path(row.config["model"]).name, row.benchmark, label, options.get("positions", "")] = row
    return found


def marks(tests: Mapping[Any, Comparison | MeanDifference | None]) -> dict[Any, str]:
    """The mark of each difference, corrected over all that can be tested."""
    judged = {key: test.p for key, test in tests.items() if test is not None and test.p is not None}
    corrected = dict(zip(judged, holm(list(judged.values())), strict=True))
    return {key: mark(judged.get(key), corrected.get(key, 1.0)) for key in tests}


def beds_table(grid: Path, beds: Path) -> str:
    """Scores, differences, and where SCAP looks, one column for each model."""
    found = runs(grid, beds)
    shown = [bed for bed in BEDS if any(key[0] == bed for key in found)]
    tables = [_scores(found, shown), _differences(found, shown), _leaning(grid, beds, shown)]
    return "\n\n".join(markdown(table) for table in tables)


def _scores(found: Mapping[Key, Row], shown: Sequence[str]) -> Table:
    groups = []
    for benchmark in BENCHMARKS:
        full = {bed: _full(found, bed, benchmark) for bed in shown}
        lines = [(FULL, *(_score(full[bed]) for bed in shown))]
        for label in METHODS:
            cells = [
                " → ".join(_score(found.get((bed, benchmark, label, policy)), "") for policy in (CLOSED, KEPT))
                for bed in shown
            ]
            cells = [ABSENT if cell == f"{ABSENT} → {ABSENT}" else cell for cell in cells]
            lines.append((label, *cells))
        groups.append(Group(_about([row for row in full.values() if row]), tuple(lines)))
    note = "Score, of all tokens ± half of its 95 % interval (bootstrap over pictures). At 64 tokens: closed up → kept."
    return Table("The models at 64 of 576 tokens", ("method", *(BEDS[bed] for bed in shown)), tuple(groups), note)


def _differences(found: Mapping[Key, Row], shown: Sequence[str]) -> Table:
    tests: dict[tuple[str, str, str], Comparison] = {}
    lines = {f"{label}: kept less closed up": ((label, KEPT), (label, CLOSED)) for label in MOVED}
    for policy, word in WORDS.items():
        lines |= {f"{one} less {other}, {word}": ((one, policy), (other, policy)) for one, other in PAIRS}
    for benchmark in BENCHMARKS:
        for line, sides in lines.items():
            for bed in shown:
                first, second = (found.get((bed, benchmark, *side)) for side in sides)
                test = compare(first, second) if first and second else None
                if test is not None:
                    tests[bed, benchmark, line] = test
    said = marks(tests)

    def cell(bed: str, benchmark: str, line: str) -> str:
        test = tests.get((bed, benchmark, line))
        if test is None:
            return ABSENT
        return signed(test.difference, test.bounds) + said[bed, benchmark, line]

    groups = []
    for benchmark in BENCHMARKS:
        about = _about([row for bed in shown if (row := _full(found, bed, benchmark))])
        groups.append(Group(about, tuple((line, *(cell(bed, benchmark, line) for bed in shown)) for line in lines)))
    note = (
        "Points, with the 95 % interval, paired by question, pictures drawn together; † p < 0.05, ‡ also after Holm's "
        f"correction over the {sum(test.p is not None for test in tests.values())} differences of this table."
    )
    return Table("Differences at 64 tokens", ("first less second", *(BEDS[bed] for bed in shown)), tuple(groups), note)


def _leaning(grid: Path, beds: Path, shown: Sequence[str]) -> Table:
    """Claim 11 on each model: whether SCAP leans toward late patches."""
    files = {bed: beds / f"{bed}.scap.json" for bed in shown} | {"llava-mini": grid / results.SCAP}
    scaps = {bed: read_json(file, "make pages", dict) for bed, file in files.items() if file.is_file()}
    lines = []
    for of, words in (("late", "last third less first, with rotation"), ("rotation", "the same less that without")):
        cells = []
        for bed in shown:
            one = next((one for one in scaps.get(bed, {}).get("contrasts", ()) if one["of"] == of), None)
            cells.append(ABSENT if one is None else signed(one["difference"], one["interval"]))
        lines.append((words, *cells))
    asked = {f"{scap['questions']} questions about {scap['pictures']} pictures" for scap in scaps.values()}
    return Table(
        "Where SCAP looks", ("mean saliency", *(BEDS[bed] for bed in shown)),
        (Group(f"GQA, {', '.join(sorted(asked))}", tuple(lines)),),
        "In percent of what each patch would have if all had the same; 95 % interval, pictures drawn together.",
    )  # fmt: skip


def _full(found: Mapping[Key, Row], bed: str, benchmark: str) -> Row | None:
    return next((row for key, row in found.items() if key[:3] == (bed, benchmark, FULL)), None)


def _about(rows: Sequence[Row]) -> str:
    if not rows or rows[0].metrics is None:
        return ABSENT
    return f"{rows[0].facts.title}, {rows[0].metrics['questions']} questions about {rows[0].pictures} pictures"


def _score(row: Row | None, interval: str | None = None) -> str:
    if row is None or row.score is None:
        return ABSENT
    return f"{row.score:.1f}" + (half(row.bounds) if interval is None else interval)


def scap(model: str, out: Path) -> None:
    """Runs the study's probe on GQA and leaves what SCAP does there, as `paper study` would."""
    given = cli.parser("paper").parse_args(["paper", "study", "--model", model, "--device", "cpu"])
    config = arguments.config(given, benchmarks.make("gqa"), make("full"))
    running = paper._all_run((([results.probing(config, Share(0.12))], out / results.RUNS),), given, loaded_once(given))
    try:
        while True:
            print(next(running), flush=True)
    except StopIteration as done:
        content = results.scap(done.value[0])
    write_out(out / f"{Path(model).name}.scap.json", (json.dumps(content) + "\n").encode())


if __name__ == "__main__":
    scap(sys.argv[1], Path(sys.argv[2]))
