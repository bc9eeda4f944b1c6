"""The paper's claims are judged by result files alone, and what was not run is said to be not run."""

from pathlib import Path

import pytest
import study_files
from run_folders import store

from llava_consensus import cli
from llava_consensus.evaluation.report.rows import Row, read_row
from llava_consensus.paper import claims
from llava_consensus.paper.claims import FALSE, NOT_RUN, TOO_FEW, TRUE, UNDECIDED, Contrast, beats, matters_not, paired
from llava_consensus.paper.figures import Material


def contrast(low: float, high: float, pictures: int = 50) -> Contrast:
    """A difference that is real alone where its interval leaves zero out."""
    if pictures < 10:
        return Contrast("one less other", (low + high) / 2, None, None, pictures)
    return Contrast("one less other", (low + high) / 2, (low, high), 0.01 if low > 0 or high < 0 else 0.3, pictures)


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


def test_a_verdict_is_corrected_over_its_family() -> None:
    """One difference below zero among ten, real where it is looked at alone: this made a claim false once."""
    family = [contrast(-2, -0.1), *[contrast(-1, 1)] * 9]
    assert beats(family[:1]).verdict == FALSE and beats(family).verdict == UNDECIDED and beats(family).family == 10
    assert matters_not([contrast(0.1, 3), *[contrast(-1, 1)] * 9]).verdict == UNDECIDED


def test_from_few_pictures_there_is_too_little_to_say() -> None:
    few = [contrast(1, 2), contrast(1, 2, pictures=5)]
    assert beats(few).verdict == matters_not(few).verdict == TOO_FEW and "+1.5 (5 pictures)" in beats(few).evidence


def test_the_evidence_starts_with_what_speaks_against_the_claim() -> None:
    found = beats(contrast(low, low + 1) for low in (5, -2, 3, 1))
    assert found.evidence.startswith("one less other: -1.5 (-2.0 to -1.0)")


def test_a_paired_difference_is_the_mean_over_benchmarks(tmp_path: Path) -> None:
    def runs(right: int) -> dict[str, Row]:
        rows = [
            read_row(store(tmp_path, [1.0] * right + [0.0] * (20 - right), benchmark=name)) for name in ("gqa", "seed")
        ]
        return {row.benchmark: row for row in rows}

    found = paired("better less worse", runs(16), runs(10))
    assert found is not None and found.difference == pytest.approx(30) and found.bounds is not None
    assert 0 < found.bounds[0] < 30 < found.bounds[1] and found.p is not None and found.p < 0.05
    assert found.pictures == 20
    assert paired("nothing in common", runs(16), {}) is None


def test_nothing_is_claimed_without_results() -> None:
    text = claims.claims_table(Material())
    assert len(claims.CLAIMS) == 12 and text.count(f"**{NOT_RUN}**") == 22 and "- no runs" in text  # two policies


@pytest.mark.parametrize(
    ("gain", "slope", "late", "verdicts"),
    [(2.0, -0.3, True, (TRUE, TRUE, TRUE)), (0.1, -0.3, True, (UNDECIDED, TRUE, TRUE)), (-3, 0.3, False, (FALSE,) * 3)],
)
def test_the_study_decides(gain: float, slope: float, late: bool, verdicts: tuple[str, ...]) -> None:
    material = Material(study=study_files.study(gain, slope), scap=study_files.scap(late))
    judges = (claims.of_study("gain"), claims.of_study("fall"), claims.scap_looks_late)
    for policy in claims.POLICIES:
        assert tuple(judge(material, policy).verdict for judge in judges) == verdicts


def test_a_study_of_few_pictures_decides_nothing() -> None:
    material = Material(study=study_files.study(pictures=5), scap=study_files.scap(pictures=5))
    for judge in (claims.of_study("gain"), claims.of_study("fall"), claims.scap_looks_late):
        assert judge(material, "keep").verdict == TOO_FEW


def test_the_study_tells_which_side_is_better() -> None:
    found = claims.of_study("sides")(Material(study=study_files.study()), "renumber")
    assert found.verdict == TRUE and found.family == 2 and "25 % kept: +3.0 (+2.0 to +4.0)" in found.evidence


def test_times_on_a_line_are_linear() -> None:
    content = study_files.bench()
    assert claims.time_is_linear(Material(benches=[content]), "keep").verdict == TRUE
    for row in content["rows"]:
        row["share"] = 0.4
    assert claims.time_is_linear(Material(benches=[content]), "keep").verdict == FALSE


def test_the_page_says_what_decided_and_on_how_many_questions(tmp_path: Path) -> None:
    out = tmp_path / "results"
    store(out, [1.0] * 40, limit=40)
    page = tmp_path / "paper.md"
    page.write_text("before\n<!-- results:begin -->\n<!-- results:end -->\nafter\n")
    assert cli.main(["paper", "claims", "--out", str(out), "--write", str(page)]) == 0
    text = page.read_text()
    assert "the first 40 questions" in text and text.startswith("before") and text.endswith("after\n")
    table = claims.claims_table(Material(study=study_files.study()))
    line = next(line for line in table.splitlines() if line.startswith("| 2. "))
    assert (
        "renumbered: **true**<br>kept: **true**" in line
        and "50, 25 % kept" in line
        and "<br>each retention: 2 |" in line
    )


def test_verdicts_of_other_models_stand_beside() -> None:
    table = claims.claims_table(Material(), {"drawn": Material(study=study_files.study())})
    head, line = table.splitlines()[0], next(line for line in table.splitlines() if line.startswith("| 2. "))
    assert head.endswith("| drawn |") and f"renumbered: **{NOT_RUN}**<br>kept: **{NOT_RUN}** | - |" in line
    assert line.endswith(f"| renumbered: **{TRUE}**<br>kept: **{TRUE}** |")
