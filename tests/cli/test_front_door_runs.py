"""What runs leave behind: nothing of a failed load, no semaphores of killed workers, numbers in trackers, short prints.

Run: `pytest tests/cli/test_front_door_runs.py`.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fakes import Fake, FakeHost, config, make_data, make_model, make_place
from run_folders import store

from llava_consensus import attach, cli
from llava_consensus.cli import evaluate
from llava_consensus.errors import DataError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.evaluation.report.table import BEGIN, END
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.hosts.base import PictureOutcome

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of an evaluation of the fake benchmark on a fake host."""
    monkeypatch.setitem(BENCHMARKS, "fake", Fake)
    monkeypatch.setattr(models, "load", lambda *_: FakeHost())
    make_model(tmp_path / "model")
    data = make_data(tmp_path / "data")
    rest = ["--model", str(tmp_path / "model"), "--data", str(data), "--device", "cpu", "--no-progress"]
    return [*rest, "--out", str(tmp_path / "out")]


def test_a_failed_load_leaves_no_folder_and_a_failed_question_does(tmp_path: Path) -> None:
    data = make_place(tmp_path / "data")

    def broken(*_: Any) -> Any:
        raise DataError("the weights are damaged")

    with pytest.raises(DataError, match="damaged"):
        loop.run(config(data, data / "model"), tmp_path / "out", Execution(2, progress=False), broken)
    assert not list((tmp_path / "out").iterdir())

    class Breaking(FakeHost):
        def encode(self, images: list[Any]) -> list[Any]:
            raise DataError("no more")

    with pytest.raises(DataError, match="no more"):
        loop.run(config(data, data / "model"), tmp_path / "out", Execution(2, progress=False), lambda *_: Breaking())
    (run,) = (tmp_path / "out").iterdir()
    assert (run / "config.json").is_file()


def test_an_attachment_and_its_outcomes_print_in_a_line(llava_model: Any, prompt: types.SimpleNamespace) -> None:
    with attach(llava_model, "random", tokens=6) as attached:
        assert repr(attached) == "<Random on LlavaLlamaForCausalLM, 6 tokens, no call yet>"
        llava_model.generate(prompt.ids, images=prompt.images, max_new_tokens=1, do_sample=False)
        assert repr(attached).endswith("6 tokens, last call 16 -> 6 (37.5% kept)>")
        assert repr(attached.outcomes) == "[<picture of row 0: 16 -> 6 tokens>]"
    assert repr(attached).endswith("detached>")
    two = PictureOutcome(1, 10, 4, 2, ((0, None), (1, None)), (), (torch.zeros(10), torch.zeros(10)))  # type: ignore[arg-type]
    assert repr(two) == "<picture of row 1: 10 -> 4 tokens and 2 structural ones, reduced in 2 parts>"


def test_eval_as_json(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "fake", *place, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["score"] is not None and found["all_tokens"] is None and Path(found["run"]).is_dir()


def test_a_sweep_ends_with_a_table(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", "--bench", "fake", "--methods", "random", "--tokens", "32 64", *place]) == 0
    shown = capsys.readouterr()
    assert "64 tokens" in shown.out and "all tokens" in shown.out and "of 3 runs, about" in shown.err
    assert [line.split()[0] for line in shown.out.splitlines() if line.strip().startswith("random")] == ["random"] * 2


def test_trackers_are_told_of_finished_runs(
    place: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[str, Any, Any]] = []
    for name in evaluate.TRACKERS:
        monkeypatch.setitem(evaluate.TRACKERS, name, lambda *given, name=name: told.append((name, *given)))
    monkeypatch.setattr(evaluate, "find_spec", lambda _: object())
    assert cli.main(["eval", "fake", *place, "--log", "mlflow"]) == 0
    sweep = ["sweep", "--bench", "fake", "--methods", "random", "--tokens", "64", *place]
    assert cli.main([*sweep, "--log", "wandb"]) == 0
    with monkeypatch.context() as broken:
        broken.setitem(evaluate.TRACKERS, "wandb", lambda *_: (_ for _ in ()).throw(OSError("no network\nat all")))
        capsys.readouterr()
        assert cli.main([*sweep, "--log", "wandb"]) == 5
        said = capsys.readouterr()
        last = said.err.splitlines()[-1]
        assert "runs are complete" in said.out and last.startswith("error: --log wandb: no network at all. The run is")
    assert [name for name, *_ in told] == ["mlflow", "wandb", "wandb"]
    _, path, run, values = told[0]
    assert path.is_dir() and run["benchmark"] == "fake" and values["tokens/after"] == 64.0 and "score" in values
    monkeypatch.setattr(evaluate, "find_spec", lambda _: None)
    assert cli.main(["eval", "fake", *place, "--log", "wandb"]) == 2
    assert "pip install 'llava-consensus[wandb]'" in capsys.readouterr().err


def test_wandb_is_told_under_the_name_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    told = types.SimpleNamespace(log=calls.append, finish=lambda: calls.append("finish"))
    fake = types.SimpleNamespace(init=lambda **given: calls.append(given["id"]) or told)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    evaluate.TRACKERS["wandb"](tmp_path / "gqa-random-64-abc", {"tokens": 64}, {"score": 0.5})
    assert calls == ["gqa-random-64-abc", {"score": 0.5}, "finish"]


def test_tensorboard_and_mlflow_take_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    evaluate.TRACKERS["tensorboard"](tmp_path / "run", {"tokens": 64}, {"score": 0.5})
    assert list((tmp_path / "tensorboard" / "run").glob("events*"))
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    evaluate.TRACKERS["mlflow"](tmp_path / "run", {"tokens": 64}, {"score": 0.5})
    (found,) = mlflow.search_runs(experiment_names=[evaluate.PROJECT], output_format="list")
    assert found.data.metrics == {"score": 0.5} and found.info.run_name == "run"


def test_pages_refuse_grids_that_are_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out", tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    out.mkdir()
    command = ["report", "--out", str(out), "--complete", "--write", str(page)]
    assert cli.main(command) == 3 and "there are no runs" in capsys.readouterr().err
    store(out, [1, 0, 1], limit=None)
    assert cli.main([*command, "--markdown", str(tmp_path / "tables.md")]) == 0
    written = page.read_text()
    assert "Retain" in written and "Retain" in (tmp_path / "tables.md").read_text()
    store(out, [1, 0], limit=2)
    assert cli.main(command) == 3
    assert "the first 2 questions only" in capsys.readouterr().err and page.read_text() == written


def test_public_ci_does_what_our_own_does() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["run"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    from llava_consensus import __version__

    assert citation["version"] == __version__
