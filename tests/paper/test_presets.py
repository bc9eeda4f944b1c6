"""Presets of the paper's tables: every one can be run, its numbers are the paper's, and what its tables say is so."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Fake, FakeHost, make_data, make_model
from run_folders import store

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.evaluation.report import paper as printed
from llava_consensus.evaluation.report.rows import Row, read_row
from llava_consensus.evaluation.report.table import Table
from llava_consensus.evaluation.runs.configuration import describe_reduction
from llava_consensus.hosts import HOSTS
from llava_consensus.methods import METHODS
from llava_consensus.paper import preset
from llava_consensus.paper import results as report


@pytest.mark.parametrize("name", preset.names())
def test_every_preset_can_be_run_and_stands_beside_printed_rows(name: str) -> None:
    found = preset.read(name)
    for row in found.rows:
        assert row.reduction[0].reduces
        compared = found.reference_of(row) or next(one for one in found.rows if one.against == row.method)
        assert compared, "there is something to compare with"
        beside = found.printed_row(row)
        assert bool(beside) == bool(row.printed)
        assert not beside or all(beside.get(column) for column in found.benchmarks.values())
    assert set(found.benchmarks) <= set(BENCHMARKS) and set(found.hosts) <= set(HOSTS)
    assert len({(row.label, row.tokens) for row in found.rows}) == len(found.rows)
    if name in ("alpha", "anchors", "recovery", "score", "temperature"):  # every printed row of an ablation is in it
        rows = [found.printed_row(row) for row in found.rows]
        assert [row for row in printed.printed_tables()[found.printed] if row not in rows] == []


def lines_of(table: Table) -> dict[tuple[str, str], dict[str, str]]:
    """Cells by column, of each heading and name."""
    return {
        (heading, line[0]): dict(zip(table.head[1:], line[1:], strict=True))
        for heading, lines in table.groups.items()
        for line in lines
    }


def test_ours_stands_beside_the_papers_and_real_differences_are_marked(tmp_path: Path) -> None:
    """The alpha ablation on POPE alone: 0.3 is clearly worse, 0.5 is the same."""
    found, runs = preset.read("alpha"), {}
    for row in found.rows:
        right = [0.0] * 30 + [1.0] * 70 if row.label == "alpha 0.3" else [1.0] * 100
        runs[row, "pope"] = read_row(store(tmp_path, right, benchmark="pope", tokens=128))
    results = report.Results(replace(found, benchmarks={"pope": "pope_f1"}), runs)
    beside, differences = map(lines_of, results.tables())
    pope = "POPE (100 questions, 100 images)"
    low, same, reference = (beside["128 tokens", f"alpha 0.{digit}"] for digit in (3, 5, 7))
    assert low[pope].startswith("70.0 ±") and low[pope].endswith("‡") and low["POPE, paper"] == "82.0"
    assert same[pope] == reference[pope] == "100.0 ± 1.5" and reference["POPE, paper"] == "85.1"
    assert low["mean"].startswith("70.0 ±") and low["mean, paper"] == "82.0"
    low, same = (differences["128 tokens", f"alpha 0.{digit}"]["POPE"] for digit in (3, 5))
    assert low.startswith("-30.0 (") and low.endswith("p 4e-09") and same == "+0.0 (-3.0 to +3.0), p 1"
    row = next(row for row in results.csv_rows if row["label"] == "alpha 0.3")
    assert (row["score"], row["difference"], row["printed"]) == (70.0, -30.0, 82.0) and row["p_corrected"] < 0.01


def test_table_one_has_accuracy_and_cost_of_every_row(tmp_path: Path) -> None:
    found = preset.read("t1")
    one = replace(found, benchmarks={"gqa": "gqa"})
    runs: dict[Any, Row] = {
        (row, "gqa"): read_row(store(tmp_path, [1.0] * 60 + [0.0] * 20, method=row.method, tokens=row.tokens))
        for row in one.rows
    }
    runs[None, "gqa"] = read_row(store(tmp_path, [1.0] * 80 + [0.0] * 20, method="full", tokens=None))
    timed = [{"method": "fastv", "tokens": 64, "ttft_ms": 12.34, "tpot_ms": 5.0}]
    _, _, costs = report.Results(one, runs, [{"rows": timed}]).tables()
    lines = lines_of(costs)
    assert len(lines) == len(runs) and all(line["Acc"][:4] in ("80.0", "75.0") for line in lines.values())
    fastv = lines["64 tokens", "FastV"]
    assert (fastv["Rel (%)"], fastv["Rel (%), paper"], fastv["TTFT (ms)"]) == ("93.8", "71.6", "12.3")
    assert (fastv["TTFT (ms), paper"], fastv["TPOT (ms)"], fastv["TPOT (ms), paper"]) == ("71.4", "5.0", "25.9")
    assert lines["64 tokens", "VisionZip"]["TTFT (ms)"] == "-", "not measured"


def test_table_three_has_the_judges_scores(tmp_path: Path) -> None:
    found = preset.read("t3")
    run = read_row(store(tmp_path, [1.0] * 20, benchmark="msvd", method="full", tokens=None))
    assert run.metrics is not None
    run.metrics["report"]["average_score"] = 3.456
    *_, scores = report.Results(found, {(None, "msvd"): run}).tables()
    line = lines_of(scores)["all tokens", "all tokens"]
    assert (line["MSVD"], line["MSVD, paper"]) == ("3.46", "3.93") and len(scores.groups) == 4


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
    monkeypatch.setattr(models, "load", lambda *_: FakeHost())
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    make_data(tmp_path / "data")
    (tmp_path / "mine.json").write_text(json.dumps(mine()))
    return ["--model", "model", "--data", "data", "--out", "out", "--device", "cpu", "--no-progress"]


def test_a_preset_of_ones_own(place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", "table", "mine.json", *place]) == 0
    said = capsys.readouterr().out
    assert "[3/3] fake random 128" in said and "Difference to consensusdrop" in said
    written = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    assert written == {"mine.md", "mine.tex", "mine.csv"}
    assert cli.main(["paper", "table", "mine.json", *place, "--format", "csv"]) == 0
    assert ",random,random,renumber,128,,fake," in capsys.readouterr().out
    assert cli.main(["paper", "table", "mine.json", *place, "--bench", "gqa"]) == 2


def test_a_preset_of_sweep_leaves_an_archive_that_import_reads(
    place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "mine.json").write_text(json.dumps({**mine(), "models": ["model", "other"]}))
    make_model(tmp_path / "other")
    assert cli.main(["sweep", "--preset", "mine.json", "--published", "none.json", *place[2:]]) == 0
    said = capsys.readouterr().out
    assert said.index("other: 3 runs, ") < said.index("All tokens against") < said.index("[3/3] fake random 128")
    assert cli.main(["report", "import", "out.tar.xz", "--out", "again"]) == 0
    names = [sorted(path.parent.name for path in (tmp_path / out).glob("*/metrics.json")) for out in ("out", "again")]
    assert names[0] == names[1] and len(names[0]) == 6
    assert cli.main(["report", "import", "none.json"]) == 2 and "--benchmark" in capsys.readouterr().err


def test_an_ablation_with_positions_kept_has_tables_of_its_own(place: list[str], tmp_path: Path) -> None:
    assert cli.main(["paper", "table", "mine.json", *place, "--positions", "keep"]) == 0
    runs = [read_row(path.parent) for path in (tmp_path / "out").glob("*/config.json")]
    assert {row.config["options"]["positions"] for row in runs if not row.full} == {"keep"} and len(runs) == 3
    table = (tmp_path / "out" / "tables" / "mine-keep.md").read_text()
    assert "Difference to consensusdrop:positions=keep" in table, "each is compared with what kept positions too"


def test_a_preset_of_several_budgets_compares_rows_with_one_another(
    place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"label": "closed up", "method": "random", "tokens": [128, 64]}]
    rows += [{"label": "kept", "method": "random:positions=keep", "tokens": [128, 64], "against": "random"}]
    words = {"title": "Mine", "about": "a copy", "printed": "", "reference": "", "samples": {"fake": 12}}
    (tmp_path / "pairs.json").write_text(json.dumps({**words, "benchmarks": {"fake": ""}, "rows": rows}))
    assert cli.main(["paper", "table", "pairs.json", *place]) == 0
    said = capsys.readouterr().out
    assert "12 questions drawn at random" in said and ", paper" not in said
    assert said.count("| kept ") == 2 * 2, "one line for each budget in both tables"
    wrong = {**words, "benchmarks": {}, "rows": [{**rows[0], "tokens": ["x"]}]}
    (tmp_path / "pairs.json").write_text(json.dumps(wrong))
    assert cli.main(["paper", "table", "pairs.json", *place]) == 3
    assert "a value is missing or of another type" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["t2", "t3", "t4-cogvlm"])
def test_a_table_of_other_weights_says_which(place: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", "table", name, *place]) == 2
    assert f"{name}: needs weights of " in capsys.readouterr().err


def test_the_paper_lists_what_it_made_and_what_needs_which_weights(
    place: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preset, "names", lambda: ["t3", "mine.json"])
    assert cli.main(["paper", "table", "all", *place, "--limit", "6"]) == 0
    *_, other, mine = capsys.readouterr().out.splitlines()
    assert "needs weights of Video-LLaVA" in other and mine == "Mine: out/tables/mine.md"


def test_the_results_grid_has_both_ways_to_number_positions_of_every_method_under_their_names() -> None:
    found = preset.read("results")
    policies: dict[tuple[str, str], set[str]] = {}
    for row in found.rows:
        config = describe_reduction(*row.reduction)
        label = re.sub(r", seed \d", "", row.label)  # runs of several seeds are one line of the page
        assert Row(config, None, 0, Path()).label == label
        others = {key: value for key, value in config["options"].items() if key != "positions"}
        policies.setdefault((config["method"], str(others)), set()).add(config["options"]["positions"])
    assert {name for name, _ in policies} <= {*METHODS} - {"full", "consensusdrop+"} and len(policies) > 20
    assert all(both == {"renumber", "keep"} for both in policies.values())
    assert found.asked_at(64) == list(found.benchmarks) and found.asked_at(32) == ["gqa", "textvqa"]


@pytest.mark.parametrize("fewer", [{"48": ["fake"]}, {"128": ["mme"]}, {"128": "fake"}])
def test_a_preset_that_asks_what_it_has_not(tmp_path: Path, fewer: dict[str, Any]) -> None:
    (tmp_path / "wrong.json").write_text(json.dumps(mine() | {"fewer": fewer}))
    with pytest.raises(DataError, match="must be a budget of its rows"):
        preset.read(str(tmp_path / "wrong.json"))


def test_a_plan_says_needs_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "eval").mkdir()
    assert cli.main(["paper", "plan", "t1", "--tokens", "64", "--data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in out.splitlines() if "|" in line]
    lines = {name: found for name, *found in cells}
    assert lines["vqav2"][:2] == ["107,394", "8"] and "EvalAI" in lines["vqav2"][-1]
    assert "a judge (llava-consensus judge mmvet)" in lines["mmvet"][-1] and "judge" not in lines["mmbench"][-1]
    assert "first: llava-consensus data download vqav2 gqa" in out
    command = next(line for line in out.splitlines() if line.startswith("then:"))
    assert "paper table t1 --tokens '64' --model liuhaotian/llava-v1.5-7b" in command
    for name, model in (("t2", "llava-hf/llava-v1.6-vicuna-7b-hf"), ("t4-qwen-vl", "Qwen/Qwen-VL --trust-remote-code")):
        assert cli.main(["paper", "plan", name, "--data", str(tmp_path)]) == 0
        assert f"paper table {name} --model {model} --data" in capsys.readouterr().out
    assert cli.main(["paper", "table", "t1", "--tokens", "65"]) == 2
    assert "must be of 32, 64, 128, 192, which t1 asks" in capsys.readouterr().err
