"""Tables of what closing up positions does, from the content of positions.json (`study/format.py` says what it is)."""

from collections.abc import Mapping
from typing import Any

from llava_consensus.evaluation.report.section import half
from llava_consensus.evaluation.report.table import ABSENT, Group, Table

NAMES = {"full": "all tokens", "renumber": "ConsensusDrop, renumber", "keep": "ConsensusDrop, keep"}
PARTS = 4  # of the picture from top to bottom, in the table


def tables(content: Mapping[str, Any]) -> list[Table]:
    """Accuracy by the layer from which positions are closed up, and where the last word looks in every layer."""
    return [by_layer(content), by_place(content)]


def by_layer(content: Mapping[str, Any]) -> Table:
    """Accuracy, and the difference to positions that are closed up nowhere."""
    lines = []
    for row in content["layers"]:
        bounds = row["difference_interval"]
        shown = ABSENT if bounds is None else f"{row['difference']:+.1f} ({bounds[0]:+.1f} to {bounds[1]:+.1f})"
        lines.append((label(row["closed_from"]), f"{row['accuracy']:.1f}{half(row['interval'])}", shown))
    note = (
        "The patches that the class token looks at most stay, before the first layer; only their positions differ. "
        "Score ± half of its 95 % interval; difference paired by question, to positions that are closed up nowhere."
    )
    head = ("positions", content["title"], "difference (95 % interval)")
    return Table("Closed up from a layer on", head, (Group(f"{content['tokens']} tokens", tuple(lines)),), note)


def by_place(content: Mapping[str, Any]) -> Table:
    """Share of the last word's attention in each quarter of the picture and in all of it."""
    groups = []
    for layer in sorted({row["layer"] for row in content["attention"]}):
        lines = []
        for row in content["attention"]:
            if row["layer"] == layer:
                quarters = [100 * sum(part) for part in quartered(row["stretches"])]
                lines.append((NAMES[row["positions"]], *(f"{one:.1f}" for one in (*quarters, 100 * row["visual"]))))
        groups.append(Group(f"layer {layer}", tuple(lines)))
    note = (
        f"In percent of the attention of the prompt's last word, mean over heads and {content['questions']} questions "
        f"of {content['title']}; the rest goes to the text."
    )
    head = ("tokens", "top quarter", "second", "third", "bottom quarter", "whole picture")
    return Table("Where the last word looks, by patch index", head, tuple(groups), note)


def label(closed_from: Any) -> str:
    """What a row of the first table is called."""
    if closed_from == "full":
        return "all tokens"
    return "kept in all layers" if closed_from is None else f"closed up from layer {closed_from + 1} on"


def quartered(stretches: list[float]) -> list[list[float]]:
    """Stretches in four equal parts."""
    size = len(stretches) // PARTS
    return [stretches[start : start + size] for start in range(0, size * PARTS, size)]


def csv_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Both tables as lines of one kind, unrounded."""
    lines: list[dict[str, Any]] = []
    for row in content["layers"]:
        low, high = row["difference_interval"] or (None, None)
        facts: dict[str, Any] = {"table": "accuracy", "name": label(row["closed_from"]), "layer": None, "stretch": None}
        lines.append({**facts, "value": row["accuracy"], "difference": row["difference"], "low": low, "high": high})
    for row in content["attention"]:
        for number, value in enumerate(row["stretches"], 1):
            facts = {"table": "attention", "name": row["positions"], "layer": row["layer"], "stretch": number}
            lines.append({**facts, "value": value, "difference": None, "low": None, "high": None})
    return lines
