"""How the methods' own work grows (F19), from `llava-consensus bench --growth`: time and memory on random features."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llava_consensus.paper.figures import style
from llava_consensus.paper.figures.material import Material, NotMeasured

MIB = 2**-20
NAMES = {  # as tables call them; the order is that of their colours
    "consensusdrop": "ConsensusDrop",
    "divprune": "DivPrune",
    "vispruner": "VisPruner",
    "cdpruner": "CDPruner",
    "tome_post": "ToMe behind the tower",
    "visionzip": "VisionZip",
    "prumerge": "PruMerge",
}
LEAST = 1.0  # MiB; what took less cannot be told from the allocator's own


class View(NamedTuple):
    """One panel: a curve, what is along it, and what is shown."""

    title: str
    curve: str
    along: str
    axis: str
    shows: Callable[[Mapping[str, Any]], float | None]


def _time(point: Mapping[str, Any]) -> float | None:
    ms: float | None = point["ms"]
    return ms


def _memory(point: Mapping[str, Any]) -> float | None:
    return None if point["bytes"] is None or point["bytes"] * MIB < LEAST else MIB * float(point["bytes"])


TIME, MEMORY = "time (ms)", "memory (MiB)"
VIEWS = (
    View(f"{TIME}, 64 tokens", "fixed", "patches", "patches N", _time),
    View(f"{TIME}, N / 9 tokens", "ninth", "patches", "patches N", _time),
    View(f"{TIME}, N = 576, 64 tokens", "batch", "batch", "pictures in a batch", _time),
    View(f"{MEMORY}, 64 tokens", "fixed", "patches", "patches N", _memory),
    View(f"{MEMORY}, N / 9 tokens", "ninth", "patches", "patches N", _memory),
    View(f"{TIME}, N = 2,304, 64 kept", "merged", "merged", "merged tokens M", _time),
)


def curves(material: Material) -> Any:
    """F19: six panels, both axes logarithmic; a line of slope 1 in grey."""
    if material.growth is None:
        raise NotMeasured("no growth.json")
    points = material.growth["points"]
    figure, panels = style.panels(len(VIEWS), 3)
    for panel, view in zip(panels, VIEWS, strict=True):
        _draw(panel, view, [point for point in points if point["curve"] == view.curve])
    style.key(figure, panels)
    return figure


def _draw(panel: Any, view: View, points: list[Mapping[str, Any]]) -> None:
    lowest: list[tuple[float, float]] = []
    for number, (name, title) in enumerate(NAMES.items()):
        found = [(point[view.along], view.shows(point)) for point in points if point["method"] == name]
        line = [(float(place), value) for place, value in found if value is not None]
        if not line:
            continue
        colour, marker = style.look(number)
        panel.plot(*zip(*line, strict=True), color=colour, marker=marker, label=title)
        lowest = min(lowest or line, line, key=lambda one: one[0][1])
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    if lowest:
        (first, least), last = lowest[0], lowest[-1][0]
        panel.plot((first, last), (least, least * last / first), color=style.GREY, linestyle=":", label="slope 1")
    ticks = sorted({point[view.along] for point in points})
    panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
    panel.yaxis.set_major_locator(style.ticks(1.0, 3.0))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    panel.minorticks_off()
    panel.set_xlabel(view.axis)
    panel.set_title(view.title)
