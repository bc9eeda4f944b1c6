"""The mini twins in the official layouts: keys, counts, ids, images, and the traps that the real files have. Their
scenes are seeded, their splits disjoint, and building them is idempotent.
"""

import collections
import hashlib
import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image
from tiny_data import said

from llava_consensus.evaluation.benchmarks import BENCHMARKS, make
from llava_consensus.evaluation.media import read_frames
from llava_consensus.evaluation.runs.questions import drawn
from playground.mini import build as builder
from playground.mini.benchmarks import BUILDERS, WITH_SPLIT
from playground.mini.paths import MINI
from playground.mini.scenes import SPLITS, render, scene

EVAL = MINI / "eval"
TEXTS = (".json", ".jsonl", ".tsv", ".txt")
GOLDEN = Path(__file__).parents[1] / "golden" / "mini_files.json"


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    builder.build()


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


def test_what_guessing_scores() -> None:
    """The last one: of the first task of MME, and one question of the second."""
    cases = (("gqa", None, 0.0), ("pope", 7, 50.0), ("seed", None, 25.0), ("mme", None, 750.0), ("mme", 21, 75.0))
    for name, limit, chance in cases:
        assert make(name).chance(make(name).load(MINI)[:limit], MINI) == chance, name


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


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"refcoco"}))  # whose twin shows photographs
def test_every_mini_loads_and_scores_through_its_benchmark(name: str) -> None:
    benchmark = make(name)
    questions = benchmark.load(MINI)
    assert len(questions) >= 60
    if benchmark.read_image is None:
        folder = EVAL / benchmark.folder / benchmark.images
        files = list(dict.fromkeys(folder / name for question in questions for name in question.images))
        assert files and all(path.is_file() for path in files)
        for path in files[:: max(1, len(files) // 5)]:
            pictures = read_frames(path, 8) if benchmark.frames else [Image.open(path).convert("RGB")]
            assert all(min(picture.size) >= 100 for picture in pictures)
    report = benchmark.score(said(questions), MINI)
    assert report["complete"] and report["counts"]["answered"] == len(questions)


def test_scenes_are_seeded_and_splits_disjoint() -> None:
    assert scene("test", 3) == scene("test", 3)
    assert np.array_equal(np.asarray(render(scene("test", 3))), np.asarray(render(scene("test", 3))))
    bases = sorted(SPLITS.values())
    assert all(b - a >= 10**9 for a, b in itertools.pairwise(bases))
    with pytest.raises(ValueError, match="outside"):
        scene("train", 10**9)
    seen = {split: {scene(split, i).seed for i in range(200)} for split in SPLITS}
    assert not seen["train"] & seen["test"] and not seen["val"] & seen["test"] and not seen["train"] & seen["val"]


def test_build_is_idempotent_and_leaves_videos_out_without_pyav(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders = dict.fromkeys(("gqa", builder.VIDEOS), lambda path: path.mkdir(parents=True))
    monkeypatch.setattr(builder, "BUILDERS", builders)
    for there, names in ((None, ["gqa"]), (object(), [builder.VIDEOS, "gqa"])):
        monkeypatch.setattr(builder, "find_spec", lambda name, there=there: there)
        assert builder.build(tmp_path) and not builder.build(tmp_path)
        assert sorted(path.name for path in (tmp_path / "eval").iterdir() if path.is_dir()) == names
    (tmp_path / "eval" / ".complete").write_text("older sources")
    assert builder.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["eval"]
