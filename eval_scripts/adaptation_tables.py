"""The tables of `adaptation.py`: pure functions of the folders of trainings and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.evaluation.files import CONFIG, METRICS
from llava_consensus.evaluation.report.rows import Row, read_row
from llava_consensus.evaluation.report.section import signed
from llava_consensus.evaluation.report.stats import Comparison, compare

METHODS, POSITIONS, BUDGETS = ("consensusdrop", "visionzip", "random"), ("renumber", "keep"), (64, 32)
CONTROL = "full"  # the same conversations with all tokens
TITLES = {"textvqa": "TextVQA", "gqa": "GQA"}
NOTE = (
    "Each cell: score before -> after, and below it the paired difference with its 95 % interval (bootstrap over "
    "questions). A difference whose interval holds 0 says nothing. `-`: not measured."
)


class Key(NamedTuple):
    """What tells runs of this study apart."""

    model: str  # last part of its path
    benchmark: str
    method: str
    positions: str
    tokens: int | None


def asked(method: str, positions: str) -> list[tuple[str, str]]:
    """Method and positions that an adaptation is measured with: its own; for the control those of ConsensusDrop."""
    return [(METHODS[0], policy) for policy in POSITIONS] if method == CONTROL else [(method, positions)]


def runs(folder: Path) -> dict[Key, Row]:
    """All complete runs; those with all tokens under the method `full`."""
    found = {}
    for path in sorted(folder.glob(f"*/{METRICS}")):
        row = read_row(path.parent)
        config = json.loads((path.parent / CONFIG).read_text())
        if row.complete:
            positions = config["changed"].get("positions", "renumber")
            key = Key(Path(config["model"]).name, row.benchmark, config["method"], positions, config["tokens"])
            found[key] = row
    return found


def text(out: Path, names: list[str], base: str = "llava-mini") -> str:
    """All tables."""
    known = runs(out / "runs")
    files = {name: out / name / "training.json" for name in names}
    trainings = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    tables = [_table(benchmark, known, trainings, base) for benchmark in TITLES]
    speed = out / "speed.json"
    parts = [_about(list(trainings.values())), *filter(None, tables), NOTE if any(tables) else "", _speed(speed)]
    return "\n\n".join(part for part in parts if part)


def _about(trainings: list[dict[str, Any]]) -> str:
    """What all trainings share, in a sentence."""
    if not trainings:
        return "No adaptation is complete."
    one = trainings[0]
    data = one["data"]
    return (
        f"Complete so far: {len(trainings)} adaptations of the embedded model, each of {one['steps']} steps of "
        f"{one['batch']} conversations (data of {data['conversations']}, fingerprint {data['fingerprint'][:12]}, seed "
        f"{one['seed']}, transformers {one['versions']['transformers']})."
    )


def _table(benchmark: str, known: dict[Key, Row], trainings: dict[str, dict[str, Any]], base: str) -> str:
    """One line for each adaptation that was measured on a benchmark, by its name."""
    lines = []
    for name, said in trainings.items():
        budgets = " or ".join(map(str, said["budgets"])) or "all"
        for method, positions in asked(said["method"], said["options"].get("positions", "renumber")):
            keys = [Key(name, benchmark, method, positions, tokens) for tokens in (*BUDGETS, None)]
            cells = [_cell(known, key, base) for key in keys]
            if any(cell != "-" for cell in cells):
                adapted = "none (control)" if said["method"] == CONTROL else said["method"]
                line = [said["tune"], adapted, budgets, f"{method}, {positions}", *cells]
                lines.append(f"| {' | '.join(line)} |")
    if not lines:
        return ""
    counts = [row.metrics["questions"] for key, row in known.items() if key.benchmark == benchmark and row.metrics]
    head = "| trained | with | at | asked with | at 64 | at 32 | at all 576 |\n" + "| --- " * 7 + "|"
    return f"{TITLES[benchmark]}, {counts[0]} questions:\n\n{head}\n" + "\n".join(lines)


def _cell(known: dict[Key, Row], key: Key, base: str) -> str:
    """Score before and after, and their paired difference."""
    if key.tokens is None:
        key = key._replace(method="full", positions="renumber")
    before, after = known.get(key._replace(model=base)), known.get(key)
    if before is None or after is None:
        return "-"
    difference = compare(after, before)
    return f"{before.score:.1f} -> {after.score:.1f}<br>{_said(difference)}"


def _said(difference: Comparison | None) -> str:
    if difference is None:
        return "no interval"
    return signed(difference.difference, difference.bounds)


def _speed(file: Path) -> str:
    """The table of `adaptation_speed.py`."""
    if not file.is_file():
        return ""
    found = json.loads(file.read_text())
    full = found["rows"]["full all"]
    lines = [
        f"| {name} | {1 / row['processor']:.2f} | {full['processor'] / row['processor']:.2f} | "
        f"{1 / row['seconds']:.2f} | {row['bytes'] / 2**20:.0f} |"
        for name, row in found["rows"].items()
    ]
    head = (
        "| method, tokens | steps per second of the processor | times the full model | steps per second of the clock | "
        "MiB kept for the backward pass |\n| --- | --: | --: | --: | --: |"
    )
    about = (
        f"A training step of {found['batch']} conversations with everything but the tower trained, medians of "
        f"{found['rounds']} rounds in turns on a shared machine (torch {found['torch']}, one thread):"
    )
    return f"{about}\n\n{head}\n" + "\n".join(lines)
