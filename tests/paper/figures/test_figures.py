"""Every figure of the paper is drawn from result files, and one without results is named, not drawn empty."""

import json
import sys
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import study_files
from PIL import Image
from run_folders import store

from llava_consensus import cli
from llava_consensus.errors import DataError, MissingDependency
from llava_consensus.evaluation.report.results import in_sections
from llava_consensus.evaluation.report.rows import read_rows
from llava_consensus.evaluation.report.section import Section
from llava_consensus.paper import figures
from llava_consensus.paper.ablations import settings
from llava_consensus.paper.figures import ablations, accuracy, costs, style
from llava_consensus.paper.figures.study import decay
from llava_consensus.paper.material import NotMeasured

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


def test_every_figure_is_drawn_twice_and_alike(results: Path, tmp_path: Path) -> None:
    drawn = list(figures.draw(figures.read(results), tmp_path))
    assert [one.missing for one in drawn if not one.files] == []
    assert len(drawn) == len({one.figure.name for one in drawn}) == len(figures.FIGURES)
    for one in drawn:
        picture, drawing = one.files
        assert Image.open(picture).size[0] > 300 and drawing.read_text().startswith("<?xml")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    list(figures.draw(figures.read(results), tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")} == before


def test_a_figure_of_one_benchmark_overlaps_nowhere(results: Path) -> None:
    """Caption, panels and key of each figure, in pixels."""
    whole = figures.read(results)
    rows = [row for row in whole.study["rows"] if row["benchmark"] == "pope"]  # type: ignore[index]
    sections = [Section([row for row in one.rows if row.benchmark == "pope"]) for one in whole.sections]
    material = replace(whole, sections=sections, study={"description": {}, "rows": rows})
    for figure in figures.FIGURES:
        with style.sheet():
            drawing = figure.draw(material)
            style.caption(drawing, figure.about(material))
            drawing.draw_without_rendering()
        parts = [panel.get_tightbbox() for panel in drawing.axes]
        parts += [one.get_window_extent() for one in (drawing._suptitle, *drawing.legends) if one is not None]
        for first, second in combinations([part for part in parts if part is not None], 2):
            apart = first.padded(-1).overlaps(second.padded(-1))
            assert not apart, figure.name
        assert all(part.x0 >= -1 and part.x1 <= drawing.bbox.x1 + 1 for part in parts if part is not None), figure.name
        said = figure.about(material)
        assert "GQA" not in said or figure.name == "claim-11-scap", "a caption names what is drawn"


def test_what_was_not_measured_is_named_with_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    assert cli.main(["paper", "figures", "--out", str(tmp_path / "results"), "--to", str(tmp_path / "to")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert list((tmp_path / "to").iterdir()) == []
    for figure in figures.FIGURES:
        if figure.makes:
            assert any(line.startswith(f"{figure.name}: not drawn") and figure.makes in line for line in lines)


def test_folders_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", "figures", "--out", str(tmp_path / "none")]) == 3
    (tmp_path / "file").touch()
    assert cli.main(["paper", "figures", "--out", str(tmp_path), "--to", str(tmp_path / "file")]) == 3
    error = capsys.readouterr().err
    assert "no such folder of results" in error and "Give another name" in error


def test_no_panel_cuts_the_lines_of_another(results: Path) -> None:
    rows = [
        {**row, "correction": 2 * row["correction"]} if row["correction"] and row["benchmark"] == "gqa" else row
        for row in study_files.study()["rows"]
    ]
    drawn = decay(replace(figures.read(results), study={"description": {}, "rows": rows}))
    panels = drawn.axes
    assert len(panels) == 2
    for panel in panels:
        bottom, top = panel.get_ylim()
        assert bottom == 0 and all(max(line.get_ydata()) < top for line in panel.lines)


def test_an_ablation_takes_its_own_runs_alone(results: Path) -> None:
    material = figures.read(results)
    assert list(settings(material, "alpha").cells) == [(0.3,), (0.5,), (0.7,)]
    assert set(settings(material, "recovery").cells) == set(product(("vision", "cross"), (0.1, 0.3)))
    assert list(settings(material, "anchors").cells) == [
        (0,),
        (20,),
        (40,),
    ]  # 20 of 128 is what a run without a number has
    assert len(settings(material, "temperature").cells) == 5
    found = settings(material, "alpha")
    assert found.tokens == 128 and set(found.names) == set(BENCHMARKS)
    assert found.percent((0.3,), "pope") == 30
    assert found.printed[0.7,]["pope"] == 85.1 and found.printed[0.7,]["mme"] == pytest.approx(1451.1 / 20)


def test_an_ablation_prefers_the_papers_settings(tmp_path: Path) -> None:
    """Runs of vision-only and cross-only on more benchmarks are no ablation of alpha."""
    for name in BENCHMARKS:
        for alpha in (0.0, 1.0):
            run(tmp_path, name, 5, tokens=64, alpha=alpha)
    for alpha in (0.3, 0.5):
        run(tmp_path, "pope", 5, alpha=alpha)
    material = figures.read(tmp_path)
    found = settings(material, "alpha")
    assert list(found.cells) == [(0.3,), (0.5,)] and found.tokens == 128
    said = next(figure.about(material) for figure in figures.FIGURES if figure.name == "f09-alpha")
    assert said.endswith("cpu: POPE 10 questions / 10 pictures"), "the runs that are drawn, and no others"


def test_other_settings_take_no_benchmark_away(tmp_path: Path) -> None:
    for name in BENCHMARKS:
        for alpha in (0.3, 0.5):
            run(tmp_path, name, 5, alpha=alpha)
    run(tmp_path, "pope", 5, alpha=1.0)
    found = settings(figures.read(tmp_path), "alpha")
    assert found.names == list(BENCHMARKS) and list(found.cells) == [(0.3,), (0.5,)]


def test_the_page_names_every_figure() -> None:
    page = (Path(__file__).parents[3] / "docs" / "paper.md").read_text()
    assert [figure.name for figure in figures.FIGURES if figure.name not in page] == []


def test_the_measurement_of_the_right_budgets_is_taken(results: Path) -> None:
    material = figures.read(results)
    assert [content["model"] for content in material.measured] == ["llava-1.5-13b", "llava-mini"]
    other = {
        **material.benches[0],
        "rows": [{**row, "tokens": row["tokens"] + 1} for row in material.benches[0]["rows"]],
    }
    two = figures.Material(benches=[other, material.benches[0]])
    assert two.bench_of([128, 64]) is material.benches[0]["rows"] and len(two.measured) == 1


def test_times_of_other_budgets_draw_nothing(results: Path) -> None:
    material = figures.read(results)
    rows = [{**row, "tokens": row["tokens"] + 1} for row in material.benches[0]["rows"]]
    with pytest.raises(NotMeasured, match=r"at the budgets of the runs \(128 64\)"):
        costs.pareto(replace(material, benches=[{**material.benches[0], "rows": rows}]))


def test_an_ablation_of_one_setting_is_none(tmp_path: Path) -> None:
    run(tmp_path, "pope", 5)
    with pytest.raises(NotMeasured, match="alpha"):
        settings(figures.read(tmp_path), "alpha")


# ---- score against tokens


@pytest.fixture
def sections(tmp_path: Path) -> list[Section]:
    """Nine methods at two budgets on two benchmarks."""
    out = tmp_path / "results"
    for name in ("gqa", "seed"):
        store(out, [1] * 9 + [0], method="full", tokens=576, benchmark=name)
        for place in range(9):
            method = ("consensusdrop", "random", "tome")[place] if place < 3 else f"method{place}"
            for tokens in (32, 64):
                right = min(9, place + tokens // 32)
                store(out, [1] * right + [0] * (10 - right), method=method, tokens=tokens, benchmark=name)
    return in_sections(read_rows(out))


def test_pictures_are_drawn(sections: list[Section], tmp_path: Path) -> None:
    accuracy.score_against_tokens(sections, tmp_path / "figure.png")
    assert Image.open(tmp_path / "figure.png").size[0] > 300
    with pytest.raises(DataError, match="make tables"):
        accuracy.score_against_tokens([], tmp_path / "none.png")


def drawn(section: Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The panels of the figure of score against tokens."""
    kept: list[Any] = []
    monkeypatch.setattr(accuracy, "save", lambda figure, _: kept.extend(figure.axes))
    accuracy.score_against_tokens([section], tmp_path / "figure.png")
    return kept


def test_few_methods_stand_out_and_points_are_scores_with_intervals(
    sections: list[Section], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = drawn(sections[0], tmp_path, monkeypatch)[0]
    lines = {line.get_label(): line for line in panel.lines}
    own = [label for label in lines if label not in ("other methods", "all tokens")]
    assert "ConsensusDrop" in own and "random" in own and "method8" in own and "ToMe" not in own and len(own) == 6
    assert len({(lines[label].get_color(), lines[label].get_marker()) for label in own}) == 6
    assert lines["method8"].get_xydata().tolist() == [[32, 90], [64, 90]]
    assert len(panel.collections) == 3, "ours, the best other and random selection have bands"


def test_without_matplotlib_the_pip_line_is_named(
    sections: list[Section], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"pip install .*\[plots\]'"):
        accuracy.score_against_tokens(sections, tmp_path / "figure.png")


def test_the_memory_of_a_process_is_noise_and_has_no_panel(results: Path) -> None:
    def titles(device: str) -> set[str]:
        content = study_files.bench() | {"machine": {"device": device}}
        content["rows"] = [{**row, "peak_bytes": 10**9} for row in content["rows"]]
        drawn = costs.over_ratio(replace(figures.read(results), benches=[content]))
        return {panel.get_title() for panel in drawn.axes}

    assert "peak memory (GB)" in titles("cuda:0") and "peak memory (GB)" not in titles("cpu")


def test_every_measured_figure_says_of_what_it_is(results: Path) -> None:
    material = figures.read(results)
    said = {figure.name: figure.about(material) for figure in figures.FIGURES if figure.makes}
    assert "GQA 100 questions / 50 pictures" in said["f02-recovery-helps"]
    assert "checkpoints/llava-mini on playground/mini, cpu: POPE 10 questions / 10 pictures" in said["f09-alpha"]
    assert "llava-mini on cpu" in said["f16-efficiency"] and all(said.values())


def test_maps_share_one_scale_of_colours(results: Path) -> None:
    for draw in (ablations.temperature, ablations.score):
        images = [image for panel in draw(figures.read(results)).axes for image in panel.images]
        assert len(images) > 1 and len({(image.cmap.name, image.get_clim()) for image in images}) == 1
