"""Life of an attachment, on official LLaVA and on a model of transformers."""

import copy
import gc
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES, prompts, square
from models import tiny_llava
from prompts import ANYRES, batch, row, tiles
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.entrance import Entrance
from llava_consensus.hosts.outcomes import ImageOutcome
from llava_consensus.methods import METHODS

needs_5 = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="needs transformers >= 5.19")
BOTH = ("consensusdrop", "fastv")
TOGETHER = (*BOTH, "tome", "resize")  # a method for each place
GREEDY = {"max_new_tokens": 6, "do_sample": False}


class Host:
    """A tiny model of four layers, and prompts for it with an image each."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.official = kind == "official"
        self.model: Any = tiny_llava(folder, num_hidden_layers=4) if self.official else CASES["llava"].build()
        self.tower = self.model.get_vision_tower().vision_tower if self.official else self.model.model.vision_tower

    def prompt(self, number: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        if self.official:
            return torch.tensor([row(5 + number % 5, after=4 + number % 3)]), {"images": tiles(1, number)}
        inputs = prompts([1, 5 + number % 5, square(number), *range(20, 24 + number % 3)])
        return inputs.pop("input_ids"), inputs

    def logits(self, model: Any = None) -> Tensor:
        ids, given = self.prompt()
        logits: Tensor = (self.model if model is None else model)(ids, **given).logits
        return logits


@pytest.fixture(params=["official", pytest.param("transformers", marks=needs_5)])
def host(request: pytest.FixtureRequest, tower_folder: Path) -> Host:
    return Host(request.param, tower_folder)


def built(name: str) -> tuple[Any, dict[str, Any], int]:
    case = CASES[name]
    return case.build(), case.inputs(), case.tokens


# ---- calls do not meet

KINDS = ("plain", "generate", "autocast", "failure", "copy")


@pytest.mark.parametrize("name", TOGETHER)
def test_calls_in_six_threads_answer_like_single_calls(host: Host, name: str) -> None:
    """Plain and generating ones, under autocast, on copies made meanwhile, and some that fail."""
    model, asked = host.model, [host.prompt(number) for number in range(60)]
    # a copy iterates over hooks, which calls in other threads register on blocks and layers
    kinds = KINDS if host.official and name != "fastv" else KINDS[:-1]
    host.logits()  # transformers installs hooks of its own at the first call
    before = {key: (set(vars(module)), len(module._forward_hooks)) for key, module in model.named_modules()}
    start = threading.Barrier(6)

    @torch.no_grad()
    def ask(number: int) -> Any:
        words, given = asked[number]
        kind = kinds[number * 7 // 3 % len(kinds)]
        if kind == "failure":
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                model(words, **{key: value[:, :2] if value.ndim == 4 else value for key, value in given.items()})
            return "failed"
        if kind == "copy":
            return copy.deepcopy(model)(words, **given).logits.tolist()
        if kind == "generate":
            said = model.generate(words, **given, max_new_tokens=4, do_sample=False)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                said = model(words, **given).logits
        return said.tolist(), [(*one[:4], one.reductions[0][1].kept.tolist()) for one in attached.outcomes]

    def work(worker: int) -> dict[int, Any]:
        start.wait()
        return {number: ask(number) for number in range(worker, len(asked), 6)}

    with attach(model, name, tokens=6 if name != "resize" else 4) as attached:
        alone = {number: ask(number) for number in range(len(asked))}
        with ThreadPoolExecutor(6) as pool:
            together = {number: one for part in pool.map(work, range(6)) for number, one in part.items()}
    assert together == alone
    after = {key: (set(vars(module)), len(module._forward_hooks)) for key, module in model.named_modules()}
    assert after == before, "nothing stays on the model"


class Running:
    """A thread that generates and waits at a place until it may go on; `said` is what it will have answered."""

    PLACES = ("at the first step", "before the images are encoded", "in a decoder layer")

    def __init__(self, host: Host, place: str) -> None:
        self.here, self.on, self.said, handle = threading.Event(), threading.Event(), list[Any](), None
        at = self.PLACES.index(place)
        if at:
            part = host.tower if at == 1 else host.model.get_decoder().layers[2]
            handle = part.register_forward_pre_hook(lambda *_: self.pause())
        self.handle = handle

        def work() -> None:
            try:
                self.said.append(answer(host, None if at else self.pause))
            except Exception as error:
                self.said.append(error)

        self.thread = threading.Thread(target=work)
        self.thread.start()
        assert self.here.wait(30)

    def pause(self) -> None:
        if threading.current_thread() is self.thread and not self.here.is_set():
            self.here.set()
            assert self.on.wait(30)

    def end(self) -> None:
        self.on.set()
        self.thread.join(30)
        if self.handle is not None:
            self.handle.remove()


def answer(host: Host, pause: Callable[[], None] | None = None) -> list[list[float]]:
    def stop(ids: Tensor, scores: Any) -> Tensor:
        if pause is not None:
            pause()
        return torch.zeros(len(ids), dtype=torch.bool)

    words, given = host.prompt()
    options = {"stopping_criteria": transformers.StoppingCriteriaList([stop]), "return_dict_in_generate": True}
    made = host.model.generate(words, **given, **GREEDY, **options, output_logits=True)
    return [step[0].tolist() for step in made.logits]


@needs_5
@pytest.mark.parametrize("place", Running.PLACES)
def test_a_call_that_has_begun_ends_with_the_method_and_the_rest_is_plain(host: Host, place: str) -> None:
    for method in BOTH:
        plain = answer(host)
        attached = attach(host.model, method, tokens=3)
        reduced = answer(host)
        running = Running(host, place)
        attached.detach()
        assert answer(host) == plain, "a call that begins meanwhile"
        running.end()
        # images that are encoded after `detach` are read whole; official LLaVA reduces its prompts before they are
        begun = place != Running.PLACES[1] or (host.official and method == "consensusdrop")
        assert reduced != plain and running.said == [reduced if begun else plain]
        assert "generate" not in vars(host.model) and answer(host) == plain


@needs_5
@pytest.mark.parametrize("place", Running.PLACES)
def test_attaching_leaves_a_plain_call_as_it_began(host: Host, place: str) -> None:
    plain, running = answer(host), Running(host, place)
    with attach(host.model, "consensusdrop", tokens=3):
        assert answer(host) != plain
        running.end()
    assert running.said == [plain]


def test_of_threads_that_attach_at_once_only_one_does(host: Host) -> None:
    start, plain = threading.Barrier(6), host.logits()

    def work(number: int) -> Any:
        start.wait()
        try:
            return attach(host.model, BOTH[number % 2], 5)
        except OptionError as error:
            return str(error)

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(work, range(6)))
    refused = [one for one in found if isinstance(one, str)]
    assert len(refused) == 5 and all("attached already" in one for one in refused)
    next(one for one in found if not isinstance(one, str)).detach()
    assert torch.equal(host.logits(), plain)


@pytest.mark.parametrize("method", BOTH)
@torch.enable_grad()
def test_an_attachment_is_entered_again_and_keeps_no_model(host: Host, method: str) -> None:
    (words, given), plain, gone = host.prompt(), host.logits(), weakref.ref(host.model)
    attached, found, caches = attach(host.model, method, 5), [], []
    for _ in range(2):
        with attached:
            options = {"output_scores": True, "return_dict_in_generate": True}
            found.append(host.model.generate(words, **given, **GREEDY, **options).scores[-1])
            caches.append(host.model(words, **given).past_key_values)  # whose hooks are not registered twice
        assert torch.equal(host.logits(), plain)
    assert torch.equal(*found)
    del host.model, host.tower, caches
    gc.collect()
    assert gone() is None
    with pytest.raises(OptionError, match="the model of this attachment is gone"):
        attached.__enter__()


# ---- copies, replicas, compiled models, wrappers


@pytest.mark.parametrize("name", TOGETHER)
def test_a_deep_copy_of_an_attached_model_is_attached_by_itself(host: Host, name: str) -> None:
    plain = host.logits()
    with attach(host.model, name, tokens=4) as attached:
        reduced = host.logits()
        twin = copy.deepcopy(host.model)
        assert not copy.deepcopy(attached).outcomes
        for parameter in host.model.parameters():
            parameter.zero_()  # whatever the copy still took from the original would show
        assert torch.equal(host.logits(twin), reduced)
    assert torch.equal(host.logits(twin), reduced), "detaching the original leaves it"
    own = [getattr(hook, "__self__", None) for hook in twin._forward_pre_hooks.values()]
    next(one for one in own if isinstance(one, Entrance)).owner.detach()
    assert torch.equal(host.logits(twin), plain)


@needs_5
def test_an_attached_model_says_that_it_cannot_be_pickled() -> None:
    model = CASES["llava"].build()  # transformers leaves hooks on a model that has run, which cannot be pickled either
    with attach(model, "consensusdrop", 5), pytest.raises(OptionError, match="detach first"):
        pickle.dumps(model)
    assert pickle.dumps(model)


def replica(model: Any) -> Any:
    """What DataParallel makes of a model for another device, with weights of its own."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, twin in copies.items():
        for name, child in module._modules.items():
            if child is not None:
                twin._modules[name] = copies[child]
        for name, parameter in module._parameters.items():
            setattr(twin, name, None if parameter is None else parameter.detach().clone())
    return copies[model]


@needs_5
@pytest.mark.parametrize("name", BOTH)
def test_a_replica_of_data_parallel_reads_its_own_weights(name: str) -> None:
    own, inputs, tokens = built("llava")
    with attach(own, name, tokens):
        reduced = own(**inputs).logits
        twin = replica(own)
        for parameter in own.parameters():
            parameter.zero_()
        assert torch.equal(twin(**inputs).logits, reduced)


@needs_5
def test_wrappers_are_refused_by_the_name_of_the_inner_model() -> None:
    model, inputs, _ = built("llava")

    class Adapted(torch.nn.Module):
        """As PEFT wraps a model."""

        def get_base_model(self) -> Any:
            return model

    wrapper = torch.nn.DataParallel(model)
    for wrong, inner in ((Adapted(), r"model\.get_base_model\(\)"), (wrapper, r"model\.module")):
        with pytest.raises(OptionError, match=rf"{type(wrong).__name__}.*attach to.*{inner}"):
            attach(wrong, "consensusdrop", 5)
    with attach(wrapper.module, "consensusdrop", 5) as attached:
        assert wrapper(**inputs).logits.shape[1] == inputs["input_ids"].shape[1]
        assert [(one.before, one.after) for one in attached.outcomes] == [(16, 5)]


@pytest.mark.parametrize(("name", "before"), [("consensusdrop", False), ("divprune", True), ("fastv", True)])
def test_a_compiled_model_answers_like_the_plain_one(host: Host, name: str, before: bool) -> None:
    torch._dynamo.reset()
    model, full = host.model, host.logits()
    with attach(model, name, tokens=4):
        reduced = host.logits()
    compiled = torch.compile(model, backend="eager")
    if before:
        assert torch.allclose(host.logits(compiled), full, atol=1e-5)
    with attach(compiled if before else model, name, tokens=4) as attached:
        assert torch.allclose(host.logits(compiled), reduced, atol=1e-5)
        assert attached.outcomes[0].after == 4
    assert torch.allclose(host.logits(compiled), full, atol=1e-5)


PAGE = Path(__file__).parents[2] / "docs" / "efficiency.md"
RECIPE = re.findall(r"```python\n(.*?)```", PAGE.read_text().split("## Use torch.compile\n")[1], re.DOTALL)[0]


@needs_5
@pytest.mark.parametrize("method", ["consensusdrop", "consensusdrop+"])
def test_the_recipe_for_a_compiled_step_gives_the_ids_of_the_plain_path(method: str) -> None:
    """As printed in docs/efficiency.md. On a CPU `generate` compiles only on request, and the backend `eager` traces
    as the default one does without compiling C++ for half a minute.
    """
    model, inputs, _ = built("llava")
    compiling = transformers.CompileConfig(backend="eager", fullgraph=False)
    compiling._compile_all_devices = True
    recipe = RECIPE.replace('"consensusdrop"', repr(method)).replace("tokens=64", "tokens=4")
    plain = recipe.replace('cache_implementation="static", ', "")
    torch._dynamo.reset()
    found = []
    for text, more in ((plain, {}), (recipe, {"compile_config": compiling})):
        given: dict[str, Any] = {"model": model, "inputs": {**inputs, **more}}
        exec(text.replace("max_new_tokens=128", "max_new_tokens=8"), given)
        found.append(given["output"])
    assert torch.equal(*found)
    assert not torch.equal(found[0], model.generate(**inputs, max_new_tokens=8, do_sample=False)), "not reduced"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


# ---- drafts, adapters, attention maps


@needs_5
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl"])
def test_a_reduced_draft_leaves_the_answer_of_its_target(name: str, method: str, both: bool) -> None:
    target, inputs, tokens = built(name)
    draft = copy.deepcopy(target)
    for parameter in draft.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)  # so that some of its guesses are wrong
    attached = [attach(model, method, tokens) for model in ((draft, target) if both else (draft,))]
    wanted = target.generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), wanted)
    assert [one.after for one in attached[-1].outcomes] == [tokens] * both  # transformers shows drafts no images


@needs_5
@pytest.mark.parametrize("method", ["consensusdrop", "visionzip", "fastv"])
@pytest.mark.parametrize("where", [r".*vision_tower.*(q_proj|k_proj)", r".*language_model.*(q_proj|k_proj|v_proj)"])
def test_adapters_added_after_attach_are_followed(method: str, where: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=64, target_modules=where, init_lora_weights=False)
    logits = []
    for first in (True, False):
        model, inputs, tokens = built("llava")
        attached = None if first else attach(model, method, tokens)
        torch.manual_seed(1)
        peft.get_peft_model(model, config)
        with attached or attach(model, method, tokens):
            logits.append(model(**inputs).logits)
    assert torch.allclose(*logits, atol=1e-4)


@needs_5
@pytest.mark.parametrize("method", BOTH)
def test_attention_maps_are_of_the_rows_that_each_layer_has(method: str) -> None:
    model, inputs, tokens = built("llava")
    model.set_attn_implementation("eager")
    with attach(model, method, tokens) as attached:
        output = model(**inputs, output_attentions=True)
    size = inputs["input_ids"].shape[1]
    (outcome,) = attached.outcomes
    lengths = [size - outcome.before + left for left in outcome.entering or (outcome.after,) * 4]
    assert [tuple(one.shape[-2:]) for one in output.attentions] == [(left, left) for left in lengths]
    assert output.logits.shape[1] == size


# ---- what steers a selection, and what does not


def test_saliencies_have_single_precision_whatever_the_model_has(tower_folder: Path, prompt: SimpleNamespace) -> None:
    model = tiny_llava(tower_folder)
    for mixed, images in ((True, prompt.images), (False, prompt.images.bfloat16())):
        with attach(model, tokens=6) as attached, torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            embeds = model.prepare_inputs_labels_for_multimodal(prompt.ids, *[None] * 4, images)[4]
            tower = attached.entrance.encode(images, [1])
        assert attached.outcomes[0].reductions[0][1].fused.dtype == torch.float32
        assert tower[0].tiles.parts["query"].dtype == torch.bfloat16, "the tower itself runs as the caller wants it"
        assert mixed or embeds.dtype == torch.bfloat16
        model.bfloat16()


CHOICES = [("scope", "reduce"), ("tome", "fold"), ("tome", "bias"), ("dart", "select")]


@pytest.mark.parametrize(("name", "function"), CHOICES)
def test_choices_are_made_outside_autocast(
    tower_folder: Path, prompt: SimpleNamespace, name: str, function: str
) -> None:
    model = tiny_llava(tower_folder, num_hidden_layers=4)
    original, seen = getattr(METHODS[name], function), []

    def recording(self: Any, *args: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return original(self, *args)

    with attach(model, name, tokens=5), pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(METHODS[name], function, recording)
        model(prompt.ids, images=prompt.images)
    assert seen and not any(seen)


@pytest.mark.parametrize("name", ["consensusdrop", "fastv", "dart"])
def test_a_loss_and_an_answer_select_the_same_tokens(tower_folder: Path, name: str) -> None:
    model = tiny_llava(tower_folder, num_hidden_layers=4)
    question = row(5, 6, after=4)
    answer = [40, 41, 42, 2]
    words = torch.tensor([question + answer])
    labels = torch.tensor([[-100] * len(question) + answer])

    def selected(attached: Any) -> list[Any]:
        return [one.kept.tolist() for outcome in attached.outcomes for _, one in outcome.reductions]

    with attach(model, name, tokens=5) as attached:
        model(torch.tensor([question]), images=tiles(1))
        answered = selected(attached)
        model(words, images=tiles(1), labels=labels)
        assert selected(attached) == answered
    with attach(model, name, tokens=5, answer_rows=True) as attached:
        model(words, images=tiles(1), labels=labels)
        steered = selected(attached)
    with attach(model, name, tokens=5) as attached:
        model(words, images=tiles(1))
        assert selected(attached) == steered, "as if the answer were part of the question"


def test_a_budget_of_all_tokens_of_a_tiled_picture_is_the_full_model(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder, mm_patch_merge_type="spatial_unpad", **ANYRES)
    words, mask = batch(row(5, after=4))
    images, sizes = [tiles(3)], [(28, 56)]  # an image of 1 x 2 tiles and the base view: fewer than the most of 5
    dense = model(words, attention_mask=mask, images=images, image_sizes=sizes).logits
    with attach(model, tokens=1000) as attached:
        model(words, attention_mask=mask, images=images, image_sizes=sizes)
        available = attached.outcomes[0].before
    for name in ("consensusdrop", "random", "fastv"):
        with attach(model, name, tokens=available) as attached:
            assert torch.equal(model(words, attention_mask=mask, images=images, image_sizes=sizes).logits, dense)
            assert attached.outcomes[0].after == available
        with attach(model, name, tokens=available - 1) as attached:
            model(words, attention_mask=mask, images=images, image_sizes=sizes)
            assert attached.outcomes[0].after < available


# ---- what is reported


def test_recovery_has_no_fused_saliency_and_a_prompt_without_text_no_cross_one(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder)
    words, mask = batch(row(5, after=4), [1, 6, -200])
    with attach(model, tokens=5, fuser="recovery") as attached:
        model(words, attention_mask=mask, images=tiles(2))
        assert all(one.reductions[0][1].fused is None for one in attached.outcomes)
    with attach(model, tokens=5) as attached, pytest.warns(UserWarning, match="vision saliency alone"):
        model(words, attention_mask=mask, images=tiles(2))
        asked, bare = (one.reductions[0][1] for one in attached.outcomes)
    assert asked.cross is not None and bare.cross is None and bare.vision is not None


def test_an_attachment_and_its_outcomes_print_in_a_line(llava_model: Any, prompt: SimpleNamespace) -> None:
    with attach(llava_model, "random", tokens=6) as attached:
        assert repr(attached) == "<Random on LlavaLlamaForCausalLM, 6 tokens, no call yet>"
        llava_model.generate(prompt.ids, images=prompt.images, max_new_tokens=1, do_sample=False)
        assert repr(attached).endswith("6 tokens, last call 16 -> 6 (37.5% kept)>")
        assert repr(attached.outcomes) == "[<image of row 0: 16 -> 6 tokens>]"
    assert repr(attached).endswith("detached>")
    two = ImageOutcome(1, 10, 4, 2, ((0, None), (1, None)), (), (torch.zeros(10), torch.zeros(10)))  # type: ignore[arg-type]
    assert repr(two) == "<image of row 1: 10 -> 4 tokens and 2 structural ones, reduced in 2 parts>"
