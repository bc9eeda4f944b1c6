"""The paper's twelve claims, each judged by result files alone, under both position policies.

`llava-consensus paper claims --out results --write docs/paper.md` puts the table between the page's markers. `CLAIMS`
is the only list; a claim names its figure, whose entry in `figures.FIGURES` has the command that makes its results.

The differences that a claim is about are its family: each is paired by question, pictures drawn together, and its p is
corrected over the family (Holm 1979). A claim that one thing beats others is true where every difference is above zero
and stands after the correction, false where one is below zero and stands, and undecided otherwise; of intervals
without a p it is said where they lie, which is no verdict. A claim that something does not matter is true where every
interval lies within `MARGIN` of zero, false where a difference stands. From fewer than `stats.LEAST` pictures there is
too little to say.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import FULL, LINEUP, Row, compare
from llava_consensus.evaluation.report.section import Section, signed
from llava_consensus.evaluation.report.stats import SIGNIFICANT, Bounds, corrected, mean_difference
from llava_consensus.paper.ablations import Setting, Settings, settings
from llava_consensus.paper.material import Material, NotMeasured

TRUE, FALSE, UNDECIDED, NOT_RUN, TOO_FEW = "true", "false", "undecided", "not run yet", "too few to say"
UNTESTED = "not tested"  # intervals without a p: what they say is no verdict
POLICIES = {"renumber": "renumbered", "keep": "kept"}
MARGIN = 2.0  # points; the paper's own spread for one configuration is as large (TextVQA)
VISION_ONLY, CROSS_ONLY = LINEUP[1].label, LINEUP[2].label
STRAIGHT, BENT = 0.95, 0.8  # share of the times' variance that a line explains
LITTLE, MUCH = 0.05, 0.2  # share of the time to first token


class Contrast(NamedTuple):
    """A difference in points: what less what, its 95 % interval, p, and of how many pictures; neither of the two where
    these are too few. `scope` is the benchmarks that it is a mean of, with their numbers of questions.
    """

    words: str
    difference: float
    bounds: Bounds | None
    p: float | None
    pictures: int
    scope: str = ""

    def __str__(self) -> str:
        few = "" if self.bounds else f" ({self.pictures} picture{'s' * (self.pictures != 1)})"
        return f"{self.words}: {signed(self.difference, self.bounds)}{few}"


class Verdict(NamedTuple):
    """Verdict on a claim, the number of comparisons in its family, the evidence, and what it was measured on."""

    verdict: str
    evidence: str = ""
    family: int = 0
    scope: str = ""


def paired(words: str, first: Mapping[str, Row], second: Mapping[str, Row]) -> Contrast | None:
    """Mean over the benchmarks that both have, first less second, paired by question; None where there are no pairs."""
    found = {name: compare(first[name], second[name]) for name in sorted(first.keys() & second.keys())}
    tests = {name: test for name, test in found.items() if test is not None}
    if not tests:
        return None
    scope = ", ".join(f"{first[name].facts.title} {test.questions}" for name, test in tests.items())
    return Contrast(words, *mean_difference(list(tests.values()), [first[name].scale for name in tests]), scope)


def measured(rows: Iterable[Mapping[str, Any]], *kinds: str, policy: str | None = None) -> list[Contrast]:
    """The contrasts of these kinds that the study's files hold, of a position policy where they have one."""
    found = []
    for row in rows:
        if row["of"] in kinds and row.get("positions") == policy:
            student = "" if row.get("student") is None else f", student {row['student']}, rate {row['rate']:g}"
            at = "" if row.get("retention") is None else f"{100 * row['retention']:g} % kept{student}"
            words = ", ".join(filter(None, (row["of"] if len(kinds) > 1 or not at else "", at)))
            bounds = None if row["interval"] is None else tuple(row["interval"])
            scope = ", ".join(row.get("benchmarks", ()))
            found.append(Contrast(words, row["difference"], bounds, row["p"], row["pictures"], scope))
    return found


def beats(contrasts: Iterable[Contrast | None]) -> Verdict:
    """The verdict on a claim that every difference is above zero."""
    known = sorted((one for one in contrasts if one is not None), key=lambda one: one.difference)
    stands = _stand(known)
    if stands is None and known and all(one.bounds for one in known):
        return Verdict(f"{UNTESTED}: {_where(known)}", _first(known), len(known), _scope(known))
    if stands is None:
        return _unable(known)
    below = any(real and one.difference < 0 for one, real in zip(known, stands, strict=True))
    above = all(real and one.difference > 0 for one, real in zip(known, stands, strict=True))
    return Verdict(FALSE if below else TRUE if above else UNDECIDED, _first(known), len(known), _scope(known))


def _where(contrasts: Sequence[Contrast]) -> str:
    """Where the intervals of a family lie."""
    ends = [one.bounds for one in contrasts if one.bounds]
    if any(high < 0 for _, high in ends):
        return "an interval lies below zero"
    return "all intervals lie above zero" if all(low > 0 for low, _ in ends) else "intervals reach across zero"


def matters_not(contrasts: Iterable[Contrast | None]) -> Verdict:
    """The verdict on a claim that no difference is worth speaking of."""
    known = sorted((one for one in contrasts if one is not None), key=lambda one: -abs(one.difference))
    stands = _stand(known)
    if stands is None:
        return _unable(known)
    close = all(one.bounds and max(map(abs, one.bounds)) < MARGIN for one in known)
    verdict = TRUE if close else FALSE if any(stands) else UNDECIDED
    return Verdict(verdict, _first(known), len(known), _scope(known))


def _stand(family: Sequence[Contrast]) -> list[bool] | None:
    """Which differences are significant after Holm's correction over the family; None where one cannot be tested."""
    values = corrected({place: one.p for place, one in enumerate(family)})
    return [p < SIGNIFICANT for p in values.values()] if values and len(values) == len(family) else None


def _unable(family: Sequence[Contrast]) -> Verdict:
    return Verdict(
        TOO_FEW if family else NOT_RUN, _first([one for one in family if not one.bounds] or family), len(family)
    )


def _scope(contrasts: Sequence[Contrast]) -> str:
    """The benchmarks of a family, each once."""
    return "; ".join(dict.fromkeys(one.scope for one in contrasts if one.scope))


def _first(contrasts: Sequence[Contrast]) -> str:
    """The difference that speaks most against a claim."""
    return str(contrasts[0]) if contrasts else ""


class Claim(NamedTuple):
    """A claim, the name of its figure's files, what its family of comparisons is, and what judges it under a position
    policy.
    """

    words: str
    figure: str
    family: str
    judge: Callable[[Material, str], Verdict]
    any_policy: bool = False  # whether it has nothing to do with positions


def of_study(*kinds: str) -> Callable[[Material, str], Verdict]:
    """Judges that every contrast of these kinds in study.json is above zero."""

    def judge(material: Material, policy: str) -> Verdict:
        content = material.study or {}
        found = beats(measured(content.get("contrasts", ()), *kinds, policy=policy))
        if not found.family:
            return found
        asked = {row["benchmark"]: f"{row['title']} {row['questions']}" for row in content.get("rows", ())}
        kept = sorted({row["retention"] for row in content.get("rows", ()) if row["retention"] < 1}, reverse=True)
        names = [name for name in found.scope.replace(";", ",").split(", ") if name]
        scope = ", ".join(dict.fromkeys(asked.get(name, name) for name in names)) or "its benchmarks"
        where = "" if (layer := content.get("description", {}).get("layer")) is None else f", after layer {layer}"
        return found._replace(scope=f"{scope}; {', '.join(f'{100 * one:g}' for one in kept)} % kept{where}")

    return judge


def best_of(ablation: str, setting: Setting) -> Callable[[Material, str], Verdict]:
    """Judges whether one setting of an ablation beats all others."""

    def judge(material: Material, policy: str) -> Verdict:
        found = settings(material, ablation, policy)
        if setting not in found.cells:
            return Verdict(NOT_RUN)
        return beats(_between(found, setting, other) for other in found.cells if other != setting)

    return judge


def temperature_matters_not(material: Material, policy: str) -> Verdict:
    """Claim 6: every pair of settings, each benchmark on its own, so that one that moves is not averaged away."""
    found = settings(material, "temperature", policy)
    pairs = combinations(found.cells, 2)
    return matters_not(_between(found, *pair, name) for pair in pairs for name in found.averaged)


def vision_is_the_better_student(material: Material, policy: str) -> Verdict:
    """Claim 7: vision less cross as student, at each rate."""
    found = settings(material, "recovery", policy)
    rates = sorted({rate for _, rate in found.cells})
    pairs = [(("vision", rate), ("cross", rate)) for rate in rates]
    return beats(_between(found, *pair) for pair in pairs if all(setting in found.cells for setting in pair))


def papers_order(material: Material, policy: str) -> Verdict:
    """Claim 10: every two methods that the paper's Table 1 has in an order, at every budget with several benchmarks."""
    contrasts: list[Contrast | None] = []
    for section in material.sections:
        for tokens, lines in _by_budget(section, policy).items():
            printed = sorted(paper.printed_tables()[paper.PICTURES], key=lambda row: -row["acc"])
            ranked = [
                row["method"] for row in printed if row["tokens"] == tokens and len(lines.get(row["method"], ())) > 1
            ]
            for first, second in combinations(ranked, 2):
                contrasts.append(paired(f"{tokens:g} tokens, {first} less {second}", lines[first], lines[second]))
    return beats(contrasts)


def scap_looks_late(material: Material, _policy: str) -> Verdict:
    """Claim 11: SCAP in the last third of the patches less the first, and the same less that without rotation. The
    evidence names what other probed models say, which may have another rotation.
    """
    content = material.scap or {}
    found = beats(measured(content.get("contrasts", ()), "late", "rotation"))
    if not found.family:
        return found
    others = []
    for one in material.other_scaps:
        late = measured(one["contrasts"], "late")
        others += (
            [f"{one['description']['model'].rpartition('/')[2]} {signed(late[0].difference, late[0].bounds)}"]
            if late
            else []
        )
    asked = f"{content['benchmark']} {content['questions']}" if "benchmark" in content else ""
    return found._replace(evidence="; ".join([found.evidence, *others]), scope=asked)


def time_is_linear(material: Material, _policy: str) -> Verdict:
    """Claim 12: how much of the times a straight line explains, and the selection's largest share of them."""
    rows = [row for row in material.measured[0]["rows"] if row["method"] in (FULL, "consensusdrop")]
    if len(rows) < 4:
        return Verdict(NOT_RUN)
    tokens, times = ([row[key] for row in rows] for key in ("tokens", "ttft_ms"))
    explained = float(np.corrcoef(tokens, times)[0, 1] ** 2)
    share = max(row["share"] or 0.0 for row in rows)
    good, bad = explained >= STRAIGHT and share <= LITTLE, explained < BENT or share > MUCH
    words = f"a line explains {100 * explained:.0f} %; selection at most {100 * share:.1f} % ({len(rows)} budgets)"
    return Verdict(TRUE if good else FALSE if bad else UNDECIDED, words, 1, material.measured[0]["model"])


CLAIMS = (
    Claim(
        "Recovery beats both single signals at every retention",
        "f02-recovery-helps",
        "gain at each retention, student and rate",
        of_study("gain"),
    ),
    Claim("Vision-only beats cross-only", "f02-recovery-helps", "each retention", of_study("sides")),
    Claim(
        "Lower retention: more disagreement, correction and gain",
        "f03-three-way",
        "each of the three at the least retention less the most, by student and rate",
        of_study("disagreement", "correction", "rise"),
    ),
    Claim(
        "The correction falls with the rate",
        "f04-decay",
        "each rate less the next, by retention and student",
        of_study("fall"),
    ),
    Claim(
        "alpha = 0.7 is best",
        "f09-alpha",
        "0.7 less each other alpha",
        best_of("alpha", (0.7,)),
    ),
    Claim(
        "Temperatures do not matter",
        "f10-temperature",
        "each pair of settings on each benchmark",
        temperature_matters_not,
    ),
    Claim(
        "Vision is the better student",
        "f11-recovery",
        "each rate",
        vision_is_the_better_student,
    ),
    Claim(
        "20 merged of 128 is best",
        "f12-anchors",
        "20 less each other number",
        best_of("anchors", (20,)),
    ),
    Claim(
        "Class attention with all text rows is best",
        "f13-score",
        "these two less each other pair",
        best_of("score", ("class", "all")),
    ),
    Claim(
        "The methods' order at each budget",
        "f06-pareto",
        "each pair that Table 1 orders, by budget",
        papers_order,
    ),
    Claim(
        "SCAP leans toward late patches",
        "claim-11-scap",
        "last third less first, with rotation, and less that without",
        scap_looks_late,
        any_policy=True,
    ),
    Claim(
        "Time to first token is linear in tokens, selection costs little",
        "f16-efficiency",
        "one line through the budgets",
        time_is_linear,
        any_policy=True,
    ),
)


def claims_table(material: Material, beside: Mapping[str, Material] | None = None) -> str:
    """Every claim with its verdict under both position policies, the difference that speaks most against it, and the
    benchmarks with their numbers of questions.

    Args:
        material: the results that decide.
        beside: results of other models, by the head of a column that has their verdicts alone.
    """
    others = beside or {}
    head = ("claim", "verdict", "most against it, in points (95 % interval)", "benchmarks and n", *others)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for number, claim in enumerate(CLAIMS, 1):
        found = _judged(claim, material)
        evidence = [f"{_policy(claim, policy)}{one.evidence}" for policy, one in found.items() if one.evidence]
        scope = dict.fromkeys(one.scope for one in found.values() if one.scope)
        counts = " / ".join(dict.fromkeys(str(one.family) for one in found.values()))
        asked = "<br>".join([*scope, f"{claim.family}: {counts}"])
        verdicts = [_verdicts(claim, _judged(claim, one)) for one in others.values()]
        cells = (
            f"{number}. {claim.words}",
            _verdicts(claim, found),
            "<br>".join(evidence) or "-",
            asked,
            *verdicts,
        )
        lines.append(f"| {' | '.join(cells)} |")
    scopes = []
    for section in material.sections:
        config = section.rows[0].config
        scopes.append(f"- {config['model']} on {config['data']}, {section.rows[0].part or 'all questions'}")
    runs = "\n".join(dict.fromkeys(scopes)) or "- no runs"
    return (
        "\n".join(lines) + f"\n\nFrom these runs, and from study.json, scap.json and bench*.json beside them:\n\n{runs}"
    )


def _verdicts(claim: Claim, found: Mapping[str, Verdict]) -> str:
    return "<br>".join(f"{_policy(claim, policy)}**{one.verdict}**" for policy, one in found.items())


def _policy(claim: Claim, policy: str) -> str:
    return "" if claim.any_policy else f"{POLICIES[policy]}: "


def _judged(claim: Claim, material: Material) -> dict[str, Verdict]:
    """A claim's verdict by position policy; one alone where it has nothing to do with positions."""
    found = {}
    for policy in list(POLICIES)[: 1 if claim.any_policy else None]:
        try:
            found[policy] = claim.judge(material, policy)
        except NotMeasured:
            found[policy] = Verdict(NOT_RUN)
    return found


def _by_budget(section: Section, policy: str) -> dict[float, dict[str, Mapping[str, Row]]]:
    """Complete runs under a position policy by budget, label and benchmark, without benchmarks in which the full model
    guesses.
    """
    found: dict[float, dict[str, Mapping[str, Row]]] = {}
    for line in section.reduced:
        for name, row in line.runs.items():
            same = row.config["options"].get("positions", "renumber") == policy
            if same and row.complete and name not in section.near_chance:
                found.setdefault(line.tokens, {}).setdefault(row.variant, {})[name] = row  # type: ignore[index]
    return found


def _between(found: Settings, first: Setting, second: Setting, benchmark: str | None = None) -> Contrast | None:
    """Two settings of an ablation, first less second, on all its benchmarks or on one."""
    names = found.averaged if benchmark is None else [benchmark]
    runs = [{name: found.cells[setting][name].row for name in names} for setting in (first, second)]
    words = ["/".join(map(str, setting)) for setting in (first, second)]
    where = "" if benchmark is None else f"{found.section.title(benchmark)}, "
    return paired(where + " less ".join(words), *runs)
