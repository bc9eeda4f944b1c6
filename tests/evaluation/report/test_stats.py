"""Intervals and tests: coverage where the truth is known, McNemar by hand, statistics against the scorers' rules."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import store
from tiny_data import MADE, said

from llava_consensus import cli
from llava_consensus.evaluation.benchmarks import make, pope
from llava_consensus.evaluation.report import stats
from llava_consensus.evaluation.report.stats import Sample, counted, sample


def report(correct: Any, **more: Any) -> dict[str, Any]:
    return {"extracted": [{"index": place, "correct": value} for place, value in enumerate(correct)], **more}


def made(found: dict[str, Any]) -> Sample:
    """A report's sample with whatever score its rows make."""
    statistic = stats.STATISTICS[found.get("statistic", "mean")]
    raw = stats._sample(counted(found), found.get("statistic", "mean"))
    assert raw is not None and raw.score is statistic.score
    return raw


def score(one: Sample) -> float:
    return float(one.score(one.sums.sum(axis=0)))


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    truth, inside = 0.7, 0
    for trial in range(400):
        low, high = stats.interval(stats.draws(made(report(random.random(200) < truth)), f"trial {trial}", 500))
        inside += low <= 100 * truth <= high
    assert 0.92 <= inside / 400 <= 0.975  # 95 % asked; binomial spread of 400 trials is 1.1 points


def test_bootstrap_equals_the_known_standard_error() -> None:
    values = stats.draws(made(report([1] * 300 + [0] * 700)), "gqa", 20000)
    assert values.mean() == pytest.approx(30, abs=0.05)
    assert values.std() == pytest.approx(100 * math.sqrt(0.3 * 0.7 / 1000), rel=0.03)


def test_calibration_by_hand() -> None:
    told = report([1, 0, 1, 0])
    for row, sure in zip(told["extracted"], (0.95, 0.85, 0.55, 0.55), strict=True):
        row["logprob"] = math.log(sure)
    # bins of a tenth: 1 - 0.95, 0.85 and 1.1 - 1; risks 0, 1/2 and, with the mean of equally sure ones, 1.5/3 and 2/4
    wanted = {"ece": 100 * (0.05 + 0.85 + 0.1) / 4, "aurc": 100 * (0 + 0.5 + 0.5 + 0.5) / 4}
    assert stats.calibration(told) == pytest.approx(wanted)
    del told["extracted"][2]["logprob"]
    assert stats.calibration(told) is None


def test_draws_are_seeded_by_name_and_rows_of_a_unit_are_drawn_together() -> None:
    one = made(report([1, 0] * 20))
    assert np.array_equal(stats.draws(one, "gqa"), stats.draws(one, "gqa"))
    assert not np.array_equal(stats.draws(one, "gqa"), stats.draws(one, "pope"))
    alone, paired = report([1] * 50 + [0] * 50), report([1] * 50 + [0] * 50)
    for row in paired["extracted"]:
        row["unit"] = row["index"] // 10  # ten units, each all right or all wrong
    wide, narrow = stats.draws(made(paired), "a", 8000).std(), stats.draws(made(alone), "a", 8000).std()
    assert narrow == pytest.approx(5, rel=0.05) and wide == pytest.approx(5 * math.sqrt(10), rel=0.05)


def flips(first: int, second: int) -> float:
    return stats.sign_flips(np.repeat([1.0, -1.0], [first, second]))


def all_flips(steps: Any) -> float:
    """The share of all ways to swap that reach as far."""
    signs = np.array(list(itertools.product([1, -1], repeat=len(steps))))
    return (np.abs(signs @ steps) >= abs(steps.sum()) - 1e-9).mean()


@pytest.mark.parametrize("parts", [1, 3, 10, 60])
def test_sign_flips_are_all_ways_to_swap(parts: int) -> None:
    random = np.random.default_rng(parts)
    steps = random.integers(-4, 6, 12) / parts
    assert stats.sign_flips(steps) == pytest.approx(all_flips(steps), rel=1e-12)


def test_what_cannot_be_counted_has_a_p_a_little_above() -> None:
    """Too many sums, steps without a common measure, several benchmarks."""
    random = np.random.default_rng(2)
    many = random.integers(-10, 11, 9000) / 10
    normal = math.erfc((abs(many.sum()) - 0.05) / math.sqrt(2 * (many**2).sum()))
    assert stats.sign_flips(many) == pytest.approx(normal, rel=0.01)
    some = np.repeat([1.0, -1.0], [70, 40])
    exact = stats.sign_flips(some)
    assert exact == pytest.approx(2 * sum(math.comb(110, k) for k in range(41)) / 2**110)
    assert exact <= stats.sign_flips(some * (1 + 1e-7 * random.random(110))) < 1.3 * exact
    assert exact <= stats.sign_flips(some[:50], some[50:]) < 1.001 * exact
    parts = random.integers(-2, 4, 8) / 7, random.integers(-2, 4, 7) / 3
    exact = all_flips(np.concatenate(parts))
    assert exact - 1e-9 <= stats.sign_flips(*parts) <= exact + 0.01


def test_mcnemar_of_many_questions_is_the_normal_one_and_holm_by_hand() -> None:
    p = flips(5200, 5000)
    assert p == pytest.approx(math.erfc((200 - 1) / math.sqrt(10200) / math.sqrt(2)), rel=0.01)
    assert 0 < flips(20000, 0) < 1e-300  # smaller than any float, no overflow, and not 0
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([]) == [] and stats.holm([0.8, 0.9]) == [1.0, 1.0]


@pytest.mark.parametrize("of_picture", [1, 5])
def test_the_test_keeps_its_level(of_picture: int) -> None:
    """Two runs equally good, alike within an image: p < 0.05 in about 5 % of the experiments."""
    random = np.random.default_rng(1)
    hits = 0
    for trial in range(300):
        alike = random.choice([0.0, 0.3, 0.6, 1.0], (2, 150 // of_picture))
        first, second = (about(values.repeat(of_picture), of_picture) for values in alike)
        found = stats.paired(first, second, f"trial {trial}", 400)
        assert found is not None and found.test.startswith("exact") and found.p is not None
        hits += found.p < 0.05
    assert 0.02 <= hits / 300 <= 0.09


def about(correct: Any, of_picture: int) -> dict[str, Any]:
    """A report of questions, so many about each picture."""
    found = report(correct)
    for row in found["extracted"]:
        row["picture"] = f"{row['index'] // of_picture}.jpg"
    return found


def test_swapping_pictures_is_mcnemar_where_each_has_one_question() -> None:
    first, second = [1] * 10 + [0] * 12, [0] * 8 + [1] * 4 + [0] * 10
    found = stats.paired(report(first), report(second), "gqa")
    assert found is not None and found.test == "exact McNemar" and found.p == pytest.approx(flips(8, 2))
    found = stats.paired(report([1, 1, 0, 0]), report([0, 1, 1]), "gqa")
    assert found is not None and found.questions == 3 and found.difference == 0, "only common questions are paired"


@pytest.mark.parametrize(("pictures", "enough"), [(1, False), (9, False), (10, True)])
def test_few_pictures_have_no_interval_no_test_and_no_mark(pictures: int, enough: bool) -> None:
    """Five questions about one image printed "-20.00 to -20.00, p = 0" once."""
    first, second = about([0, 1, 1, 1, 1] * pictures, 5), about([1] * 5 * pictures, 5)
    found = stats.paired(first, second, "gqa")
    assert found is not None and found.difference == pytest.approx(-20)
    assert (found.p is not None, found.bounds is not None) == (enough, enough)
    assert (stats.bounds(made(first), "gqa") is not None) is enough
    assert stats.mark(found.p, 0.0) == ("‡" if enough else "")
    if enough:
        assert found.test == "exact sign flips of images" and found.p == pytest.approx(2 / 2**10)


def test_no_difference_in_320_answers_allows_about_a_point() -> None:
    same = report([1, 0] * 160)
    found = stats.paired(same, same, "textvqa")
    assert found is not None and found.p == 1.0 and found.bounds == pytest.approx((-0.93, 0.93), abs=0.01)


def test_runs_of_several_seeds_are_their_mean_and_are_compared_as_one() -> None:
    seeds = [made(report(np.random.default_rng(seed).random(200) < 0.5)) for seed in range(5)]
    one, full = stats.pooled(seeds), made(report([1] * 180 + [0] * 20))
    assert score(one) == pytest.approx(np.mean([score(seed) for seed in seeds]))
    found = stats.Comparison(one, full, "gqa")
    assert found.difference == pytest.approx(score(one) - 90) and 0 < found.p < 1e-9


def binary(random: np.random.Generator, size: int) -> tuple[dict[str, Any], list[str], list[str]]:
    """A report of questions of three groups in turn, their answers and labels."""
    labels, said = (random.choice(["yes", "no"], size).tolist() for _ in range(2))
    groups = [("random", "popular", "adversarial")[place % 3] for place in range(size)]
    rows = report(one == other for one, other in zip(said, labels, strict=True))["extracted"]
    for row, text, group in zip(rows, said, groups, strict=True):
        row |= {"extracted": text, "group": group}
    return {"extracted": rows, "statistic": "f1_mean"}, said, labels


def test_f1_is_the_scorers() -> None:
    found, said, labels = binary(np.random.default_rng(5), 120)
    official = [pope.metrics(said[start::3], labels[start::3])["f1"] for start in range(3)]
    assert score(made(found)) == pytest.approx(100 * np.mean(official), rel=1e-12)
    rows = [{"index": place, "extracted": "no", "correct": True, "group": "random"} for place in range(3)]
    rows += [{"index": 3, "extracted": "yes", "correct": True, "group": "popular"}]
    assert score(made({"extracted": rows, "statistic": "f1_mean"})) == 100, "without positives a group counts nothing"


def test_f1_is_tested_by_right_answers() -> None:
    random = np.random.default_rng(8)
    first, second = (binary(random, 120)[0] for _ in range(2))
    rows = zip(first["extracted"], second["extracted"], strict=True)
    steps = [float(one["correct"]) - float(other["correct"]) for one, other in rows]
    found = stats.paired(first, second, "pope")
    assert found is not None and found.test == "exact sign flips of right answers"
    assert found.p == pytest.approx(flips(steps.count(1), steps.count(-1)))


def test_a_mean_of_benchmarks_is_tested_exactly_and_counts_one_without_a_difference() -> None:
    one, other, same = report([1] * 12 + [0] * 28), report([0] * 2 + [1] * 2 + [0] * 36), report([1, 0] * 20)
    tests = [stats.paired(*pair, "gqa") for pair in ((one, other), (same, same))]
    assert all(test is not None for test in tests)
    mean = stats.mean_difference(tests, [1.0, 1.0])  # type: ignore[arg-type]
    assert mean.difference == pytest.approx(12.5) and mean.p == pytest.approx(flips(10, 0))
    alone, reach = tests[0].bounds, tests[1].first.reach  # type: ignore[union-attr]
    assert mean.bounds[1] - mean.difference == pytest.approx(math.hypot(alone[1] - 25, reach) / 2, abs=0.7)


def test_groups_keep_their_size_when_drawn() -> None:
    found, *_ = binary(np.random.default_rng(6), 120)
    one = made(found)
    assert sorted(set(one.strata.tolist())) == [0, 1, 2]
    for row in found["extracted"]:
        row["unit"] = row["index"] // 3  # an image that lies in all three groups cannot be drawn within one
    assert set(made(found).strata.tolist()) == {0}


def test_mme_by_hand() -> None:
    right = [1, 1, 1, 0, 0, 0, 1, 1]  # existence: images a (2 of 2), b (1 of 2); count: a (0 of 2); code: c (2 of 2)
    tasks = ["existence"] * 4 + ["count"] * 2 + ["code"] * 2
    units = ["a", "a", "b", "b", "a", "a", "c", "c"]
    rows = report(right)["extracted"]
    for row, task, unit in zip(rows, tasks, units, strict=True):
        row |= {"group": task, "unit": unit}
    found = {"extracted": rows, "statistic": "mme", "counted": ["existence", "count"]}
    assert score(made(found)) == pytest.approx((75 + 50) + (0 + 0))
    assert sample(found, 125.0) is not None and len(made(found).sums) == 3  # image a of another task is another unit


def test_circular_by_hand() -> None:
    circular = report([1, 1, 1, 0, 0, 0] * 4, statistic="circular")
    for row in circular["extracted"]:
        row["unit"] = row["index"] // 2
    assert score(made(circular)) == pytest.approx(100 / 3)
    found = stats.paired(circular, circular, "mmbench")
    assert found is not None and found.test == "exact McNemar" and found.p == 1.0


def test_no_sample_where_the_score_cannot_be_made() -> None:
    odd = report([1, 0], statistic="unheard of"), report([1, 0], counted=["other"])
    for found in ({}, {"extracted": []}, report([1, None]), report([1, 1]), *odd):  # `[1, 1]` makes 100, not 50
        assert sample(found, 50.0) is None, found
    assert sample(report([1, 0]), None) is None and sample(report([1, 0]), 50.0) is not None


@pytest.mark.parametrize("name", MADE)
def test_rows_of_every_benchmark_make_up_its_score(name: str, tmp_path: Path) -> None:
    data = MADE[name](tmp_path)
    for words in (("yes",), ("A", "yes", "B"), ("no", "A", "1999", "dog")):
        answers = said(make(name).load(data), lambda one, words=words: words[sum(map(ord, one.text)) % len(words)])
        found = make(name).score(answers, data)
        assert sample(found, found[make(name).metric]) is not None, words


def test_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    folders = [
        store(out, [1] * 30 + [0] * 10),
        store(out, [1] * 20 + [0] * 18 + [1] * 2, method="random"),
        store(out, [1] * 40, questions="others"),
        store(out, None, tokens=32),
    ]
    for folder in folders[:2]:
        metrics = json.loads((folder / "metrics.json").read_text())
        for row in metrics["report"]["extracted"]:
            row["group"] = "choose" if row["index"] < 30 else "query"
        (folder / "metrics.json").write_text(json.dumps(metrics))
    assert cli.main(["report", "compare", str(folders[0]), "001", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "A: 75.00  ConsensusDrop, 64 tokens" in text and "B: 55.00  random, 64 tokens" in text
    assert "A - B (95 % interval): +20.00 (" in text
    assert "p = 0.039 (exact McNemar); 10 questions better in A, 2 in B" in text
    assert "gqa, 40 questions about 40 images" in text
    choose, query = (line.split() for line in text.splitlines()[-2:])
    assert choose[:4] == ["choose", "30", "30", "+33.33"] and query[:4] == ["query", "10", "10", "-20.00"]
    for other, message in (("002", "other questions"), ("003", "not complete"), ("00", "found 000, 001")):
        assert cli.main(["report", "compare", str(folders[0]), other, "--out", str(out)]) == 3
        assert message in capsys.readouterr().err
