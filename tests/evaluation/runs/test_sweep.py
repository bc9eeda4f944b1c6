"""A grid of runs: checked first, loaded once, gone on with."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from fakes import Fake, FakeHost, config, make_place

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.runs.configuration import prepare
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.sweep import cells, sweep
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_place(tmp_path / "data", pictures=8)


def test_sweep_checks_first_loads_once_and_goes_on_past_a_failure(data: Path, tmp_path: Path) -> None:
    load = Mock(side_effect=lambda *_: FakeHost())
    methods = [make("full"), make("consensusdrop", alpha=1.0, fuser="convex"), make("random")]
    full = config(data, data / "model", method="full")
    grid = cells([full], methods, [Budget(32), Budget(64), Budget(64)])
    wanted = [("full", None), *((name, count) for count in (64, 32) for name in ("consensusdrop", "random"))]
    assert [(cell.plan.description["method"], cell.plan.description["tokens"]) for cell in grid] == wanted
    assert grid[1].plan.description == prepare(replace(full, method=methods[1], budget=Budget(64))).description
    still = Execution(progress=False)
    done = list(sweep(grid, tmp_path / "out", still, load))
    assert load.call_args.args[0] == str(data / "model") and len(done) == 5 and all(cell.result for cell in done)
    assert (done[0].name, done[1].name) == ("fake full all", "fake consensusdrop:alpha=1.0 64")
    again = list(sweep(grid, tmp_path / "out", still, load))
    assert load.call_count == 1 and [cell.result.asked for cell in again if cell.result] == [0] * 5
    damaged = done[1].result
    assert damaged
    (damaged.path / "answers.jsonl").write_text("{}\n{}\n")
    third = list(sweep(grid, tmp_path / "out", still, load))
    assert [bool(cell.error) for cell in third] == [False, True, False, False, False]


def test_a_sweep_reads_the_questions_of_a_benchmark_once(data: Path) -> None:
    reads: list[Path] = []

    class Counted(Fake):
        def load(self, data: Path) -> list[Question]:
            reads.append(data)
            return super().load(data)

    counted = Counted()
    full = config(data, data / "model", method="full", benchmark=counted)
    grid = cells([full], [make("consensusdrop"), make("random")], [Budget(64), Budget(32)])
    assert len(grid) == 5 and reads == [data]


def test_a_sweep_matches_every_method_but_the_full_model_and_stops_at_a_wrong_cell(data: Path) -> None:
    full = config(data, data / "model", method="full", match="flops")
    found = [cell.plan for cell in cells([full], [make("random")], [Budget(64)])]
    assert [plan.match for plan in found] == ["kept", "flops"]
    assert ["match" in plan.description for plan in found] == [False, True]
    with pytest.raises(DataError, match="missing file"):
        cells([full, replace(full, data=data / "nowhere")], [make("random")], [Budget(64)])
