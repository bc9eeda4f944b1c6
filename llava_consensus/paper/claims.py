"""The paper's twelve claims, each judged by result files: true, false, undecided, or not run yet.

`llava-consensus paper claims --out results --write docs/paper.md` puts the table between the page's markers. `CLAIMS`
is the only list; a claim names its figure, whose entry in `figures.FIGURES` has the command that makes its results.

A claim that one thing beats others is true where the 95 % interval of every difference lies above zero, false where one
lies below, and undecided otherwise. A claim that something does not matter is true where every interval lies within
`MARGIN` of zero.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import FULL, LINEUP, Row
from llava_consensus.evaluation.report.section import Section
from llava_consensus.evaluation.report.stats import above_chance, compare, independent_mean, mean_difference
from llava_consensus.paper.ablations import Setting, Settings, settings
from llava_consensus.paper.material import Material, NotMeasured

TRUE, FALSE, UNDECIDED, NOT_RUN = "true", "false", "undecided", "not run yet"
MARGIN = 2.0  # points; the paper's own spread for one configuration is as large (TextVQA)
IN_EVIDENCE = 3  # differences that are named
VISION_ONLY, CROSS_ONLY = LINEUP[1].label, LINEUP[2].label
STRAIGHT, BENT = 0.95, 0.8  # share of the times' variance that a line explains
LITTLE, MUCH = 0.05, 0.2  # share of the time to first token
VISION_AND_CROSS = 'llava-consensus sweep --bench "vqav2 gqa pope textvqa"'  # its usual methods have both


class Contrast(NamedTuple):
    """A difference in points: what less what, and its 95 % interval."""

    words: str
    difference: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.words}: {self.difference:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


class Verdict(NamedTuple):
    """What became of a claim here, and why."""

    verdict: str
    evidence: str = ""


def paired(words: str, first: Mapping[str, Row], second: Mapping[str, Row]) -> Contrast | None:
    """Mean over the benchmarks that both have, first less second, paired by question; None where there are no pairs."""
    found = {name: compare(first[name], second[name]) for name in sorted(first.keys() & second.keys())}
    tests = {name: test for name, test in found.items() if test is not None}
    if not tests:
        return None
    scales = [first[name].facts.scale for name in tests]
    return Contrast(words, *mean_difference(list(tests.values()), scales))


def mean_gain(words: str, rows: Sequence[Mapping[str, Any]]) -> Contrast | None:
    """Mean gain of rows of the study over different benchmarks; their intervals add up as independent ones do."""
    known = [row for row in rows if row.get("gain_interval") is not None]
    if not known:
        return None
    widths = [(row["gain_interval"][1] - row["gain_interval"][0]) / row["scale"] for row in known]
    return Contrast(words, *independent_mean([row["gain"] / row["scale"] for row in known], widths, len(known)))


def unpaired(
    words: str, first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]]
) -> Contrast | None:
    """Mean over the benchmarks that both have, of scores of the study that are known with their intervals alone: wider
    than a paired difference would be.
    """
    pairs = [(first[name], second[name]) for name in sorted(first.keys() & second.keys())]
    known = [pair for pair in pairs if all(row["interval"] for row in pair)]
    if not known:
        return None
    values = [(one["accuracy"] - other["accuracy"]) / one["scale"] for one, other in known]
    widths = [(row["interval"][1] - row["interval"][0]) / row["scale"] for pair in known for row in pair]
    return Contrast(words, *independent_mean(values, widths, len(known)))


def beats(contrasts: Iterable[Contrast | None]) -> Verdict:
    """The verdict on a claim that every difference is above zero."""
    known = [one for one in contrasts if one is not None]
    if not known:
        return Verdict(NOT_RUN)
    below = any(one.high < 0 for one in known)
    verdict = FALSE if below else TRUE if all(one.low > 0 for one in known) else UNDECIDED
    return Verdict(verdict, _evidence(sorted(known, key=lambda one: one.difference)))


def matters_not(contrasts: Iterable[Contrast | None]) -> Verdict:
    """The verdict on a claim that no difference is worth speaking of."""
    known = [one for one in contrasts if one is not None]
    if not known:
        return Verdict(NOT_RUN)
    apart = any(one.low > 0 or one.high < 0 for one in known)
    close = all(max(abs(one.low), abs(one.high)) < MARGIN for one in known)
    verdict = TRUE if close else FALSE if apart else UNDECIDED
    return Verdict(verdict, _evidence(sorted(known, key=lambda one: -abs(one.difference))))


def _evidence(contrasts: Sequence[Contrast]) -> str:
    """The first few of ordered contrasts, and how many there are."""
    more = f"; and {len(contrasts) - IN_EVIDENCE} more that say less against it" if len(contrasts) > IN_EVIDENCE else ""
    return "; ".join(map(str, contrasts[:IN_EVIDENCE])) + more


class Claim(NamedTuple):
    """A claim, the name of its figure's files, and what judges it."""

    words: str
    figure: str
    judge: Callable[[Material], Verdict]
    command: str = ""  # what makes its results, where the figure's command does not


def recovery_beats(material: Material) -> Verdict:
    """Claim 1: the mean gain over the student alone, at each retention, student and rate."""
    guessed = _guessed(material)
    rows = [row for row in _study(material, "recovery") if row["benchmark"] not in guessed]
    keys = sorted({(row["retention"], row["student"], row["rate"]) for row in rows})
    return beats(
        mean_gain(
            f"{100 * retention:g} % kept, student {student}, rate {rate:g}",
            [row for row in rows if (row["retention"], row["student"], row["rate"]) == (retention, student, rate)],
        )
        for retention, student, rate in keys
    )


def vision_beats_cross(material: Material) -> Verdict:
    """Claim 2: ConsensusDrop with alpha 1 less alpha 0, at each budget; without such runs the study's selections."""
    try:
        section = _section(material, VISION_ONLY, CROSS_ONLY)
    except NotMeasured:
        return _study_vision_beats_cross(material)
    return beats(
        paired(f"{tokens:g} tokens", lines[VISION_ONLY], lines[CROSS_ONLY])
        for tokens, lines in _by_budget(section).items()
        if VISION_ONLY in lines and CROSS_ONLY in lines
    )


def _study_vision_beats_cross(material: Material) -> Verdict:
    """The study's selection by vision less that by the question, at each retention, over the benchmarks of both."""
    sides = [_study(material, scores) for scores in ("vision", "cross")]
    guessed = _guessed(material)
    contrasts = []
    for retention in sorted({row["retention"] for row in sides[0]}):
        own = [
            {row["benchmark"]: row for row in rows if row["retention"] == retention and row["benchmark"] not in guessed}
            for rows in sides
        ]
        contrasts.append(unpaired(f"{100 * retention:g} % kept, not paired", *own))
    return beats(contrasts)


def less_is_more(material: Material) -> Verdict:
    """Claim 3: mean disagreement, correction and gain at the least retention against the most. No intervals."""
    rows = _study(material, "recovery")
    least, most = (pick(row["retention"] for row in rows) for pick in (min, max))
    if least == most:
        return Verdict(NOT_RUN)
    guessed = _guessed(material)
    told = [row for row in rows if row["benchmark"] not in guessed] or rows
    of = {"disagreement": rows, "correction": rows, "gain": told}
    changes = {key: _mean(some, least, key) - _mean(some, most, key) for key, some in of.items()}
    rising = [change > 0 for change in changes.values()]
    verdict = TRUE if all(rising) else UNDECIDED if any(rising) else FALSE
    words = ", ".join(f"{key} {change:+.2f}" for key, change in changes.items())
    return Verdict(verdict, f"{100 * least:g} % kept less {100 * most:g} %: {words} (means, no intervals)")


def correction_falls(material: Material) -> Verdict:
    """Claim 4: in how many series of a benchmark, student and retention the correction falls at every step."""
    series: dict[tuple[Any, ...], dict[float, float]] = {}
    for row in _study(material, "recovery"):
        series.setdefault((row["benchmark"], row["student"], row["retention"]), {})[row["rate"]] = row["correction"]
    ordered = [[line[rate] for rate in sorted(line)] for line in series.values() if len(line) > 1]
    if not ordered:
        return Verdict(NOT_RUN)
    falling = sum(all(later < earlier for earlier, later in pairwise(line)) for line in ordered)
    verdict = TRUE if falling == len(ordered) else FALSE if 2 * falling < len(ordered) else UNDECIDED
    return Verdict(verdict, f"falls at every step in {falling} of {len(ordered)} series")


def best_of(ablation: str, setting: Setting) -> Callable[[Material], Verdict]:
    """Judges whether one setting of an ablation beats all others."""

    def judge(material: Material) -> Verdict:
        found = settings(material, ablation)
        if setting not in found.cells:
            return Verdict(NOT_RUN)
        return beats(_between(found, setting, other) for other in found.cells if other != setting)

    return judge


def temperature_matters_not(material: Material) -> Verdict:
    """Claim 6: every pair of settings."""
    found = settings(material, "temperature")
    return matters_not(_between(found, one, other) for one, other in combinations(found.cells, 2))


def vision_is_the_better_student(material: Material) -> Verdict:
    """Claim 7: vision less cross as student, at each rate; the mean differences are listed by rate."""
    found = settings(material, "recovery")
    rates = sorted({rate for _, rate in found.cells})
    pairs = [(("vision", rate), ("cross", rate)) for rate in rates]
    return beats(_between(found, *pair) for pair in pairs if all(setting in found.cells for setting in pair))


def papers_order(material: Material) -> Verdict:
    """Claim 10: every two methods that the paper's Table 1 has in an order, at every budget."""
    contrasts: list[Contrast | None] = []
    for section in material.sections:
        for tokens, lines in _by_budget(section).items():
            printed = sorted(paper.printed_tables()[paper.PICTURES], key=lambda row: -row["acc"])
            ranked = [row["method"] for row in printed if row["tokens"] == tokens and row["method"] in lines]
            for first, second in combinations(ranked, 2):
                contrasts.append(paired(f"{tokens:g} tokens, {first} less {second}", lines[first], lines[second]))
    return beats(contrasts)


def scap_looks_late(material: Material) -> Verdict:
    """Claim 11: the mean saliency of the last third of patches over that of the first, with rotation and without."""
    ratios = {}
    for line in (material.scap or {}).get("positions", ()):
        third = len(line["saliency"]) // 3
        ratios[line["rotated"]] = sum(line["saliency"][-third:]) / max(sum(line["saliency"][:third]), 1e-9)
    if len(ratios) < 2:
        return Verdict(NOT_RUN)
    late = ratios[True] > 1 and ratios[True] > ratios[False]
    words = f"last third over first third: {ratios[True]:.2f} rotated, {ratios[False]:.2f} not (means, no intervals)"
    return Verdict(TRUE if late else FALSE, words)


def time_is_linear(material: Material) -> Verdict:
    """Claim 12: how much of the times a straight line explains, and the selection's largest share of them."""
    rows = [row for row in material.measured[0]["rows"] if row["method"] in (FULL, "consensusdrop")]
    if len(rows) < 4:
        return Verdict(NOT_RUN)
    tokens, times = ([row[key] for row in rows] for key in ("tokens", "ttft_ms"))
    explained = float(np.corrcoef(tokens, times)[0, 1] ** 2)
    share = max(row["share"] or 0.0 for row in rows)
    good, bad = explained >= STRAIGHT and share <= LITTLE, explained < BENT or share > MUCH
    words = f"a line explains {100 * explained:.0f} %; selection at most {100 * share:.1f} % ({len(rows)} budgets)"
    return Verdict(TRUE if good else FALSE if bad else UNDECIDED, words)


CLAIMS = (
    Claim("Recovery beats both single signals at every retention", "f02-recovery-helps", recovery_beats),
    Claim("Vision-only beats cross-only", "f02-recovery-helps", vision_beats_cross, VISION_AND_CROSS),
    Claim("Lower retention: more disagreement, correction and gain", "f03-three-way", less_is_more),
    Claim("The correction falls with the rate", "f04-decay", correction_falls),
    Claim("alpha = 0.7 is best", "f09-alpha", best_of("alpha", (0.7,))),
    Claim("Temperatures do not matter", "f10-temperature", temperature_matters_not),
    Claim("Vision is the better student", "f11-recovery", vision_is_the_better_student),
    Claim("20 merged of 128 is best", "f12-anchors", best_of("anchors", (20,))),
    Claim("Class attention with all text rows is best", "f13-score", best_of("score", ("class", "all"))),
    Claim("The methods' order at each budget", "f06-pareto", papers_order, "llava-consensus paper table t1"),
    Claim("SCAP leans toward late patches", "claim-11-scap", scap_looks_late),
    Claim("Time to first token is linear in tokens, selection costs little", "f16-efficiency", time_is_linear),
)


def claims_table(material: Material, commands: Mapping[str, str]) -> str:
    """Every claim with its verdict, evidence, figure and command, as Markdown.

    Args:
        material: what was measured.
        commands: what makes the results of a figure, by the figure's name.
    """
    lines = ["| claim | here | differences in points (95 % interval) | figure | made by |", "|---|---|---|---|---|"]
    for number, claim in enumerate(CLAIMS, 1):
        try:
            found = claim.judge(material)
        except NotMeasured:
            found = Verdict(NOT_RUN)
        cells = (f"{number}. {claim.words}", f"**{found.verdict}**", found.evidence or "-", claim.figure)
        lines.append(f"| {' | '.join(cells)} | `{claim.command or commands[claim.figure]}` |")
    scopes = []
    for section in material.sections:
        config = section.rows[0].config
        limit = "all questions" if config["limit"] is None else f"the first {config['limit']} questions alone"
        scopes.append(f"- {config['model']} on {config['data']}, {limit}")
    scope = "\n".join(scopes) or "- no runs"
    return (
        "\n".join(lines)
        + f"\n\nFrom these runs, and from study.json, scap.json and bench*.json beside them:\n\n{scope}"
    )


def _study(material: Material, scores: str) -> list[Mapping[str, Any]]:
    rows = [row for row in (material.study or {}).get("rows", ()) if row["scores"] == scores]
    if not rows:
        raise NotMeasured("no study.json")
    return rows


def _guessed(material: Material) -> set[str]:
    """Benchmarks of the study in which all tokens cannot be told from guessing."""
    rows = (material.study or {}).get("rows", ())
    full = [row for row in rows if row["scores"] == FULL and row["accuracy"] is not None]
    return {
        row["benchmark"] for row in full if not above_chance(row["accuracy"], row["interval"], row.get("chance", 0.0))
    }


def _mean(rows: Sequence[Mapping[str, Any]], retention: float, key: str) -> float:
    values = [
        row[key] / (row["scale"] if key == "gain" else 1)
        for row in rows
        if row["retention"] == retention and row[key] is not None
    ]
    return sum(values) / len(values)


def _section(material: Material, *labels: str) -> Section:
    """The first section that has lines with these labels."""
    for section in material.sections:
        if set(labels) <= {line.label for line in section.reduced}:
            return section
    raise NotMeasured(f"no runs of {' and '.join(labels)}")


def _by_budget(section: Section) -> dict[float, dict[str, Mapping[str, Row]]]:
    """Complete runs by budget, label and benchmark, without benchmarks in which the full model guesses."""
    found: dict[float, dict[str, Mapping[str, Row]]] = {}
    for line in section.reduced:
        told = {name: row for name, row in line.runs.items() if row.complete and name not in section.near_chance}
        found.setdefault(line.tokens, {})[line.label] = told
    return found


def _between(found: Settings, first: Setting, second: Setting) -> Contrast | None:
    """Two settings of an ablation, first less second."""
    runs = [{name: found.cells[setting][name].row for name in found.averaged} for setting in (first, second)]
    words = ["/".join(map(str, setting)) for setting in (first, second)]
    return paired(" less ".join(words), *runs)
