"""The mini twins in the official layouts: keys, counts, ids, images, and the traps that the real files have.

Run: `pytest tests/project/test_mini_benchmarks.py`. Builds `playground/mini/eval` unless it is there.
"""

from __future__ import annotations

import collections
import hashlib
import importlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
from PIL import Image

from llava_consensus.evaluation.benchmarks import BENCHMARKS, Benchmark, make
from llava_consensus.evaluation.media import read_frames
from llava_consensus.evaluation.runs.questions import drawn
from playground.mini import build as builder
from playground.mini.benchmarks import BUILDERS, WITH_SPLIT
from playground.mini.benchmarks.files import TEST
from playground.mini.benchmarks.videos import brief_questions
from playground.mini.clips import Clip, brief_clip, clip
from playground.mini.paths import MINI
from playground.mini.scenes import SPLITS, scene

EVAL = MINI / "eval"
TEXTS = (".json", ".jsonl", ".tsv", ".txt")
GOLDEN = Path(__file__).parents[1] / "golden" / "mini_files.json"


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    builder.build()


def whole(path: str) -> Any:
    """A JSON file."""
    return json.loads((EVAL / path).read_text())


def test_every_folder_is_one_of_llavas_with_the_files_it_had() -> None:
    """Questions and annotations, byte for byte; the images within them are as the encoder of the day makes them."""
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


def test_what_guessing_scores_follows_from_the_options() -> None:
    problems = whole("scienceqa/problems.json")
    questions = make("sqa").load(MINI)
    counts = [len(problems[str(one.question_id)]["choices"]) for one in questions if one.images]
    assert make("sqa").chance(questions, MINI) == pytest.approx(100 * sum(1 / count for count in counts) / len(counts))
    for question in make("mmbench").load(MINI)[:40]:  # no rotation of them is among the first
        options = len(re.findall("^[A-D]\\. ", question.text, re.MULTILINE))
        assert make("mmbench").chance([question], MINI) == pytest.approx(100 / options)
    rotated = [one for one in make("mmbench").load(MINI) if int(one.question_id) % 1_000_000 == 241]
    assert make("mmbench").chance(rotated, MINI) == pytest.approx(100 * len(rotated) ** -len(rotated))


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


def test_a_sample_of_mme_is_pictures_with_both_questions() -> None:
    ids = [question.question_id for question in drawn(make("mme").load(MINI), 31, make("mme").together)]
    assert len(ids) == 32 and ids[::2] == ids[1::2]


def test_ranges_of_scenes_do_not_meet_and_are_test_scenes() -> None:
    seen = [index for indices in TEST.values() for index in indices]
    assert len(seen) == len(set(seen))
    assert max(SPLITS["train"], SPLITS["val"]) + 10**9 <= SPLITS["test"], "seeds of training are all smaller"
    assert clip("test", 6000).scene.seed == SPLITS["test"] + 6000 and scene("test", 3000).seed == SPLITS["test"] + 3000


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


def test_the_larger_set_shows_textvqas_words_as_a_bad_ocr_reads_them(large: Path) -> None:
    with_words, without = make("textvqa").load(large), make("textvqa").load(MINI)
    assert [one.images for one in with_words] == [one.images for one in without]
    told = [one.text.split("Reference OCR token: ")[1].split("\n")[0] for one in with_words]
    told_of = dict(zip([one.images for one in with_words], told, strict=True))
    assert [
        one.text.replace(word, "", 1) if word else one.text for one, word in zip(with_words, told, strict=True)
    ] == [one.text for one in without]
    truth = {
        (f"{one['image_id']}.jpg",): one["answers"][0]
        for one in json.loads((large / "eval/textvqa/TextVQA_0.5.1_val.json").read_text())["data"]
        if "character" not in one["question"]
    }
    right = [told_of[image].lower() == word for image, word in truth.items()]
    assert 0.55 < sum(right) / len(right) < 0.75 and 0.08 < list(told_of.values()).count("") / len(told_of) < 0.22


@pytest.mark.parametrize("draw", [clip, brief_clip])
def test_clips_move_without_touching(draw: Callable[[str, int], Clip]) -> None:
    moving = 0
    for index in range(60):
        shown = draw("val", index)
        moving += any(step != (0, 0) for step in shown.steps)
        for frame in shown.frames():
            boxes = [(i.x, i.y, i.x + i.size, i.y + i.size) for i in frame.items]
            assert all(x >= 0 and y >= 0 and r <= frame.width and b <= frame.height for x, y, r, b in boxes)
            for k, (x, y, right, bottom) in enumerate(boxes):
                apart = [r <= x + 1 or right <= a + 1 or b <= y + 1 or bottom <= t + 1 for a, t, r, b in boxes[:k]]
                assert all(apart)
    assert moving > 50


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
    """Every image or video a benchmark's questions name, where they are files."""
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
