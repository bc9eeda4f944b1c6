"""The runs of the study, and the content of study.json and scap.json, which is read from their folders only.

`study.json` has the setting of all runs (`description`), a row for each run, and `contrasts`. A row has the options of
its run (null for all tokens), `accuracy` (divided by `scale` in percent) with `chance` and the 95 % `interval`, and
means over its images: `agreement`, the overlap of the two sides' K best tokens as a share of K, and `correction`.
`gain` is the accuracy minus that of its student, with `gain_interval` and `p`, paired by question.

A contrast is a mean over the benchmarks in which all tokens are above guessing, paired by question, in points, without
`interval` and `p` from too few images:

    of            "gain": recovery minus its student; "sides": vision minus the question; and of what
                  is measured image by image, in percent: "disagreement" and "correction" at the least retention minus
                  those at the most, "rise" of the gain between the same, and "fall" of the correction from one rate to
                  the next

`scap.json` says where SCAP, the attention of the first layer, looks:

    positions     SCAP's mean saliency with and without rotation of queries and keys, in 24 equal stretches of patch
                  indices, as a multiple of an even one: 1 is no preference
    contrasts     "late": SCAP in the last third of the patches minus that in the first, in percent of no preference;
                  "rotation": the same minus that without rotation
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.files import ANSWERS, Record, read_lines
from llava_consensus.evaluation.report.rows import OF_SECTION, Row, compare, read_row
from llava_consensus.evaluation.report.section import half, signed
from llava_consensus.evaluation.report.stats import (
    Comparison,
    Report,
    above_chance,
    corrected,
    mark,
    mean_difference,
    paired,
)
from llava_consensus.evaluation.report.table import ABSENT, Table, pivoted
from llava_consensus.evaluation.runs.configuration import RunConfig, prepare
from llava_consensus.evaluation.runs.sweep import Cell, cells
from llava_consensus.paper.study.methods import PUBLISHED_LAYER, RECOVERY, SIDES, LayerProbe, Selection
from llava_consensus.reduction.budget import Share
from llava_consensus.reduction.decoder import only_cut

STUDY, SCAP = "study.json", "scap.json"
RUNS = "study"  # folder in that of results, so that tables of methods do not mix with the study's selections
MEASURES: dict[str, Callable[[Mapping[str, Any]], Any]] = {  # kind of a contrast -> value of an image
    "disagreement": lambda image: 1 - np.mean(image["agreement"]),
    "correction": lambda image: np.mean(image["correction"]),
    "fall": lambda image: np.mean(image["correction"]),
}
LABELS = {"vision": "vision-only", "cross": "cross-only", "full": "all tokens"}


def grid(
    full: Sequence[RunConfig], retentions: Sequence[Share], rates: Sequence[float], layer: int | None = None
) -> list[Cell]:
    """All runs of the study, each checked: under both position policies each side, then recovery with either
    student at every rate. `layer` as in `Selection`.
    """
    methods = [Selection(scores=side, layer=layer) for side in SIDES]
    methods += [Selection(scores=RECOVERY, student=side, rate=rate, layer=layer) for side in SIDES for rate in rates]
    return cells(full, [replace(one, positions=way) for way in ("keep", "renumber") for one in methods], retentions)


def probing(full: RunConfig, retention: Share) -> Cell:
    """The run with all tokens that records where SCAP looks."""
    return Cell(prepare(full).reduced_by(LayerProbe(), retention, "kept"))


class RunKey(NamedTuple):
    benchmark: str
    positions: str | None = None  # None and the following for all tokens
    retention: float = 1.0
    scores: str = "full"
    student: str | None = None
    rate: float | None = None

    @property
    def alone(self) -> "RunKey":
        return self._replace(scores=str(self.student), student=None, rate=None)


Runs = Mapping[RunKey, Row]


def _key(run: Row) -> RunKey:
    if run.full:
        return RunKey(run.benchmark)
    options = run.config["options"]
    key = RunKey(run.benchmark, options["positions"], run.tokens, str(options["scores"]))
    return key._replace(student=options["student"], rate=options["rate"]) if key.scores == RECOVERY else key


def study(folders: Sequence[Path]) -> Record:
    """The content of study.json, from the folders of complete runs of the study, in order."""
    found = [read_row(folder) for folder in folders]
    runs = {_key(run): run for run in found}
    return {
        "description": _description(found),
        "rows": [_row(key, runs) for key in runs],
        "contrasts": list(_contrasts(runs)),
    }


def _description(runs: Sequence[Row]) -> Record:
    """The setting that all runs share, and the decoder layer after which tokens were dropped, if a run records it."""
    layer = None
    for run in runs:
        account = (run.metrics or {}).get("account")
        if layer is None and account and "scores" in run.config["options"]:
            depth = len(account["measured"]["kv_bytes_per_layer"])
            layer = only_cut(run.config["options"]["layer"], PUBLISHED_LAYER, depth)
    return {**{key: runs[0].config.get(key) for key in (*OF_SECTION, "sample", "weights", "dtype")}, "layer": layer}


def _row(key: RunKey, runs: Runs) -> Record:
    run = runs[key]
    images = [] if run.full else [image for _, image in _measured(run)]
    values = ([value for image in images for value in image.get(name, ())] for name in ("agreement", "correction"))
    agreement, correction = (float(np.mean(found)) if found else None for found in values)
    gain = compare(run, runs[key.alone]) if key.scores == RECOVERY and key.alone in runs else None
    assert run.metrics is not None
    return {
        **key._asdict(),
        "title": run.facts.title,
        "metric": run.metrics["metric"],
        "scale": run.scale,
        "chance": run.chance,
        "accuracy": run.score,
        "interval": run.bounds,
        "questions": run.metrics["answered"],
        "pictures": run.images,
        "agreement": agreement,
        "disagreement": None if agreement is None else 1 - agreement,
        "correction": correction,
        "gain": gain and gain.difference,
        "gain_interval": gain and gain.bounds,
        "p": gain and gain.p,
    }


def _measured(run: Row) -> Iterator[tuple[Record, Mapping[str, Any]]]:
    """The method's own measures of its choices, image by image, each with the metadata of its answer."""
    for answer in read_lines(run.folder / ANSWERS, ("metadata",)):
        for image in answer["metadata"].get("measures", ()):
            yield answer["metadata"], image


def _contrasts(runs: Runs) -> Iterator[Record]:
    full = {key.benchmark: run for key, run in runs.items() if key.scores == "full"}
    told = [name for name, run in full.items() if above_chance(run.score, run.bounds, run.chance)]
    settings = dict.fromkeys(key._replace(benchmark="") for key in runs if key.positions)
    most = max((key.retention for key in settings), default=1.0)
    least = min((key.retention for key in settings), default=1.0)
    later = dict(pairwise(sorted({key.rate for key in settings if key.rate is not None})))
    for key in settings:
        others = {}  # kind -> the setting that is subtracted
        if key.scores == SIDES[0]:
            others["sides"] = key._replace(scores=SIDES[1])
        if key.scores == RECOVERY:
            others["gain"] = key.alone
            if key.retention == least < most:
                others |= dict.fromkeys(("disagreement", "correction", "rise"), key._replace(retention=most))
            if key.rate in later:
                others["fall"] = key._replace(rate=later[key.rate])
        setting = {name: value for name, value in key._asdict().items() if name not in ("benchmark", "scores")}
        for kind, other in others.items():
            pairs = [[one._replace(benchmark=name) for one in (key, other)] for name in told]
            tests = [test for pair in pairs if (test := _test(runs, kind, *pair)) is not None]
            if tests:
                yield {
                    "of": kind,
                    **setting,
                    **_mean(tests, [test.first.most / 100 for test in tests]),
                    "benchmarks": [test.benchmark for test in tests],
                }


def _mean(tests: Sequence[Comparison], scales: Sequence[float]) -> Record:
    mean = mean_difference(tests, scales)
    return {"difference": mean.difference, "interval": mean.bounds, "p": mean.p, "pictures": mean.images}


def _test(runs: Runs, kind: str, first: RunKey, second: RunKey) -> Comparison | None:
    """Two runs paired by question; None unless both are there."""
    if first not in runs or second not in runs:
        return None
    if kind in ("sides", "gain"):
        return compare(runs[first], runs[second])
    if kind == "rise":
        return paired(_gains(runs, first), _gains(runs, second), first.benchmark)
    value = MEASURES[kind]
    return paired(_report(runs[first], value), _report(runs[second], value), first.benchmark)


def _gains(runs: Runs, key: RunKey) -> Report:
    if key.alone not in runs:
        return {}
    alone = {row["index"]: row["correct"] for row in runs[key.alone].report.get("extracted", ())}
    rows = [row for row in runs[key].report.get("extracted", ()) if row["index"] in alone]
    gains = [{**row, "group": None, "unit": None, "correct": row["correct"] - alone[row["index"]]} for row in rows]
    return {"extracted": gains}


def _report(run: Row, value: Callable[[Mapping[str, Any]], Any]) -> Report:
    """A measure of each question, mean over its images, as rows of a report."""
    found: dict[int, tuple[Any, list[float]]] = {}
    for metadata, image in _measured(run):
        found.setdefault(metadata["index"], (metadata.get("pictures"), []))[1].append(float(value(image)))
    rows = [{"index": index, "picture": name, "correct": np.mean(of)} for index, (name, of) in found.items()]
    return {"extracted": rows}


def scap(folder: Path) -> Record:
    """The content of scap.json, from the folder of a complete run of `LayerProbe`. OptionError without images."""
    run = read_row(folder)
    images = [image for _, image in _measured(run)]
    if not images:
        raise OptionError(f"{folder}: no image with text after it was looked at")

    def lean(image: Mapping[str, Any], name: str) -> float:
        stretches = np.ravel(image[name])
        third = len(stretches) // 3
        return float(stretches[-third:].mean() - stretches[:third].mean())

    means = {name: np.mean([image[name] for image in images], axis=0)[0].tolist() for name in ("rotated", "plain")}
    late = _report(run, lambda image: lean(image, "rotated"))
    tests = {
        "late": paired(late, _report(run, lambda image: 0.0), run.benchmark),
        "rotation": paired(late, _report(run, lambda image: lean(image, "plain")), run.benchmark),
    }
    return {
        "description": _description([run]),
        "benchmark": run.benchmark,
        "questions": len(images),
        "pictures": run.images,
        "retention": run.tokens,
        "positions": [{"rotated": name == "rotated", "saliency": mean} for name, mean in means.items()],
        "contrasts": [{"of": of, **_mean([test], [1.0])} for of, test in tests.items() if test],
    }


# ---- the table and lines of study.json


def study_table(content: Mapping[str, Any]) -> Table:
    """Score of every run; of recovery also its gain over the student, disagreement and correction factor."""
    rows = content["rows"]
    recovered = [row for row in rows if row["rate"] is not None]
    after = corrected({place: row["p"] for place, row in enumerate(recovered)})
    gains = {id(row): mark(row["p"], after[place]) for place, row in enumerate(recovered) if place in after}
    cells = []
    for row in sorted(rows, key=lambda row: (-row["retention"], row["positions"] or "")):
        policy = {"keep": ", positions kept", "renumber": ", positions closed up"}.get(row["positions"], "")
        label = LABELS.get(row["scores"]) or f"recovery, {row['student']} student, r = {row['rate']:g}"
        text = ABSENT if row["accuracy"] is None else f"{row['accuracy']:.1f}{half(row['interval'])}"
        if row["gain"] is not None:
            text += f"; {signed(row['gain'], row['gain_interval'])}{gains.get(id(row), '')}"
        if row["correction"] is not None:
            text += f"; {100 * row['disagreement']:.1f} / {100 * row['correction']:.1f}"
        cells.append((f"Retain {100 * row['retention']:g} % of the tokens{policy}", label, row["benchmark"], text))
    names = {row["benchmark"]: f"{row['title']} ({row['questions']}, {row['pictures']})" for row in rows}
    note = (
        "Questions and images in brackets. Score ± half of its 95 % interval; gain of recovery over its student alone, "
        "paired by question († p < 0.05, ‡ also after Holm's correction); percent of the K best tokens on which the "
        "sides differ / correction factor. MME in points."
    )
    layer = content["description"]["layer"]
    where = "inside the language model" if layer is None else f"after decoder layer {layer}"
    return pivoted(f"Selection {where}", "scores", names, cells, note)


def study_csv(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of study.json with the ends of intervals in separate columns."""
    ends = ("interval", "gain_interval")
    return [
        {key: value for key, value in row.items() if key not in ends}
        | {f"{name}_{end}": (row[name] or (None, None))[end == "high"] for name in ends for end in ("low", "high")}
        for row in content["rows"]
    ]
