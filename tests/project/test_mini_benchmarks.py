"""The mini twins in the official layouts: keys, counts, ids, pictures, and the traps that the real files have.

Run: `pytest tests/project/test_mini_benchmarks.py`. Builds `playground/mini/eval` unless it is there.
"""

from __future__ import annotations

import collections
import hashlib
import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
from PIL import Image

from llava_consensus.evaluation.benchmarks import BENCHMARKS, Benchmark, make
from llava_consensus.evaluation.media import read_frames
from llava_consensus.evaluation.runs.questions import drawn
from playground.mini import build as builder
from playground.mini.benchmarks import BUILDERS, WITH_SPLIT, files
from playground.mini.benchmarks.choices import WRITERS, choose
from playground.mini.benchmarks.files import TEST
from playground.mini.benchmarks.videos import brief_questions
from playground.mini.clips import brief_clip, clip
from playground.mini.paths import MINI
from playground.mini.questions import View
from playground.mini.scenes import SPLITS, scene

EVAL = MINI / "eval"
TEXTS = (".json", ".jsonl", ".tsv", ".txt")
GOLDEN = Path(__file__).parents[1] / "golden" / "mini_files.json"
VIDEO_SETS = {"TGIF": "mp4", "MSVD": "videos", "MSRVTT": "videos/all"}  # as Video-LLaVA's scripts name them


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    builder.build()


def test_every_folder_is_one_of_llavas_with_the_files_it_had() -> None:
    """Questions and annotations, byte for byte; the pictures within them are as the encoder of the day makes them."""
    assert {path.name for path in EVAL.iterdir()} == {*BUILDERS, ".complete"}
    found = {}
    for folder in sorted(BUILDERS):
        texts = [path for path in sorted((EVAL / folder).rglob("*")) if path.suffix in TEXTS and path.is_file()]
        content = hashlib.sha256()
        for path in texts:
            frame = pandas.read_table(path).drop(columns="image").to_csv() if path.suffix == ".tsv" else None
            content.update(str(path.relative_to(EVAL)).encode() + (frame or path.read_text()).encode())
        found[folder] = content.hexdigest()
    assert found == json.loads(GOLDEN.read_text()), "changed on purpose? Then write these checksums there"


@pytest.mark.parametrize(
    ("name", "limit", "chance"),
    [
        ("gqa", None, 0.0),
        ("pope", 7, 50.0),
        ("seed", None, 25.0),
        ("mme", None, 750.0),
        ("mme", 21, 75.0),  # the first task, and one question of the second
    ],
)
def test_what_guessing_scores(name: str, limit: int | None, chance: float) -> None:
    assert make(name).chance(make(name).load(MINI)[:limit], MINI) == chance


@pytest.mark.parametrize("name", ["gqa", "pope", "textvqa", "mme", "mmbench"])
def test_a_sample_is_of_all_pictures_and_tears_nothing_apart(name: str) -> None:
    one = make(name)
    questions = one.load(MINI)
    some = drawn(questions, 150, one.together)
    left = [question for question in questions if question not in some]
    assert 150 <= len(some) <= 153 and not {*map(one.together, some)} & {*map(one.together, left)}
    pictures = [len({question.images for question in asked}) for asked in (some, questions[: len(some)])]
    assert pictures[0] >= {"gqa": 46, "pope": 45}.get(name, 0), f"the first ones are about {pictures[1]}"
    if name == "pope":
        assert len({question.category for question in some}) == 3 > len({one.category for one in questions[:150]})


@pytest.mark.parametrize("name", ["vqav2", "sqa", "mme", "mmbench", "mmbench_cn", "mmvet", "seed", "videos"])
def test_builders_show_test_scenes_of_their_own_range(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every seed that a builder draws from is recorded while it builds without pictures."""
    module = importlib.import_module(f"playground.mini.benchmarks.{name.removesuffix('_cn')}")
    drawn: list[tuple[str, int]] = []

    def recording(draw: Any) -> Any:
        return lambda split, index: (drawn.append((split, index)), draw(split, index))[1]

    monkeypatch.setattr(module, "scene", recording(scene), raising=False)
    monkeypatch.setattr(files, "scene", recording(scene))
    monkeypatch.setattr(module, "clip", recording(clip), raising=False)
    monkeypatch.setattr(
        module, "picture", lambda path, _: path.parent.mkdir(parents=True, exist_ok=True), raising=False
    )
    monkeypatch.setattr(module, "write_video", lambda *_: None, raising=False)
    monkeypatch.setattr(module, "encoded", lambda _: "", raising=False)
    getattr(module, f"build_{name}")(tmp_path)
    own = {"sqa": ["scienceqa"], "mme": ["MME"], "mmvet": ["mm-vet"], "seed": ["seed_bench", "seed_clips"],
           "videos": list(VIDEO_SETS)}.get(name, [name])  # fmt: skip
    assert drawn and {split for split, _ in drawn} == {"test"}
    assert {index for _, index in drawn} <= {index for key in own for index in TEST[key]}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The larger set without its pictures."""
    folder = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patch:
        for name, builder in WITH_SPLIT["large"].items():
            module = importlib.import_module(builder.__module__)
            patch.setattr(module, "picture", lambda path, _: path.parent.mkdir(parents=True, exist_ok=True))
            builder(folder / "eval" / name, "large")
    return folder


@pytest.mark.parametrize("name", ["gqa", "pope", "vqav2"])
def test_the_larger_set_has_250_pictures_that_the_smaller_one_has_not(large: Path, name: str) -> None:
    images = collections.Counter(question.images for question in make(name).load(large))
    assert len(images) == 250 and {*images.values()} <= {3, 4, 5}
    assert not images.keys() & {question.images for question in make(name).load(MINI)}
    kinds = collections.Counter(question.category for question in make("pope").load(large))
    assert {*kinds} == {"adversarial", "popular", "random"} and max(kinds.values()) - min(kinds.values()) <= 2


def test_choices_have_one_right_option_and_turn() -> None:
    for kind in sorted(WRITERS):
        made = [choose(View(scene("val", index)), kind, random.Random(index)) for index in range(120)]
        found = [one for one in made if one]
        assert len(found) > 5, kind
        for one in found:
            assert len(set(one.options)) == len(one.options) >= 2 and 0 <= one.right < len(one.options)
            for turn in range(len(one.options)):
                turned = one.rotated(turn)
                assert turned.options[turned.right] == one.options[one.right]
        assert len({one.right for one in found}) > 1, kind


def test_what_is_asked_about_a_brief_clip_is_seen_in_one_frame_alone() -> None:
    kinds = set()
    for index in TEST["brief"]:
        shown = brief_clip("test", index)
        items, sign, frames = shown.scene.items, shown.scene.sign, shown.frames()
        assert shown.scene.seed == SPLITS["test"] + index and len(shown.only) == len(items) + 1
        for kind, question, answer in brief_questions(shown, random.Random(index)):
            kinds.add(kind)
            if kind == "text":
                assert sign is not None and sign.text == answer and [f.sign for f in frames].count(sign) == 1
                continue
            name = answer if kind == "object" else question.split()[-1].rstrip("?")
            (item,) = [one for one in items if one.name == name]
            assert sum(item in frame.items for frame in frames) == 1 and not item.large
            assert kind == "object" or item.colour == answer
            assert kind == "color" or [one.category for one in items].count(item.category) == 1
    assert kinds == {"object", "color", "text"}


def files_of(benchmark: Benchmark) -> Iterator[Path]:
    """Every picture or video a benchmark's questions name, where they are files."""
    for question in benchmark.load(MINI):
        for name in question.images:
            yield EVAL / benchmark.folder / benchmark.images / name


@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"refcoco"}))  # whose twin shows photographs
def test_every_mini_loads_and_scores_through_its_benchmark(name: str) -> None:
    benchmark = make(name)
    questions = benchmark.load(MINI)
    assert len(questions) >= 60
    if benchmark.picture is None:
        files = list(dict.fromkeys(files_of(benchmark)))
        assert files and all(path.is_file() for path in files)
        for path in files[:: max(1, len(files) // 5)]:
            pictures = read_frames(path, 8) if benchmark.frames else [Image.open(path).convert("RGB")]
            assert all(min(picture.size) >= 100 for picture in pictures)
    answers = [
        {
            "question_id": one.question_id,
            "prompt": one.prompt or one.text,
            "text": "yes",
            "metadata": {"index": one.index},
        }
        for one in questions
    ]
    report = benchmark.score(answers, MINI)
    assert report["complete"] and report["counts"]["answered"] == len(questions)
