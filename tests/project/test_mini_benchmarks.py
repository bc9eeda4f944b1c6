"""The mini twins in the official layouts: keys, counts, ids, pictures, and the traps that the real files have.

Run: `pytest tests/project/test_mini_benchmarks.py`. Builds `playground/mini/eval` unless it is there.
"""

from __future__ import annotations

import base64
import collections
import importlib
import io
import json
import math
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
from llava_consensus.evaluation.runs.configuration import drawn
from playground.mini import build as builder
from playground.mini.benchmarks import BUILDERS, WITH_SPLIT, files
from playground.mini.benchmarks.choices import WRITERS, choose
from playground.mini.benchmarks.files import TEST
from playground.mini.benchmarks.mme import SPLIT_FOLDERS, TASKS
from playground.mini.benchmarks.videos import brief_questions
from playground.mini.clips import FRAMES, Clip, brief_clip, clip
from playground.mini.paths import MINI
from playground.mini.questions import SHORT, View
from playground.mini.scenes import SPLITS, scene
from playground.mini.styles import LETTER

EVAL = MINI / "eval"
VIDEO_SETS = {"TGIF": "mp4", "MSVD": "videos", "MSRVTT": "videos/all"}  # as Video-LLaVA's scripts name them


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    builder.build()


def rows(path: str) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in (EVAL / path).read_text().splitlines()]


def whole(path: str) -> Any:
    """A JSON file."""
    return json.loads((EVAL / path).read_text())


def table(path: str) -> pandas.DataFrame:
    """A table as LLaVA reads it."""
    return pandas.read_table(EVAL / path)


def test_every_folder_is_one_of_llavas() -> None:
    assert set(BUILDERS) == {
        "gqa", "pope", "textvqa", "vqav2", "scienceqa", "MME", "mmbench", "mmbench_cn", "mm-vet", "seed_bench",
        "GPT_Zero_Shot_QA",
    }  # fmt: skip
    assert {path.name for path in EVAL.iterdir()} == {*BUILDERS, ".complete"}


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


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_choices_have_one_right_option_and_turn(kind: str) -> None:
    made = [choose(View(scene("val", index)), kind, random.Random(index)) for index in range(120)]
    found = [one for one in made if one]
    assert len(found) > 5
    for one in found:
        assert len(set(one.options)) == len(one.options) >= 2 and 0 <= one.right < len(one.options)
        for turn in range(len(one.options)):
            turned = one.rotated(turn)
            assert turned.options[turned.right] == one.options[one.right]
    assert len({one.right for one in found}) > 1


def test_choices_are_true_of_the_scene() -> None:
    for index in range(150):
        view = View(scene("val", index))
        one = choose(view, "identity", random.Random(index))
        assert one and [name in view.names for name in one.options].count(True) == 1
        other = choose(view, "missing", random.Random(index))
        if other:
            assert [name in view.names for name in other.options].count(False) == 1
        number = choose(view, "counting", random.Random(index))
        assert number and int(number.options[number.right]) in view.names.values()


def test_vqav2_files() -> None:
    dev, every = (rows(f"vqav2/llava_vqav2_mscoco_{split}.jsonl") for split in ("test-dev2015", "test2015"))
    assert 150 <= len(dev) < len(every) <= 300 and list(dev[0]) == ["question_id", "image", "text", "category"]
    ids = [row["question_id"] for row in every]
    assert len(set(ids)) == len(ids) and {row["question_id"] for row in dev} < set(ids)
    assert all(row["image"] == f"COCO_test2015_{row['question_id'] // 1000:012d}.jpg" for row in every)
    assert all(row["text"].endswith(f"\n{SHORT}") for row in every)
    gold = whole("vqav2/v2_mscoco_test-dev2015_annotations.json")
    assert {"info", "license", "data_subtype", "annotations", "data_type", "task_type"} == set(gold)
    assert {one["question_id"] for one in gold["annotations"]} == {row["question_id"] for row in dev}
    for one in gold["annotations"]:
        assert set(one) == {
            "question_type",
            "multiple_choice_answer",
            "answers",
            "image_id",
            "answer_type",
            "question_id",
        }
        assert [answer["answer_id"] for answer in one["answers"]] == list(range(1, 11))
        assert sum(answer["answer"] == one["multiple_choice_answer"] for answer in one["answers"]) >= 7
        assert one["answer_type"] in ("yes/no", "number", "other")
    assert {len({a["answer"] for a in one["answers"]}) for one in gold["annotations"]} == {1, 2}
    asked = whole("vqav2/v2_OpenEnded_mscoco_test-dev2015_questions.json")["questions"]
    assert [f"{one['question']}\n{SHORT}" for one in asked] == [row["text"] for row in dev]


def test_scienceqa_files() -> None:
    items, problems = whole("scienceqa/llava_test_CQM-A.json"), whole("scienceqa/problems.json")
    test = whole("scienceqa/pid_splits.json")["test"]
    assert [one["id"] for one in items] == test == list(problems) and len(test) == len(set(test)) >= 400
    pictured = [one for one in items if "image" in one]
    assert 0.4 < len(pictured) / len(items) < 0.8
    assert {len(one["choices"]) for one in problems.values()} == {2, 3, 4, 5}
    for one in items:
        known, (human, answer) = problems[one["id"]], one["conversations"]
        letters = [f"{'ABCDE'[k]}. {text}" for k, text in enumerate(known["choices"])]
        head = ["<image>"] * ("image" in one) + [f"Context: {known['hint']}"] * bool(known["hint"])
        assert human["value"].split("\n") == [*head, known["question"], *letters]
        assert answer["value"] == "ABCDE"[known["answer"]]
        assert one.get("image") == (f"{one['id']}/{known['image']}" if known["image"] else None)


def test_mme_files() -> None:
    asked = rows("MME/llava_mme.jsonl")
    tasks = collections.Counter(row["category"] for row in asked)
    assert set(tasks) == set(TASKS) and len(tasks) == 14 and set(tasks.values()) == {20}
    release = EVAL / "MME" / "MME_Benchmark_release_version"
    for first, second in zip(asked[::2], asked[1::2], strict=True):
        assert first["question_id"] == first["image"] == second["question_id"] and first["text"] != second["text"]
        task, *inner, name = first["image"].split("/")
        assert inner == (["images"] if task in SPLIT_FOLDERS else [])
        place = release / task / ("questions_answers_YN" if inner else ".")
        lines = [line.split("\t") for line in (place / name.replace(".jpg", ".txt")).read_text().splitlines()]
        assert [answer for _, answer in lines] == ["Yes", "No"]
        texts = [row["text"].removesuffix(f"\n{SHORT}") + " Please answer yes or no." for row in (first, second)]
        assert [question for question, _ in lines] == texts


@pytest.mark.parametrize("path", ["mmbench/mmbench_dev_20230712.tsv", "mmbench_cn/mmbench_dev_cn_20231003.tsv"])
def test_mmbench_tables(path: str) -> None:
    frame = table(path)
    assert list(frame) == ["index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image", "source",
                           "l2-category", "comment", "split"]  # fmt: skip
    assert frame["index"].is_unique and set(frame["split"]) == {"dev"}
    assert (frame["index"] % 1_000_000).nunique() >= (60 if "_cn" in path else 400)
    turns = frame["index"] // 1_000_000
    assert list(turns) == sorted(turns), "all first rows come first"
    for _, group in frame.groupby(frame["index"] % 1_000_000):
        options = [[text for text in row if isinstance(text, str) or not math.isnan(text)]
                   for row in group[list("ABCD")].values.tolist()]  # fmt: skip
        assert [index // 1_000_000 for index in group["index"]] == list(range(len(options[0])))
        assert all(row == options[0][k:] + options[0][:k] for k, row in enumerate(options))
        right = {row["ABCD".index(letter)] for row, letter in zip(options, group["answer"], strict=True)}
        assert len(right) == 1 and group["question"].nunique() == group["image"].nunique() == 1
    if "_cn" in path:
        assert all(re.search("[\u4e00-\u9fff]", text) for text in frame["question"])
    else:
        assert {2, 3, 4} == set(frame.groupby(frame["index"] % 1_000_000).size()) and frame["hint"].notna().any()
    for text in frame["image"].iloc[:10]:
        assert Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB").width > 100


def test_mm_vet_files() -> None:
    asked, truth = rows("mm-vet/llava-mm-vet.jsonl"), whole("mm-vet/mm-vet.json")
    assert [row["question_id"] for row in asked] == list(range(60))
    assert list(truth) == [f"v1_{row['question_id']}" for row in asked]
    for row, known in zip(asked, truth.values(), strict=True):
        assert (row["image"], row["text"], row["category"]) == (known["imagename"], known["question"], "conv")
        assert set(known) == {"imagename", "question", "answer", "imagesource", "capability"}
    used = {tuple(known["capability"]) for known in truth.values()}
    assert {one for many in used for one in many} == {"rec", "ocr", "know", "gen", "spat", "math"} and len(used) >= 6
    answers = [known["answer"] for known in truth.values()]
    assert any("<AND>" in text for text in answers) and any("<OR>" in text for text in answers)


def test_seed_files() -> None:
    gold = whole("seed_bench/SEED-Bench.json")
    asked = rows("seed_bench/llava-seed-bench.jsonl")
    names = {number: name for name, number in gold["question_type"].items()}
    assert sorted(names) == list(range(1, 13)) and len(asked) == len(gold["questions"]) >= 400
    kinds = collections.Counter(one["question_type_id"] for one in gold["questions"])
    assert set(kinds) == set(names) and min(kinds.values()) >= 10
    for row, one in zip(asked, gold["questions"], strict=True):
        video = one["question_type_id"] > 9
        assert one["data_type"] == ("video" if video else "image") and isinstance(one["question_id"], str)
        assert row["question_id"] == (one["question_id"] if video else int(one["question_id"]))
        assert row["category"] == names[one["question_type_id"]]
        options = [f"{letter}. {one[f'choice_{letter.lower()}']}" for letter in "ABCD"]
        assert row["text"].split("\n") == [one["question"], *options, LETTER]
        assert row["image"].startswith("SEED-Bench-video-image/" if video else "SEED-Bench-image/")
    ids = [row["question_id"] for row in asked]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", VIDEO_SETS)
def test_video_files(name: str) -> None:
    folder = f"GPT_Zero_Shot_QA/{name}_Zero_Shot_QA"
    asked, answers = whole(f"{folder}/test_q.json"), whole(f"{folder}/test_a.json")
    assert len(asked) == len(answers) >= 150 and set(asked[0]) == {"video_name", "question_id", "question"}
    assert [one["question_id"] for one in asked] == [one["question_id"] for one in answers]
    assert len({one["question_id"] for one in asked}) == len(asked)
    videos = {path.stem for path in (EVAL / folder / VIDEO_SETS[name]).glob("*.mp4")}
    assert videos == {one["video_name"] for one in asked}
    frames = read_frames(EVAL / folder / VIDEO_SETS[name] / f"{asked[0]['video_name']}.mp4", 8)
    assert len(frames) == FRAMES and frames[0].tobytes() != frames[-1].tobytes()


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
