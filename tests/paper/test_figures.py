"""Every figure of the paper is drawn from result files, and one without results is named, not drawn empty."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import study_files
from PIL import Image
from run_folders import store

from llava_consensus import cli
from llava_consensus.paper import figures, preset
from llava_consensus.paper.results import Material, NotMeasured, claims, read

pytest.importorskip("matplotlib")

BENCHMARKS = ("pope", "seed", "textvqa")
OPTIONS = {
    "fuser": "convex", "student": "vision", "rate": 0.1, "alpha": 0.7, "tau_vision": 1.0, "tau_cross": 1.0,
    "vision_score": "class", "aggregate": "all",
}  # fmt: skip


def run(out: Path, benchmark: str, right: int, tokens: int = 128, merged: int | None = None, **changed: object) -> None:
    """A run of ConsensusDrop with other options, `right` of its ten answers right."""
    answers: list[float] = [1] * right + [0] * (10 - right)
    options = {**OPTIONS, **changed}
    store(out, answers, benchmark=benchmark, tokens=tokens, merged=merged, options=options, changed=changed)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that any figure needs."""
    out = tmp_path_factory.mktemp("results")
    for name in BENCHMARKS:
        store(out, [1.0] * 9 + [0.0], method="full", tokens=576, benchmark=name)
        for tokens in (128, 64):
            run(out, name, 7, tokens)
        for alpha in (0.3, 0.5):
            run(out, name, int(10 * alpha), alpha=alpha)
        for pair in product((0.7, 1.3), repeat=2):
            run(out, name, 6, tau_vision=pair[0], tau_cross=pair[1])
        for student, rate in product(("vision", "cross"), (0.1, 0.3)):
            options = {"fuser": "recovery", "student": student, "rate": rate}
            run(out, name, 5, **{key: value for key, value in options.items() if OPTIONS[key] != value})
        for merged in (0, 40):
            run(out, name, 6, merged=merged)
        run(out, name, 6, vision_score="tokens")
        for method in ("vispruner", "sparsevlm"):
            for tokens in (128, 64):
                store(out, [1.0] * 6 + [0.0] * 4, method=method, tokens=tokens, benchmark=name, options={})
    for file, content in (("study", study_files.study()), ("scap", study_files.scap()), ("bench", study_files.bench())):
        (out / f"{file}.json").write_text(json.dumps(content))
    (out / "bench-large.json").write_text(json.dumps(study_files.bench("llava-1.5-13b")))
    return out


def test_every_figure_is_drawn_as_two_kinds(results: Path, tmp_path: Path) -> None:
    assert [missing for _, missing in figures.draw(read(results), tmp_path) if missing] == []
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(files) == 2 * len(figures.FIGURES)
    assert all(Image.open(path).size[0] > 300 for path in tmp_path.glob("*.png"))


def test_what_was_not_measured_is_named_with_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    assert cli.main(["paper", "figures", "--out", str(tmp_path / "results"), "--to", str(tmp_path / "to")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert list((tmp_path / "to").iterdir()) == []
    for figure in figures.FIGURES:
        assert any(line.startswith(f"{figure.name}: not drawn") and figure.makes in line for line in lines)
    page = (Path(__file__).parents[2] / "docs" / "paper.md").read_text()
    assert [figure.name for figure in figures.FIGURES if figure.name not in page] == []


def settings(material: Material, name: str, *options: str) -> set[tuple[Any, ...]]:
    """The settings of an ablation that were found, by these options of their methods."""
    runs = material.of(preset.read(name)).runs
    return {tuple(getattr(line.reduction[0], option) for option in options) for line, _ in runs if line}


def test_an_ablation_takes_its_own_runs_alone(results: Path) -> None:
    material = read(results)
    assert settings(material, "alpha", "alpha") == {(0.3,), (0.5,), (0.7,)}
    assert settings(material, "recovery", "fuser", "student", "rate") == {
        ("convex", "vision", 0.1),
        *(("recovery", *pair) for pair in product(("vision", "cross"), (0.1, 0.3))),
    }
    assert len(settings(material, "temperature", "tau_vision", "tau_cross")) == 5
    found = material.of(preset.read("anchors"))
    assert {line.merged for line, _ in found.runs if line} == {0, None, 40}
    found = material.of(preset.read("alpha"))
    low = next(line for line in found.preset.rows if line.label == "alpha 0.3")
    assert low.tokens == 128 and found.percent(low, "pope") == (30, pytest.approx(0), pytest.approx(60))
    assert found.printed(found.preset.rows[-1], "mme") == 1451.1


def test_an_ablation_is_found_at_the_budget_with_most_settings(tmp_path: Path) -> None:
    """Runs of vision-only and cross-only on more benchmarks are no ablation of alpha."""
    for name in BENCHMARKS:
        for alpha in (0.0, 1.0):
            run(tmp_path, name, 5, tokens=192, alpha=alpha)
    run(tmp_path, "pope", 5, alpha=0.3)
    with pytest.raises(NotMeasured, match="alpha"):
        read(tmp_path).of(preset.read("alpha"))
    run(tmp_path, "pope", 5, tokens=64, alpha=0.3)
    run(tmp_path, "pope", 5, tokens=64, alpha=0.5)
    run(tmp_path, "pope", 5, tokens=64)
    for name in BENCHMARKS:
        run(tmp_path, name, 5, tokens=192)
        run(tmp_path, name, 5, tokens=192, alpha=0.5)
    points = figures._over("alpha", "alpha")(read(tmp_path))
    assert points.attrs["about"].endswith("cpu; 64 tokens") and set(points.panel) == {"POPE"} and len(points) == 3


def test_the_measurement_of_the_right_budgets_is_taken(results: Path) -> None:
    material = read(results)
    assert [content["model"] for content in material.measured] == ["llava-1.5-13b", "llava-mini"]
    rows = [{**row, "tokens": row["tokens"] + 1} for row in material.benches[0]["rows"]]
    other = {**material.benches[0], "rows": rows}
    two = Material(benches=[other, material.benches[0]])
    assert two.bench_of([128, 64]) is material.benches[0]["rows"] and len(two.measured) == 1
    with pytest.raises(NotMeasured, match=r"at the budgets of the runs \(128 64\)"):
        figures.pareto(replace(material, benches=[other]))


def test_accuracy_over_cost_is_of_the_runs_and_the_measurements(results: Path) -> None:
    points = figures.pareto(read(results))
    own = points[(points.line == "ConsensusDrop") & points.y.notna() & (points.panel == "time to first token")]
    assert own.x.tolist() == pytest.approx([100 * 32.8 / 77.6, 100 * 26.4 / 77.6])
    assert own.y.tolist() == pytest.approx([100 * 70 / 90] * 2)
    assert (points.paper.notna() & points.line.eq("ConsensusDrop")).sum() == 8


# ---- claims


def test_claims_are_paired_differences_corrected_within_each(results: Path) -> None:
    tables, lines = claims(read(results))
    groups = tables[0].groups.items()
    found = {(heading.partition(".")[0], line[0]): tuple(line[1:]) for heading, lines in groups for line in lines}
    assert found["1", "positions: keep"] == ("12", "12", "0", "+2.0 (+1.0 to +3.0)")
    assert found["11", "positions: any"] == ("2", "2", "0", "+40.0 (+39.0 to +41.0)")
    of_alpha = {line["what"]: line for line in lines if line["claim"].startswith("5.")}
    worst = of_alpha["alpha 0.3, 128 tokens"]
    assert worst["difference"] == pytest.approx(40) and worst["low"] > 0 and worst["pictures"] == 10
    assert worst["p"] < 0.05 and worst["p_corrected"] == pytest.approx(2 * worst["p"])
    assert ("5", "positions: keep") not in found and claims(Material()) == ([], [])
    lines = claims(Material(study=study_files.study(gain=-3), scap=study_files.scap(late=False)))[1]
    assert {line["difference"] for line in lines if line["claim"].startswith(("1.", "11."))} == {-3, -40}


def test_an_ablation_with_positions_kept_is_compared_with_itself(tmp_path: Path) -> None:
    for alpha, right in ((0.7, 9), (0.3, 4)):
        changed = {} if alpha == 0.7 else {"alpha": alpha}
        run(tmp_path, "pope", right, **changed, positions="keep")
    (line,) = claims(read(tmp_path))[1]
    assert line["positions"] == "keep" and line["difference"] == pytest.approx(50)
