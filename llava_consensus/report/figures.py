"""Figures from result files: rows in, a picture out. Needs the extra `plots`.

`llava-consensus report --figure docs/accuracy.png` draws score against tokens, one panel for each benchmark.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError, missing_extra
from llava_consensus.report.table import Row, half_width

COLOURS = ("#0b6e4f", "#3f7cac", "#d17a22", "#7d5ba6", "#8a8d91", "#c0392b")


def score_against_tokens(rows: Iterable[Row], file: Path) -> None:
    """One panel per benchmark: score of every method over its budgets, the full model as a line.

    Raises:
        DataError: when there is no complete run to draw.
        MissingDependency: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("figures (matplotlib)", "plots") from error
    done = [row for row in rows if row.score is not None]
    if not done:
        raise DataError("no complete run to draw: `make tables` measures them")
    names = sorted({row.config["benchmark"] for row in done})
    figure = Figure(figsize=(4.2 * len(names), 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    labels = sorted({row.label for row in done if not row.full})
    colours = dict(zip(labels, COLOURS * len(labels), strict=False))  # one colour for a method in every panel
    for panel, name in zip(panels, names, strict=True):
        _panel(panel, [row for row in done if row.config["benchmark"] == name], colours)
        panel.set_title(f"{name} (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=130)


def _panel(panel: Any, rows: list[Row], colours: dict[str, str]) -> None:
    """Lines with 95 % intervals over a logarithmic axis of tokens."""
    for row in rows:
        if row.full:
            panel.axhline(row.score, color="black", linestyle=":", label="all tokens")
    for label, colour in colours.items():
        found = sorted(
            (row for row in rows if row.label == label and not row.full), key=lambda row: row.config["tokens"]
        )
        tokens = [row.config["tokens"] for row in found]
        widths = [half_width(list(row.correct.values())) or 0.0 for row in found]
        panel.errorbar(tokens, [row.score for row in found], widths, color=colour, marker="o", capsize=2, label=label)
    panel.set_xscale("log", base=2)
    ticks = sorted({row.config["tokens"] for row in rows if not row.full})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_xlabel("visual tokens")
    panel.spines[["top", "right"]].set_visible(False)
