"""Tables are pure functions of result folders: Markdown, CSV, LaTeX."""

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import store

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.evaluation.files import canonical, write_metrics
from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import read_rows
from llava_consensus.evaluation.report.section import Section, in_sections, with_interval, written
from llava_consensus.evaluation.report.table import Table

PRINTED = "a373364999ec61c0bf6d6dfaa862b35a6164cec375eace865c5b93d2e1a466fd"  # sha256 of its tables
NINE = {one.column: name for name, one in BENCHMARKS.items() if one.column in paper.averaged()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    store(tmp_path, [1, 1, 1, 0] * 4, method="full", tokens=576)
    store(tmp_path, [1, 1, 1, 1] * 4, method="full", tokens=576, benchmark="pope", questions="ghi")
    store(tmp_path, [1, 0, 0, 0] * 4, method="random")
    store(tmp_path, [1, 1, 0, 0] * 4)
    store(tmp_path, [1, 1, 0, 1] * 4, benchmark="pope", questions="ghi")
    store(tmp_path, [0, 1, 0, 0] * 4, changed={"alpha": 1.0})
    store(tmp_path, [0, 0, 0, 0] * 4, changed={"fuser": "recovery", "tau_cross": 2.0}, tokens=32)
    store(tmp_path, None, tokens=128)
    return tmp_path


def only(out: Path) -> Section:
    (section,) = in_sections(read_rows(out))
    return section


def text_of(out: Path) -> str:
    return written(in_sections(read_rows(out)))


def told(folder: Path, **changes: Any) -> Path:
    """Lets a finished run say something else of itself."""
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps(metrics | changes))
    return folder


def each(folder: Path, **values: Any) -> None:
    """Lets a finished run say something of each answer."""
    report = json.loads((folder / "metrics.json").read_text())["report"]
    for name, column in values.items():
        for row, value in zip(report["extracted"], column, strict=True):
            row[name] = value
    told(folder, report=report)


def lines_of(one: Table) -> dict[str, list[tuple[str, ...]]]:
    return {heading: list(map(tuple, lines)) for heading, lines in one.groups.items()}


def test_calibration_is_a_column_if_every_run_has_probabilities(tmp_path: Path) -> None:
    folders = [store(tmp_path, [1, 1, 0, 1] * 4, method="full", tokens=576), store(tmp_path, [1, 0, 0, 1] * 4)]
    for folder, more in zip(folders, ([], ["ECE (%)", "AURC (%)"]), strict=True):
        each(folder, logprob=[0.0] * 16)
        table = only(tmp_path).scores()
        assert table.head[4:] == tuple(more)
    assert [line[4:] for (line,) in table.groups.values()] == [("25.0", "25.0"), ("50.0", "50.0")]


def test_incomplete_is_never_averaged_over(out: Path) -> None:
    lines = lines_of(only(out).scores())
    assert lines["128 tokens (77.8 % fewer)"] == [("ConsensusDrop", "incomplete (3 answered)", "-", "-", "-")]
    assert lines["64 tokens (88.9 % fewer)"][2][2:] == ("-", "-", "-")  # random has no POPE
    store(out, [1, 1], tokens=32, questions_asked=3)
    store(out, [1, 1, 1, 1], tokens=32, benchmark="pope", questions="ghi")
    section = only(out)
    short = next(line for line in section.reduced if line.tokens == 32 and line.label == "ConsensusDrop")
    cell = section.cell(short, "gqa")
    assert with_interval(cell) == "incomplete (2 of 3)" and cell is not None and cell.test is None
    assert section.accuracy(short) is None and section.relative(short) is None


def test_acc_leaves_out_what_nobody_has_judged(tmp_path: Path) -> None:
    for method, tokens in (("full", 576), ("consensusdrop", 64)):
        store(tmp_path, [1, 1, 1, 0] * 4, method=method, tokens=tokens)
        told(store(tmp_path, [1, 0], benchmark="mmvet", method=method, tokens=tokens), score=None)
    section = only(tmp_path)
    found = section.accuracy(section.reduced[0])
    assert section.names == ["gqa", "mmvet"] and section.averaged == ["gqa"]
    assert found is not None and found.value == 75 and "Acc: mean of GQA." in section.scores().note


def test_no_average_has_a_benchmark_that_cannot_move(tmp_path: Path) -> None:
    """All tokens do not differ from guessing in POPE, and score 3 points in TextVQA."""
    for method, tokens in (("full", 576), ("consensusdrop", 64)):
        for name, right, chance in (("gqa", 300, 50.0), ("pope", 216, 50.0), ("textvqa", 12, 0.0)):
            folder = store(tmp_path, [1] * right + [0] * (400 - right), benchmark=name, method=method, tokens=tokens)
            told(folder, chance=chance)
    section = only(tmp_path)
    found = section.accuracy(section.reduced[0])
    assert section.averaged == ["gqa"] and found is not None and found.value == 75
    reduced_only = Section([row for row in section.rows if not row.full])
    assert len(reduced_only.averaged) == 3  # nobody knows without the full model


def test_mme_enters_acc_by_a_twentieth(tmp_path: Path) -> None:
    store(tmp_path, [1, 0], score=1510.7, benchmark="mme", statistic="unheard of")
    store(tmp_path, [1, 0])
    section = only(tmp_path)
    found = section.accuracy(section.reduced[0])
    assert found is not None and found.value == pytest.approx((1510.7 / 20 + 50) / 2) and found.bounds is None


def test_acc_and_rel_of_the_papers_own_rows_come_out(tmp_path: Path) -> None:
    rows = [row for row in paper.printed_tables()["llava_1_5_7b"] if row["method"] in ("LLaVA-1.5-7B", "ConsensusDrop")]
    for row in rows:
        method = {"method": "full"} if row["tokens"] == 576 else {}
        for column, name in NINE.items():
            store(tmp_path, [1], score=row[column], benchmark=name, tokens=row["tokens"], **method)
    assert rows[0]["gqa"] == 62.0
    assert hashlib.sha256(canonical(paper.printed_tables()).encode()).hexdigest() == PRINTED
    section = only(tmp_path)
    assert [line.tokens for line in section.lines] == [row["tokens"] for row in rows] == [576, 192, 128, 64, 32]
    for line, row in zip(section.lines, rows, strict=True):
        accuracy, relative = section.accuracy(line), section.relative(line)
        assert accuracy is not None
        assert accuracy.value == pytest.approx(row["acc"], abs=0.1)  # nine rounded, one rounded
        assert relative == pytest.approx(row["rel_percent"], abs=0.15)


def test_significant_differences_are_marked(tmp_path: Path) -> None:
    store(tmp_path, [1] * 40, method="full", tokens=576)
    store(tmp_path, [0] * 10 + [1] * 30)  # McNemar: p = 2 / 2**10
    store(tmp_path, [0] * 6 + [1] * 34, tokens=128)  # 2 / 2**6 = 0.031
    store(tmp_path, [0] * 5 + [1] * 35, tokens=192)  # 2 / 2**5 = 0.0625
    section = only(tmp_path)
    texts = {line.tokens: with_interval(section.cell(line, "gqa")) for line in section.lines}
    marks = {tokens: "".join(sign for sign in "†‡" if sign in text) for tokens, text in texts.items()}
    assert marks == {576: "", 192: "", 128: "†", 64: "‡"}  # Holm: 3 / 512 < 0.05, but 2 x 0.031 is not


def test_one_method_against_each_of_the_others(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paired, at the same budget, corrected over the table: by hand 8 of 8 discordant images are 2 / 2**8."""
    assert cli.main(["report", "--out", str(out), "--format", "markdown", "--against", "random"]) == 0
    shown = capsys.readouterr().out
    assert "Difference to random with the same budget" in shown and "† p < 0.05 against random" in shown
    (section,) = in_sections(read_rows(out), "random")
    lines = lines_of(section.differences())
    ours, vision = lines["64 tokens (88.9 % fewer)"]
    assert list(lines) == ["64 tokens (88.9 % fewer)"] and len(ours) == len(vision) == 2  # random has no POPE
    assert ours[1].startswith("+25.0 (+") and ours[1].endswith("p 0.25") and vision[1].startswith("+0.0 (")
    assert cli.main(["report", "--out", str(out), "--against", "nothing"]) == 2
    assert "only of consensusdrop, " in capsys.readouterr().err
    store(out, [1, 0], method="fastv", data="elsewhere")  # another setting, without runs of random
    assert cli.main(["report", "--out", str(out), "--against", "random"]) == 0
    assert capsys.readouterr().out.count("Difference to random") == 1


def test_means_of_differences_are_corrected_over_the_methods(tmp_path: Path) -> None:
    for name, low in (("gqa", 10), ("vqav2", 12)):
        for method, right in (("consensusdrop", 40), ("fastv", 40 - low), ("dart", 39)):
            store(tmp_path, [1] * right + [0] * (40 - right), method=method, benchmark=name)
    (section,) = in_sections(read_rows(tmp_path), "consensusdrop")
    table = section.differences()
    fastv, dart = sorted(lines_of(table)["64 tokens"], key=lambda cells: cells[0], reverse=True)
    raw = section.difference(section.reduced[[line.label for line in section.reduced].index("FastV")])
    assert table.head[-1] == "mean of 2" and fastv[-1].startswith("-27.5 (") and raw is not None and raw.p is not None
    assert fastv[-1].endswith(f"p {2 * raw.p:.0e}") and dart[-1].endswith("p 0.5")


def test_each_position_policy_has_a_ranking_of_its_own(tmp_path: Path) -> None:
    for method, own in (("consensusdrop", "renumber"), ("random", "renumber"), ("fastv", "keep")):
        store(tmp_path, [1, 0], method=method, options={"positions": own})
    store(tmp_path, [1, 0], options={"positions": "keep"}, changed={"positions": "keep"})
    lines = lines_of(only(tmp_path).scores())
    names = {heading: [cells[0] for cells in found] for heading, found in lines.items()}
    renumbered, kept = ["ConsensusDrop", "random"], ["ConsensusDrop", "FastV"]
    assert names == {"64 tokens, positions=renumber": renumbered, "64 tokens, positions=keep": kept}


def test_flipped_answers_are_counted_against_all_tokens(tmp_path: Path) -> None:
    for method, tokens, texts in (("full", 576, "abcd" * 4), ("consensusdrop", 64, "abzd" * 4)):
        each(store(tmp_path, [1, 1, 0, 1] * 4, method=method, tokens=tokens), extracted=texts)
    table = only(tmp_path).scores()
    assert table.head[-1] == "flips (%)" and lines_of(table)["64 tokens (88.9 % fewer)"][0][-1] == "25.0"


def test_a_judges_score_joins_the_run_whose_answers_it_graded(tmp_path: Path) -> None:
    folders = [told(store(tmp_path, [1] * 12, benchmark="mmvet", tokens=tokens), score=None) for tokens in (64, 32)]
    (folders[1] / "answers.jsonl").write_text("other answers\n")
    answers = hashlib.sha256((folders[0] / "answers.jsonl").read_bytes()).hexdigest()
    graded = [{"index": place, "correct": value, "group": "all"} for place, value in enumerate((0.5, 0.25, 0.2) * 4)]
    judged = tmp_path / "judge" / "mmvet-x"
    judged.mkdir(parents=True)
    (judged / "config.json").write_text(json.dumps({"benchmark": "mmvet", "answers": answers, "judge": {"asked": "j"}}))
    score = {"score": 31.7, "metric": "total", "complete": True, "extracted": graded, "rounded": 1, "counted": ["all"]}
    (judged / "metrics.json").write_text(json.dumps(score))
    section = only(tmp_path)
    shown = {line.tokens: section.cell(line, "mmvet") for line in section.reduced}
    assert with_interval(shown[64]).startswith("31.7 ± ")
    assert with_interval(shown[32]) == "not scored"
    (judged / "metrics.json").write_text(json.dumps(score | {"complete": False}))
    assert all(row.score is None for row in read_rows(tmp_path))
    (judged / "config.json").write_text("[]")
    with pytest.raises(DataError, match="judged run"):
        read_rows(tmp_path)


def test_runs_of_several_seeds_are_one_line_with_their_spread(tmp_path: Path) -> None:
    store(tmp_path, [1] * 20, method="full", tokens=576)
    for seed, right in ((0, 10), (1, 14), (2, 12)):
        changed = {"seed": seed} if seed else {}
        store(tmp_path, [1] * right + [0] * (20 - right), method="random", changed=changed)
    section = only(tmp_path)
    (line,) = section.reduced
    cell = section.cell(line, "gqa")
    assert line.label == "random" and cell is not None and cell.row.score == pytest.approx(60)
    assert cell.row.spread == pytest.approx(10) and cell.test is not None and cell.test.difference == pytest.approx(-40)
    assert " (sd 10.0)" in written([section])


def mme(out: Path, method: str, tokens: int, tasks: dict[str, str]) -> None:
    """A run of MME; for each task one letter an image: both questions right, one, or none (b, o, n)."""
    folder = store(out, [1], benchmark="mme", method=method, tokens=tokens)
    letters = [(task, letter) for task, of_task in tasks.items() for letter in of_task]
    rows = [
        {"index": 2 * place + second, "group": task, "unit": place, "picture": f"{place}.jpg", "correct": right[second]}
        for place, (task, letter) in enumerate(letters)
        for second, right in enumerate([{"b": (1, 1), "o": (1, 0), "n": (0, 0)}[letter]] * 2)
    ]
    score = sum(100 * (2 * one.count("b") + one.count("o") / 2) / len(one) for one in tasks.values())
    report = {"extracted": rows, "statistic": "mme", "counted": [*tasks, "scene"]}
    told(folder, score=score, report=report, chance=0.0, questions=len(rows), answered=len(rows))


def test_mme_of_two_tasks_is_divided_by_their_full_score_(tmp_path: Path) -> None:
    for method, tokens in (("full", 576), ("consensusdrop", 64)):
        mme(tmp_path, method, tokens, {"color": "b" * 12, "OCR": "bbbooonnn" + "nno"})
    section = only(tmp_path)
    found = section.accuracy(section.reduced[0])
    assert found is not None and found.value == pytest.approx((200 + 100 * 5 / 12 + 25) / 4)  # of 400 points


def test_settings_and_questions_are_not_mixed(out: Path) -> None:
    store(out, [1, 1], limit=2)
    store(out, [1, 1], weights="other")
    store(out, [0, 0, 0, 0], questions="another version", method="full", tokens=576)
    text = text_of(out)
    assert text.count("**checkpoints/llava-mini**") == 4 and ", the first 2 questions" in text
    full = [section.full for section in in_sections(read_rows(out)) if section.full]
    assert [line.runs["gqa"].score for line in full] == [75.0, 0.0]


def test_scores_are_read_from_their_file(out: Path) -> None:
    before = text_of(out)
    for path in out.glob("*/metrics.json"):
        metrics = json.loads(path.read_text())
        write_metrics(path.parent, metrics, metrics["report"].pop("extracted"))
    assert text_of(out) == before
    (out / "003" / "scores.jsonl").write_text("[]\n")
    with pytest.raises(DataError, match=r"003/scores\.jsonl, line 1: .*llava-consensus eval"):
        text_of(out)


ACCOUNT: dict[str, Any] = {
    **{"entering": 64, "kept": 64, "average": 64.0, "kv_bytes": 2**20},
    "flops": {"llm": 2e9, "vision": 1e9, "method": 0.5e9, "total": 3.5e9},
    "measured": {"entering": 64, "kept": 32, "average": 40.5, "kv_bytes": 3 * 2**19},
}


def test_costs(tmp_path: Path) -> None:
    store(tmp_path, [1, 0], account=ACCOUNT)
    store(tmp_path, [1, 0], account=ACCOUNT | {"flops": ACCOUNT["flops"] | {"total": None}}, method="fastv")
    bench = [{"method": "consensusdrop", "tokens": 64, "ttft_ms": 90.04, "tpot_ms": 12.5, "share": 0.084}]
    (section,) = in_sections(read_rows(tmp_path), bench=bench)
    ours, fastv = lines_of(section.scores())["64 tokens"]
    assert ours[-6:] == ("40.5", "3.5", "1.5", "90.0", "12.5", "8.4")
    assert fastv[-6:] == ("40.5", "-", "1.5", "-", "-", "-")


def test_costs_are_compared_over_the_same_benchmarks(tmp_path: Path) -> None:
    store(tmp_path, [1, 0], account=ACCOUNT)
    store(tmp_path, [1, 0], account=ACCOUNT | {"measured": None, "average": 1.0}, benchmark="sqa")  # without images
    store(tmp_path, [1, 0], account=ACCOUNT, method="fastv")
    store(tmp_path, None, method="dart", benchmark="pope")
    found = only(tmp_path).scores()
    place = found.head.index("tokens per layer")
    average = {cells[0]: cells[place] for cells in lines_of(found)["64 tokens"]}
    assert average == {"ConsensusDrop": "40.5", "FastV": "40.5", "DART": "-"}


def test_csv_has_every_cell(out: Path) -> None:
    rows = list(csv.DictReader(written(in_sections(read_rows(out)), form="csv").splitlines()))
    assert len(rows) == 8 and {row["status"] for row in rows} == {"complete", "incomplete"}
    (best,) = [row for row in rows if row["label"] == "ConsensusDrop" and row["score"] == "75.0"]
    assert float(best["low"]) <= 75 <= float(best["high"]) and best["difference"] == "-25.0" and best["p"] == "0.125"


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_damaged_run_is_named(out: Path, content: str) -> None:
    (out / "003" / "config.json").write_text(content)
    with pytest.raises(DataError, match="003"):
        read_rows(out)
