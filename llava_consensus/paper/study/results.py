"""The runs of the study, and what they say: the content of study.json and scap.json.

The runs are ordinary ones of a sweep, so they are resumed, shared out and kept as any other. What is read of them is
read from their folders alone; tables (`tables.py`) and figures are made of these files.

`study.json` has the setting of all runs (`description`), a row for each run and `contrasts`. Of a row, what its name
does not tell:

    scale         divisor of `accuracy` to a percentage: 1, and 20 for MME
    chance        score of guessing on these questions, in the unit of `accuracy`; older files do not have it
    positions     "keep" or "renumber"; null for all tokens
    retention     share of a picture's tokens that are left, rho; 1.0 for all tokens
    scores        ranking of tokens: "vision", "cross", "recovery" (the student's, corrected by the teacher's), "full"
    student       "vision" or "cross", and `rate`, share of the kept tokens that the teacher adds; null unless
                  `scores` is "recovery"
    interval      95 %, bootstrap over pictures; null where the scorer's rows do not make up the score
    agreement     overlap of the two sides' K best tokens as a share of K, mean over pictures; null for all tokens
    gain          accuracy less that of the student alone, with `gain_interval` and `p`, paired by question

A contrast is a mean over the benchmarks in which all tokens are above guessing, paired by question, in points:

    of            "gain": recovery less its student alone; "sides": vision alone less the question alone; and of what is
                  measured picture by picture, in percent: "disagreement" and "correction" at the least retention less
                  those at the most, "rise" of the gain between the same, and "fall" of the correction from one rate to
                  the next
    pictures      of the benchmark that has the fewest; from too few `interval` and `p` are null

`scap.json` says how SCAP, which is the attention of the first layer, compares with the attention of every layer:

    layers        for each decoder layer, from 1, and `aggregate` ("all", "last" or "max" of the text rows):
                  Spearman's rank `correlation` of SCAP with the layer's own attention, and the `overlap` of their best
                  tokens
    positions     SCAP's mean saliency with and without rotation of queries and keys, in 24 equal stretches of patch
                  indices, as a multiple of an even one: 1 is no preference
    contrasts     "late": SCAP in the last third of the patches less that in the first, in percent of no preference;
                  "rotation": the same less that without rotation

A null number was not measured, or means nothing there. Rows stand in the order they were run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.files import ANSWERS, Record, read_lines
from llava_consensus.evaluation.report.rows import OF_SECTION, Row, compare, read_row
from llava_consensus.evaluation.report.stats import (
    Comparison,
    MeanDifference,
    Report,
    above_chance,
    mean_difference,
    paired,
)
from llava_consensus.evaluation.runs.configuration import RunConfig, prepare
from llava_consensus.evaluation.runs.sweep import Cell, cells
from llava_consensus.paper.study.methods import (
    PUBLISHED_LAYER,
    RECOVERY,
    SIDES,
    LayerProbe,
    Selection,
)
from llava_consensus.reduction.budget import Share
from llava_consensus.reduction.decoder import only_cut
from llava_consensus.reduction.saliency import AGGREGATES

STUDY, SCAP = "study.json", "scap.json"
RUNS = "study"  # folder in that of results, so that tables of methods do not mix with the study's selections


def grid(
    full: Sequence[RunConfig], retentions: Sequence[Share], rates: Sequence[float], layer: int | None = None
) -> list[Cell]:
    """All runs of the study, each checked: under both position policies both sides alone, then recovery with either
    student at every rate.

    Args:
        full: the run with all tokens of each benchmark.
        retentions: shares of a picture's tokens that stay.
        rates: of recovery.
        layer: how many decoder layers see everything; None is 2, in shallow models in proportion.
    Raises:
        ConsensusError: for a run that is wrong.
    """
    alone = [Selection(scores=side, layer=layer) for side in SIDES]
    recovered = [
        Selection(scores=RECOVERY, student=student, rate=rate, layer=layer) for student in SIDES for rate in rates
    ]
    methods = [replace(one, positions=policy) for policy in ("keep", "renumber") for one in (*alone, *recovered)]
    return cells(full, methods, retentions)


def probing(full: RunConfig, retention: Share) -> Cell:
    """The run that compares SCAP with the attention of every layer, at the overlap of the best tokens of this share."""
    return Cell(prepare(full).reduced_by(LayerProbe(), retention, "kept"))


def study(folders: Sequence[Path]) -> Record:
    """The content of study.json.

    Args:
        folders: of complete runs of the study, in order.
    """
    runs = [read_row(folder) for folder in folders]
    known = {_key(run): run for run in runs}
    return {
        "description": description(runs),
        "rows": [study_row(run, known) for run in runs],
        "contrasts": list(contrasts(known)),
    }


class RunKey(NamedTuple):
    """Identity of a run of the study."""

    benchmark: str
    positions: str | None = None  # None and the following for all tokens
    retention: float = 1.0
    scores: str = "full"
    student: str | None = None
    rate: float | None = None

    @property
    def alone(self) -> "RunKey":
        """The run of recovery's student alone."""
        return self._replace(scores=str(self.student), student=None, rate=None)


def _key(run: Row) -> RunKey:
    if run.full:
        return RunKey(run.benchmark)
    options = run.config["options"]
    key = RunKey(run.benchmark, options["positions"], run.tokens, str(options["scores"]))
    return key._replace(student=options["student"], rate=options["rate"]) if key.scores == RECOVERY else key


def description(runs: Sequence[Row]) -> Record:
    """The setting that all runs share, and the decoder layer after which tokens were dropped."""
    return {
        **{key: runs[0].config.get(key) for key in (*OF_SECTION, "sample", "weights", "dtype")},
        "layer": layer_of(runs),
    }


def layer_of(runs: Sequence[Row]) -> int | None:
    """Number of decoder layers before the cut; None where the run does not record the model's depth."""
    for run in runs:
        account = (run.metrics or {}).get("account")
        if account and "scores" in run.config["options"]:
            depth = len(account["measured"]["kv_bytes_per_layer"])
            return only_cut(run.config["options"]["layer"], PUBLISHED_LAYER, depth)
    return None


def study_row(run: Row, known: Mapping[RunKey, Row]) -> Record:
    """One row of study.json."""
    key = _key(run)
    agreement, correction = (None if run.full else mean_of(measures(run), name) for name in ("agreement", "correction"))
    student = known.get(key.alone) if key.scores == RECOVERY else None
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
        "pictures": run.pictures,
        "agreement": agreement,
        "disagreement": None if agreement is None else 1 - agreement,
        "correction": correction,
        **gain(run, student),
    }


def contrasts(known: Mapping[RunKey, Row]) -> Iterator[Record]:
    """Contrasts that the paper's claims are about, each a mean over benchmarks, paired by question."""
    full = {key.benchmark: run for key, run in known.items() if key.scores == "full"}
    told = [name for name, run in full.items() if above_chance(run.score, run.bounds, run.chance)]
    settings = dict.fromkeys(key._replace(benchmark="") for key in known if key.positions)
    most = max((one.retention for one in settings), default=1.0)
    least = min((one.retention for one in settings), default=1.0)
    later = dict(pairwise(sorted({one.rate for one in settings if one.rate is not None})))
    for one in settings:
        keys = [one._replace(benchmark=name) for name in told]
        if one.scores == SIDES[0]:
            other = SIDES[1]
            yield from _contrast("sides", one, [_compared(known, key, key._replace(scores=other)) for key in keys])
        if one.scores != RECOVERY:
            continue
        yield from _contrast("gain", one, [_compared(known, key, key.alone) for key in keys])
        if one.retention == least < most:
            for of in ("disagreement", "correction", "rise"):
                tests = [_changed(known, key, key._replace(retention=most), of) for key in keys]
                yield from _contrast(of, one, tests)
        if one.rate in later:
            tests = [_changed(known, key, key._replace(rate=later[one.rate]), "correction") for key in keys]
            yield from _contrast("fall", one, tests)


def _contrast(of: str, one: RunKey, found: Sequence[Comparison | None]) -> Iterator[Record]:
    """A contrast over the benchmarks that have a test."""
    tests = [test for test in found if test is not None]
    if tests:
        mean = mean_difference(tests, [test.first.most / 100 for test in tests])
        setting = {key: value for key, value in one._asdict().items() if key not in ("benchmark", "scores")}
        yield {"of": of, **setting, **_said(mean), "benchmarks": [test.benchmark for test in tests]}


def _said(mean: MeanDifference) -> Record:
    return {"difference": mean.difference, "interval": mean.bounds, "p": mean.p, "pictures": mean.pictures}


def _compared(known: Mapping[RunKey, Row], first: RunKey, second: RunKey) -> Comparison | None:
    return compare(known[first], known[second]) if first in known and second in known else None


def _changed(known: Mapping[RunKey, Row], first: RunKey, second: RunKey, what: str) -> Comparison | None:
    """A per-picture measure, or the gain (`rise`), of one run less that of another."""
    return paired(_by_picture(known, first, what), _by_picture(known, second, what), first.benchmark)


def _by_picture(known: Mapping[RunKey, Row], key: RunKey, what: str) -> Report:
    """A run's `disagreement`, `correction`, or gain over the student alone, as rows of a report, one a question."""
    if key not in known or (what == "rise" and key.alone not in known):
        return {}
    if what == "rise":
        alone = {row["index"]: row["correct"] for row in known[key.alone].report.get("extracted", ())}
        rows = [row for row in known[key].report.get("extracted", ()) if row["index"] in alone]
        return {
            "extracted": [
                {**row, "group": None, "unit": None, "correct": row["correct"] - alone[row["index"]]} for row in rows
            ]
        }
    name = "correction" if what == "correction" else "agreement"
    rows = []
    for answer in read_lines(known[key].folder / ANSWERS, ("metadata",)):
        values = [value for one in answer["metadata"].get("measures", ()) for value in one.get(name, ())]
        if values:
            share = float(np.mean(values))
            value = share if name == what else 1 - share
            rows.append(
                {"index": answer["metadata"]["index"], "picture": answer["metadata"].get("pictures"), "correct": value}
            )
    return {"extracted": rows}


def gain(run: Row, student: Row | None) -> Record:
    """Gain of recovery over its student alone, paired by question where rows make up both scores."""
    test = None if student is None else compare(run, student)
    if test is None:
        return {"gain": None, "gain_interval": None, "p": None}
    return {"gain": test.difference, "gain_interval": test.bounds, "p": test.p}


def measures(run: Row) -> list[Mapping[str, Any]]:
    """The method's own measures of its choices, by picture."""
    answers = read_lines(run.folder / ANSWERS, ("metadata",))
    return [picture for answer in answers for picture in answer["metadata"].get("measures", ())]


def mean_of(pictures: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """A measure's mean over pictures; None where none was taken."""
    values = [value for picture in pictures for value in picture.get(name, ())]
    return float(np.mean(values)) if values else None


def scap(folder: Path) -> Record:
    """The content of scap.json.

    Args:
        folder: of the complete run of `LayerProbe`.
    Raises:
        OptionError: where no picture was compared, because none has as many tokens as the overlap counts.
    """
    run = read_row(folder)
    pictures = measures(run)
    if not pictures:
        raise OptionError(f"{folder}: no picture with text after it was compared with the layers' attention")

    def mean(name: str) -> Any:
        return np.mean([picture[name] for picture in pictures], axis=0).tolist()

    tests = {"late": paired(_late(run, "rotated"), _late(run, ""), run.benchmark)}
    tests["rotation"] = paired(_late(run, "rotated"), _late(run, "plain"), run.benchmark)

    correlation = {aggregate: mean(f"correlation_{aggregate}") for aggregate in AGGREGATES}
    overlap = {aggregate: mean(f"overlap_{aggregate}") for aggregate in AGGREGATES}
    return {
        "description": description([run]),
        "benchmark": run.benchmark,
        "questions": len(pictures),
        "pictures": run.pictures,
        "retention": run.tokens,
        "layers": [
            {"layer": layer, "aggregate": aggregate, "correlation": value, "overlap": overlap[aggregate][layer - 1]}
            for aggregate in AGGREGATES
            for layer, value in enumerate(correlation[aggregate], 1)
        ],
        "positions": [{"rotated": name == "rotated", "saliency": mean(name)[0]} for name in ("rotated", "plain")],
        "contrasts": [{"of": of, **_said(mean_difference([test], [1.0]))} for of, test in tests.items() if test],
    }


def _late(run: Row, name: str) -> Report:
    """SCAP in the last third of the patches less that in the first, one row a question; 0 without a name."""
    rows = []
    for answer in read_lines(run.folder / ANSWERS, ("metadata",)):
        for picture in answer["metadata"].get("measures", ()):
            value = 0.0
            if name:
                stretches = np.ravel(picture[name])
                third = len(stretches) // 3
                value = float(stretches[-third:].mean() - stretches[:third].mean())
            rows.append(
                {"index": answer["metadata"]["index"], "picture": answer["metadata"].get("pictures"), "correct": value}
            )
    return {"extracted": rows}
