"""The examples in docs/adding.md of a benchmark, a judge and a report column work as printed."""

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from run_folders import store

from llava_consensus.errors import OptionError
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.evaluation.judge import GRADERS, grader_of
from llava_consensus.evaluation.judge.grader import Reply
from llava_consensus.evaluation.report import results
from llava_consensus.evaluation.report.rows import read_rows
from llava_consensus.evaluation.report.table import Column

PAGE = Path(__file__).parents[2] / "docs" / "adding.md"


def code(heading: str) -> str:
    """The first Python block below a heading."""
    section = PAGE.read_text().split(f"# {heading}\n")[1]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


def module(heading: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    name = heading.replace(" ", "_")
    found = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, found)
    exec(compile(code(heading), str(PAGE), "exec"), vars(found))
    return found


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three questions about grey things, and the benchmark of the page in the list."""
    monkeypatch.setitem(BENCHMARKS, "colours", module("Adding a benchmark", monkeypatch).Colours)
    folder = tmp_path / "eval" / "colours"
    folder.mkdir(parents=True)
    asked = [{"question_id": number, "image": "1.png", "text": "Which?"} for number in range(3)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    (folder / "answers.json").write_text(json.dumps({str(number): "grey" for number in range(3)}))
    return tmp_path


ANSWERS = [{"question_id": number, "text": text} for number, text in enumerate(("Grey.", "gray", "red"))]


def test_the_example_benchmark(data: Path) -> None:
    colours = benchmarks.make("colours")
    assert colours.score(ANSWERS, data)["accuracy"] == pytest.approx(200 / 3) and colours.asking == {}
    british = benchmarks.make("colours", spelling="british")
    assert british.score(ANSWERS, data)["accuracy"] == pytest.approx(100 / 3)
    assert british.chosen == {"spelling": "british"}
    with pytest.raises(OptionError, match="whether `gray` counts"):
        benchmarks.make("colours", spelling="french")


def test_the_example_judge(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BENCHMARKS["colours"], "judge", "colours")
    monkeypatch.setitem(GRADERS, "colours", module("Adding a judge", monkeypatch).ColoursGrader)
    grader = grader_of("colours")
    candidates, counts = grader.candidates(ANSWERS, data)
    assert counts["answered"] == 3
    assert grader.prompt().fill(candidates[2].fields)[0]["content"].startswith("Is this a")
    dialogue = grader.dialogue(candidates[0])
    next(dialogue)
    dialogue.send(Reply("perhaps"))
    with pytest.raises(StopIteration) as end:
        dialogue.send(Reply("yes"))
    outcomes = {"0": [end.value.value]}
    assert grader.report(candidates, outcomes, data, 1)["accuracy"] == 100
    assert grader.grades(candidates, outcomes) == {"0": "yes"}


def test_the_example_column_is_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    column: Column = eval(code("Adding a report column"), vars(results))
    monkeypatch.setattr(results, "COSTS", (*results.COSTS, column))
    store(tmp_path, [1, 0])
    bench = [{"method": "consensusdrop", "tokens": 64, "peak_bytes": 3 * 2**20}]
    sections = results.in_sections(read_rows(tmp_path))
    marked, csv, tex = (results.FORMATS[name](sections, bench) for name in ("markdown", "csv", "latex"))
    assert "| peak (MiB) |" in marked and "| 3.0 |" in marked and "Peak: memory" in marked
    assert csv.splitlines()[0].endswith(",peak_bytes") and csv.splitlines()[1].endswith(f",{3 * 2**20}")
    assert "peak (MiB)" in tex
