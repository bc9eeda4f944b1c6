"""What the runs of the study say: the content of study.json and scap.json (`format.py`). Read from result folders
alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.files import ANSWERS, Record, read_lines
from llava_consensus.evaluation.report.rows import OF_SECTION, Row, read_row
from llava_consensus.evaluation.report.stats import compare, draws, interval
from llava_consensus.paper.study.selection import PUBLISHED_LAYER, RECOVERY
from llava_consensus.reduction.decoder import only_cut
from llava_consensus.reduction.saliency import AGGREGATES


def study(folders: Sequence[Path]) -> Record:
    """The content of study.json.

    Args:
        folders: of complete runs of the study, in order.
    """
    runs = [read_row(folder) for folder in folders]
    alone = {(run.benchmark, run.tokens, run.config["options"].get("scores")): run for run in runs}
    return {"description": description(runs), "rows": [study_row(run, alone) for run in runs]}


def description(runs: Sequence[Row]) -> Record:
    """The setting that all runs share, and the decoder layer after which tokens were dropped."""
    return {**{key: runs[0].config.get(key) for key in (*OF_SECTION, "weights", "dtype")}, "layer": layer_of(runs)}


def layer_of(runs: Sequence[Row]) -> int | None:
    """How many decoder layers saw everything; None where the host did not tell how many it has."""
    for run in runs:
        account = (run.metrics or {}).get("account")
        if account and "scores" in run.config["options"]:
            depth = len(account["measured"]["kv_bytes_per_layer"])
            return only_cut(run.config["options"]["layer"], PUBLISHED_LAYER, depth)
    return None


def study_row(run: Row, alone: Mapping[tuple[str, float, Any], Row]) -> Record:
    """One row of study.json."""
    options = run.config["options"]
    scores = "full" if run.full else str(options["scores"])
    recovery = scores == RECOVERY
    pictures = [] if run.full else measures(run)
    agreement, correction = mean_of(pictures, "agreement"), mean_of(pictures, "correction")
    student = alone.get((run.benchmark, run.tokens, options["student"])) if recovery else None
    assert run.metrics is not None
    return {
        "benchmark": run.benchmark,
        "title": run.facts.title,
        "metric": run.metrics["metric"],
        "scale": run.facts.scale,
        "chance": run.chance,
        "retention": 1.0 if run.full else run.tokens,
        "scores": scores,
        "student": options["student"] if recovery else None,
        "rate": options["rate"] if recovery else None,
        "accuracy": run.score,
        "interval": None if run.sample is None else interval(draws(run.sample, run.benchmark)),
        "questions": run.metrics["answered"],
        "agreement": agreement,
        "disagreement": None if agreement is None else 1 - agreement,
        "correction": correction,
        **gain(run, student),
    }


def gain(run: Row, student: Row | None) -> Record:
    """How much recovery gains over its student alone, paired by question where rows make up both scores."""
    nothing = {"gain": None, "gain_interval": None, "p": None}
    if student is None or run.score is None or student.score is None:
        return nothing
    test = compare(run, student)
    if test is None:
        return {**nothing, "gain": run.score - student.score}
    return {"gain": test.difference, "gain_interval": [test.low, test.high], "p": test.p}


def measures(run: Row) -> list[Mapping[str, Any]]:
    """What the method said of its choices, picture by picture."""
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

    correlation = {aggregate: mean(f"correlation_{aggregate}") for aggregate in AGGREGATES}
    overlap = {aggregate: mean(f"overlap_{aggregate}") for aggregate in AGGREGATES}
    return {
        "description": description([run]),
        "benchmark": run.benchmark,
        "questions": len(pictures),
        "retention": run.tokens,
        "layers": [
            {"layer": layer, "aggregate": aggregate, "correlation": value, "overlap": overlap[aggregate][layer - 1]}
            for aggregate in AGGREGATES
            for layer, value in enumerate(correlation[aggregate], 1)
        ],
        "positions": [{"rotated": name == "rotated", "saliency": mean(name)[0]} for name in ("rotated", "plain")],
    }
