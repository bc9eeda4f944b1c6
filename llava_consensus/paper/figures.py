"""Every figure of the paper from result files: `llava-consensus paper figures --out results --to FOLDER`.

`FIGURES` is the only list. A figure whose results are missing is named with the command that makes them, and not drawn.
Colours are those of Okabe and Ito, and everything that has a colour has a marker or a place of its own too, so figures
can be read in grey print. Grey is what the paper prints: another model on other data, so compare shapes, not levels.
Needs the extra `plots`.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from math import ceil, floor
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from llava_consensus.errors import DataError, missing_extra
from llava_consensus.evaluation.files import write_out
from llava_consensus.evaluation.report import efficiency, paper
from llava_consensus.evaluation.report.rows import LINEUP, RANDOM, compare
from llava_consensus.evaluation.report.section import Section
from llava_consensus.paper import preset
from llava_consensus.paper.results import Material, NotMeasured, Results, scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("png", "svg")
NARROWEST = 3.8  # inches of a figure; captions and legends of one panel need them
INCH_OF_LETTER, INCH_OF_HANDLE = 0.055, 0.5  # of a legend
GREY = "#9a9a9a"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = tuple(zip(PALETTE, MARKERS, strict=True))
PRINTED = "printed in the paper (LLaVA-1.5-7B)"
DIVERGING = "PuOr"  # colour map: pale if nothing differs
MERGED = 20  # of 128 tokens, which the paper merges
SIGNALS = ("cross-only", "vision-only", "recovery, cross as student", "recovery, vision as student")
PARETO = ("ConsensusDrop", "VisPruner", "SparseVLM")
MIB, GB, TERA = 2**-20, 1e-9, 1e-12

Drawing = tuple["Figure", str]  # and its caption


# ---- style


@contextlib.contextmanager
def sheet() -> Iterator[None]:
    """Applies the style sheet inside the block. MissingDependency without matplotlib."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise missing_extra("figures (matplotlib)", "plots") from error
    with (
        resources.as_file(resources.files("llava_consensus.paper") / "paper.mplstyle") as path,
        matplotlib.rc_context(fname=path),
    ):
        yield


def panels(count: int, columns: int, size: tuple[float, float], **options: Any) -> "tuple[Figure, list[Axes]]":
    """A figure with `count` panels in rows of at most `columns`, each of a width and height in inches."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = ceil(count / columns)
    figure = Figure((max(size[0] * columns + 0.2, NARROWEST), size[1] * rows + 0.4), layout="constrained")
    found = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in found[count:]:
        panel.set_axis_off()
    return figure, found[:count]


def legend(figure: "Figure", columns: int = 4) -> None:
    """One legend below a figure for everything that has a label in it."""
    found = {
        label: handle for panel in figure.axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if found:
        widest = INCH_OF_HANDLE + INCH_OF_LETTER * max(map(len, found))
        columns = max(1, min(columns, int(figure.get_figwidth() / widest), len(found)))
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False)


def caption(figure: "Figure", words: str) -> None:
    """A line above the panels: model, data, questions and device."""
    figure.suptitle(fill(words, max(40, int(17 * figure.get_figwidth()))), fontsize=6.5, color="#444444")


def save(figure: "Figure", file: Path) -> None:
    """Writes an image of the kind that the file's name ends with. DataError for an unknown kind."""
    content, kind = io.BytesIO(), file.suffix.removeprefix(".") or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise DataError(f"{file}: must end with .png, .pdf or .svg")
    figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_out(file, content.getvalue())


def save_all(figure: "Figure", folder: Path, name: str) -> None:
    """A figure as one file of every kind."""
    for kind in KINDS:
        save(figure, folder / f"{name}.{kind}")


def _lines(panel: "Axes", points: Sequence[Any], number: int, label: str, **more: Any) -> None:
    """A line through (across, values, low, high) with intervals, in the colour and with the marker of its number."""
    across, values, low, high = (np.asarray(part, dtype=float) for part in points)
    colour, marker = STYLES[number % len(STYLES)]
    ends = np.nan_to_num(np.stack([values - low, high - values])).clip(0)
    look: dict[str, Any] = {"color": colour, "marker": marker, "label": label, "elinewidth": 0.7, "capsize": 2} | more
    panel.errorbar(across, values, ends, **look)


def _printed(panel: "Axes", across: Any, values: Any, line: str = "-", label: str = PRINTED) -> None:
    """The paper's numbers in grey, behind ours."""
    points = pd.Series(list(values), list(across), dtype=float).dropna().sort_index()
    if len(points):
        panel.plot(points, line, color=GREY, marker="x", linewidth=1, label=label, zorder=1)


# ---- the controlled study: F2, F3, F4, and SCAP by place


def _study(material: Material) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The reduced rows of study.json with positions kept, as FastV does, and those of all tokens; scores in percent."""
    rows = pd.DataFrame((material.study or {}).get("rows", []))
    kept = rows[rows.positions == "keep"] if len(rows) else rows
    if not len(kept):
        raise NotMeasured("no study.json with rows")
    rows["score"] = rows.accuracy / rows.scale
    for end, name in enumerate(("low", "high")):
        rows[name] = rows.interval.map(lambda pair, end=end: np.nan if pair is None else pair[end]) / rows.scale
    recovered = "recovery, " + rows.student.astype(str) + " as student"
    rows["signal"] = recovered.where(rows.scores == "recovery", rows.scores + "-only")
    return rows[rows.positions == "keep"], rows[rows.scores == "full"]


def _of_study(material: Material, rows: pd.DataFrame) -> str:
    setting = (material.study or {})["description"]
    asked = {row.title: f"{row.title} {row.questions} questions / {row.pictures} images" for row in rows.itertuples()}
    return f"{_setting(setting)}: {', '.join(asked.values())}; positions kept"


def _setting(config: Mapping[str, Any]) -> str:
    return f"{config.get('model')} on {config.get('data')}, {config.get('device')}"


def recovery_helps(material: Material) -> Drawing:
    """F2: both single signals and recovery with either student, a panel for each benchmark. The number in a bar of
    recovery is its rate, the best of those that were run.
    """
    rows, full = _study(material)
    best = rows.sort_values("accuracy").groupby(["benchmark", "retention", "signal"]).tail(1)
    retentions, names = sorted(rows.retention.unique()), rows.benchmark.unique()
    where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "center", "fontsize": 5.5}
    where["bbox"] = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
    figure, axes = panels(len(names), 3, (2.6, 2.1))
    for panel, name in zip(axes, names, strict=True):
        own = best[best.benchmark == name]
        for place, signal in enumerate(SIGNALS):
            found = own[own.signal == signal]
            middle = found.retention.map(retentions.index) + (place - 1.5) * 0.2
            look: dict[str, Any] = {"hatch": "////", "edgecolor": "white", "linewidth": 0} if place > 1 else {}
            panel.bar(middle, found.score, 0.184, color=PALETTE[place], label=signal, **look)
            panel.vlines(middle, found.low, found.high, color="black", linewidth=0.8)
            for x, rate in zip(middle, found.rate, strict=True):
                if place > 1:
                    panel.annotate(f"{rate:g}", (x, 0.03), **where)
        for score in full[full.benchmark == name].score:
            panel.axhline(score, color="black", linestyle=":", linewidth=1, label="all tokens")
        # the axis starts below the lowest interval, so that differences can be seen
        bottom = max(0.0, 5 * ((own.low.fillna(own.score).min() - 5) // 5))
        panel.set_ylim(bottom, min(101.0, panel.get_ylim()[1]))
        panel.set_ylabel("score (%)" + (f", axis from {bottom:g}" if bottom else ""))
        panel.set_xticks(range(len(retentions)), [f"{100 * share:g} % kept" for share in retentions])
        panel.set_title(own.title.iloc[0])
    legend(figure, 5)
    return figure, _of_study(material, rows)


def three_way(material: Material) -> Drawing:
    """F3: a bubble for each benchmark and retention: gain over correction, its size the disagreement."""
    rows, _ = _study(material)
    rows = rows[(rows.scores == "recovery") & rows.gain.notna()]
    students = sorted(rows.student.unique(), reverse=True)
    if not students:
        raise NotMeasured("no recovery in study.json")
    ranges = rows.groupby("retention").disagreement.agg(["min", "max"])
    figure, axes = panels(len(students), 2, (3.4, 3.0), sharey=True)
    for panel, student in zip(axes, students, strict=True):
        for number, (retention, own) in enumerate(rows[rows.student == student].groupby("retention")):
            low, high = 100 * ranges.loc[retention]
            label = f"{100 * retention:g} % kept: size is the disagreement, {low:.0f} to {high:.0f} %"
            colour, marker = STYLES[number % len(STYLES)]
            look: dict[str, Any] = {"color": colour, "marker": marker, "alpha": 0.55, "edgecolors": "white"}
            panel.scatter(own.correction, own.gain / own.scale, 300 * own.disagreement, label=label, **look)
        panel.axhline(0, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=f"student: {student}", xlabel="correction factor")
    axes[0].set_ylabel("gain over the student alone (points)")
    legend(figure, 1)
    return figure, _of_study(material, rows)


def decay(material: Material) -> Drawing:
    """F4: the correction factor over the rate, on the paper's two benchmarks, or the first that was run."""
    rows, _ = _study(material)
    rows = rows[rows.scores == "recovery"]
    names = [name for name in ("pope", "gqa") if name in set(rows.benchmark)] or list(rows.benchmark.unique()[:1])
    rows = rows[rows.benchmark.isin(names)]
    figure, axes = panels(len(names), 2, (2.8, 2.3), sharey=True)
    for panel, name in zip(axes, names, strict=True):
        sides = rows[rows.benchmark == name].sort_values("rate").groupby(["student", "retention"])
        for number, ((student, retention), own) in enumerate(sorted(sides, key=lambda side: side[0][0] != "vision")):
            label, dash = f"{student} as student, {100 * retention:g} % kept", "-" if student == "vision" else "--"
            colour, marker = STYLES[number % len(STYLES)]
            panel.plot(own.rate, own.correction, dash, color=colour, marker=marker, label=label)
        panel.set(title=own.title.iloc[0], xlabel="recovery rate r", xticks=sorted(own.rate.unique()))
    axes[0].set_ylim(0, None)  # after all lines: it is shared, and would cut those of later panels
    axes[0].set_ylabel("correction factor")
    legend(figure, 2)
    return figure, _of_study(material, rows)


def scap_by_place(material: Material) -> Drawing:
    """SCAP's mean saliency by patch index, with and without rotation: where it looks whatever the image shows."""
    scap = material.scap or {}
    if not scap.get("positions"):
        raise NotMeasured("no scap.json with positions")
    figure, (panel,) = panels(1, 1, (3.6, 2.4))
    for number, line in enumerate(scap["positions"]):
        label, (colour, marker) = (
            "queries and keys rotated (SCAP)" if line["rotated"] else "not rotated",
            STYLES[number],
        )
        across = range(1, len(line["saliency"]) + 1)
        panel.plot(across, line["saliency"], color=colour, marker=marker, markersize=3, label=label)
    panel.axhline(1, color="black", linestyle=":", linewidth=0.8)
    panel.set(xlabel=f"patches, from the first to the last in {len(across)} stretches")
    panel.set(ylabel="mean saliency (1: no preference)", ylim=(0, None))
    legend(figure, 2)
    asked = f"{scap['benchmark']} {scap['questions']} questions / {scap.get('pictures')} images"
    return figure, f"{_setting(scap['description'])}: {asked}"


# ---- the ablations: F9 to F13


def _ablation(material: Material, name: str, *keys: str) -> tuple[Results, pd.DataFrame]:
    """The runs of the settings that the paper prints, on the benchmarks that all of them have: a line each, with the
    options `keys` of its method, its score and interval and the paper's number in percent.
    """
    results = material.of(preset.read(name))
    lines = [line for line in results.preset.rows if line.printed and any(line is row for row, _ in results.runs)]
    names = [one for one in results.preset.benchmarks if all((line, one) in results.runs for line in lines)]
    found = []
    for line in lines:
        method, merged = (
            line.reduction[0],
            floor(MERGED * line.tokens / 128 + 0.5) if line.merged is None else line.merged,
        )
        setting = {key: merged if key == "merged" else getattr(method, key) for key in keys}
        for one in names:
            printed = results.printed(line, one)
            theirs = np.nan if printed is None else printed / scale(results.preset.benchmarks[one])
            ours = dict(zip(("score", "low", "high"), results.percent(line, one) or (np.nan,) * 3, strict=True))
            about = {"line": line, "benchmark": one, "title": results.title(one), "paper": theirs}
            found.append({**setting, **ours, **about})
    if not names or len(lines) < 2:
        raise NotMeasured(f"no two settings of {', '.join(keys)} with one budget and benchmark")
    return results, pd.DataFrame(found)


def _about(results: Results, names: Sequence[str]) -> str:
    runs = {name: run for (_, name), run in results.runs.items() if name in names}
    asked = [
        f"{results.title(name)} {(run.metrics or {}).get('questions')} questions / {run.pictures} images"
        for name, run in runs.items()
    ]
    tokens = {f"; {row.tokens:g} tokens" for row in results.preset.rows}
    words = tokens.pop() if len(tokens) == 1 else ""
    return f"{_setting(next(iter(runs.values())).config)}: {', '.join(asked)}{words}"


def alpha(material: Material) -> Drawing:
    """F9: scores over alpha, a panel for each benchmark."""
    results, rows = _ablation(material, "alpha", "alpha")
    figure, axes = panels(rows.benchmark.nunique(), 3, (2.4, 2.0))
    for panel, (title, own) in zip(axes, rows.groupby("title", sort=False), strict=True):
        _lines(panel, (own.alpha, own.score, own.low, own.high), 0, "ConsensusDrop")
        _printed(panel, own.alpha, own.paper)
        panel.set(title=title, xlabel="alpha")
    axes[0].set_ylabel("score (%)")
    legend(figure, 5)
    return figure, _about(results, rows.benchmark.unique())


def recovery(material: Material) -> Drawing:
    """F11: scores over the recovery rate, a line for each student."""
    results, rows = _ablation(material, "recovery", "student", "rate")
    figure, axes = panels(rows.benchmark.nunique(), 3, (2.4, 2.0))
    for panel, (title, own) in zip(axes, rows.groupby("title", sort=False), strict=True):
        for number, (student, line) in enumerate(own.groupby("student", sort=False)):
            _lines(panel, (line.rate, line.score, line.low, line.high), number, f"{student} as student")
            _printed(panel, line.rate, line.paper, ("-", "--")[number], f"{PRINTED}, {student}")
        panel.set(title=title, xlabel="recovery rate")
    axes[0].set_ylabel("score (%)")
    legend(figure, 2)
    return figure, _about(results, rows.benchmark.unique())


def anchors(material: Material) -> Drawing:
    """F12: scores over the number of merged tokens, and the paired improvement over none."""
    results, rows = _ablation(material, "anchors", "merged")
    none = rows[rows.merged == 0].set_index("benchmark").line
    if not len(none):
        raise NotMeasured("no run with merged=0, which the improvement is over")
    figure, (left, right) = panels(2, 2, (3.3, 2.6))
    for number, (title, own) in enumerate(rows.groupby("title", sort=False)):
        _lines(left, (own.merged, own.score, own.low, own.high), number, title)
        points = []
        for row in own[own.merged != 0].itertuples():
            run = results.runs[row.line, row.benchmark]
            test = compare(run, results.runs[none[row.benchmark], row.benchmark])
            if test is not None:
                ends = test.bounds or (test.difference, test.difference)
                points.append(
                    (row.merged + 0.35 * (number - 2), *(value / run.scale for value in (test.difference, *ends)))
                )
        if points:
            _lines(right, list(zip(*points, strict=True)), number, title, linestyle="")
    means = rows.groupby("merged").paper.mean()
    _printed(right, means.index, means - means[0], label=f"mean {PRINTED}")
    right.axhline(0, color="black", linestyle=":", linewidth=0.8)
    for panel, label in ((left, "score (%)"), (right, "improvement over none (points)")):
        panel.set(xlabel=f"merged tokens of {rows.line[0].tokens:g}", ylabel=label)
    legend(figure, 3)
    return figure, _about(results, rows.benchmark.unique())


def temperature(material: Material) -> Drawing:
    """F10: a map of both temperatures for each benchmark, ours above, the paper's below; colours are points from the
    map's own mean.
    """
    results, rows = _ablation(material, "temperature", "tau_vision", "tau_cross")
    groups = list(rows.groupby("title", sort=False))
    figure, axes = panels(2 * len(groups), len(groups), (1.55, 1.5))
    maps = [
        own.pivot(index="tau_vision", columns="tau_cross", values=of) for of in ("score", "paper") for _, own in groups
    ]
    halves = [own.assign(half=(own.high - own.low) / 2) for _, own in groups]
    notes = [own.pivot(index="tau_vision", columns="tau_cross", values="half") for own in halves]
    _maps(figure, axes, maps, [table - table.stack().mean() for table in maps], notes, "points from the map's mean")
    for panel in axes:
        panel.invert_yaxis()
        panel.set_xlabel("cross temperature")
    for panel, (title, _) in zip(axes, groups, strict=False):
        panel.set_title(title)
    for panel, whose in zip(axes[:: len(groups)], ("ours", "paper"), strict=True):
        panel.set_ylabel(f"{whose}\nvision temperature")
    return figure, _about(results, rows.benchmark.unique())


def score(material: Material) -> Drawing:
    """F13: every way to score saliencies: numbers are scores, colours points from the benchmark's mean."""
    results, rows = _ablation(material, "score", "vision_score", "aggregate")
    rows["setting"] = rows["vision_score"] + " + " + rows["aggregate"]
    maps = []
    for of in ("score", "paper"):
        table = rows.pivot(index="setting", columns="title", values=of)[rows.title.unique()].dropna(axis=1)
        counted = [one for one in table if one not in map(results.title, results.near_chance)] or list(table)
        maps += [table.assign(mean=table[counted].mean(axis=1))] if len(table.columns) else []
    figure, axes = panels(len(maps), 2, (3.6, 2.6))
    _maps(figure, axes, maps, [table - table.mean() for table in maps], [], "points from the column's mean")
    for panel, title in zip(axes, ("ours", "paper"), strict=False):
        panel.set(title=title, aspect="auto")
        panel.tick_params(axis="x", rotation=30)
    return figure, _about(results, rows.benchmark.unique())


def _maps(
    figure: "Figure",
    axes: "Sequence[Axes]",
    maps: Sequence[pd.DataFrame],
    deviations: Sequence[pd.DataFrame],
    halves: Sequence[pd.DataFrame],
    label: str,
) -> None:
    """Maps with their numbers, and half intervals if given, on one scale of colours; at least a point, so that a tenth
    of one stays pale.
    """
    reach = max(1.0, *(table.abs().max().max() for table in deviations if table.notna().any().any()))
    for number, (panel, table, deviation) in enumerate(zip(axes, maps, deviations, strict=True)):
        if table.isna().all(axis=None):
            panel.set_axis_off()
            continue
        image = panel.imshow(deviation, cmap=DIVERGING, vmin=-reach, vmax=reach)
        panel.set_xticks(range(table.shape[1]), [str(one) for one in table.columns])
        panel.set_yticks(range(table.shape[0]), [str(one) for one in table.index])
        for (row, column), value in np.ndenumerate(table.to_numpy(dtype=float)):
            dark = abs(deviation.iloc[row, column]) > 0.6 * reach
            words = f"{value:.1f}" + (f"\n± {halves[number].iloc[row, column]:.1f}" if number < len(halves) else "")
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5}
            panel.text(column, row, "" if np.isnan(value) else words, color="white" if dark else "black", **look)
    figure.colorbar(image, ax=list(axes), shrink=0.8, label=label)


# ---- time and memory: F6, F16


def pareto(material: Material) -> Drawing:
    """F6: accuracy over time and over cache; below, both in percent of the full model, beside the paper's Table 1."""
    results = material.of(preset.read("t1"))
    lines = [None, *(line for line in results.preset.rows if line.label in PARETO)]
    lines = [line for line in lines if any(line is row for row, _ in results.runs)]
    names = [name for name in results.averaged if all((line, name) in results.runs for line in lines)]
    if not names or None not in lines or len(lines) < 2:
        raise NotMeasured(f"no benchmark with complete runs of all tokens and of {', '.join(PARETO)}")
    common = {name: results.preset.benchmarks[name] for name in names}
    accuracy = {line: replace(results, preset=replace(results.preset, benchmarks=common)).mean(line) for line in lines}
    bench = material.bench_of([line.tokens for line in lines if line])
    timed = {(row["method"], row["tokens"]): row for row in bench}
    full = next((row for row in bench if row["method"] == "full"), None)
    points = []
    for line, acc in accuracy.items():
        row = full if line is None else timed.get((line.method, line.tokens))
        if row is not None and full is not None:
            points.append({"label": "all" if line is None else line.label, "acc": acc, **row})
    frame = pd.DataFrame(points)
    if not len(frame[frame.label != "all"] if len(frame) else frame):
        budgets = " ".join(f"{tokens:g}" for tokens in dict.fromkeys(line.tokens for line in lines if line))
        raise NotMeasured(f"no bench*.json at the budgets of the runs ({budgets})")
    printed = pd.DataFrame(paper.printed_tables()[paper.PICTURES])
    figure, axes = panels(4, 2, (3.2, 2.4))
    prices = (("time to first token", "ttft_ms", "ttft_ms", 1.0, "ms"), ("KV cache", "kv_bytes", "kv_mb", MIB, "MiB"))
    for column, (title, key, theirs, unit, word) in enumerate(prices):
        above, below = axes[column], axes[2 + column]
        whole = frame[frame.label == "all"].iloc[0]
        for number, label in enumerate(PARETO):
            own = frame[frame.label == label].sort_values(key)
            if len(own):
                pairs = [(row.get("quartiles") or {}).get(key, (row[key], row[key])) for _, row in own.iterrows()]
                ends = np.abs(np.array(pairs).T - own[key].to_numpy())
                look: dict[str, Any] = {"color": PALETTE[number], "marker": MARKERS[number], "label": label}
                look["elinewidth"] = 0.7
                above.errorbar(unit * own[key], own.acc, xerr=unit * ends, **look)
                share, up = 100 * own[key] / whole[key], 100 * own.acc / whole.acc
                below.errorbar(share, up, xerr=100 * ends / whole[key], **look)
                for row in own.itertuples():
                    place = (unit * getattr(row, key), row.acc)
                    above.annotate(f"{row.tokens:g}", place, xytext=(3, 3), textcoords="offset points", fontsize=5.5)
            line = printed[(printed.method == label) & printed[theirs].notna()].sort_values(theirs)
            shares = 100 * line[[theirs, "acc"]] / printed[[theirs, "acc"]].iloc[0]
            look = {"color": GREY, "marker": MARKERS[number], "markersize": 3.5, "linewidth": 0.8, "zorder": 1}
            below.plot(shares[theirs], shares.acc, label=f"{label}, printed (7B)", **look)
        below.axhline(100, color="black", linestyle=":", linewidth=0.8)
        above.set(xlabel=f"{title} ({word})", ylabel=f"mean of {len(names)} benchmarks (%)")
        below.set(xlabel=f"{title} (% of all tokens)", ylabel="mean (% of all tokens)")
        above.grid(True)
        below.grid(True)
    legend(figure, 4)
    return figure, f"{_about(results, names)}; {_of_benches(material)}"


def _of_benches(material: Material) -> str:
    return "; ".join(
        f"{one['model']} on {one['machine']['device']} ({one['machine'].get('processor', '')}), medians of "
        f"{len(one['rows'][0].get('samples', ()))} answers, whiskers: quartiles"
        for one in material.measured
    )


def over_ratio(material: Material) -> Drawing:
    """F16: a panel for each measured quantity over the share of tokens that is taken away; the first model is solid,
    the second dashed. Seconds and bytes of the paper are shown beside a model of the same size only, ratios beside any.
    """
    contents = material.measured
    table = efficiency.printed_table(contents[0]["model"])
    theirs = pd.DataFrame(paper.printed_tables()[table])
    theirs = theirs[theirs.method.isin(("Baseline", "ConsensusDrop (Ours)"))]
    same = contents[0]["model"] in efficiency.TABLES
    theirs = theirs.assign(kv_saved=100 * (1 - theirs.kv_mb / theirs.kv_mb.iloc[0]))
    quantities = (  # our column, the paper's, title
        ("ttft_ms", "ttft_ms", "time to first token (ms)"),
        ("speedup", "speedup", "speed-up"),
        ("kv", "kv_mb", "KV cache (MiB)"),
        ("flops", "flops_t", "TFLOPs of the language model"),
        ("peak", "gpu_mem_gb", "peak memory (GB)"),
        ("kv_saved", "kv_saved", "KV saved (%)"),
    )
    frames = [_bench_frame(content) for content in contents]
    shown = [quantity for quantity in quantities if any(frame[quantity[0]].notna().any() for frame in frames)]
    labels = list(dict.fromkeys(label for frame in frames for label in frame.label if label != "full"))
    figure, axes = panels(len(shown), 3, (2.5, 2.0))
    for panel, (key, column, title) in zip(axes, shown, strict=True):
        if same or key in ("speedup", "kv_saved"):
            model = next(model for model, name in efficiency.TABLES.items() if name == table)
            _printed(panel, theirs.reduction_percent, theirs[column], label=f"ConsensusDrop as printed ({model})")
        for content, frame, dash in zip(contents, frames, ("-", "--", ":"), strict=False):
            for number, label in enumerate(labels):
                own = frame[frame.label.isin(("full", label)) & frame[key].notna()].sort_values("reduction_percent")
                words = f"{label}, {content['model']}" if len(contents) > 1 else label
                if label in set(own.label):
                    ends = [own[f"{key}_{end}"] if f"{key}_low" in own else own[key] for end in ("low", "high")]
                    _lines(panel, (own.reduction_percent, own[key], *ends), number, words, linestyle=dash)
        panel.set(title=title, xlabel="tokens taken away (%)")
        panel.grid(True, axis="y")
    legend(figure, 4)
    return figure, _of_benches(material)


def _bench_frame(content: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of a bench file, all tokens first, with what F16 shows of them."""
    rows = content["rows"]
    frame, full = pd.DataFrame(rows), rows[0]
    frame["label"] = ["full", *map(efficiency.label, rows[1:])]
    frame["kv"] = MIB * frame.kv_bytes
    frame["kv_saved"] = 100 * (1 - frame.kv_bytes / full["kv_bytes"])
    frame["flops"] = [TERA * row["paper"]["flops"] if row.get("paper") else np.nan for row in rows]
    # the memory of a process on the CPU is noise
    on_gpu = str(content["machine"]["device"]).startswith("cuda")
    frame["peak"] = GB * frame.peak_bytes.astype(float) if on_gpu else np.nan
    times = np.array([(row.get("quartiles") or {}).get("ttft_ms", [row["ttft_ms"]] * 2) for row in rows])
    frame["ttft_ms_low"], frame["ttft_ms_high"] = times.T
    frame["speedup_low"], frame["speedup_high"] = full["ttft_ms"] / times.T[::-1]
    return frame


# ---- the list

STUDY = "llava-consensus paper study"
BENCH = 'llava-consensus bench --out results/bench.json --tokens "432 288 144 57 28"'
TIMED = (
    "llava-consensus paper table t1 && llava-consensus bench --out results/bench-tradeoff.json "
    '--methods "consensusdrop vispruner sparsevlm" --tokens "192 128 64 32"'
)


class FigureOf(NamedTuple):
    """One figure: name of its files, what it shows, what draws it, and the command that makes its results."""

    name: str
    title: str
    draw: Callable[[Material], Drawing]
    makes: str


FIGURES = (
    FigureOf("f02-recovery-helps", "both signals alone and together", recovery_helps, STUDY),
    FigureOf("f03-three-way", "disagreement, correction and gain", three_way, STUDY),
    FigureOf("f04-decay", "correction over the recovery rate", decay, STUDY),
    FigureOf("f06-pareto", "accuracy over time and cache", pareto, TIMED),
    FigureOf("f09-alpha", "weight of the vision side", alpha, "llava-consensus paper table alpha"),
    FigureOf("f10-temperature", "temperatures of both sides", temperature, "llava-consensus paper table temperature"),
    FigureOf("f11-recovery", "student and rate of recovery", recovery, "llava-consensus paper table recovery"),
    FigureOf("f12-anchors", "how many tokens are merged ones", anchors, "llava-consensus paper table anchors"),
    FigureOf("f13-score", "how saliencies are scored", score, "llava-consensus paper table score"),
    FigureOf("f16-efficiency", "six costs over the share taken away", over_ratio, BENCH),
    FigureOf("claim-11-scap", "where the probe looks whatever the image shows", scap_by_place, STUDY),
)


def draw(material: Material, folder: Path) -> Iterator[tuple[FigureOf, str]]:
    """Every figure as PNG and SVG in a folder, each with what is missing; nothing if it was drawn."""
    for figure in FIGURES:
        with sheet():
            try:
                drawing, words = figure.draw(material)
            except NotMeasured as error:
                yield figure, str(error)
                continue
            caption(drawing, words)
            save_all(drawing, folder, figure.name)
        yield figure, ""


# ---- F7, and `report --figure`: score against tokens


def score_against_tokens(sections: Sequence[Section], file: Path) -> None:
    """A panel for each benchmark of the section with most runs: the score of every method over its budgets, the best
    five and random selection in colour.

    Raises:
        DataError: if there is no complete run to draw.
    """
    found = [_curves(section) for section in sections]
    frame = max(found, key=len, default=pd.DataFrame())
    if not len(frame):
        raise DataError("no complete run to draw: `make tables` measures them")
    section, titles = sections[[len(one) for one in found].index(len(frame))], frame.title.unique()
    means = frame.groupby("label").percent.mean().sort_values(ascending=False)
    best = [label for label in (LINEUP[0].label, *means.index) if label in means and label != RANDOM]
    looks = dict(zip(list(dict.fromkeys(best))[:5], STYLES, strict=False)) | {RANDOM: ("#000000", "x")}
    banded = [*list(looks)[:2], RANDOM] if set(means.index) - set(looks) else list(looks)
    figure, axes = panels(len(titles), 5 if len(titles) > 8 else 4, (3.6, 3.1))
    for panel, title in zip(axes, titles, strict=True):
        own = frame[frame.title == title].sort_values("tokens")
        for label, line in own.groupby("label"):
            colour, marker = looks.get(label, ("#b5b5b5", ""))
            label = label if label in looks else "other methods"
            panel.plot(line.tokens, line.score, color=colour, marker=marker, label=label, zorder=2 + (label in looks))
            if label in banded:
                panel.fill_between(line.tokens, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        full = section.full.runs.get(own.benchmark.iloc[0]) if section.full else None
        if full is not None and full.score is not None:
            panel.axhline(full.score, color="black", linestyle=":", linewidth=1, label="all tokens")
        ticks = sorted(own.tokens.unique())
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tokens:g}" for tokens in ticks])
        panel.minorticks_off()
        panel.set(title=f"{title} ({'%' if own.scale.iloc[0] == 1 else 'points'})", xlabel="visual tokens")
    legend(figure, 4)
    save(figure, file)


def _curves(section: Section) -> pd.DataFrame:
    """The complete reduced runs of a section; budgets that are shares have no place on the axis of tokens."""
    cells = [(line, name, run) for line in section.reduced for name, run in line.runs.items() if run.complete]
    return pd.DataFrame(
        {
            "benchmark": name,
            "title": run.facts.title,
            "scale": run.facts.scale,
            "label": line.label,
            "tokens": line.tokens,
            "score": run.score,
            "percent": run.score / run.facts.scale,
            "low": (run.bounds or (run.score,) * 2)[0],
            "high": (run.bounds or (run.score,) * 2)[1],
        }
        for line, name, run in cells
        if line.tokens >= 1 and run.score is not None
    )
