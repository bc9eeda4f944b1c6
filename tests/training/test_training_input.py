"""What stops a training is said before the first step: data, options, packages, methods."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from llava_consensus.errors import DataError, MissingDependency, OptionError
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.tokens import Need
from llava_consensus.training import plan as plans
from llava_consensus.training.plan import TrainingPlan, read
from llava_consensus.training.run import STATES, train

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
        ([GOOD, 3], r"entry 1: a value is missing or of another type"),
        ([GOOD, {**GOOD, "conversations": turns("<image>\nWhat?")}], "turns must be human, gpt"),
        ([{**GOOD, "conversations": turns("<image>\nWhat?", "  ")}], "an answer is empty"),
        ([{**GOOD, "conversations": turns("What?", "a dog")}], "0 placeholders <image> for 1 image"),
        ([{"id": "2", "conversations": turns("<image> What?", "x")}], "1 placeholders <image> for 0 image"),
        ([{**GOOD, "image": "../a.png"}], "leads out of the folder"),
        ([{**GOOD, "image": ["a.png"]}], "a value is missing or of another type"),
        ([GOOD, *[{**GOOD, "image": f"{n}.png"} for n in range(5)]], r"0\.png: "),
    ],
)
def test_bad_data_is_refused_with_the_entry(tmp_path: Path, entries: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(*written(tmp_path, entries))


def plan(tmp_path: Path, **changes: Any) -> TrainingPlan:
    known = {"conversations": tmp_path / "data.json", "images": tmp_path / "images", "out": tmp_path / "llava-out"}
    chosen = {"method": make("consensusdrop"), "budgets": (Budget(64),)}
    return TrainingPlan(**{"model": MINI, **known, **chosen, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tune": "adapter"}, "tune='adapter' must be one of"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"learning_rate": 0.0}, "must be above 0"),
        ({"precision": "int8"}, "dtype='int8' must be one of"),
        ({"attention": "x"}, "attention='x' must be one of"),
        ({"budgets": ()}, "--tokens 64"),
        ({"tune": "scorer"}, "ends in .safetensors"),
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
    with pytest.raises(OptionError, match="layers that --checkpointing computes again would not be cut"):
        plan(tmp_path, method=make("fastv"), checkpointing=True).check("fastv")


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


def test_budgets_are_drawn_alike_everywhere_and_all_of_them(tmp_path: Path) -> None:
    budgets = (Budget(64), Budget(32), Share(0.1))
    one, same, other = (plan(tmp_path, budgets=budgets, seed=seed) for seed in (3, 3, 4))
    drawn = [one.budget(step) for step in range(60)]
    assert drawn == [same.budget(step) for step in range(60)] != [other.budget(step) for step in range(60)]
    assert set(drawn) == set(budgets)


def test_a_folder_that_no_training_made_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [GOOD])
    (tmp_path / "llava-out").mkdir()
    (tmp_path / "llava-out" / "x").touch()
    with pytest.raises(DataError, match="holds no unfinished training"):
        train(plan(tmp_path), "consensusdrop")
    assert not (tmp_path / "llava-out" / STATES).exists()
