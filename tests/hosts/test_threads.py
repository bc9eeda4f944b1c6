"""Attaching and detaching while another thread generates: what has begun goes on with what it began with."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny_llava
from transformers import StoppingCriteriaList

from llava_consensus import attach

PLACES = ("at the first step", "before the images are encoded", "in a decoder layer")


class Pause:
    """Stops the other thread at a place until it may go on."""

    def __init__(self) -> None:
        self.here, self.on, self.main = threading.Event(), threading.Event(), threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != self.main and not self.here.is_set():
            self.here.set()
            assert self.on.wait(30)


class Asked:
    """A model, and how it answers."""

    def __init__(self, model: Any, tower: Any, inputs: dict[str, Any]) -> None:
        self.model, self.tower, self.inputs = model, tower, inputs

    def answer(self, pause: Callable[[], None] | None = None) -> list[list[float]]:
        def stop(ids: torch.Tensor, scores: Any) -> torch.Tensor:
            if pause is not None:
                pause()
            return torch.zeros(len(ids), dtype=torch.bool)

        made = self.model.generate(
            **self.inputs, max_new_tokens=5, do_sample=False, stopping_criteria=StoppingCriteriaList([stop]),
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return [step[0].tolist() for step in made.logits]

    def begun(self, pause: Pause, place: str) -> tuple[threading.Thread, list[Any], Any]:
        """A thread that answers and waits at a place, what it will have answered, and the handle of its hook."""
        said: list[Any] = []

        def work() -> None:
            try:
                said.append(self.answer(pause if place == PLACES[0] else None))
            except Exception as error:
                said.append(error)

        part = self.tower if place == PLACES[1] else self.model.get_decoder().layers[2]
        handle = None if place == PLACES[0] else part.register_forward_pre_hook(pause)
        thread = threading.Thread(target=work)
        thread.start()
        assert pause.here.wait(30)
        return thread, said, handle


@pytest.fixture(params=["official", "transformers"])
def asked(request: pytest.FixtureRequest, tower_folder: Path, prompt: SimpleNamespace) -> Asked:
    if request.param == "official":
        model = tiny_llava(tower_folder, num_hidden_layers=4)
        inputs = dict(inputs=prompt.ids, images=prompt.images, attention_mask=torch.ones_like(prompt.ids))
        return Asked(model, model.get_vision_tower().vision_tower, inputs)
    from hf_models import CASES, prompts

    model = CASES["llava"].build()
    return Asked(model, model.model.vision_tower, prompts([1, 5, 6, CASES["llava"].picture(0), 7, 8, 9]))


@pytest.mark.parametrize("place", PLACES)
def test_a_call_that_has_begun_ends_with_the_method_and_the_rest_is_plain(asked: Asked, place: str) -> None:
    official = "LlavaLlama" in type(asked.model).__name__
    for method in ("consensusdrop", "fastv"):
        plain, pause = asked.answer(), Pause()
        attached = attach(asked.model, method, tokens=3)
        reduced = asked.answer()
        thread, said, handle = asked.begun(pause, place)
        attached.detach()
        assert asked.answer() == plain, "a call that begins meanwhile"
        pause.on.set()
        thread.join(30)
        if handle is not None:
            handle.remove()
        # images that are encoded after `detach` are read whole; official LLaVA reduces its prompts before they are
        begun = place != PLACES[1] or (official and method == "consensusdrop")
        assert reduced != plain and said == [reduced if begun else plain]
        assert "generate" not in vars(asked.model) and asked.answer() == plain


@pytest.mark.parametrize("place", PLACES)
def test_attaching_leaves_a_plain_call_as_it_began(asked: Asked, place: str) -> None:
    plain, pause = asked.answer(), Pause()
    thread, said, handle = asked.begun(pause, place)
    with attach(asked.model, "consensusdrop", tokens=3):
        assert asked.answer() != plain
        pause.on.set()
        thread.join(30)
    if handle is not None:
        handle.remove()
    assert said == [plain]
