"""Figures of time and memory (F16, F17, F18), from files of `llava-consensus bench`.

The first model is drawn solid, the second dashed. The paper's numbers are grey, where they can be compared: speed-ups
and savings always, milliseconds and bytes only beside a model of the same size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.efficiency import FALLBACK, FULL_TITLE, OURS, TABLES, label, read
from llava_consensus.evaluation.report.rows import FULL
from llava_consensus.paper.figures import style
from llava_consensus.paper.figures.material import Material

DASHES = ("-", "--", ":")
MIB, GB, TERA = 2**-20, 1e-9, 1e-12

Row = Mapping[str, Any]


class Quantity(NamedTuple):
    """Something measured: how it is called, read from a row of a bench file (with the full model's), and printed."""

    title: str
    ours: Callable[[Row, Row], float | None]
    printed: Callable[[Row, Row], float]
    anywhere: bool = False  # whether it can be compared with another model's


def plain(scale: float, *keys: str) -> Callable[[Row, Row], float | None]:
    """Reads a number that stands so deep in a row, times `scale`."""
    find = read(*keys)
    return lambda row, _: None if find(row) is None else scale * find(row)


def saving(row: Row, full: Row) -> float:
    """How much smaller the cache is than the full model's, in percent."""
    return 100 * (1 - row["kv_bytes"] / full["kv_bytes"])


TTFT = Quantity("time to first token (ms)", plain(1.0, "ttft_ms"), lambda row, _: row["ttft_ms"])
SPEEDUP = Quantity("speed-up", plain(1.0, "speedup"), lambda row, _: row["speedup"], anywhere=True)
KV = Quantity("KV cache (MiB)", plain(MIB, "kv_bytes"), lambda row, _: row["kv_mb"])
QUANTITIES = (
    TTFT,
    SPEEDUP,
    KV,
    Quantity("TFLOPs of the language model", plain(TERA, "paper", "flops"), lambda row, _: row["flops_t"]),
    Quantity("peak memory (GB)", plain(GB, "peak_bytes"), lambda row, _: row["gpu_mem_gb"]),
    Quantity("KV saved (%)", saving, lambda row, full: 100 * (1 - row["kv_mb"] / full["kv_mb"]), anywhere=True),
)


def over_ratio(material: Material) -> Any:
    """F16: six panels over the share of tokens that is taken away."""
    return _draw(material, QUANTITIES, 3)


def time_and_cache(material: Material) -> Any:
    """F17: time to first token and cache over the same."""
    return _draw(material, (TTFT, KV), 2)


def speedups(material: Material) -> Any:
    """F18: a group of bars for each budget of the first model, the paper's beside them in grey."""
    content = material.measured[0]
    rows = [row for row in content["rows"] if row["method"] != FULL]
    ratios = sorted({row["reduction_percent"] for row in rows})
    methods = list(dict.fromkeys(label(row) for row in rows))
    figure, (panel,) = style.panels(1, 1, (6.4, 2.6))
    width = 0.85 / len(methods)
    printed = {(row["method"], row["tokens"]): row["speedup"] for row in paper.tables()[_table(content)]}
    for number, name in enumerate(methods):
        own = {row["reduction_percent"]: row for row in rows if label(row) == name}
        places = [place for place, ratio in enumerate(ratios) if ratio in own]
        across = [place + (number - (len(methods) - 1) / 2) * width for place in places]
        found = [own[ratios[place]] for place in places]
        hatch = ("", "///", "...", "xxx", "\\\\\\")[number % 5]
        panel.bar(
            across,
            [row["speedup"] for row in found],
            0.92 * width,
            color=style.look(number).colour,
            label=name,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
        )
        theirs = [
            (x, printed[_printed_name(row), row["tokens"]])
            for x, row in zip(across, found, strict=True)
            if (_printed_name(row), row["tokens"]) in printed
        ]
        for x, value in theirs:
            panel.hlines(
                value,
                x - width / 2,
                x + width / 2,
                color="#555555",
                linewidth=1.4,
                label=f"printed in the paper ({_model_of(_table(content))})",
            )
    panel.axhline(1, color="black", linestyle=":", linewidth=0.8)
    panel.set_xticks(range(len(ratios)), [f"{ratio:.0f} % fewer" for ratio in ratios])
    panel.set_ylabel("speed-up of the first token")
    panel.set_title(f"{content['model']} on {content['machine']['device']}")
    style.key(figure, [panel], 5)
    return figure


def _draw(material: Material, quantities: Sequence[Quantity], columns: int) -> Any:
    contents = material.measured
    first = contents[0]
    figure, panels = style.panels(len(quantities), columns, (2.5, 2.0))
    names = list(dict.fromkeys(label(row) for content in contents for row in content["rows"]))
    looks = {name: style.look(number) for number, name in enumerate(name for name in names if name != "full")}
    for panel, quantity in zip(panels, quantities, strict=True):
        if quantity.anywhere or first["model"] in TABLES:
            _grey(panel, quantity, _table(first))
        for content, dash in zip(contents, DASHES, strict=False):
            _lines(panel, quantity, content, dash, looks, len(contents) > 1)
        panel.set_title(quantity.title)
        panel.set_xlabel("tokens taken away (%)")
        panel.grid(True, axis="y")
    style.key(figure, panels, 4)
    return figure


def _lines(
    panel: Any, quantity: Quantity, content: Row, dash: str, looks: Mapping[str, style.Look], several: bool
) -> None:
    """A line for each method, which starts at the full model."""
    full = content["rows"][0]
    for name, (colour, marker) in looks.items():
        own = [row for row in content["rows"] if label(row) == name]
        points = [(row["reduction_percent"], quantity.ours(row, full)) for row in (full, *own)]
        known = sorted((across, up) for across, up in points if up is not None)
        words = f"{name}, {content['model']}" if several else name
        if own and known:
            panel.plot(*zip(*known, strict=True), dash, color=colour, marker=marker, label=words)


def _grey(panel: Any, quantity: Quantity, table: str) -> None:
    """ConsensusDrop as the paper prints it."""
    rows = paper.tables()[table]
    full = next(row for row in rows if row["method"] == FULL_TITLE)
    own = [row for row in rows if row["method"] in (FULL_TITLE, OURS)]
    points = sorted((row["reduction_percent"], quantity.printed(row, full)) for row in own)
    panel.plot(
        *zip(*points, strict=True),
        color=style.GREY,
        marker="x",
        linewidth=1,
        zorder=1,
        label=f"ConsensusDrop as printed ({_model_of(table)})",
    )


def _table(content: Row) -> str:
    return TABLES.get(content["model"], TABLES[FALLBACK])


def _model_of(table: str) -> str:
    return next(model for model, name in TABLES.items() if name == table)


def _printed_name(row: Row) -> str:
    return OURS if row["method"] == "consensusdrop" else str(row["title"])
