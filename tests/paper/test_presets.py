"""Presets of the paper's tables: every one can be run, its numbers are the paper's, and what its tables say is so."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Fake, FakeHost, make_data, make_model
from run_folders import store

from llava_consensus import cli, hosts
from llava_consensus.cli import arguments, paper
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.evaluation.report import paper as printed
from llava_consensus.evaluation.report.rows import read_row
from llava_consensus.evaluation.report.table import PACKAGES, latex
from llava_consensus.hosts import HOSTS
from llava_consensus.paper import ablation as report
from llava_consensus.paper import preset
from llava_consensus.reduction.budget import budget

ABLATIONS = ("alpha", "anchors", "recovery", "score", "temperature")
TEX = shutil.which("tectonic") or shutil.which("pdflatex")


@pytest.mark.parametrize("name", preset.names())
def test_every_preset_can_be_run_and_stands_beside_printed_rows(name: str) -> None:
    found = preset.read(name)
    for row in found.rows:
        assert arguments.one_word_method(row.method).reduces and budget(row.tokens, row.merged)
        compared = found.reference_of(row) or next(one for one in found.rows if one.against == row.method)
        assert compared, "there is something to compare with"
        beside = found.printed_row(row.printed)
        assert (beside is None) == (not row.printed)
        assert beside is None or all(beside.get(column) for column in found.benchmarks.values())
    assert set(found.benchmarks) <= set(BENCHMARKS) and set(found.hosts) <= set(HOSTS)
    assert found.is_ablation == (name in ABLATIONS)
    assert len({report.key(row, "") for row in found.rows}) == len(found.rows)


def test_every_printed_row_of_an_ablation_is_in_its_preset() -> None:
    for name in ABLATIONS:
        found = preset.read(name)
        rows = [found.printed_row(row.printed) for row in found.rows if row.printed]
        assert [row for row in printed.tables()[found.printed] if row not in rows] == []


def test_the_papers_own_spread() -> None:
    (table,) = [one for one in report.tables(report.Results(preset.read("alpha"), {})) if "spread" in one.title]
    apart = {line[0]: line[1:] for line in table.groups[1].lines}
    assert apart["largest less smallest of these"] == ("26.5", "1.4", "0.5", "1.3", "2.0")
    assert apart["largest less smallest of T5"] == ("68.8", "3.1", "0.8", "1.2", "0.3")


@pytest.fixture
def results(tmp_path: Path) -> report.Results:
    """The alpha ablation on POPE alone: 0.3 is clearly worse, 0.5 is the same."""
    found = preset.read("alpha")
    right = {"alpha 0.3": [0.0] * 30 + [1.0] * 70, "alpha 0.5": [1.0] * 100, "alpha 0.7": [1.0] * 100}
    one = replace(found, benchmarks={"pope": "pope_f1"})
    runs = {
        report.key(row, "pope"): read_row(store(tmp_path, right[row.label], benchmark="pope", tokens=128))
        for row in found.rows
    }
    return report.Results(one, runs)


def test_ours_stands_beside_the_papers_and_real_differences_are_marked(results: report.Results) -> None:
    beside, differences, _ = report.tables(results)
    low, same, reference = beside.groups[1].lines
    assert low[0] == "alpha 0.3" and low[1].startswith("70.0 ±") and low[1].endswith("‡") and low[2] == "82.0"
    assert same[1] == "100.0 ± 0.0" and reference[1:3] == ("100.0 ± 0.0", "85.1") and low[3:] == ("70.0", "82.0")
    low, same, reference = (line[1] for line in differences.groups[0].lines)
    assert low.startswith("-30.0 (") and low.endswith("‡") and same == "+0.0 (+0.0 to +0.0)" and reference == "-"
    assert "Of 2 differences 1 are real" in differences.note
    row = next(row for row in report.csv_rows(results) if row["label"] == "alpha 0.3")
    assert (row["score"], row["difference"], row["printed"]) == (70.0, -30.0, 82.0) and row["p_corrected"] < 0.01


@pytest.mark.skipif(TEX is None, reason="needs tectonic or pdflatex")
def test_latex_compiles(results: report.Results, tmp_path: Path) -> None:
    body = "\n\n".join(latex(table) for table in report.tables(results))
    page = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "page.tex").write_text(f"{PACKAGES}\n{page}")
    options = [] if "tectonic" in str(TEX) else ["-interaction=nonstopmode", "-halt-on-error"]
    done = subprocess.run([str(TEX), *options, "page.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "page.pdf").exists(), done.stdout[-2000:]


@pytest.mark.parametrize(
    "change, said", [({"printed": "nothing"}, "must be one of"), ({"rows": [{"label": "a"}]}, "no method in it")]
)
def test_a_file_that_is_no_preset_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**mine(), **change}))
    with pytest.raises(DataError, match=said):
        preset.read(str(path))
    with pytest.raises(OptionError, match="must be one of alpha, anchors"):
        preset.read("alpa")


# ---- the commands


def mine() -> dict[str, Any]:
    """A preset of two rows on the fake benchmark."""
    rows = [{"label": "all seen", "method": "consensusdrop", "tokens": 128}]
    rows += [{"label": "random", "method": "random", "tokens": 128}]
    words = {"title": "Mine", "about": "a copy", "printed": "llava_1_5_7b", "reference": "consensusdrop"}
    return {**words, "benchmarks": {"fake": "gqa"}, "rows": rows}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a command on a fake host, with `mine.json` in the folder."""
    monkeypatch.setitem(BENCHMARKS, "fake", Fake)
    monkeypatch.setattr(hosts, "load", lambda *_: FakeHost())
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    make_data(tmp_path / "data")
    (tmp_path / "mine.json").write_text(json.dumps(mine()))
    return ["--model", "model", "--data", "data", "--out", "out", "--device", "cpu", "--no-progress"]


def test_a_preset_of_ones_own(place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", "ablation", "mine.json", *place]) == 0
    said = capsys.readouterr().out
    assert "[3/3] fake random 128" in said and "Difference to consensusdrop" in said and "own spread" not in said
    written = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    assert written == {"mine.md", "mine.tex", "mine.csv"}
    assert cli.main(["paper", "table", "mine.json", *place, "--format", "csv"]) == 0
    assert "mine,random,random,128,,fake," in capsys.readouterr().out
    assert cli.main(["paper", "ablation", "mine.json", *place, "--bench", "gqa"]) == 2


def test_a_preset_of_several_budgets_compares_rows_with_one_another(
    place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"label": "closed up", "method": "random", "tokens": [128, 64]}]
    rows += [{"label": "kept", "method": "random:positions=keep", "tokens": [128, 64], "against": "random"}]
    words = {"title": "Mine", "about": "a copy", "printed": "", "reference": "", "limits": {"fake": 12}}
    (tmp_path / "pairs.json").write_text(json.dumps({**words, "benchmarks": {"fake": ""}, "rows": rows}))
    assert cli.main(["paper", "table", "pairs.json", *place]) == 0
    said = capsys.readouterr().out
    assert "kept less closed up" in said and "the first 12 questions" in said and "paper" not in said.lower()
    assert said.count("| kept ") == 2 * 2, "one line for each budget in both tables"
    (tmp_path / "pairs.json").write_text(
        json.dumps({**words, "benchmarks": {}, "rows": [{**rows[0], "tokens": ["x"]}]})
    )
    assert cli.main(["paper", "table", "pairs.json", *place]) == 3
    assert "tokens is of the wrong type (str)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["t2", "t3", "t4-cogvlm"])
def test_a_table_of_other_weights_says_which(place: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", "table", name, *place]) == 2
    assert f"{name}: needs weights of " in capsys.readouterr().err


def test_the_paper_lists_what_it_made_and_what_needs_which_weights(
    place: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preset, "names", lambda: ["t3", "mine.json"])
    monkeypatch.setitem(paper.STUDY, "bench", "fake")
    monkeypatch.setitem(paper.STUDY, "scap_bench", "none")
    assert cli.main(["paper", "all", *place, "--limit", "6"]) == 0
    last = capsys.readouterr().out.splitlines()[-3:]
    assert last[1:] == ["Mine: out/tables/mine.md", "The controlled study: out/study.md"]
    assert "needs weights of Video-LLaVA" in last[0]
