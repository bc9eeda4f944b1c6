"""What stops a training is said before the first step: data, options, packages, methods."""

import codecs
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from llava_consensus.cli import main
from llava_consensus.errors import DataError, MissingDependency, OptionError
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.tokens import Need
from llava_consensus.training import plan as plans
from llava_consensus.training.plan import TrainingPlan, read
from llava_consensus.training.run import STATES, train
from llava_consensus.training.trainer import COMPLETE, last_state

MINI = "checkpoints/llava-mini"


def turns(*values: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[place % 2], "value": value} for place, value in enumerate(values)]


def written(folder: Path, entries: Any, pictures: tuple[str, ...] = ("a.png",)) -> tuple[Path, Path]:
    """A file of conversations and its folder of pictures."""
    path, images = folder / "data.json", folder / "images"
    path.write_text(json.dumps(entries))
    images.mkdir(exist_ok=True)
    for name in pictures:
        Image.new("RGB", (3, 2)).save(images / name)
    return path, images


GOOD = {"id": "1", "image": "a.png", "conversations": turns("<image>\nWhat?", "a dog")}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "an empty list"),
        ({"id": 1}, "expected a JSON list"),
        ([GOOD, 3], r"entry 1: `conversations` must be a list"),
        ([GOOD, {**GOOD, "conversations": turns("<image>\nWhat?")}], "turns must be human, gpt"),
        ([{**GOOD, "conversations": turns("<image>\nWhat?", "  ")}], "an answer is empty"),
        ([{**GOOD, "conversations": turns("What?", "a dog")}], "0 placeholders <image> for 1 image"),
        ([{"id": "2", "conversations": turns("<image> What?", "x")}], "1 placeholders <image> for 0 image"),
        ([{**GOOD, "image": "../a.png"}], "leads out of the folder"),
        ([{**GOOD, "image": ["a.png"]}], "must be the name of one image"),
        ([GOOD, *[{**GOOD, "image": f"{n}.png"} for n in range(5)]], r"0\.png: "),
        ([{**GOOD, "conversations": turns("<image>\nWhat?", "a \ud800dog")}], "half of a character"),
    ],
)
def test_bad_data_is_refused_with_the_entry(tmp_path: Path, entries: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(*written(tmp_path, entries))


def test_good_data_is_read_and_its_fingerprint_follows_files_and_pictures(tmp_path: Path) -> None:
    path, images = written(tmp_path, [GOOD, {"id": "2", "conversations": turns("Hello?", "yes")}])
    data = read(path, images)
    assert data.pictures == ["a.png"] and data.without_picture == 1
    assert data.description["conversations"] == 2
    Image.new("RGB", (30, 20)).save(images / "a.png")
    assert read(path, images).fingerprint != data.fingerprint


def test_what_would_stop_a_training_in_its_middle_is_refused_before_it(tmp_path: Path) -> None:
    path, images = written(tmp_path, [GOOD])
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    with pytest.raises(DataError, match="byte order mark"):
        read(path, images)
    written(tmp_path, [GOOD])
    (images / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a\.png: not an image"):
        read(path, images)
    Image.new("1", (30_000, 30_000)).save(images / "a.png")
    with pytest.raises(DataError, match="decompression bomb"):
        read(path, images)
    (images / "a.png").unlink()
    os.mkfifo(images / "a.png")
    with pytest.raises(DataError, match="not a regular file"):
        read(path, images)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="is a pipe"):
        read(path, images)


def plan(tmp_path: Path, **changes: Any) -> TrainingPlan:
    known = {
        "model": MINI,
        "conversations": tmp_path / "data.json",
        "images": tmp_path / "images",
        "out": tmp_path / "llava-out",
        "method": make("consensusdrop"),
        "budgets": (Budget(64),),
    }
    return TrainingPlan(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tune": "adapter"}, "unknown part to tune"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"learning_rate": 0.0}, "must be above 0"),
        ({"precision": "int8"}, "unknown dtype"),
        ({"attention": "x"}, "unknown attention 'x'"),
        ({"budgets": ()}, "--tokens 64"),
        ({"out": Path("checkpoints/adapted")}, "must contain 'llava'"),
        ({"out": Path("checkpoints/llava-lora")}, "none of lora, mpt, mistral"),
        ({"out": Path("llava/checkpoint-3")}, "not begin with 'checkpoint-'"),
        ({"arguments": ("--learning_rate", "1")}, "--learning_rate: is set by an option before"),
    ],
)
def test_bad_plans_say_argument_value_and_bound(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan(tmp_path, **changes)


def test_every_method_is_trained_with_or_refused_with_the_reason(tmp_path: Path) -> None:
    for name in METHODS:
        method = make(name)
        if not (method.acts_inside or Need.QUESTION in method.needs):
            plan(tmp_path, method=method if method.reduces else None).check(name)
            continue
        with pytest.raises(OptionError, match=rf"{name}.*(without gradients|reads the text of the question)"):
            plan(tmp_path, method=method).check(name)


def test_what_a_method_cannot_work_under_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Leave it out, or take a method that acts after the tower"):
        plan(tmp_path, method=make("fastv"), checkpointing=True).check("fastv")
    stage = tmp_path / "zero3.json"
    for content in ('{"zero_optimization": {"stage": 7}}', '{"zero_optimization": []}', '{"zero_optimization": 3}'):
        stage.write_text(content)
        with pytest.raises(DataError, match=r"must be 0, 1, 2 or 3|is not what it must be"):
            _ = plan(tmp_path, deepspeed=stage).zero_stage


def test_deepspeed_without_a_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it looks for MPI, whose package is not there: a foreign traceback."""
    monkeypatch.setattr(plans, "find_spec", lambda name: name)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(OptionError, match=r"under a launcher, for one GPU too\. Start it by torchrun"):
        plan(tmp_path, deepspeed=Path("eval_scripts/zero2.json")).check("consensusdrop")


def test_stage_3_needs_a_picture_in_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "find_spec", lambda name: name)
    monkeypatch.setenv("RANK", "0")
    path, images = written(tmp_path, [GOOD, {"id": "2", "conversations": turns("Hello?", "yes")}])
    stage = tmp_path / "zero3.json"
    stage.write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(OptionError, match="1 of 2 conversations have none"):
        plan(tmp_path, deepspeed=stage).check("consensusdrop", read(path, images))
    plan(tmp_path, deepspeed=stage, method=make("visionzip")).check("visionzip", read(path, images))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tune": "lora"}, "peft: not installed.*pip install .*.train."),
        ({"deepspeed": Path("eval_scripts/zero2.json")}, "deepspeed: not installed.*pip install .*.train."),
        ({"attention": "flash_attention_2"}, "flash_attn: not installed.*pip install .*.gpu."),
    ],
)
def test_a_missing_package_is_named_with_its_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr(plans, "find_spec", lambda name: name if name == "accelerate" else None)
    with pytest.raises(MissingDependency, match=line):
        plan(tmp_path, **changes).check("consensusdrop")


def test_the_command_refuses_a_budget_above_all_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, images = written(tmp_path, [GOOD])
    given = ["--data-path", str(path), "--images", str(images), "--out", str(tmp_path / "llava-x")]
    assert main(["train", *given, "--tokens", "64 577"]) == 2
    assert "tokens=577: an image of checkpoints/llava-mini has 576 visual tokens" in capsys.readouterr().err
    assert not (tmp_path / "llava-x").exists()


def test_budgets_are_drawn_alike_everywhere_and_all_of_them(tmp_path: Path) -> None:
    budgets = (Budget(64), Budget(32), Share(0.1))
    one, same, other = (plan(tmp_path, budgets=budgets, seed=seed) for seed in (3, 3, 4))
    drawn = [one.budget(step) for step in range(60)]
    assert drawn == [same.budget(step) for step in range(60)] != [other.budget(step) for step in range(60)]
    assert set(drawn) == set(budgets)


def test_only_complete_states_count(tmp_path: Path) -> None:
    for step in (2, 10, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert last_state(tmp_path) is None
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / COMPLETE).touch()
    assert last_state(tmp_path) == tmp_path / "checkpoint-10"


def test_a_folder_that_no_training_made_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [GOOD])
    (tmp_path / "llava-out").mkdir()
    (tmp_path / "llava-out" / "x").touch()
    with pytest.raises(DataError, match="no training made it"):
        train(plan(tmp_path), "consensusdrop")
    assert not (tmp_path / "llava-out" / STATES).exists()
