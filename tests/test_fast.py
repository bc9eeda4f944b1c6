"""Answers in fixed shapes (`attach(..., fast=True)`) are those of the plain path; what no graph can hold is found
without a GPU, on a tape of what torch dispatches; who cannot is refused with the reason.
"""

import copy
import runpy
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES as HF_CASES
from hf_models import IMAGE as HF_PICTURE
from hf_models import prompts as hf_prompts
from models import IMAGE, tiny_llava
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.fast import capture, checks
from llava_consensus.hosts.fast.capture import Capturing, Function
from llava_consensus.hosts.fast.engine import CACHES, SELECTIONS
from llava_consensus.hosts.fast.sizes import CacheSize, cache_length, rounded
from llava_consensus.hosts.fast.tape import CaptureError, Tape, tensors_used
from llava_consensus.hosts.hf.fixed import FixedLlava

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="fixed caches need transformers 5"
)
METHODS = ("consensusdrop", "visionzip", "random", "divprune", "full")
FRONT = [1, 5, 6, 7, 8]
PICTURE = -200
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}  # float32, of logits up to some tens


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tape, "strict", True)


@pytest.fixture(scope="module")
def model(tower_folder: Path) -> Any:
    return tiny_llava(tower_folder, seed=1, tokenizer_padding_side="left")


def question(words: int, seed: int = 0) -> list[int]:
    return torch.randint(10, 500, (words,), generator=torch.Generator().manual_seed(seed + 100 * words)).tolist()


def batch(*rows: list[int]) -> dict[str, Tensor]:
    """Left-padded prompts of official LLaVA, a picture for every row."""
    width = max(map(len, rows))
    pixels = torch.randn(len(rows), 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(len(rows)))
    return {
        "inputs": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
        "images": pixels,
    }


def asked(*words: int) -> dict[str, Tensor]:
    return batch(*([*FRONT, PICTURE, *question(count, seed)] for seed, count in enumerate(words)))


def both(model: Any, method: str, prompts: list[dict[str, Any]], **settings: Any) -> list[tuple[Any, Any]]:
    """What `generate` gives without and with `fast`, tokens and logits of every step."""
    settings = {**GREEDY, **settings}
    plain, quick = [], []
    with attach(model, method, tokens=5) as attached:
        for prompt in prompts:
            found = model.generate(**prompt, **settings, return_dict_in_generate=True, output_logits=True)
            kept = [[part.kept.tolist() for _, part in one.reductions] for one in attached.outcomes]
            plain.append((found.sequences, torch.stack(found.logits), kept))
    with attach(model, method, tokens=5, fast=True) as attached, warnings.catch_warnings():
        warnings.simplefilter("error")
        for prompt in prompts:
            logits: list[Tensor] = []
            with attached.fast.listening(lambda answers, logits=logits: logits.append(answers.logits.clone())):
                sequences = model.generate(**prompt, **settings)
            kept = [[part.kept.tolist() for _, part in one.reductions] for one in attached.outcomes]
            quick.append((sequences, torch.stack(logits), kept))
    return list(zip(plain, quick, strict=True))


def check_equal(pairs: list[tuple[Any, Any]]) -> None:
    for (tokens, logits, kept), (quick_tokens, quick_logits, quick_kept) in pairs:
        assert torch.equal(quick_tokens, tokens)
        assert quick_kept == kept
        torch.testing.assert_close(quick_logits, logits, **TOLERANCE)


# ---- the same answers


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_the_plain_path(model: Any, method: str) -> None:
    over_the_borders = [asked(count) for count in (7, 16, 17, 7, 3, 40)]
    batches = [asked(4, 15), asked(16, 2, 9), asked(4, 15)]
    check_equal(both(model, method, over_the_borders + batches))


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("method", ["consensusdrop", "visionzip"])
def test_replays_dispatch_what_was_captured(model: Any, method: str) -> None:
    check_equal(both(model, method, [asked(7), asked(9), asked(8, 3), asked(2, 12)]))


@pytest.mark.parametrize("method", ["consensusdrop", "divprune"])
def test_rows_without_a_picture_and_prompts_of_words_alone(model: Any, method: str) -> None:
    mixed = batch([*FRONT, PICTURE, *question(6)], [1, *question(20)], [1, 3, PICTURE, *question(4)])
    words = {name: value for name, value in batch([1, *question(9)], [1, *question(9, 5)]).items() if name != "images"}
    check_equal(both(model, method, [mixed, words]))


@pytest.mark.parametrize("method", METHODS)
def test_hugging_face_llava(method: str) -> None:
    case = HF_CASES["llava"]
    rows = [[1, 5, 6, case.picture(0), *question(7)], [1, 5, 6, case.picture(1), *question(12)]]
    one, two = hf_prompts(rows[0]), hf_prompts(*rows)
    assert (one["input_ids"] == HF_PICTURE).sum() == 16
    check_equal(both(case.build(), method, [one, two, one]))


def test_tiles_of_a_picture_are_one_graph_for_each_number(tower_folder: Path) -> None:
    from prompts import ANYRES

    tiled = tiny_llava(tower_folder, **ANYRES)
    prompts = []
    for size, count in (((112, 112), 5), ((56, 112), 3), ((112, 112), 5)):
        pixels = torch.randn(count, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(count))
        ids = torch.tensor([[*FRONT, PICTURE, *question(7)]])
        prompts.append({"inputs": ids, "images": [pixels], "image_sizes": [size]})
    check_equal(both(tiled, "consensusdrop", prompts))


def test_answers_end_as_those_of_generate(model: Any) -> None:
    prompt = asked(4, 9, 12)
    with attach(model, tokens=5):
        (tokens, *_) = model.generate(**prompt, **GREEDY)
    end = [int(tokens[2]), 499]
    for settings in ({"eos_token_id": end}, {"eos_token_id": end, "min_new_tokens": 5}, {"eos_token_id": end[0]}):
        pairs = both(model, "consensusdrop", [prompt], **settings)
        assert torch.equal(pairs[0][0][0], pairs[0][1][0])


def test_bfloat16_stays_within_its_tolerance(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder, seed=1, tokenizer_padding_side="left").bfloat16()
    prompts = [{**prompt, "images": prompt["images"].bfloat16()} for prompt in (asked(7), asked(4, 9))]
    for (_, logits, _), (_, quick, _) in both(model, "visionzip", prompts, max_new_tokens=1):
        torch.testing.assert_close(quick, logits, rtol=0.05, atol=0.05 * float(logits.abs().max()))


# ---- what is not captured


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": 0.7},
        {"num_beams": 2},
        {"repetition_penalty": 1.3},
        {"use_cache": False},
        {"stopping_criteria": transformers.StoppingCriteriaList([transformers.MaxTimeCriteria(60)])},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_calls_that_are_not_captured_are_answered_plainly_and_say_so(model: Any, settings: dict[str, Any]) -> None:
    prompt = asked(7)
    said = []
    for fast in (False, True):
        with attach(model, tokens=5, fast=fast) as attached:
            torch.manual_seed(3)
            with warnings.catch_warnings(record=True) as noted:
                warnings.simplefilter("always")
                said.append(model.generate(**prompt, **{**GREEDY, **settings}))
            if fast:
                assert attached.fast.declined.total() == 1
                assert any("answered without it" in str(one.message) for one in noted)
    assert torch.equal(*said)


def test_a_prompt_longer_than_the_model_was_made_for_is_answered_plainly(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder, max_position_embeddings=32)
    with attach(model, tokens=5, fast=True) as attached, pytest.warns(UserWarning, match="longer than"):
        model.generate(**asked(24), **GREEDY)
    assert attached.fast is None


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("fastv", {}, "between decoder layers"),
        ("sparsevlm", {}, "between decoder layers"),
        ("tome", {}, "before the projector"),
        ("consensusdrop", {"positions": "keep"}, "positions='keep'"),
    ],
)
def test_methods_that_cannot_are_refused_with_the_reason(
    model: Any, method: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OptionError, match=reason):
        attach(model, method, tokens=5, fast=True, **options)
    assert "generate" not in vars(model)


def test_models_that_cannot_are_refused_with_the_reason(tower_folder: Path) -> None:
    with pytest.raises(OptionError, match="is not adapted"):
        attach(HF_CASES["llava_next"].build(), tokens=5, fast=True)
    windowed = tiny_llava(tower_folder, "mistral", sliding_window=8)
    with pytest.raises(OptionError, match="sliding_window"):
        attach(windowed, tokens=5, fast=True)


# ---- buffers


def test_graphs_are_bounded_and_the_account_of_the_cache_holds(model: Any) -> None:
    with attach(model, "visionzip", tokens=5, fast=True) as attached:
        for rows in range(1, CACHES + 2):
            model.generate(**asked(*[4] * rows), **{**GREEDY, "max_new_tokens": 2})
        for front in range(SELECTIONS + 2):
            prompt = batch([*question(front + 1), PICTURE, *question(4)])
            model.generate(**prompt, **{**GREEDY, "max_new_tokens": 2})
        assert attached.fast.graphs["selection"] == SELECTIONS
        answers = attached.fast._caches.values()
        assert len(answers) == CACHES
        held = [buffer.nbytes for one in answers for layer in one.cache.layers for buffer in layer]
        assert attached.fast.cache_bytes == sum(held)
    # LLaVA-1.5-7B in bfloat16 at 64 tokens: 35 + 64 + 16 rows rounded up to 32 words, and 128 tokens of an answer
    length = cache_length(35 + 64 + rounded(16, 16), 128)
    assert length == 256
    assert CacheSize(32, 1, 32, 128, length, 2).bytes == 128 << 20


def test_lengths_are_rounded_up_by_a_quarter_at_most() -> None:
    assert [rounded(length, 16) for length in (0, 1, 16, 17, 64, 65, 128, 129)] == [0, 16, 16, 32, 64, 80, 128, 160]
    assert all(length <= rounded(length, 16) <= max(length + 15, 1.25 * length) for length in range(2000))
    assert len({rounded(length, 16) for length in range(4097)}) < 32


def test_threads_get_their_own_answers(model: Any) -> None:
    prompts = [asked(7), asked(9), asked(20), asked(4, 9)]
    with attach(model, tokens=5):
        expected = [model.generate(**prompt, **GREEDY) for prompt in prompts]
    with attach(model, tokens=5, fast=True) as attached:
        said: dict[int, list[Tensor]] = {}
        counts: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            prompt = prompts[number]
            said[number] = [model.generate(**prompt, **GREEDY) for _ in range(3)]
            counts[number] = [outcome.row for outcome in attached.outcomes]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == {0: [0], 1: [0], 2: [0], 3: [0, 1]}
    assert all(torch.equal(one, expected[number]) for number, found in said.items() for one in found)


def test_outcomes_of_one_call_are_not_changed_by_the_next(model: Any) -> None:
    with attach(model, tokens=5, fast=True) as attached:
        model.generate(**asked(7), **GREEDY)
        before = attached.outcomes[0].reductions[0][1]
        fused = before.fused.clone()
        prompt = asked(7)
        model.generate(**{**prompt, "images": -prompt["images"]}, **GREEDY)
        assert torch.equal(before.fused, fused)
        assert not torch.equal(attached.outcomes[0].reductions[0][1].fused, fused)
        assert set(attached.milliseconds()) == {"selection"}


def test_detaching_restores_the_model_and_copies_are_fast(model: Any) -> None:
    prompt = asked(7)
    dense, before = model.generate(**prompt, **GREEDY), set(vars(model))
    with attach(model, tokens=5, fast=True) as attached:
        said = model.generate(**prompt, **GREEDY)
        twin = copy.deepcopy(model)
        assert torch.equal(twin.generate(**prompt, **GREEDY), said)
    assert attached.fast is None
    assert set(vars(model)) == before
    assert torch.equal(model.generate(**prompt, **GREEDY), dense)


def test_weights_may_change_in_place_and_may_move(tower_folder: Path) -> None:
    model, prompt = tiny_llava(tower_folder), asked(7)
    with attach(model, tokens=5, fast=True):
        model.generate(**prompt, **GREEDY)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        changed = model.generate(**prompt, **GREEDY)
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)
        moved = model.generate(**prompt, **GREEDY)
    with attach(model, tokens=5):
        assert torch.equal(model.generate(**prompt, **GREEDY), moved)
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)
        assert torch.equal(model.generate(**prompt, **GREEDY), changed)


# ---- the tape


@pytest.fixture
def captured() -> Iterator[Capturing]:
    yield Capturing(torch.device("cpu"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x * x.sum().item()],
        lambda x: [x[x > 0]],
        lambda x: [x.nonzero()],
        lambda x: [x + torch.tensor([1.0, 2.0])],
        lambda x: [x if (x > 0).all() else -x],
        lambda x: [x.unique()],
    ],
    ids=["item", "mask", "nonzero", "host data", "branch", "unique"],
)
def test_a_tape_refuses_what_no_graph_can_hold(captured: Capturing, function: Any) -> None:
    with pytest.raises(CaptureError):
        Function(function, [torch.ones(2)], captured)


@pytest.mark.usefixtures("strict")
def test_a_strict_replay_finds_other_tensors_shapes_and_numbers(captured: Capturing) -> None:
    state: dict[str, Any] = {"tensor": torch.ones(2), "number": 2, "more": False}

    def function(x: Tensor) -> list[Tensor]:
        result = (x + state["tensor"]).sum() * state["number"]
        return [result + 1 if state["more"] else result]

    captured_function = Function(function, [torch.ones(2)], captured)
    assert captured_function(torch.tensor([1.0, 2.0]))[0] == 10
    for change in ({"tensor": torch.ones(2)}, {"tensor": torch.ones(1)}, {"number": 3}, {"more": True}):
        before = dict(state)
        state.update(change)
        with pytest.raises(CaptureError):
            captured_function(torch.ones(2))
        state.update(before)
    assert captured_function(torch.ones(2))[0] == 8
    with pytest.raises(ValueError, match="captured for"):
        captured_function(torch.ones(3))


def test_a_replay_runs_no_python_and_reads_the_buffers_anew(captured: Capturing) -> None:
    runs = []
    weight = torch.ones(3)

    def function(x: Tensor) -> list[Tensor]:
        runs.append(1)
        return [x @ weight, torch.cat(list(x.split(1))).cumsum(0)]

    captured_function = Function(function, [torch.zeros(3)], captured)
    before = len(runs)
    weight.mul_(2)
    product, sums = captured_function(torch.tensor([1.0, 2.0, 3.0]))
    assert (float(product), sums.tolist(), len(runs)) == (12.0, [1.0, 3.0, 6.0], before)


# ---- a second device


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["official", "transformers"])
def test_no_phase_takes_data_of_the_host(
    tower_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    """On the device "meta", which has shapes and no numbers, every tensor of the host that meets one of the device is
    seen: on a GPU it would be copied, and the copy waited for.
    """
    monkeypatch.setattr(capture.Capturing, "types", ("meta",))
    monkeypatch.setattr(checks, "DEVICES", ("meta",))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it does not know this device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    prompt: dict[str, Any] = asked(7)
    if name == "transformers":
        case = HF_CASES["llava"]
        prompt = hf_prompts([1, 5, 6, case.picture(0), *question(7)])
    model = (tiny_llava(tower_folder) if name == "official" else case.build()).to("meta")
    pixels = "images" if name == "official" else "pixel_values"
    prompt[pixels] = prompt[pixels].to("meta")
    monkeypatch.setattr(FixedLlava, "result", lambda _, request, answers: answers)  # ids are not read back
    with attach(model, method, tokens=5, fast=True) as attached, warnings.catch_warnings():
        warnings.simplefilter("error")
        attached.fast.generate({**prompt, **GREEDY, "max_new_tokens": 1})
        assert attached.fast.graphs == {"tower": 1, "selection": 1, "language model": 2}


def test_data_of_the_host_would_be_seen() -> None:
    host, device = torch.arange(3), torch.zeros(3, device="meta")
    for function in (lambda x: [x[host]], lambda x: [x + host.to("meta")], lambda x: [x.copy_(host)]):
        with pytest.raises(CaptureError, match="of the host"):
            tensors_used(lambda function=function: function(device))


# ---- the script that measures on a GPU


@pytest.fixture(scope="module")
def floor() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / "eval_scripts" / "fast_floor.py"))


def test_the_floor_is_reading_or_multiplying_and_goals_are_judged_by_it(floor: dict[str, Any]) -> None:
    # LLaVA-1.5-7B at 64 tokens on a device of 4.8 TB/s and 800 TFLOP/s: 6.6 billion weights of two bytes take 2.75 ms
    rates = floor["Rates"](4.8e12, 8e14, 5e-6)
    sizes = floor["Sizes"](325_000_000, 6_600_000_000, 2, 577, 114)
    found = sizes.floor_ms(rates)
    assert found["tpot_ms"] == pytest.approx(2.75)
    assert found["ttft_ms"] == pytest.approx(2.75 + 2 * 0.325e9 * 577 / 8e14 * 1e3)  # the tower multiplies longer
    full = {"ttft_ms": 30.0, "tpot_ms": 9.0, "selection_ms": 0.0, "peak_bytes": 16.0}
    quick = {"ttft_ms": 9.0, "tpot_ms": 3.7, "selection_ms": 0.25, "peak_bytes": 16.0}
    judged = floor["verdicts"](quick, full, found)
    assert [goal["reached"] for goal in judged.values()] == [True, False, False, True]
    assert judged["tpot_over_floor"]["number"] == pytest.approx(3.7 / 2.75)


def test_the_script_runs_on_the_stand_in_and_refuses_to_call_that_a_measurement(
    floor: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_bench import TINY_TEXT, TINY_VISION

    from llava_consensus.hosts import Loading
    from llava_consensus.hosts.hf import random_weights

    def processor() -> Any:
        pixels = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
        found = random_weights.SIZES["llava-1.5-7b"].processor()
        found.image_processor = transformers.CLIPImageProcessor(**pixels)
        return found

    tiny = random_weights.Size("Llava", TINY_VISION, TINY_TEXT, processor, 16)
    monkeypatch.setattr(random_weights, "SIZES", {**random_weights.SIZES, "tiny": tiny})
    host = random_weights.plan("tiny", Loading("cpu", "float32")).host()
    content = floor["report"](host, "consensusdrop", 4, length=3, repeats=2, scale=64)
    assert list(content["runs"]) == ["full, plain", "full, fast", "consensusdrop, plain", "consensusdrop, fast"]
    numbers = [value for run in content["runs"].values() for name, value in run.items() if name != "selection_ms"]
    assert min(*numbers, *content["floor"].values(), *content["rates"].values()) > 0
    assert len(floor["lines"](content)) == 2 + 4 + 4
    monkeypatch.setattr("sys.argv", ["fast_floor.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        floor["main"]()
