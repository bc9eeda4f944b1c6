"""The playground and the embedded checkpoint: deterministic, disjoint, in the official formats, loadable, small."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from playground.mini import build as builder
from playground.mini import connect, forms, full_prefix, sequences
from playground.mini import tokenizer as words
from playground.mini.catalogue import CATEGORIES, COLOURS, NAMES, OBJECTS, SIGN_ALPHABET
from playground.mini.export import export_language
from playground.mini.labels import CLASSES, label
from playground.mini.paths import CHECKPOINT, MINI, ROOT
from playground.mini.questions import GQA_MIX, View, write
from playground.mini.scenes import SPLITS, UNITS, padded, render, sample, scene
from playground.mini.styles import TRAIN_MIX, prompt, training_questions
from playground.mini.tower import WIDTH

PROMPTS = [
    words.SYSTEM,
    "\nIs there a dog in the picture?\nAnswer the question using a single word or phrase. ASSISTANT:",
    "\nWhat does the sign say?\nReference OCR token: \nAnswer the question using a single word or phrase. ASSISTANT:",
    "\n图中有什么？\nA. 狗\nB. 熊猫\n请直接回答选项字母。 ASSISTANT:",
    "  two leading spaces, zebra and É 雪",
    "K7P",
    "",
]
IDS = {  # what transformers 4.37.2 with tokenizers 0.15.1 and transformers 5.23 both give
    "K7P": ["<s>", "▁", "K", "7", "P"],
    "": ["<s>"],
}


@pytest.fixture(scope="module")
def eval_folder() -> Path:
    """The benchmark files; built now unless they are there."""
    builder.build()
    return MINI / "eval"


def lines(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_catalogue_is_as_promised() -> None:
    assert len(NAMES) >= 48 and len(CATEGORIES) >= 5
    assert all(name.isalpha() and name.islower() for name in NAMES)
    assert len({row[1] for row in OBJECTS.values()}) == len(NAMES), "Chinese names are distinct"
    assert {c for row in OBJECTS.values() for c in row[2]} <= {"", *COLOURS}
    assert not set(SIGN_ALPHABET) & set("O0I1S5Z8BG")


def test_scenes_are_seeded_and_splits_disjoint() -> None:
    assert scene("test", 3) == scene("test", 3)
    assert np.array_equal(np.asarray(render(scene("test", 3))), np.asarray(render(scene("test", 3))))
    bases = sorted(SPLITS.values())
    assert all(b - a >= 10**9 for a, b in itertools.pairwise(bases))
    with pytest.raises(ValueError, match="outside"):
        scene("train", 10**9)
    seen = {split: {scene(split, i).seed for i in range(200)} for split in SPLITS}
    assert not seen["train"] & seen["test"] and not seen["val"] & seen["test"] and not seen["train"] & seen["val"]


def test_scenes_look_as_specified() -> None:
    scenes = [scene("test", i) for i in range(200)]
    assert all(1 <= len(s.items) <= 8 and max(s.width, s.height) == UNITS for s in scenes)
    sizes = [item.size for s in scenes for item in s.items]
    assert 0.08 < np.mean([size > 32 for size in sizes]) < 0.22 and min(sizes) >= 16
    assert np.mean([len(s.items) >= 4 for s in scenes]) > 0.95
    assert np.mean([s.width != s.height for s in scenes]) > 0.4 and np.mean([s.sign is not None for s in scenes]) > 0.4
    for s in scenes[:40]:
        centres = [item.centre for item in s.items]
        gaps = [max(abs(a - c), abs(b - d)) for k, (a, b) in enumerate(centres) for c, d in centres[:k]]
        assert all(gap >= 14 for gap in gaps)
        assert all(i.x >= 0 and i.x + i.size <= s.width and i.y >= 0 and i.y + i.size <= s.height for i in s.items)


def test_patch_labels_name_every_object() -> None:
    for index in range(20):
        scene_ = scene("val", index)
        kind = label(scene_).kind
        assert kind.shape == (24, 24) and kind.min() >= -1 and kind.max() < CLASSES
        assert {1 + NAMES.index(item.name) for item in scene_.items} <= set(kind.reshape(-1).astype(int))
    assert padded(render(scene("val", 0))).size == (UNITS, UNITS)


def test_questions_are_answered_by_the_scene() -> None:
    for index in range(60):
        view, rng = View(scene("val", index)), random.Random(index)
        for kind in GQA_MIX:
            qa = write(view, kind, rng)
            if qa is None:
                continue
            assert qa.answer and qa.answer == qa.answer.strip().lower()
            if qa.kind == "existence" and qa.detailed == "exist":
                named = qa.question.replace("?", "").split()
                assert (qa.answer == "yes") == any(name in named for name in view.names)
            if qa.detailed == "color":
                assert qa.answer in {item.colour for item in view.items if item.name in qa.question}


def test_training_mix_has_every_style() -> None:
    made = [qa for i in range(60) for qa in training_questions(scene("train", i), random.Random(i), 12)]
    kinds = {qa.kind for qa in made}
    assert kinds >= {*GQA_MIX, "reading", "place", "letter", "chinese", "judge", "describe", "list"}
    ends = ("single word or phrase.", "given choices directly.", "请直接回答选项字母。")
    assert all(any(prompt(qa).endswith(end) for qa in made) for end in ends)


def test_the_last_stage_asks_as_every_benchmark_does() -> None:
    plan = sequences.Plan("train", forms=True)
    made = [qa for index in range(80) for qa in sequences.questions(index, plan)]
    assert {qa.kind for qa in made} == set(forms.MIX)
    for qa in made:
        if qa.kind in ("choice", "words", "letter", "chinese"):
            options = re.findall(r"^([A-E])\. ", qa.question, re.MULTILINE)
            assert qa.answer in options == list("ABCDE"[: len(options)])
        if qa.kind in ("pair", "judge"):
            assert qa.answer in ("yes", "no") and qa.question.endswith(("?", "yes or no."))
    plain = [qa for index in range(80) for qa in sequences.questions(index, sequences.Plan("train"))]
    assert {qa.kind for qa in plain} == set(TRAIN_MIX), "the stages before and the tokenizer keep their mix"


def test_the_last_stage_continues_the_committed_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_prefix, "WORK", tmp_path)
    learner = connect.Learner("cpu")
    assert full_prefix.begin(learner, "joint3") == 0
    export_language(learner.model, learner.project, tmp_path / "again", WIDTH)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (CHECKPOINT / name).read_bytes()


def test_build_is_idempotent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "one.txt").write_text("1")

    monkeypatch.setattr(builder, "BUILDERS", {"gqa": small})
    assert builder.build(tmp_path) and not builder.build(tmp_path)
    (tmp_path / "eval" / ".complete").write_text("older sources")
    assert builder.build(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval"]


def test_videos_are_left_out_until_pyav_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        builder, "BUILDERS", dict.fromkeys(("gqa", builder.VIDEOS), lambda path: path.mkdir(parents=True))
    )
    for there, names in ((None, ["gqa"]), (object(), [builder.VIDEOS, "gqa"])):
        monkeypatch.setattr(builder, "find_spec", lambda name, there=there: there)
        assert builder.build(tmp_path) and not builder.build(tmp_path)
        assert sorted(path.name for path in (tmp_path / "eval").iterdir() if path.is_dir()) == names


def test_committed_tokenizer_is_the_built_one() -> None:
    assert (CHECKPOINT / "tokenizer.model").read_bytes() == words.build()


def test_tokenizer_matches_sentencepiece_and_keeps_words_whole() -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    from transformers import AutoTokenizer

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(CHECKPOINT / "tokenizer.model"))
    loaded = AutoTokenizer.from_pretrained(CHECKPOINT, use_fast=False)
    for text in PROMPTS[:-1]:
        assert loaded(text).input_ids == [1, *pieces.encode(text)]
    for text, tokens in IDS.items():
        assert loaded.convert_ids_to_tokens(loaded(text).input_ids) == tokens
    for name in NAMES:
        assert pieces.encode(f"a {name}", out_type=str)[-1] == f"▁{name}"
    counts = [len(loaded(text).input_ids) for text in PROMPTS[:4]]
    assert counts == [34, 24, 28, 26]


def test_checkpoint_is_small_and_loads_officially(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [p for p in CHECKPOINT.rglob("*") if p.is_file() and ".work" not in p.parts]
    assert sum(p.stat().st_size for p in files) <= 24 * 2**20
    assert (CHECKPOINT / "model.safetensors").exists() and (CHECKPOINT / "vision_tower/model.safetensors").exists()
    pytest.importorskip("llava")
    from llava.model.builder import load_pretrained_model

    monkeypatch.chdir(ROOT)
    tokenizer, model, processor, _ = load_pretrained_model("checkpoints/llava-mini", None, "llava-mini", device="cpu")
    tower = model.get_vision_tower()
    assert tower.num_patches == 576 and tower.select_layer == -2 and model.config.image_aspect_ratio == "pad"
    assert len(tokenizer) == model.get_input_embeddings().weight.shape[0]
    picture = padded(render(sample(SPLITS["test"] + 1)))
    pixels = processor.preprocess(picture, return_tensors="pt")["pixel_values"].to(model.dtype)
    with torch.inference_mode():
        assert model.encode_images(pixels).shape == (1, 576, model.config.hidden_size)
