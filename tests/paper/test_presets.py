"""Presets of the paper's tables: every one can be run, its numbers are the paper's, and what its tables say is so."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Fake, FakeHost, make_data, make_model
from run_folders import BASE, store

from llava_consensus import cli
from llava_consensus.cli import paper
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.evaluation.report import paper as printed
from llava_consensus.evaluation.report.rows import Row, read_row
from llava_consensus.evaluation.report.table import BEGIN, END
from llava_consensus.evaluation.runs.configuration import describe_reduction
from llava_consensus.hosts import HOSTS
from llava_consensus.methods import METHODS
from llava_consensus.paper import preset
from llava_consensus.paper import results as report
from llava_consensus.paper.preset import holds

ABLATIONS = ("alpha", "anchors", "recovery", "score", "temperature")


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


def test_every_printed_row_of_an_ablation_is_in_its_preset() -> None:
    for name in ABLATIONS:
        found = preset.read(name)
        rows = [found.printed_row(row) for row in found.rows]
        assert [row for row in printed.printed_tables()[found.printed] if row not in rows] == []


@pytest.fixture
def results(tmp_path: Path) -> report.Results:
    """The alpha ablation on POPE alone: 0.3 is clearly worse, 0.5 is the same."""
    found = preset.read("alpha")
    right = {"alpha 0.3": [0.0] * 30 + [1.0] * 70, "alpha 0.5": [1.0] * 100, "alpha 0.7": [1.0] * 100}
    one = replace(found, benchmarks={"pope": "pope_f1"})
    runs = {
        (row, "pope"): read_row(store(tmp_path, right[row.label], benchmark="pope", tokens=128)) for row in found.rows
    }
    return report.Results(one, runs)


def test_ours_stands_beside_the_papers_and_real_differences_are_marked(results: report.Results) -> None:
    beside, differences = report.tables(results)
    low, same, reference = beside.groups[1].lines
    assert low[0] == "alpha 0.3" and low[1].startswith("70.0 ±") and low[1].endswith("‡") and low[2] == "82.0"
    assert same[1] == "100.0 ± 1.5" and reference[1:3] == ("100.0 ± 1.5", "85.1") and low[3:] == ("70.0", "82.0")
    low, same = (line[1] for line in differences.groups[0].lines)
    assert low.startswith("-30.0 (") and low.endswith("‡") and same == "+0.0 (-3.0 to +3.0)"
    assert "Of 2 differences 1 are significant" in differences.note
    row = next(row for row in report.csv_rows(results) if row["label"] == "alpha 0.3")
    assert (row["score"], row["difference"], row["printed"]) == (70.0, -30.0, 82.0) and row["p_corrected"] < 0.01


def test_table_one_has_accuracy_and_cost_of_every_row(tmp_path: Path) -> None:
    found = preset.read("t1")
    one = replace(found, benchmarks={"gqa": "gqa"})
    rows = (None, *one.rows)
    runs = {
        (row, "gqa"): read_row(
            store(
                tmp_path,
                [1.0] * (80 if row is None else 60) + [0.0] * 20,
                method="full" if row is None else row.method,
                tokens=None if row is None else row.tokens,
            )
        )
        for row in rows
    }
    timed = [{"method": "fastv", "tokens": 64, "ttft_ms": 12.34, "tpot_ms": 5.0}]
    _, _, costs = report.tables(report.Results(one, runs, [{"rows": timed}]))
    assert costs.head[1::2] == ("Acc", "Rel (%)", "TTFT (ms)", "TPOT (ms)", "KV (MiB)")
    lines = {(group.heading, line[0]): line[1:] for group in costs.groups for line in group.lines}
    assert len(lines) == len(rows) and all(line[0] in ("80.0", "75.0") for line in lines.values())
    assert lines["64 tokens", "FastV"][2:8] == ("93.8", "71.6", "12.3", "71.4", "5.0", "25.9")
    assert lines["64 tokens", "VisionZip"][4] == "-", "not measured"


def test_table_three_has_the_judges_scores(tmp_path: Path) -> None:
    found = preset.read("t3")
    run = read_row(store(tmp_path, [1.0] * 20, benchmark="msvd", method="full", tokens=None))
    assert run.metrics is not None
    run.metrics["report"]["average_score"] = 3.456
    *_, scores = report.tables(report.Results(found, {(None, "msvd"): run}))
    assert scores.groups[0].lines[0][3:5] == ("3.46", "3.93") and len(scores.groups) == 4


@pytest.mark.parametrize(
    "change, said", [({"printed": "nothing"}, "must be one of"), ({"rows": [{"label": "a"}]}, "KeyError: 'tokens'")]
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
    assert "random,random,128,,fake," in capsys.readouterr().out
    assert cli.main(["paper", "table", "mine.json", *place, "--bench", "gqa"]) == 2


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
    assert "kept minus closed up" in said and "12 questions drawn at random" in said and "paper" not in said.lower()
    assert said.count("| kept ") == 2 * 2, "one line for each budget in both tables"
    (tmp_path / "pairs.json").write_text(
        json.dumps({**words, "benchmarks": {}, "rows": [{**rows[0], "tokens": ["x"]}]})
    )
    assert cli.main(["paper", "table", "pairs.json", *place]) == 3
    assert "a value is missing, or is not what it must be" in capsys.readouterr().err


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
    assert cli.main(["paper", "table", "all", *place, "--limit", "6"]) == 0
    last = capsys.readouterr().out.splitlines()[-3:]
    assert last[1:] == ["Mine: out/tables/mine.md", "The controlled study: out/study.md"]
    assert "needs weights of Video-LLaVA" in last[0]


@pytest.mark.parametrize("names", ["nope", "", "gqa nope"])
def test_the_paper_of_an_unknown_benchmark_is_refused(names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", "table", "all", "--bench", names]) == 2
    assert f"--bench {names!r}: must be of " in capsys.readouterr().err


def test_a_plan_knows_a_part_of_a_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", "plan", "t1", "--bench", "gqa", "--data", "playground/mini"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| gqa")]
    assert "the official files" in line and "nothing" not in line


# ---- its runs in a folder of results

SMALL: dict[str, Any] = {
    "title": "Small",
    "about": "two ways to number positions",
    "printed": "",
    "reference": "",
    "benchmarks": {"gqa": "", "pope": ""},
    "samples": {"gqa": 4},
    "fewer": {"32": ["gqa"]},
    "rows": [
        {"label": "VisionZip", "method": "visionzip", "tokens": [64, 32]},
        {"label": "VisionZip, positions kept", "method": "visionzip:positions=keep", "tokens": [64, 32]},
    ],
}
KEPT = {"changed": {"positions": "keep"}}


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """A file of the preset above beside a complete folder of its runs, made by two versions of the code."""
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    out, newer = tmp_path / "out", {"versions": BASE["versions"] | {"llava-consensus": "0.2.0+source.other"}}
    for tokens, more in ((None, {"method": "full"}), (64, {}), (64, KEPT | newer), (32, newer), (32, KEPT)):
        given: dict[str, Any] = {"method": "visionzip", "tokens": tokens, **more}
        given |= {"questions_asked": 4} if tokens else {"tokens": 576}
        part: dict[str, Any] = {"sample": 4} if tokens == 32 else {"limit": 9}
        store(out, [1, 1, 1, bool(tokens)], **part, **given)
        if tokens != 32:
            store(out, [1, 1, 1, 1], limit=None, benchmark="pope", **given)
    for wrong in ({"limit": 2}, {"limit": 4}, {"limit": None, "match": "flops"}, {"limit": None, "merged": 3}):
        store(out, [0, 0, 0, 0], method="visionzip", questions_asked=4, **wrong)
    return tmp_path


def written(folder: Path, *more: str) -> int:
    """The page of the small preset."""
    (folder / "page.md").write_text(f"{BEGIN}\n{END}\n")
    files = ["--out", str(folder / "out"), "--write", str(folder / "page.md"), "--format", "csv"]
    return cli.main(["report", "--preset", str(folder / "small.json"), *files, *more])


def test_a_page_has_what_the_preset_says_and_nothing_else(grid: Path) -> None:
    assert written(grid) == 0
    page = (grid / "page.md").read_text()
    at_64, at_32 = page.split("**checkpoints/llava-mini**")[1:]
    assert "| visionzip | 100.0 | 100.0 |" in at_64 and "| visionzip, positions=keep | 100.0 | 100.0 |" in at_64
    assert "32 tokens" not in at_64 and "4 questions drawn at random" in at_32
    assert "64 tokens" not in at_32 and "POPE" not in at_32
    assert "| visionzip, positions=keep | 100.0 |" in at_32 and "merged=3" not in page and "| 0.0" not in page


@pytest.mark.parametrize(
    ("own", "asked", "limit", "same"),
    [
        (4, 4, 4, True),
        (None, 3, 4, True),  # a benchmark of three questions
        (9, 3, 4, True),
        (9, 3, None, True),
        (None, 9, 4, False),
        (2, 2, 4, False),
        (4, 4, None, False),  # there may be more
    ],
)
def test_the_same_questions(own: int | None, asked: int, limit: int | None, same: bool) -> None:
    assert holds(Row({"limit": own}, {"questions": asked}, asked, Path()), limit) is same
    assert holds(Row({"limit": own}, None, 1, Path()), limit) is (own == limit)
    sampled = Row({"limit": None, "sample": own}, {"questions": asked}, asked, Path())
    assert holds(sampled, None, limit) is same and holds(sampled, limit) is (same and (own is None or asked < own))


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


@pytest.mark.parametrize("fewer", [{"48": ["gqa"]}, {"32": ["mme"]}, {"32": "gqa"}])
def test_a_preset_that_asks_what_it_has_not(tmp_path: Path, fewer: dict[str, Any]) -> None:
    (tmp_path / "wrong.json").write_text(json.dumps(SMALL | {"fewer": fewer}))
    with pytest.raises(DataError, match="must be a budget of its rows"):
        preset.read(str(tmp_path / "wrong.json"))


def test_a_plan_says_needs_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "eval").mkdir()
    assert cli.main(["paper", "plan", "t1", "--tokens", "64", "--data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in out.splitlines() if line.startswith("| ")]
    lines = {name: cells for name, *cells in rows}
    assert lines["vqav2"][:2] == ["107,394", "8"] and "EvalAI" in " ".join(lines["vqav2"])
    assert "a judge (llava-consensus judge mmvet)" in " ".join(lines["mmvet"]) and "judge" not in lines["mmbench"]
    assert "first: llava-consensus data download vqav2 gqa" in out
    command = next(line for line in out.splitlines() if line.startswith("then:"))
    assert "paper table t1 --tokens '64' --model liuhaotian/llava-v1.5-7b" in command
    for name, model in (("t2", "llava-hf/llava-v1.6-vicuna-7b-hf"), ("t4-qwen-vl", "Qwen/Qwen-VL --trust-remote-code")):
        assert cli.main(["paper", "plan", name, "--data", str(tmp_path)]) == 0
        assert f"paper table {name} --model {model} --data" in capsys.readouterr().out
    assert cli.main(["paper", "table", "t1", "--tokens", "65"]) == 2
    assert "must be of 32, 64, 128, 192, which t1 asks" in capsys.readouterr().err
