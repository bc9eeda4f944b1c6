"""Tables of the kept results under both position policies: methods by budget, layers, and the paper's ablations.

`pages.py` puts them into docs/positions.md and docs/results.md. All differences of a table are paired by question,
pictures drawn together, and Holm's correction is over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from eval_scripts.beds import BEDS, marks
from llava_consensus.cli.report import known
from llava_consensus.evaluation.report.rows import Row
from llava_consensus.evaluation.report.section import half, signed
from llava_consensus.evaluation.report.stats import Comparison, compare
from llava_consensus.evaluation.report.table import ABSENT, Group, Table, markdown
from llava_consensus.paper.ablations import TITLES, Setting, ablation, settings
from llava_consensus.paper.material import Material, NotMeasured, read

CLOSED, KEPT = "renumber", "keep"
BENCHMARKS = ("textvqa", "gqa", "pope", "vqav2")
BUDGETS = (192, 128, 64, 32)
DEFAULT = ("alpha", (0.7,))  # the ablation and setting that is ConsensusDrop as it is
CALIBRATED = "calibrated"  # of `closed_from` of the study's method
HOW = "paired by question, pictures drawn together; † p < 0.05, ‡ also after Holm's correction over the"


def budgets_table(rows: Iterable[Row]) -> str:
    """Each method with positions closed up and kept at every budget, where it was run under both at all of them."""
    found: dict[tuple[str, str], dict[tuple[float, str], Row]] = {}
    for row in rows:
        options = row.config["options"]
        if row.complete and not row.full and row.tokens in BUDGETS and not options.get("seed"):
            at = found.setdefault((row.benchmark, row.variant), {})
            at[row.tokens, options.get("positions", CLOSED)] = row
    cells = {(tokens, policy) for tokens in BUDGETS for policy in (CLOSED, KEPT)}
    whole = {key: runs for key, runs in found.items() if runs.keys() >= cells and key[0] in BENCHMARKS}
    tests = {
        (*key, tokens): compare(runs[tokens, KEPT], runs[tokens, CLOSED])
        for key, runs in whole.items()
        for tokens in BUDGETS
    }
    said, groups = marks(tests), []
    for benchmark in BENCHMARKS:
        lines = []
        for (name, label), runs in sorted(whole.items()):
            if name == benchmark:
                scores = [(runs[tokens, CLOSED].score, runs[tokens, KEPT].score) for tokens in BUDGETS]
                shown = [
                    f"{closed:.1f} → {kept:.1f} {_interval(tests[name, label, tokens])}{said[name, label, tokens]}"
                    for (closed, kept), tokens in zip(scores, BUDGETS, strict=True)
                ]
                lines.append((label, *shown))
        if lines:
            runs = next(runs for (name, _), runs in whole.items() if name == benchmark)
            groups.append(Group(about(runs[64, KEPT]), tuple(lines)))
    note = f"Score, closed up → kept, and the 95 % interval of kept less closed up: {HOW} {len(tests)} differences."
    head = ("method", *(f"{tokens} tokens" for tokens in BUDGETS))
    return markdown(Table("Positions closed up and kept", head, tuple(groups), note))


def layers_table(rows: Iterable[Row]) -> str:
    """Patches chosen before the first layer, with positions closed up from a layer on, on every model that was run."""
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        options, bed = row.config["options"], Path(row.config["model"]).name
        way = "all" if row.full else CALIBRATED if options["calibrate"] else str(options["closed_from"])
        found.setdefault(bed, {}).setdefault(way, {})[row.benchmark] = row
    benchmarks = [name for name in BENCHMARKS if any(name in runs for ways in found.values() for runs in ways.values())]
    kept = {(bed, name): run for bed, ways in found.items() for name, run in ways[str(None)].items()}
    tests = {
        (bed, way, name): compare(run, kept[bed, name])
        for bed, ways in found.items()
        for way, runs in ways.items()
        for name, run in runs.items()
        if way not in ("all", str(None)) and (bed, name) in kept
    }
    said, groups = marks(tests), []
    for bed in (name for name in BEDS if name in found):
        lines = []
        for way in sorted(found[bed], key=_depth):
            cells = []
            for name in benchmarks:
                run = found[bed][way].get(name)
                test = tests.get((bed, way, name))
                score = ABSENT if run is None else f"{run.score:.1f}{half(run.bounds)}"
                cells += [score, signed(test.difference, test.bounds) + said[bed, way, name] if test else ABSENT]
            lines.append((_way(way), *cells))
        groups.append(Group(BEDS[bed], tuple(lines)))
    titles = [about(next(run for (_, one), run in kept.items() if one == name)) for name in benchmarks]
    head = ("positions, 64 tokens", *(part for title in titles for part in (title, "less kept")))
    note = (
        "The 64 patches that the class token looks at most stay, before the first layer; only positions differ. Score "
        f"± half of its 95 % interval; difference to kept positions {HOW} {len(tests)} differences."
    )
    return markdown(Table("By layer", head, tuple(groups), note))


def ablations_table(out: Path) -> str:
    """Every setting of the paper's ablations beside ConsensusDrop as it is, under both policies."""
    material = read(out, known())
    runs = {(name, policy): _runs(material, name, policy) for name in TITLES for policy in (CLOSED, KEPT)}
    usual = {policy: runs[DEFAULT[0], policy].get(DEFAULT[1], {}) for policy in (CLOSED, KEPT)}
    benchmarks = [name for name in usual[CLOSED] if name in usual[KEPT]]
    tests: dict[tuple[str, Setting, str, str], Comparison | None] = {}
    for (ablated, policy), cells in runs.items():
        for setting, found in cells.items():
            for name in benchmarks:
                if name in found and found[name] is not usual[policy][name]:
                    tests[ablated, setting, name, policy] = compare(found[name], usual[policy][name])
    said = marks(tests)

    def cell(ablated: str, setting: Setting, name: str) -> str:
        parts = []
        for policy in (CLOSED, KEPT):
            run = runs[ablated, policy].get(setting, {}).get(name)
            parts.append(ABSENT if run is None else f"{run.score:.1f}{said.get((ablated, setting, name, policy), '')}")
        return " → ".join(parts)

    groups = [Group("as it is", (("ConsensusDrop", *(cell(*DEFAULT, name) for name in benchmarks)),))]
    for ablated, title in TITLES.items():
        options = ablation(ablated).options
        lines = [
            (", ".join(f"{option}={value}" for option, value in zip(options, setting, strict=True)),
             *(cell(ablated, setting, name) for name in benchmarks))
            for setting in runs[ablated, CLOSED]
            if any((ablated, setting, name, CLOSED) in tests for name in benchmarks)
        ]  # fmt: skip
        groups += [Group(title, tuple(lines))] if lines else []
    note = (
        f"Score, positions closed up → kept; difference to ConsensusDrop under the same policy {HOW} "
        f"{sum(test is not None for test in tests.values())} differences."
    )
    head = ("at 128 tokens", *(about(usual[CLOSED][name]) for name in benchmarks))
    return markdown(Table("The paper's ablations", head, tuple(groups), note))


def _runs(material: Material, name: str, policy: str) -> dict[Setting, dict[str, Row]]:
    try:
        found = settings(material, name, policy)
    except NotMeasured:
        return {}
    return {setting: {one: cell.row for one, cell in cells.items()} for setting, cells in found.cells.items()}


def about(row: Row) -> str:
    """The benchmark of a run, and how many questions about how many pictures it asked."""
    assert row.metrics is not None
    return f"{row.facts.title} ({row.metrics['questions']} questions, {row.pictures} pictures)"


def _interval(test: Comparison | None) -> str:
    return "" if test is None or test.bounds is None else "({:+.1f} to {:+.1f})".format(*test.bounds)


def _depth(way: str) -> tuple[int, int]:
    """All tokens, closed up from the first layer on and so forth, kept, calibrated."""
    order: Sequence[str] = ("all", "0", str(None), CALIBRATED)
    return (order.index(way), 0) if way in order else (1, int(way))


def _way(way: str) -> str:
    words = {"all": "all tokens", "0": "closed up", str(None): "kept", CALIBRATED: "kept, attention calibrated"}
    return words.get(way, f"closed up from layer {int(way) + 1} on" if way.isdigit() else way)
