"""Figures of time and memory: F6 (accuracy over time and cache) and F16 (from files of `llava-consensus bench`).

Accuracy comes from runs, times from bench files. Beside a small model the paper's seconds mean nothing: its numbers are
grey where they can be compared, which speed-ups, savings and shares of the full model's always can, milliseconds and
bytes only beside a model of the same size. Where there are two models, the first is drawn solid, the second dashed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.efficiency import (
    FULL_TITLE,
    OURS,
    TABLES,
    label,
    printed_table,
    read,
)
from llava_consensus.evaluation.report.rows import FULL, Line
from llava_consensus.evaluation.report.section import Section
from llava_consensus.paper.figures import style
from llava_consensus.paper.material import Material, NotMeasured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = ("ConsensusDrop", "VisPruner", "SparseVLM")  # methods of F6, as we and the paper call them
DASHES = ("-", "--", ":")
MIB, GB, TERA = 2**-20, 1e-9, 1e-12

Row = Mapping[str, Any]


class Price(NamedTuple):
    """A cost on the horizontal axis: its title, its key in bench rows and in the paper's table, and the unit's size."""

    title: str
    key: str
    printed: str
    unit: float


PRICES = (
    Price("time to first token (ms)", "ttft_ms", "ttft_ms", 1.0),
    Price("KV cache (MiB)", "kv_bytes", "kv_mb", MIB),
)


class Bought(NamedTuple):
    """One method at one budget: what it costs and scores, and the quartiles of what it costs where it was timed."""

    cost: float
    score: float
    low: float
    high: float
    tokens: float

    def of(self, full: "Bought") -> "Bought":
        """A copy in percent of the full model's cost and score."""
        cost, low, high = (100 * value / full.cost for value in (self.cost, self.low, self.high))
        return self._replace(cost=cost, low=low, high=high, score=100 * self.score / full.score)


def pareto(material: Material) -> "Figure":
    """F6: Acc over time and over cache; below, both in percent of the full model beside the paper's."""
    section, bench = drawn(material)
    figure, panels = style.panels(4, 2, (3.2, 2.4))
    for column, price in enumerate(PRICES):
        full, curves = _curves(section, bench, price)
        _lines_of(panels[column], curves)
        for one in (bought for line in curves.values() for bought in line):
            panels[column].annotate(
                f"{one.tokens:g}", (one.cost, one.score), textcoords="offset points", xytext=(3, 3), fontsize=5.5
            )
        panels[column].set(xlabel=price.title, ylabel=f"Acc over {len(section.averaged)} benchmarks")
        _shares(panels[2 + column], full, curves, price)
    style.key(figure, panels, 4)
    return figure


def drawn(material: Material) -> tuple[Section, Sequence[Row]]:
    """The section with most of the methods that are drawn, and the rows of bench.json."""
    counts = [
        sum(section.accuracy(line) is not None for line in section.reduced if line.label in DRAWN)
        for section in material.sections
    ]
    if not any(counts):
        raise NotMeasured("no line with an Acc of ConsensusDrop, VisPruner or SparseVLM")
    section = material.sections[counts.index(max(counts))]
    if section.full is None or section.accuracy(section.full) is None:
        raise NotMeasured("no complete runs with all tokens")
    return section, material.bench_of(line.tokens for line in section.reduced if line.label in DRAWN)


def _curves(section: Section, bench: Sequence[Row], price: Price) -> tuple[Bought, dict[str, list[Bought]]]:
    """All tokens, and the budgets of every method that have both an Acc and a measured cost. NotMeasured for none."""
    assert section.full is not None
    full_row = next((row for row in bench if row["method"] == FULL), None)
    whole, curves = _accuracy(section, section.full), {}
    for method in DRAWN:
        found = []
        for line in (line for line in section.reduced if line.label == method):
            score, row = _accuracy(section, line), next((row for row in bench if _is_of(row, line)), None)
            if score is not None and whole and row is not None and full_row is not None:
                found.append(_bought(row, price, score, line.tokens))
        curves[method] = sorted(found)
    if full_row is None or whole is None or not any(curves.values()):
        budgets = " ".join(dict.fromkeys(f"{line.tokens:g}" for line in section.reduced if line.label in DRAWN))
        raise NotMeasured(f"no bench*.json at the budgets of the runs ({budgets})")
    return _bought(full_row, price, whole, 0), curves


def _bought(row: Row, price: Price, score: float, tokens: float) -> Bought:
    low, high = row.get("quartiles", {}).get(price.key, (row[price.key], row[price.key]))
    return Bought(row[price.key] * price.unit, score, low * price.unit, high * price.unit, tokens)


def _is_of(row: Row, line: Line) -> bool:
    """True if a bench row is about a line's method, without changed options, and its budget."""
    names = {run.config["method"] for run in line.runs.values() if not run.config["changed"]}
    return row["tokens"] == line.tokens and row["method"] in names


def _accuracy(section: Section, line: Line) -> float | None:
    mean = section.accuracy(line)
    return None if mean is None else mean.value


def _shares(panel: "Axes", full: Bought, curves: Mapping[str, Sequence[Bought]], price: Price) -> None:
    """Shares of the full model's cost and Acc; in grey the methods as the paper's Table 1 prints them."""
    rows = paper.printed_tables()[paper.PICTURES]
    printed = rows[0]
    for number, name in enumerate(DRAWN):
        own = [row for row in rows if row["method"] == name and "acc" in row and row.get(price.printed)]
        points = sorted(
            (100 * row[price.printed] / printed[price.printed], 100 * row["acc"] / printed["acc"]) for row in own
        )
        if points:
            look: Row = {"color": style.GREY, "marker": style.look(number).marker, "markersize": 3.5, "linewidth": 0.8}
            panel.plot(*zip(*points, strict=True), **look, label=f"{name}, printed (7B)", zorder=1)
    _lines_of(panel, {label: [one.of(full) for one in line] for label, line in curves.items()})
    panel.axhline(100, color="black", linestyle=":", linewidth=0.8)
    panel.set(xlabel=f"{price.title.split(' (')[0]} (% of all tokens)", ylabel="Acc (% of all tokens)")


def _lines_of(panel: "Axes", curves: Mapping[str, Sequence[Bought]]) -> None:
    for number, (method, points) in enumerate(curves.items()):
        colour, marker = style.look(number)
        if points:
            costs, scores = [one.cost for one in points], [one.score for one in points]
            ends = [[one.cost - one.low for one in points], [one.high - one.cost for one in points]]
            look: Row = {"color": colour, "marker": marker, "label": method, "elinewidth": 0.7}
            panel.errorbar(costs, scores, xerr=ends, **look)
    panel.grid(True)


# ---- F16


class Quantity(NamedTuple):
    """Something measured: how it is called, read from a row of a bench file (with the full model's), and printed."""

    title: str
    ours: Callable[[Row, Row], float | None]
    printed: Callable[[Row, Row], float]
    anywhere: bool = False  # whether it can be compared with another model's
    quartiles: Callable[[Row, Row], tuple[float, float]] | None = None  # of its samples, the lower one first


def plain(scale: float, *keys: str) -> Callable[[Row, Row], float | None]:
    """Getter of a nested number of a row, times `scale`."""
    find = read(*keys)
    return lambda row, _: None if find(row) is None else scale * find(row)


def saving(row: Row, full: Row) -> float:
    """KV bytes saved against the full model, in percent."""
    return 100 * (1 - row["kv_bytes"] / full["kv_bytes"])


def allocated(row: Row, _: Row) -> float | None:
    """Peak of the device's allocator; None on a CPU, where the process's own memory is noise."""
    known = row["peak_bytes"] is not None and str(row.get("device", "")).startswith("cuda")
    return GB * row["peak_bytes"] if known else None


def _times(row: Row, _: Row) -> tuple[float, float]:
    low, high = row["quartiles"]["ttft_ms"]
    return low, high


def _speedups(row: Row, full: Row) -> tuple[float, float]:
    low, high = row["quartiles"]["ttft_ms"]
    return full["ttft_ms"] / high, full["ttft_ms"] / low


QUANTITIES = (
    Quantity("time to first token (ms)", plain(1.0, "ttft_ms"), lambda row, _: row["ttft_ms"], quartiles=_times),
    Quantity("speed-up", plain(1.0, "speedup"), lambda row, _: row["speedup"], anywhere=True, quartiles=_speedups),
    Quantity("KV cache (MiB)", plain(MIB, "kv_bytes"), lambda row, _: row["kv_mb"]),
    Quantity("TFLOPs of the language model", plain(TERA, "paper", "flops"), lambda row, _: row["flops_t"]),
    Quantity("peak memory (GB)", allocated, lambda row, _: row["gpu_mem_gb"]),
    Quantity("KV saved (%)", saving, lambda row, full: 100 * (1 - row["kv_mb"] / full["kv_mb"]), anywhere=True),
)


def over_ratio(material: Material) -> "Figure":
    """F16: a panel for each quantity that was measured, over the share of tokens that is taken away."""
    rows = [
        ({"device": one["machine"]["device"], **row}, one["rows"][0])
        for one in material.measured
        for row in one["rows"]
    ]
    quantities = [quantity for quantity in QUANTITIES if any(quantity.ours(*pair) is not None for pair in rows)]
    contents = material.measured
    first = contents[0]
    figure, panels = style.panels(len(quantities), 3, (2.5, 2.0))
    names = list(dict.fromkeys(label(row) for content in contents for row in content["rows"]))
    looks = {name: style.look(number) for number, name in enumerate(name for name in names if name != "full")}
    for panel, quantity in zip(panels, quantities, strict=True):
        if quantity.anywhere or first["model"] in TABLES:
            _grey_line(panel, quantity, printed_table(first["model"]))
        for content, dash in zip(contents, DASHES, strict=False):
            _lines(panel, quantity, content, dash, looks, len(contents) > 1)
        panel.set_title(quantity.title)
        panel.set_xlabel("tokens taken away (%)")
        panel.grid(True, axis="y")
    style.key(figure, panels, 4)
    return figure


def _lines(
    panel: "Axes", quantity: Quantity, content: Row, dash: str, looks: Mapping[str, style.Look], several: bool
) -> None:
    """A line for each method, which starts at the full model, with the quartiles of what was timed."""
    full, device = content["rows"][0], content["machine"]["device"]
    for name, (colour, marker) in looks.items():
        own = [{"device": device, **row} for row in content["rows"] if label(row) == name]
        rows = sorted([full, *own], key=lambda row: row["reduction_percent"])
        known = [(row, up) for row in rows if (up := quantity.ours(row, full)) is not None]
        words = f"{name}, {content['model']}" if several else name
        if own and known:
            across, values = [row["reduction_percent"] for row, _ in known], [up for _, up in known]
            timed = quantity.quartiles if all("quartiles" in row for row, _ in known) else None
            ends = None if timed is None else style.reaches(values, [timed(row, full) for row, _ in known])
            look: dict[str, Any] = {"color": colour, "marker": marker, "label": words, "elinewidth": 0.6, "capsize": 2}
            panel.errorbar(across, values, ends, linestyle=dash, **look)


def _grey_line(panel: "Axes", quantity: Quantity, table: str) -> None:
    """ConsensusDrop as the paper prints it."""
    rows = paper.printed_tables()[table]
    full = next(row for row in rows if row["method"] == FULL_TITLE)
    own = [row for row in rows if row["method"] in (FULL_TITLE, OURS)]
    points = ((row["reduction_percent"], quantity.printed(row, full)) for row in own)
    model = next(model for model, name in TABLES.items() if name == table)
    style.printed(panel, points, f"ConsensusDrop as printed ({model})")
