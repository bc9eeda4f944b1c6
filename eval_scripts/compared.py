"""The tables of the videos (`videos.py`) and of the compositions (`composition.py`): scores, and differences paired by
question. Clips and pictures are drawn, and Holm's correction is over all differences of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval_scripts.beds import BEDS, marks
from eval_scripts.policies import about
from llava_consensus.cli.report import known
from llava_consensus.evaluation.report.rows import Row, over_seeds, read_rows
from llava_consensus.evaluation.report.section import half, signed
from llava_consensus.evaluation.report.stats import MeanDifference, compare, mean_difference
from llava_consensus.evaluation.report.table import ABSENT, Group, Table, markdown

FULL = "all tokens"
CLIP = {"tile_budget": "global"}
LINES: dict[str, tuple[str, dict[str, Any]]] = {  # of the videos: method and options
    "ConsensusDrop, the clip": ("consensusdrop", CLIP),
    "ConsensusDrop, each frame": ("consensusdrop", {}),
    "VidCom2, the clip": ("vidcom2", {}),
    "EVS, the clip": ("evs", {}),
    "VisPruner, the clip": ("vispruner", CLIP),
    "VisPruner, each frame": ("vispruner", {}),
    "VisionZip, each frame": ("visionzip", {}),
    "SCOPE, each frame": ("scope", {}),
    "DivPrune, each frame": ("divprune", {}),
    "uniform grid, each frame": ("uniform_grid", {}),
    "random, each frame": ("random", {}),
}
FIRST, RANDOM = next(iter(LINES)), list(LINES)[-1]  # what the others are compared with
WORDS = {"keep": "kept", "renumber": "closed up"}
SALIENCIES: dict[str, dict[str, Any]] = {"vision": {"alpha": 1.0}, "recovery": {"fuser": "recovery"}, "fused": {}}
BASE = "top, fused, merged"  # ConsensusDrop+
SCREEN = {160: "textvqa", 120: "pope"}  # questions of a screening

Setting = tuple[float, str]  # tokens and policy


def marked(tests: Mapping[Any, MeanDifference | None]) -> dict[Any, str]:
    """The cells of differences, marked where they are real."""
    said = marks(tests)
    return {
        key: ABSENT if test is None else signed(test.difference, test.bounds) + said[key] for key, test in tests.items()
    }


def difference(pairs: Iterable[tuple[Row | None, Row | None]]) -> MeanDifference | None:
    """First less second, mean over benchmarks; None where a run is not there."""
    tests = [compare(first, second) if first and second else None for first, second in pairs]
    found = [test for test in tests if test is not None]
    return mean_difference(found, [1.0] * len(found)) if found and len(found) == len(tests) else None


NOTE = (
    "95 % interval, paired by question, {drawn} drawn together; † p < 0.05, ‡ also after Holm's correction over the "
    "{count} differences of this table."
)


def videos_table(out: Path) -> str:
    """Scores on the brief clips, and differences to the first line and to random."""
    found: dict[tuple[str, Setting], list[Row]] = {}
    for row in read_rows(out, known()):
        if row.metrics is None:
            continue
        options, tokens = row.config["options"], row.config["tokens"]
        scored = replace(row, metrics={**row.metrics, "score": row.metrics["report"]["contains"]})
        words = FULL if tokens is None else next(
            words
            for words, (name, given) in LINES.items()
            if (name, given.get("tile_budget", "per_tile"))
            == (row.config["method"], options.get("tile_budget", "per_tile"))
        )  # fmt: skip
        setting = (0.0, "") if tokens is None else (tokens, options["positions"])
        found.setdefault((words, setting), []).append(scored)
    runs = {key: over_seeds(rows) for key, rows in found.items()}
    settings = sorted({setting for _, setting in runs if setting[1]}, key=lambda one: (one[0], one[1]))
    head = ("method", *(f"{tokens:,} tokens, {WORDS[policy]}" for tokens, policy in settings))
    full = runs[FULL, (0.0, "")]
    assert full.metrics is not None
    lines = [(FULL, *[f"{full.score:.1f}{half(full.bounds)}"] * len(settings))]
    for words in LINES:
        cells = (runs.get((words, setting)) for setting in settings)
        lines.append((words, *(ABSENT if row is None else f"{row.score:.1f}{half(row.bounds)}" for row in cells)))
    asked = f"{full.metrics['questions']} questions about {full.pictures} clips"
    scores = Table(
        "What is seen in one frame", head, (Group(asked, tuple(lines)),),
        "Answers that contain the right word, in percent, ± half of the 95 % interval, clips drawn; of random the mean "
        "of its seeds. Tokens of all eight frames together.",
    )  # fmt: skip

    def run(words: str, setting: Setting) -> Row | None:
        return full if words == FULL else runs.get((words, setting))

    tests = {
        (words, other, setting): difference([(run(words, setting), run(other, setting))])
        for other in (RANDOM, FIRST)
        for words in (FULL, *LINES)
        for setting in settings
        if words not in (other, RANDOM) or (words, other) == (RANDOM, FIRST)
    }
    cells_of = marked(tests)
    groups = [
        Group(f"less {other}", tuple(
            (words, *(cells_of[words, other, setting] for setting in settings))
            for words in (FULL, *LINES) if (words, other, settings[0]) in tests
        ))
        for other in (RANDOM, FIRST)
    ]  # fmt: skip
    count = sum(cell != ABSENT for cell in cells_of.values())
    differences = Table(
        "Differences", head, tuple(groups), "Points, with the " + NOTE.format(drawn="clips", count=count)
    )
    return "\n\n".join(map(markdown, (scores, differences)))


def composition(config: Mapping[str, Any]) -> str:
    """The words of a run's composition."""
    options = config["options"]
    saliency = next(
        words for words, given in SALIENCIES.items() if all(options[name] == value for name, value in given.items())
    )
    calibrated = ", calibrated" if options.get("calibrate") else ""
    return f"{options['choice']}, {saliency}, {'unmerged' if config['merged'] == 0 else 'merged'}{calibrated}"


def composition_table(out: Path) -> str:
    """The screening of the compositions, and the best of them beside ConsensusDrop+ on every model."""
    rows = [row for row in read_rows(out, known()) if row.complete]
    screened = [row for row in rows if row.config["model"].endswith("/llava-mini") and row.config["sample"] in SCREEN]
    best = [row for row in rows if row not in screened]
    return "\n\n".join(map(markdown, (_screening(screened), _best(best))))


def _named(row: Row) -> str:
    return FULL if row.config["method"] == "full" else composition(row.config)


def _screening(rows: Sequence[Row]) -> Table:
    """Every composition at one budget, the best mean first."""
    runs = {(_named(row), row.benchmark): row for row in rows}
    names = sorted({name for _, name in runs}, reverse=True)
    lines = list(dict.fromkeys(line for line, _ in runs if (line, names[0]) in runs and (line, names[-1]) in runs))
    tests = {line: difference((runs[line, name], runs[BASE, name]) for name in names) for line in lines if line != BASE}
    cells = marked(tests)

    def mean(line: str) -> float:
        return sum(runs[line, name].score or 0.0 for name in names) / len(names)

    shown = [
        (line, *(f"{runs[line, name].score:.1f}" for name in names), f"{mean(line):.1f}", cells.get(line, ABSENT))
        for line in sorted(lines, key=mean, reverse=True)
    ]
    model = BEDS[Path(rows[0].config["model"]).name]
    return Table(
        "Screening", ("choice, saliency, merging", *(about(runs[BASE, name]) for name in names), "mean",
                      f"less {BASE}"),
        (Group(f"{model}; 32 tokens, positions kept, validation scenes", tuple(shown)),),
        f"`{BASE}` is ConsensusDrop+. Differences of the mean, with the "
        + NOTE.format(drawn="pictures", count=sum(test is not None for test in tests.values())),
    )  # fmt: skip


def _best(rows: Sequence[Row]) -> Table:
    """Differences to ConsensusDrop+ by model, composition and budget: of each benchmark, and of their mean."""
    runs = {
        (Path(row.config["model"]).name, _named(row), row.config["tokens"] or 0, row.benchmark): row for row in rows
    }
    names = [name for name in ("textvqa", "pope", "gqa") if any(key[3] == name for key in runs)]
    models = sorted({key[0] for key in runs}, key=lambda one: list(BEDS).index(one) if one in BEDS else len(BEDS))
    lines = sorted({key[1:3] for key in runs if key[1] not in (FULL, BASE)})
    tests = {}
    for model in models:
        for line, tokens in lines:
            pairs = {
                name: (runs.get((model, line, tokens, name)), runs.get((model, BASE, tokens, name))) for name in names
            }
            for name, pair in pairs.items():
                tests[model, line, tokens, name] = difference([pair])
            asked = [pair for pair in pairs.values() if all(pair)]
            tests[model, line, tokens, "mean"] = difference(asked) if len(asked) > 1 else None
    cells = marked(tests)
    groups = []
    for model in models:
        shown = []
        for tokens in sorted({key[2] for key in runs if key[:2] == (model, BASE)}):
            base = [runs.get((model, BASE, tokens, name)) for name in names]
            scores = (ABSENT if row is None else f"{row.score:.1f}{half(row.bounds)}" for row in base)
            shown.append((f"ConsensusDrop+, {tokens} tokens", *scores, ""))
            for line in [line for line, other in lines if other == tokens]:
                shown.append((line, *(cells[model, line, tokens, name] for name in (*names, "mean"))))
        groups.append(Group(BEDS.get(model, model), tuple(shown)))
    first = {name: next(row for key, row in runs.items() if key[3] == name) for name in names}
    return Table(
        "The best, less ConsensusDrop+",
        ("choice, saliency, merging", *(about(first[name]) for name in names), "mean"),
        tuple(groups),
        "Scores of ConsensusDrop+, and below each what a composition differs by at as many tokens, in "
        "points, with the " + NOTE.format(drawn="pictures", count=sum(test is not None for test in tests.values())),
    )  # fmt: skip
