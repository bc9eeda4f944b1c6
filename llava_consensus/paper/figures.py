"""Every figure of the paper from result files: `llava-consensus paper figures --out results --to FOLDER`.

Each entry of `FIGURES` makes a frame of points, and `lines` draws it. Grey is for the paper's values: another model on
other data, so compare shapes, not levels. Needs the extra `plots`.

Columns of a frame: `panel`, `line`, `x`, `y`, and where they are known `low` and `high` (ends of an interval), `size`
(of a bubble) and `paper` (the printed number). `attrs` has the caption.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from io import BytesIO
from math import ceil, floor
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from llava_consensus.errors import missing_extra
from llava_consensus.evaluation.files import write_out
from llava_consensus.evaluation.report import efficiency, paper
from llava_consensus.evaluation.report.section import in_sections
from llava_consensus.paper import preset
from llava_consensus.paper.results import Material, NotMeasured, Results, scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("png", "svg")
COLUMNS, PANEL = 3, (2.6, 2.1)  # panels in a row, and inches of each
GREY = "#9a9a9a"
PRINTED = "printed in the paper"
MARKERS = "os^DvPX"
BEST = 7  # lines of f07
MERGED = 20  # of 128 tokens, which the paper merges
PARETO = ("ConsensusDrop", "VisPruner", "SparseVLM")


@contextlib.contextmanager
def sheet() -> Iterator[None]:
    """Applies the style sheet inside the block. MissingDependency without matplotlib."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise missing_extra("figures (matplotlib)", "plots") from error
    with (
        resources.as_file(resources.files("llava_consensus.paper") / "paper.mplstyle") as path,
        matplotlib.rc_context(fname=path),
    ):
        yield


def _panels(count: int) -> "tuple[Figure, list[Any]]":
    from matplotlib.figure import Figure

    columns = min(COLUMNS, count)
    rows = ceil(count / columns)
    figure = Figure((max(PANEL[0] * columns, 4.0), PANEL[1] * rows + 0.8), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in axes[count:]:
        panel.set_axis_off()
    return figure, axes[:count]


def lines(frame: pd.DataFrame, x: str, y: str) -> "Figure":
    """A panel for each value of `panel`, with a line (or bubbles) for each of `line`, and the paper's numbers."""
    labels = list(dict.fromkeys(frame.line))
    groups = frame.groupby("panel", sort=False)
    figure, axes = _panels(len(groups))
    for panel, (title, own) in zip(axes, groups, strict=True):
        for label, points in own.groupby("line", sort=False):
            number = labels.index(label)
            points = points.sort_values("x")
            look: dict[str, Any] = {"color": f"C{number % 7}", "marker": MARKERS[number % 7], "label": label}
            if "size" in points:
                panel.scatter(points.x, points.y, 90 * points["size"], alpha=0.55, **look)
                continue
            ends = np.zeros((2, len(points)))
            if "low" in points:
                ends = np.nan_to_num(np.stack([points.y - points.low, points.high - points.y]).astype(float)).clip(0)
            panel.errorbar(points.x, points.y, ends, elinewidth=0.7, capsize=2, **look)
        if "paper" in own and own.paper.notna().any():
            for label, points in own.dropna(subset="paper").sort_values("x").groupby("line", sort=False):
                dash = ("-", "--", ":")[labels.index(label) % 3]
                panel.plot(points.x, points.paper, dash, color=GREY, marker="x", label=f"{label}, {PRINTED}", zorder=1)
        panel.set(title=title, xlabel=x)
    axes[0].set_ylabel(y)
    handles = {name: one for panel in axes for one, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    return figure


# ---- the controlled study: F2, F3, F4, and SCAP by place


def _study(material: Material) -> pd.DataFrame:
    """The rows of study.json with positions kept, as FastV does, and those of all tokens; scores in percent."""
    content = material.study or {}
    rows = pd.DataFrame(content.get("rows", []))
    if not len(rows) or not len(rows[rows.positions == "keep"]):
        raise NotMeasured("no study.json with rows")
    ends = pd.DataFrame([pair or (np.nan, np.nan) for pair in rows.interval], columns=["low", "high"])
    rows = rows.assign(y=rows.accuracy / rows.scale, low=ends.low / rows.scale, high=ends.high / rows.scale)
    rows = rows[rows.positions.isna() | (rows.positions == "keep")].rename(columns={"title": "panel"})
    rows.attrs["about"] = f"{_setting(content['description'])}; positions kept"
    return rows


def _setting(config: Mapping[str, Any]) -> str:
    return f"{config.get('model')} on {config.get('data')}, {config.get('device')}"


def _recovery(rows: pd.DataFrame) -> pd.DataFrame:
    found = rows[rows.scores == "recovery"]
    if not len(found):
        raise NotMeasured("no recovery in study.json")
    return found


def recovery_helps(material: Material) -> pd.DataFrame:
    """Both single signals, recovery with either student at the best of its rates, and all tokens."""
    rows = _study(material)
    signal = "recovery, " + rows.student.astype(str) + " as student"
    rows["line"] = signal.where(rows.scores == "recovery", rows.scores.replace("full", "all tokens"))
    rows["x"] = 100 * rows.retention
    best = rows.sort_values("y").groupby(["panel", "x", "line"], sort=False).tail(1)
    return best.sort_values(["benchmark", "line"])


def three_way(material: Material) -> pd.DataFrame:
    """A bubble for each benchmark and retention: gain over correction, its size the disagreement."""
    rows = _recovery(_study(material)).dropna(subset="gain")
    rows["panel"] = "student: " + rows.student
    rows["line"] = (100 * rows.retention).map("{:g} % kept".format)
    return rows.assign(x=rows.correction, y=rows.gain / rows.scale, size=rows.disagreement)


def decay(material: Material) -> pd.DataFrame:
    """The correction factor over the rate, on the paper's two benchmarks, or the first that was run."""
    rows = _recovery(_study(material))
    names = [name for name in ("pope", "gqa") if name in set(rows.benchmark)] or list(rows.benchmark.unique()[:1])
    rows = rows[rows.benchmark.isin(names)].drop(columns=["low", "high"])
    rows["line"] = rows.student + (100 * rows.retention).map(" as student, {:g} % kept".format)
    return rows.assign(x=rows.rate, y=rows.correction)


def scap_by_place(material: Material) -> pd.DataFrame:
    """SCAP's mean saliency by patch index, with and without rotation: 1 is no preference."""
    scap = material.scap or {}
    if not scap.get("positions"):
        raise NotMeasured("no scap.json with positions")
    parts = []
    for one in scap["positions"]:
        label = "queries and keys rotated (SCAP)" if one["rotated"] else "not rotated"
        x = range(1, len(one["saliency"]) + 1)
        parts.append(pd.DataFrame({"panel": scap["benchmark"], "line": label, "x": x, "y": one["saliency"]}))
    found = pd.concat(parts)
    found.attrs["about"] = _setting(scap["description"])
    return found


# ---- the ablations: F9 to F13


def _ablation(material: Material, name: str, *keys: str) -> pd.DataFrame:
    """The printed settings that were run, on the benchmarks that all have: options `keys`, our score, the paper's."""
    results = material.of(preset.read(name))
    rows = [row for row in results.preset.rows if row.printed and any(row is one for one, _ in results.runs)]
    names = [one for one in results.preset.benchmarks if all((row, one) in results.runs for row in rows)]
    if not names or len(rows) < 2:
        raise NotMeasured(f"no two settings of {', '.join(keys)} with one budget and benchmark")
    found = []
    for row in rows:
        usual = floor(MERGED * row.tokens / 128 + 0.5)
        merged = usual if row.merged is None else row.merged
        setting = {key: merged if key == "merged" else getattr(row.reduction[0], key) for key in keys}
        for one in names:
            printed = results.printed(row, one)
            theirs = np.nan if printed is None else printed / scale(results.preset.benchmarks[one])
            score, low, high = results.percent(row, one) or (np.nan,) * 3
            about = {"panel": results.title(one), "line": "ConsensusDrop", "paper": theirs}
            found.append({**about, **setting, "y": score, "low": low, "high": high})
    frame = pd.DataFrame(found)
    frame.attrs["about"] = _about(results)
    return frame


def _about(results: Results) -> str:
    tokens = ", ".join(dict.fromkeys(f"{row.tokens:g}" for row in results.preset.rows))
    return f"{_setting(next(iter(results.runs.values())).config)}; {tokens} tokens"


def _over(name: str, key: str, line: str | None = None) -> Callable[[Material], pd.DataFrame]:
    """Scores over an option of an ablation, a line for each value of another option."""

    def rows(material: Material) -> pd.DataFrame:
        frame = _ablation(material, name, *filter(None, (key, line)))
        return frame.assign(x=frame[key], line=f"{line} " + frame[line].astype(str) if line else frame.line)

    return rows


# ---- time and memory: F6, F16, and F7


def pareto(material: Material) -> pd.DataFrame:
    """Accuracy over time and over cache in percent of all tokens, beside the paper's Table 1."""
    results = material.of(preset.read("t1"))
    rows = [None, *(row for row in results.preset.rows if row.label in PARETO)]
    rows = [row for row in rows if any(row is one for one, _ in results.runs)]
    names = [name for name in results.averaged if all((row, name) in results.runs for row in rows)]
    if not names or None not in rows or len(rows) < 2:
        raise NotMeasured(f"no benchmark with complete runs of all tokens and of {', '.join(PARETO)}")
    means = {row: np.mean([(results.percent(row, name) or (np.nan,))[0] for name in names]) for row in rows}
    bench = {(one["method"], one["tokens"]): one for one in material.bench_of([row.tokens for row in rows if row])}
    full = next((one for (method, _), one in bench.items() if method == "full"), None)
    found = []
    for row in filter(None, rows):
        one = bench.get((row.method, row.tokens))
        if one is not None and full is not None:
            accuracy = 100 * means[row] / means[None]
            for panel, key in (("time to first token", "ttft_ms"), ("KV cache", "kv_bytes")):
                found.append({"panel": panel, "line": row.label, "x": 100 * one[key] / full[key], "y": accuracy})
    if not found:
        budgets = " ".join(f"{tokens:g}" for tokens in dict.fromkeys(row.tokens for row in rows if row))
        raise NotMeasured(f"no bench*.json at the budgets of the runs ({budgets})")
    printed = pd.DataFrame(paper.printed_tables()[paper.LLAVA])
    for panel, key in (("time to first token", "ttft_ms"), ("KV cache", "kv_mb")):
        own = printed[printed.method.isin(PARETO) & printed[key].notna()]
        x, y = 100 * own[key] / printed[key].iloc[0], 100 * own.acc / printed.acc.iloc[0]
        found += pd.DataFrame({"panel": panel, "line": own.method, "x": x, "paper": y}).to_dict("records")
    frame = pd.DataFrame(found)
    frame.attrs["about"] = f"{_about(results)}; mean of {len(names)} benchmarks"
    return frame


def over_ratio(material: Material) -> pd.DataFrame:
    """A panel for each quantity over the share of tokens taken away; seconds of the paper for a model of its size."""
    quantities = {  # title -> ours, the paper's
        "time to first token (ms)": ("ttft_ms", "ttft_ms"),
        "speed-up": ("speedup", "speedup"),
        "KV cache (MiB)": ("kv", "kv_mb"),
        "TFLOPs of the language model": ("flops", "flops_t"),
        "peak memory (GB)": ("peak", "gpu_mem_gb"),
        "KV saved (%)": ("kv_saved", ""),
    }
    parts = []
    for content in material.measured:
        rows = content["rows"]
        frame = pd.DataFrame(rows)
        # the memory of a process on the CPU is noise
        on_gpu = str(content["machine"]["device"]).startswith("cuda")
        frame = frame.assign(
            line=[
                efficiency.label(row) + (f", {content['model']}" if len(material.measured) > 1 else "") for row in rows
            ],
            kv=efficiency.MIB * frame.kv_bytes,
            kv_saved=100 * (1 - frame.kv_bytes / frame.kv_bytes.iloc[0]),
            flops=[efficiency.TERA * row["paper"]["flops"] if row.get("paper") else np.nan for row in rows],
            peak=efficiency.GB * frame.peak_bytes.astype(float) if on_gpu else np.nan,
        )
        printed = [efficiency.printed_row(content, row) for row in rows]
        same = content["model"] in efficiency.TABLES
        for panel, (key, theirs) in quantities.items():
            beside = [one.get(theirs) if same or key == "speedup" else None for one in printed]
            points = frame.assign(
                panel=panel, x=frame.reduction_percent, y=frame[key], paper=pd.Series(beside, dtype=float)
            )
            parts.append(points[["panel", "line", "x", "y", "paper"]].iloc[1:].dropna(subset="y"))
    found = pd.concat(parts)
    found = found.assign(panel=pd.Categorical(found.panel, [*quantities])).sort_values("panel", kind="stable")
    found["panel"] = found.panel.astype(str)
    found.attrs["about"] = "; ".join(f"{one['model']} on {one['machine']['device']}" for one in material.measured)
    return found


def over_tokens(material: Material) -> pd.DataFrame:
    """Scores over budgets, of the setting with most runs: all tokens and the best methods without changed options."""
    frames = [section.frame for section in in_sections(material.rows)]
    found = max(frames, key=len, default=pd.DataFrame())
    found = found[(found.status == "complete") & found.score.notna()] if len(found) else found
    if not len(found) or found.tokens.nunique() < 2:
        raise NotMeasured("no complete runs at two budgets")
    plain = found[~found.label.str.contains("=")]
    best = plain.groupby("label").score.mean().sort_values(ascending=False).index[:BEST]
    frame = plain[plain.label.isin(best)]
    frame = frame.assign(panel=frame.benchmark, line=frame.label, x=frame.tokens, y=frame.score)
    frame.attrs["about"] = f"{frame.model.iloc[0]} on {frame.data.iloc[0]}"
    return frame


# ---- the list

STUDY = "llava-consensus paper study"
BENCH = 'llava-consensus bench --out results/bench.json --tokens "432 288 144 57 28"'
TIMED = (
    "llava-consensus paper table t1 && llava-consensus bench --out results/bench-tradeoff.json "
    '--methods "consensusdrop vispruner sparsevlm" --tokens "192 128 64 32"'
)
TABLE = "llava-consensus paper table"


class FigureOf(NamedTuple):
    """One figure: name of its files, its points, the labels of both axes, and the command that makes its results."""

    name: str
    points: Callable[[Material], pd.DataFrame]
    x: str
    y: str
    makes: str


TAU = _over("temperature", "tau_cross", "tau_vision")
FIGURES = (
    FigureOf("f02-recovery-helps", recovery_helps, "tokens kept (%)", "score (%)", STUDY),
    FigureOf("f03-three-way", three_way, "correction factor (size: disagreement)", "gain (points)", STUDY),
    FigureOf("f04-decay", decay, "recovery rate", "correction factor", STUDY),
    FigureOf("f06-pareto", pareto, "% of all tokens", "mean (% of all tokens)", TIMED),
    FigureOf("f07-scores", over_tokens, "visual tokens", "score", f"{TABLE} results"),
    FigureOf("f09-alpha", _over("alpha", "alpha"), "alpha", "score (%)", f"{TABLE} alpha"),
    FigureOf(
        "f10-temperature", TAU, "cross temperature", "score (%), a line a vision temperature", f"{TABLE} temperature"
    ),
    FigureOf("f11-recovery", _over("recovery", "rate", "student"), "recovery rate", "score (%)", f"{TABLE} recovery"),
    FigureOf("f12-anchors", _over("anchors", "merged"), "merged tokens", "score (%)", f"{TABLE} anchors"),
    FigureOf("f13-score", _over("score", "aggregate", "vision_score"), "text rows", "score (%)", f"{TABLE} score"),
    FigureOf("f16-efficiency", over_ratio, "tokens taken away (%)", "", BENCH),
    FigureOf("claim-11-scap", scap_by_place, "stretch of patches", "mean saliency", STUDY),
)


def draw(material: Material, folder: Path) -> Iterator[tuple[FigureOf, str]]:
    """Every figure as PNG and SVG in a folder, each with its missing results; empty if it was drawn."""
    for figure in FIGURES:
        with sheet():
            try:
                points = figure.points(material)
            except NotMeasured as error:
                yield figure, str(error)
                continue
            drawing = lines(points, figure.x, figure.y)
            words = points.attrs["about"]
            drawing.suptitle(fill(words, max(40, int(17 * drawing.get_figwidth()))), fontsize=6.5, color="#444444")
            for kind in KINDS:
                content = BytesIO()
                drawing.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None)
                write_out(folder / f"{figure.name}.{kind}", content.getvalue())
        yield figure, ""
