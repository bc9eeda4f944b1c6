"""The official Video-LLaVA as a host, on a double of its package's code: clips of eight frames, both towers, what
becomes of class tokens, and the harness.
"""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import remote_cases
import remote_doubles
import torch
from PIL import Image
from remote_doubles.base import pixels_of
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import MissingDependency, OptionError
from llava_consensus.hosts import HOSTS, Loading, Prompt, load, wrap
from llava_consensus.hosts.base import Clip
from llava_consensus.hosts.probe.watch import watching
from llava_consensus.hosts.remote.video_llava.host import VideoLlavaHost
from llava_consensus.methods import METHODS, make
from llava_consensus.methods.consensusdrop import ConsensusDrop
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.saliency import class_saliency

FRAMES, PATCHES, NEW = 8, 16, 4
NAME = "video-llava-official"
POLICIES = [
    ("keep", FRAMES * PATCHES, FRAMES),
    ("drop", FRAMES * PATCHES, 0),
    ("candidates", FRAMES * (PATCHES + 1), 0),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return remote_doubles.video_llava()


def clip(seed: int, size: int = 56) -> Tensor:
    return torch.randn(3, FRAMES, size, size, generator=torch.Generator().manual_seed(seed))


def asked(*images: Tensor, text: int = 5) -> dict[str, Any]:
    """One prompt about pictures and clips: a placeholder for each picture and frame."""
    marks = [-200] * sum(1 if image.ndim == 3 else image.shape[1] for image in images)
    ids = torch.tensor([[1, 7, *marks, *range(20, 20 + text)]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "images": list(images)}


def generate(model: Any, inputs: dict[str, Any]) -> Tensor:
    said: Tensor = remote_cases.generate(model, inputs, NEW)
    return said[:, -NEW:]


@pytest.mark.parametrize(("class_tokens", "before", "structural"), POLICIES)
@pytest.mark.parametrize("tile_budget", ["global", "per_tile"])
def test_a_clip_has_one_budget(model: Any, class_tokens: str, before: int, structural: int, tile_budget: str) -> None:
    options: dict[str, Any] = {"host_options": {"class_tokens": class_tokens}, "tile_budget": tile_budget}
    with attach(model, "consensusdrop", 28, **options) as attached:
        rows = entering(model, asked(clip(0)))
        generate(model, asked(clip(0)))
        (outcome,) = attached.outcomes
    assert (outcome.before, outcome.after, outcome.structural) == (before, 28, structural)
    assert rows.shape[1] == 7 + 28 + structural
    counts = [one.tokens.shape[1] for _, one in outcome.reductions]
    assert counts == ([28] if tile_budget == "global" else [4] * 4 + [3] * 4)


@pytest.mark.parametrize("budget", [455, 227, 114])
def test_the_papers_budgets(budget: int) -> None:
    real = remote_doubles.video_llava(size=224)
    with attach(real, "consensusdrop", budget, tile_budget="global") as attached, torch.no_grad():
        real(**asked(clip(0, 224)))
        (outcome,) = attached.outcomes
    assert (outcome.before, outcome.after, outcome.structural) == (2048, budget, 8)


@pytest.mark.parametrize(("class_tokens", "before", "structural"), POLICIES)
@torch.no_grad()
def test_what_stays_are_the_models_own_rows(model: Any, class_tokens: str, before: int, structural: int) -> None:
    """The rows of the full prompt without those of dropped tokens, read by the model's own layers."""
    inputs = asked(clip(1))
    full = entering(model, inputs)
    options: dict[str, Any] = {"host_options": {"class_tokens": class_tokens}, "tile_budget": "global"}
    with attach(model, "consensusdrop", 20, merged=0, order="raster", **options) as attached:
        logits = model(**inputs).logits[0, -1]
        (outcome,) = attached.outcomes
    is_class = torch.arange(FRAMES * (PATCHES + 1)) % (PATCHES + 1) == 0
    candidates = torch.ones_like(is_class) if class_tokens == "candidates" else ~is_class
    stays = is_class & (class_tokens == "keep")
    stays[candidates.nonzero()[outcome.reductions[0][1].kept[0], 0]] = True
    rows = torch.cat((full[:, :2], full[:, 2:-5][:, stays], full[:, -5:]), 1)
    expected = model.lm_head(model.model(inputs_embeds=rows)[0])[0, -1]
    assert torch.allclose(logits, expected, atol=1e-4)


def entering(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The rows [1, S, D] that enter the language model."""
    found: list[Tensor] = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda module, given: found.append(given[0]))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return found[0]


@pytest.mark.parametrize(("image", "tower"), [(clip(2), "video_tower"), (clip(3)[:, 0], "image_tower")])
def test_the_attention_read_is_that_of_the_tower_that_runs(
    model: Any, monkeypatch: pytest.MonkeyPatch, image: Tensor, tower: str
) -> None:
    seen: list[Any] = []
    original = ConsensusDrop.reduce
    monkeypatch.setattr(ConsensusDrop, "reduce", lambda self, *given: seen.append(given[0]) or original(self, *given))
    holder = getattr(model.model, tower)
    block = getattr(holder, tower).encoder.layers[-2]
    with attach(model, "consensusdrop", 8), watching(block.self_attn) as watch, torch.no_grad():
        model(**asked(image))
    expected = watch.weights[0].mean(1)[:, 0, 1:]
    assert torch.allclose(class_saliency(seen[0].attention).reshape(expected.shape), expected, atol=1e-6)


@torch.no_grad()
def test_all_tokens_and_detach_are_bit_identical(model: Any) -> None:
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    for inputs in (asked(clip(0)), asked(clip(0)[:, 0], clip(1)[:, 0])):
        plain, said = model(**inputs).logits, generate(model, inputs)
        with attach(model, "consensusdrop", FRAMES * PATCHES, host_options={"class_tokens": "drop"}):
            assert torch.equal(model(**inputs).logits, plain)
            assert torch.equal(generate(model, inputs), said)
        assert torch.equal(model(**inputs).logits, plain)
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before


def test_two_clips_pictures_and_copies(model: Any) -> None:
    with attach(model, "consensusdrop", 8) as attached:
        said = generate(model, asked(clip(0), clip(1)))
        assert [(one.before, one.after, one.structural) for one in attached.outcomes] == [(128, 8, 8)] * 2
        assert torch.equal(generate(copy.deepcopy(model), asked(clip(0), clip(1))), said)
        generate(model, asked(clip(0)[:, 0]))
        assert [(one.before, one.after, one.structural) for one in attached.outcomes] == [(16, 8, 0)]
        with pytest.raises(OptionError, match="Ask about them apart"):
            generate(model, asked(clip(0), clip(0)[:, 0]))
        padded = asked(clip(0))
        padded["attention_mask"][0, 0] = 0
        with pytest.raises(OptionError, match="padded"):
            generate(model, padded)


def test_labels_are_cut_with_their_rows(model: Any) -> None:
    inputs = asked(clip(0))
    labels = torch.where(inputs["input_ids"] < 22, -100, inputs["input_ids"])
    with attach(model, "consensusdrop", 8):
        loss = model(**inputs, labels=labels).loss
    assert loss.isfinite() and loss.requires_grad


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("class_tokens", ["keep", "drop", "candidates"])
def test_every_method_works_or_is_refused(model: Any, method: str, class_tokens: str) -> None:
    options: dict[str, Any] = {"host_options": {"class_tokens": class_tokens}}
    inside = METHODS[method].place in (Place.TOWER, Place.PICTURE, Place.DECODER)
    if inside or method == "cdpruner" or make(method).positions != "renumber":
        with pytest.raises(OptionError):
            attach(model, method, 16, **options)
        return
    with attach(model, method, 16, **options) as attached:
        generate(model, asked(clip(0)))
        (outcome,) = attached.outcomes
    assert (outcome.after < outcome.before) == (method != "full")


# ---- the harness


class RandomHorizontalFlipVideo:
    """The step that must be left out."""

    def __call__(self, frames: Tensor) -> Tensor:
        raise AssertionError("a clip was mirrored")


@pytest.fixture
def host(model: Any) -> VideoLlavaHost:
    pictures = SimpleNamespace(
        image_mean=(0.5, 0.5, 0.5),
        preprocess=lambda image, return_tensors: {"pixel_values": pixels_of(image, 56)[None]},
    )
    steps = [lambda frames: frames[:, :, :56, :56] / 127.5 - 1, RandomHorizontalFlipVideo()]
    clips = SimpleNamespace(transform=SimpleNamespace(transforms=steps))
    model.config.image_aspect_ratio = "pad"
    found = VideoLlavaHost(model, remote_cases.tokenizer(), {"image": pictures, "video": clips}, HOSTS[NAME].defaults)
    assert type(wrap(model)) is VideoLlavaHost
    return found


def film(seed: int) -> Clip:
    pixels = torch.randint(0, 256, (FRAMES, 64, 80, 3), generator=torch.Generator().manual_seed(seed))
    frames = tuple(Image.fromarray(one.byte().numpy()) for one in pixels)
    return Clip(frames, tuple(range(FRAMES)), FRAMES)


def test_the_harness_answers_about_clips_and_pictures(host: VideoLlavaHost) -> None:
    prompts = [Prompt(text, "llava_v1", max_new_tokens=3) for text in ("What?", "What is in it?", "Where?", "Who?")]
    with host.attach(make("consensusdrop", tile_budget="global"), Budget(12)):
        one, two, picture = host.encode([film(0), film(1), remote_cases.picture(0)])
        pictures = [[one], [two], [picture], []]
        answers = host.answer(pictures, prompts)
        again = [host.answer([seen], [prompt])[0] for seen, prompt in zip(pictures, prompts, strict=True)]
    counts = [(answer.before, answer.after, answer.structural) for answer in answers]
    assert counts == [(128, 12, 8), (128, 12, 8), (16, 12, 0), (0, 0, 0)]
    assert [answer.text for answer in answers] == [answer.text for answer in again]
    assert host.shape().available == PATCHES


def test_it_is_told_from_llava_and_needs_its_own_package(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava", "mm_image_tower": '
        '"LanguageBind/LanguageBind_Image", "mm_video_tower": "LanguageBind/LanguageBind_Video_merge"}'
    )
    with pytest.raises(OptionError, match="--trust-remote-code"):
        load(str(tmp_path))
    with pytest.raises(MissingDependency, match="videollava"):
        load(str(tmp_path), Loading(trust_remote_code=True))
