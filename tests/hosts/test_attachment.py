"""What is true of any host: calls in several threads, copies, replicas, compiled models, mixed precision, and what is
reported of the last call.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from models import PATCHES, tiny_llava
from prompts import ANYRES, batch, row, tiles

from llava_consensus import attach
from llava_consensus.hosts.official import PREPARE
from llava_consensus.hosts.outcomes import ImageOutcome
from llava_consensus.methods import METHODS

MAJOR = int(transformers.__version__.split(".")[0])


# ---- calls do not meet

TOGETHER = ("consensusdrop", "fastv", "tome", "resize")  # a method for each place
KINDS = ("plain", "generate", "autocast", "copy", "failure")


@pytest.mark.parametrize("name", TOGETHER)
def test_calls_in_six_threads_answer_like_single_calls(tower_folder: Path, name: str) -> None:
    """Plain and generating ones, under autocast, on copies made meanwhile, and some that fail."""
    model = tiny_llava(tower_folder)
    prompts = [(torch.tensor([row(5 + n % 5, images=1, after=4 + n % 3)]), tiles(1, n)) for n in range(60)]
    model(prompts[0][0], images=prompts[0][1])  # transformers installs hooks of its own at the first call
    before = {key: (set(vars(module)), len(module._forward_hooks)) for key, module in model.named_modules()}
    start = threading.Barrier(6)

    @torch.no_grad()
    def ask(number: int) -> Any:
        words, images = prompts[number]
        kind = KINDS[number * 7 // 3 % len(KINDS)]
        if kind == "failure":
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                model(words, images=images[:, :2])  # no image of this tower
            return "failed"
        if kind == "copy":
            return copy.deepcopy(model)(words, images=images).logits.tolist()
        if kind == "generate":
            said = model.generate(words, images=images, max_new_tokens=4, do_sample=False)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                said = model(words, images=images).logits
        return said.tolist(), [(*one[:4], one.reductions[0][1].kept.tolist()) for one in attached.outcomes]

    def work(worker: int) -> dict[int, Any]:
        start.wait()
        return {number: ask(number) for number in range(worker, len(prompts), 6)}

    with attach(model, name, tokens=6 if name != "resize" else 4) as attached:
        alone = {number: ask(number) for number in range(len(prompts))}
        with ThreadPoolExecutor(6) as pool:
            together = {number: one for part in pool.map(work, range(6)) for number, one in part.items()}
    assert together == alone
    after = {key: (set(vars(module)), len(module._forward_hooks)) for key, module in model.named_modules()}
    assert after == before, "nothing stays on the model"


# ---- copies, replicas, compiled models


@pytest.mark.parametrize("name", TOGETHER)
@torch.no_grad()
def test_a_deep_copy_of_an_attached_model_is_attached_by_itself(
    tower_folder: Path, prompt: SimpleNamespace, name: str
) -> None:
    model = tiny_llava(tower_folder)
    with attach(model, name, tokens=4):
        reduced = model(prompt.ids, images=prompt.images).logits
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()  # whatever the copy still took from the original would show
        assert torch.equal(twin(prompt.ids, images=prompt.images).logits, reduced)
    assert torch.equal(twin(prompt.ids, images=prompt.images).logits, reduced), "detaching the original leaves it"
    vars(twin)[PREPARE].__self__.owner.detach()
    assert PREPARE not in vars(twin)
    assert twin(prompt.ids, images=prompt.images).logits.shape[1] == prompt.ids.shape[1] - 1 + PATCHES


def replica(model: Any) -> Any:
    """What DataParallel makes of a model for another device, with weights of its own."""
    modules = list(model.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, twin in copies.items():
        for name, child in module._modules.items():
            if child is not None:
                twin._modules[name] = copies[child]
        for name, parameter in module._parameters.items():
            setattr(twin, name, None if parameter is None else parameter.detach().clone())
    return copies[model]


@pytest.mark.skipif(MAJOR < 5, reason="models of transformers need version 5.19 or later")
@pytest.mark.parametrize("name", ["consensusdrop", "fastv"])
@torch.no_grad()
def test_a_replica_of_data_parallel_reads_its_own_weights(name: str) -> None:
    from hf_models import CASES, prompts

    own, inputs = CASES["llava"].build(), prompts([1, 5, CASES["llava"].picture(0), 7, 8])
    with attach(own, name, 6):
        reduced = own(**inputs).logits
        twin = replica(own)
        for parameter in own.parameters():
            parameter.zero_()
        assert torch.equal(twin(**inputs).logits, reduced)


@pytest.mark.parametrize(("name", "before"), [("consensusdrop", False), ("fastv", True)])
@torch.no_grad()
def test_a_compiled_model_answers_like_the_plain_one(
    tower_folder: Path, prompt: SimpleNamespace, name: str, before: bool
) -> None:
    model = tiny_llava(tower_folder)
    full = model(prompt.ids, images=prompt.images).logits
    with attach(model, name, tokens=4):
        reduced = model(prompt.ids, images=prompt.images).logits
    compiled = torch.compile(model, backend="eager")
    if before:
        assert torch.allclose(compiled(prompt.ids, images=prompt.images).logits, full, atol=1e-5)
    with attach(compiled if before else model, name, tokens=4) as attached:
        assert torch.allclose(compiled(prompt.ids, images=prompt.images).logits, reduced, atol=1e-5)
        assert attached.outcomes[0].after == 4
    assert torch.allclose(compiled(prompt.ids, images=prompt.images).logits, full, atol=1e-5)


# ---- what steers a selection, and what does not


@torch.no_grad()
def test_autocast_changes_no_owner(tower_folder: Path, prompt: SimpleNamespace) -> None:
    model = tiny_llava(tower_folder)
    with attach(model, tokens=6) as attached, torch.autocast("cpu", torch.bfloat16):
        model(prompt.ids, images=prompt.images)
        mixed = attached.outcomes[0].reductions[0][1]
        tower = attached.entrance.encode(prompt.images, [1])
    assert mixed.fused is not None and mixed.fused.dtype == torch.float32
    assert tower[0].tiles.parts["query"].dtype == torch.bfloat16, "the tower itself runs as the caller wants it"


@pytest.mark.parametrize(
    ("name", "function"), [("scope", "reduce"), ("tome", "fold"), ("tome", "bias"), ("dart", "select")]
)
@torch.no_grad()
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
@torch.no_grad()
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


@torch.no_grad()
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


@torch.no_grad()
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
