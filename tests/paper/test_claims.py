"""The paper's claims are judged by result files alone, and what was not run is said to be not run."""

import json
from pathlib import Path

import pytest
import study_files
from run_folders import store

from llava_consensus import cli
from llava_consensus.evaluation.report.rows import Row, read_row
from llava_consensus.paper import claims
from llava_consensus.paper.claims import FALSE, NOT_RUN, TRUE, UNDECIDED, Contrast, beats, matters_not, paired
from llava_consensus.paper.figures import Material, read


def contrast(low: float, high: float) -> Contrast:
    return Contrast("one less other", (low + high) / 2, low, high)


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ([(1, 2), (0.1, 3)], TRUE),
        ([(1, 2), (-0.1, 3)], UNDECIDED),
        ([(1, 2), (-3, -0.1)], FALSE),
        ([], NOT_RUN),
    ],
)
def test_one_thing_beats_others(ends: list[tuple[float, float]], verdict: str) -> None:
    assert beats([*(contrast(*pair) for pair in ends), None]).verdict == verdict


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [([(-1, 1), (0.1, 1.9)], TRUE), ([(-1, 5)], UNDECIDED), ([(0.5, 5)], FALSE), ([(-5, -0.5)], FALSE), ([], NOT_RUN)],
)
def test_something_does_not_matter(ends: list[tuple[float, float]], verdict: str) -> None:
    assert matters_not(contrast(*pair) for pair in ends).verdict == verdict


def test_the_evidence_starts_with_what_speaks_against_the_claim() -> None:
    found = beats(contrast(low, low + 1) for low in (5, -2, 3, 1))
    assert found.evidence.startswith("one less other: -1.5 (-2.0 to -1.0)") and "and 1 more" in found.evidence


def test_a_paired_difference_is_the_mean_over_benchmarks(tmp_path: Path) -> None:
    def runs(right: int) -> dict[str, Row]:
        rows = [
            read_row(store(tmp_path, [1.0] * right + [0.0] * (20 - right), benchmark=name)) for name in ("gqa", "seed")
        ]
        return {row.benchmark: row for row in rows}

    found = paired("better less worse", runs(16), runs(10))
    assert found is not None and found.difference == pytest.approx(30) and 0 < found.low < 30 < found.high
    assert paired("nothing in common", runs(16), {}) is None


def test_nothing_is_claimed_without_results() -> None:
    text = claims.claims_table(Material(), {claim.figure: "make it" for claim in claims.CLAIMS})
    assert text.count(f"**{NOT_RUN}**") == len(claims.CLAIMS) == 12 and "- no runs" in text


@pytest.mark.parametrize(
    ("gain", "slope", "late", "verdicts"),
    [(2.0, -0.3, True, (TRUE, TRUE, TRUE)), (0.1, -0.3, True, (UNDECIDED, TRUE, TRUE)), (-3, 0.3, False, (FALSE,) * 3)],
)
def test_the_study_decides(gain: float, slope: float, late: bool, verdicts: tuple[str, ...]) -> None:
    material = Material(study=study_files.study(gain, slope), scap=study_files.scap(late))
    judges = (claims.recovery_beats, claims.correction_falls, claims.scap_looks_late)
    assert tuple(judge(material).verdict for judge in judges) == verdicts


@pytest.mark.parametrize(("more", "verdict"), [(0.0, TRUE), (-2.0, UNDECIDED), (-9.0, FALSE)])
def test_without_runs_of_one_side_the_study_tells_which_is_better(more: float, verdict: str) -> None:
    rows = study_files.study()["rows"]  # vision 80, cross 77, give or take 2, on two benchmarks
    for row in rows:
        if row["scores"] == "vision":
            row["accuracy"] += more
    found = claims.vision_beats_cross(Material(study={"rows": rows}))
    assert found.verdict == verdict and f"25 % kept, not paired: {3 + more:+.1f}" in found.evidence


@pytest.mark.parametrize(("chance", "verdict"), [(84.0, TRUE), (0.0, FALSE)])
def test_no_gain_is_counted_where_the_full_model_guesses(chance: float, verdict: str) -> None:
    rows = study_files.study(2.0)["rows"]
    for row in rows:
        if row["benchmark"] == "pope":  # the full model's interval is from 83 to 87
            row["chance"] = chance
            row.update({"gain": -9.0, "gain_interval": [-10.0, -8.0]} if row["gain"] else {})
    assert claims.recovery_beats(Material(study={"rows": rows})).verdict == verdict


def test_times_on_a_line_are_linear() -> None:
    content = study_files.bench()
    assert claims.time_is_linear(Material(benches=[content])).verdict == TRUE
    for row in content["rows"]:
        row["share"] = 0.4
    assert claims.time_is_linear(Material(benches=[content])).verdict == FALSE


def test_runs_decide_and_the_page_says_how_few_they_were(tmp_path: Path) -> None:
    out = tmp_path / "results"
    for name in ("gqa", "pope"):
        for alpha, right in ((1.0, 38), (0.0, 10)):
            store(out, [1.0] * right + [0.0] * (40 - right), benchmark=name, changed={"alpha": alpha}, limit=40)
        for method, right in (("consensusdrop", 5), ("vispruner", 35)):
            more = {"options": {}, "limit": 40, "method": method, "benchmark": name}
            store(out, [1.0] * right + [0.0] * (40 - right), **more)
    assert claims.vision_beats_cross(read(out)).verdict == TRUE
    page = tmp_path / "paper.md"
    page.write_text("before\n<!-- results:begin -->\n<!-- results:end -->\nafter\n")
    assert cli.main(["paper", "claims", "--out", str(out), "--write", str(page)]) == 0
    text = page.read_text()
    assert "the first 40 questions alone" in text and text.startswith("before") and text.endswith("after\n")
    assert json.dumps("2. Vision-only beats cross-only | **true**")[1:-1] in text
