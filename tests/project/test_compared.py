"""Compositions are what they are called, and the embedded model as one of videos sees what official LLaVA sees."""

from typing import Any

import pytest
import torch
import transformers
from units import WATCH, of_batch, unit

from eval_scripts.compared import BASE, SALIENCIES, composition
from eval_scripts.composition import CHOICES, OWN, Calibrated, Composed, remembering
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models.base import Clip
from llava_consensus.evaluation.runs.configuration import describe_reduction
from llava_consensus.methods import METHODS, make
from llava_consensus.methods.scope import Scope
from llava_consensus.methods.vispruner import VisPruner
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from playground.mini.clips import brief_clip, pictures

MINI = "checkpoints/llava-mini"
NEW = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 19)
needs_5 = pytest.mark.skipif(not NEW, reason="generate() of transformers 4 does not advance given positions")


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compositions by name, for one test."""
    for name, method in OWN.items():
        monkeypatch.setitem(METHODS.data, name, method)


@pytest.mark.parametrize("options", [{}, {"fuser": "recovery"}, {"alpha": 1.0}])
@pytest.mark.parametrize("budget", [Budget(8), Budget(8, 0)])
def test_the_best_of_a_saliency_is_consensusdrop(options: dict[str, Any], budget: Budget) -> None:
    ours, theirs = (make(name, **options).reduce(unit(), budget) for name in ("composed", "consensusdrop+"))
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.source, theirs.source)


def test_vision_alone_is_the_method_a_choice_is_from() -> None:
    for choice, method in {"cover": Scope(), "thin": VisPruner()}.items():
        composed = make("composed", choice=choice, alpha=1.0).reduce(unit(), Budget(8, 0))
        assert torch.equal(composed.kept, method.reduce(unit(), Budget(8)).kept), choice


@pytest.mark.parametrize("options", [{}, {"fuser": "recovery", "rate": 0.5}])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_keeps_as_many_as_it_should(choice: str, options: dict[str, Any]) -> None:
    method, tokens = Composed(choice=choice, **options), unit(batch=3)
    together = method.reduce(tokens, Budget(9, 2))
    assert together.tokens.shape[1] == 9 and all(len(set(row)) == 7 for row in together.kept.tolist())
    for index in range(3):
        assert torch.equal(method.reduce(of_batch(tokens, index), Budget(9, 2)).kept[0], together.kept[index])
    if options:  # the question has half of the seven but one
        saliencies = method.saliencies(tokens, WATCH)
        assert saliencies.cross is not None
        added = saliencies.cross.argmax(1)
        assert all(one in row for one, row in zip(added.tolist(), together.kept.tolist(), strict=True))


@pytest.mark.parametrize(
    ("method", "budget", "words"),
    [
        (Composed(), Budget(32), BASE),
        (Composed(choice="dpp", alpha=1.0), Budget(32, 0), "dpp, vision, unmerged"),
        (Composed(choice="cover", fuser="recovery"), Budget(32), "cover, recovery, merged"),
        (Calibrated(), Budget(32, 0), "top, fused, unmerged, calibrated"),
    ],
)
def test_a_composition_is_named(method: Method, budget: Budget, words: str) -> None:
    assert composition(describe_reduction(method, budget)) == words and words.split(", ")[1] in SALIENCIES


@needs_5
def test_calibration_keeps_what_the_composition_keeps() -> None:
    host = models.load(MINI, models.Loading("cpu", "float32"))
    image, prompt = pictures(brief_clip("test", 6300))[0], models.Prompt("What does the sign say?", max_new_tokens=1)
    kept = []
    for method in (make("composed"), make("composed_calibrated"), make("composed_calibrated", calibrate=False)):
        with host.attach(method, Budget(24, 0)):
            _, answer = host.ask([image], prompt)
        ((_, reduction),) = answer.outcomes[0].reductions
        kept.append(reduction.source)
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[2])


@pytest.mark.skipif(not NEW, reason="methods on models of transformers need >= 5.19")
def test_a_clip_is_one_video_of_the_tokens_of_its_frames() -> None:
    from eval_scripts.videos import as_video_model

    loading = models.Loading("cpu", "float32")
    frames, official = pictures(brief_clip("test", 6300)), models.load(MINI, loading)
    made = as_video_model(MINI, loading, {})
    (video,) = made.encode([Clip(tuple(frames), tuple(range(8)), 8, 4.0)])
    apart = official.encode(list(frames))
    assert video.tiles.projected.shape == (8, 576, 192)
    for own, frame in zip(video.tiles.projected, apart, strict=True):
        torch.testing.assert_close(own, frame.tiles.projected[0], atol=1e-4, rtol=1e-4)
    with made.attach(make("vidcom2"), Budget(40)):
        _, answer = made.ask([Clip(tuple(frames), tuple(range(8)), 8, 4.0)], models.Prompt("What?", max_new_tokens=1))
    assert (answer.before, answer.after) == (4608, 40)


def test_a_picture_goes_through_the_tower_once() -> None:
    host = remembering(models.load)(MINI, models.Loading("cpu", "float32"), {})
    seen = []
    handle = host.view.tower.module.register_forward_hook(lambda *_: seen.append(1))
    image = pictures(brief_clip("test", 6300))[0]
    prompt = models.Prompt("What does the sign say?", max_new_tokens=4)
    texts = []
    for method in (make("consensusdrop"), make("scope"), make("random")):
        with host.attach(method, Budget(24)):
            texts.append(host.ask([image], prompt)[1].text)
    handle.remove()
    assert len(seen) == 2, "random needs the picture's fingerprint, which the others do not"
    plain = models.load(MINI, models.Loading("cpu", "float32"))
    for method, text in zip((make("consensusdrop"), make("scope"), make("random")), texts, strict=True):
        with plain.attach(method, Budget(24)):
            assert plain.ask([image], prompt)[1].text == text
