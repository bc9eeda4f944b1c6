"""Costs of prompts: formulas against torch's FlopCounterMode, real caches and a published configuration; `match`."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fakes import config, make_place
from models import runnable, tiny_llava
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from llava_consensus import METHODS, load, make
from llava_consensus.errors import OptionError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.models import Loading, Prompt
from llava_consensus.evaluation.models.base import Prefill, prefills, shape_of
from llava_consensus.evaluation.models.llava import LlavaRunner
from llava_consensus.evaluation.runs.configuration import prepare
from llava_consensus.evaluation.runs.metrics import AnswerCosts, budget_of, run_costs
from llava_consensus.hosts.outcomes import CachedLayer
from llava_consensus.reduction import costs as account
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import SHAPES
from llava_consensus.reduction.method import Method, Place, Shape
from llava_consensus.reduction.tokens import Need

ROOT = Path(__file__).parents[2]
NAMES = ("full", "consensusdrop", "consensusdrop+", "visionzip", "tome", "resize", "fastv", "sparsevlm")
SEVEN = SHAPES["llava-1.5-7b"]
NEXT = SHAPES["llava-next-7b"]
RUN = SEVEN._replace(text=0, question=None, number_bytes=4)  # as a host gives it
BLANK = Image.new("RGB", (192, 192), (90, 20, 160))


@dataclass(frozen=True, kw_only=True)
class Free(Method):
    """Stands for a method whose own work costs nothing."""

    def flops(self, shape: Shape, budget: Budget) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Late(Free):
    """Inside the language model: every layer up to `layer` sees all tokens."""

    layer: int = 2
    place: ClassVar[Place] = Place.DECODER

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        return [available] * self.layer + [min(budget.tokens, available)] * (layers - self.layer)


@dataclass(frozen=True, kw_only=True)
class Inside(Free):
    """Inside the vision tower: half the patches go in each of the first two blocks."""

    def vision_tokens(self, budget: Budget, shape: Shape) -> list[int]:
        half, (share, _) = shape.patches // 2, self.units(shape, budget)[0]
        return [shape.patches, half] + [min(share.tokens, half)] * (shape.blocks - 2)


@dataclass(frozen=True, kw_only=True)
class Secretive(Method):
    """Stands for a method whose cost depends on a model the shape does not describe."""

    def flops(self, shape: Shape, budget: Budget) -> float:
        raise OptionError("the size of the text tower is not known")


def counter() -> FlopCounterMode:
    """Counts the CPU's fused attention too, by torch's own formula for the others."""
    name = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={name: lambda q, k, v, *_, **__: sdpa_flop(q, k, v)})


@pytest.fixture(scope="module")
def host() -> Any:
    return load(str(ROOT / "checkpoints" / "llava-mini"), Loading("cpu"))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_language_model_flops(tower_folder: Path, family: str) -> None:
    model = tiny_llava(tower_folder, family)
    shape = LlavaRunner(model).shape(text=20)
    head = 2 * shape.width * shape.vocabulary
    for tokens in (1, 16, 300):
        with torch.inference_mode(), counter() as flops:
            model.get_model()(inputs_embeds=torch.randn(1, tokens + 20, shape.width), use_cache=True)
        ours = account.llm_flops(shape, [tokens] * shape.layers) - head
        assert ours == pytest.approx(flops.get_total_flops(), rel=0.01)


def test_vision_flops_with_projector(host: Any, tower_folder: Path) -> None:
    tiny = tiny_llava(tower_folder)
    for model in (host.model, tiny):
        images = torch.randn(1, 3, *[model.get_vision_tower().config.image_size] * 2)
        shape = LlavaRunner(model).shape()
        with torch.inference_mode(), counter() as flops:
            model.encode_images(images)
        ours = account.vision_flops(shape, [shape.patches] * shape.blocks)
        assert ours == pytest.approx(flops.get_total_flops(), rel=0.01)
        fewer = account.vision_flops(shape, [shape.patches] * (shape.blocks - 1) + [1])
        block = 8 * shape.vision_width**2 + 4 * (shape.patches + 1 + 2 * shape.classes) * shape.vision_width
        mlp = 8 * shape.vision_width * shape.vision_inner  # of the last block and of the one before
        assert ours - fewer == (shape.patches - 1) * (block + mlp + 2 * shape.projector)


@pytest.mark.parametrize("name", [name for name in NAMES if name in runnable()])
def test_a_whole_prefill(host: Any, name: str) -> None:
    """To the first token, `lm_head` for one row: of a method's own work the counter sees all but the elementwise."""
    prompt, method, budget = Prompt("What is left of the dog?", max_new_tokens=1), make(name), Budget(64)
    text, question = host.rows(prompt)
    with host.attach(method, budget), counter() as flops:
        (answer,) = host.answer([host.encode([BLANK])], [prompt])
    shape = host.shape(text)._replace(question=question)
    shape = shape._replace(blocks=shape.feature_blocks + method.blocks_ahead)  # the harness skips those behind
    found = account.account(method, budget, shape)
    assert found.flops.method is not None, found.note
    head = 2 * shape.width * shape.vocabulary
    by_module = {key: sum(value.values()) for key, value in flops.get_flop_counts().items()}
    heads = next((value for key, value in by_module.items() if key.endswith("lm_head")), head)
    assert heads % head == 0
    seen = flops.get_total_flops() - heads + head
    model = found.flops.llm + found.flops.vision
    assert 0.99 * model <= seen <= 1.01 * (model + found.flops.method)
    assert answer.prefill is not None and answer.prefill.kv_bytes == found.kv_layers
    if name == "consensusdrop":
        kept, merged = budget.split(576)
        assert found.flops.total == pytest.approx(seen + 2 * merged * (576 - kept) * shape.vision_width, rel=0.01)


@pytest.mark.parametrize("name", [name for name in NAMES if name in runnable()])
def test_measured_cache_is_the_analytic_one(host: Any, name: str) -> None:
    """In one padded batch, with questions of several lengths, and one with another picture."""
    method, budget = make(name), Budget(64)
    prompts = [Prompt("Is it? " * count, max_new_tokens=2) for count in (1, 5, 2, 3)]
    with host.attach(method, budget):
        one, other = host.encode([BLANK, BLANK.rotate(9, fillcolor=(1, 2, 3))])
        answers = host.answer([[one], [one], [one], [other]], prompts)
        pair = host.answer([[one, other], []], prompts[:2])
    asked = [*((prompt, 1, answer) for prompt, answer in zip(prompts, answers, strict=True))]
    for prompt, pictures, answer in (*asked, (prompts[0], 2, pair[0]), (prompts[1], 0, pair[1])):
        text, question = host.rows(prompt, pictures)
        found = account.account(method, budget, host.shape(text)._replace(question=question, images=pictures))
        assert answer.prefill.entering == found.layers and answer.prefill.kv_bytes == found.kv_layers
        assert sum(answer.prefill.kv_bytes) == found.kv_bytes > 0


def test_what_a_cache_holds_too_much_is_seen() -> None:
    """Ten bytes a position; rows of 5 + 4 and 3 + 4 real positions in layer 0, fewer visual tokens in layer 1."""
    outcomes = [[SimpleNamespace(structural=0, after=1, entering=(4, 1))] for _ in range(2)]
    layers = [CachedLayer(10 * 2 * 9, 2, 9), CachedLayer(10 * 2 * 6, 2, 6)]
    exact = prefills(layers, [(5, 2), (3, 1)], outcomes)  # type: ignore[arg-type]
    assert [one.kv_bytes for one in exact] == [(90, 60), (70, 40)]
    assert exact[0] == Prefill(5, 2, (4, 1), (90, 60))
    twice = prefills([layers[0], CachedLayer(10 * 2 * 12, 2, 12)], [(5, 2), (3, 1)], outcomes)  # type: ignore[arg-type]
    assert [one.kv_bytes[1] for one in twice] == [120, 100], "a layer stored twice is not explained away"


@pytest.mark.parametrize(
    ("name", "layers", "width", "inner"), [("llava-1.5-7b", 32, 4096, 11008), ("llava-1.5-13b", 40, 5120, 13824)]
)
def test_shapes_of_the_paper_match_a_config(name: str, layers: int, width: int, inner: int) -> None:
    """The presets agree with what `shape_of` makes of LLaVA-1.5's published configurations."""
    vision = SimpleNamespace(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
    vision.patch_size, vision.image_size, vision.num_channels = 14, 336, 3
    heads = width // 128
    config = SimpleNamespace(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads)
    config.num_key_value_heads, config.intermediate_size = heads, inner
    config.vocab_size, config.image_aspect_ratio = 32000, "pad"
    linear = [torch.nn.Linear(inner, width, device="meta") for inner in (1024, width)]
    tower = SimpleNamespace(blocks=range(24), tokens=576, classes=1, feature_block=22, offers={Need.PROJECTOR})
    view = SimpleNamespace(tower=tower, most_tiles=1, module=SimpleNamespace(dtype=torch.float16))
    found = shape_of(view, config, vision, torch.nn.Sequential(linear[0], torch.nn.GELU(), linear[1]), 66)
    assert found == SHAPES[name]._replace(question=None)


def test_every_method_has_an_account() -> None:
    for name in METHODS:
        for shape, budgets in ((SEVEN, (576, 192, 128, 64, 32)), (NEXT, (2880, 640, 320, 160))):
            for tokens in budgets:
                found = account.account(make(name), Budget(tokens), shape)
                assert len(found.layers) == 32 and 0 < found.kept <= found.average <= found.entering <= shape.available
                assert found.flops.total is not None or found.note
                if tokens >= shape.available:  # the unpatched model
                    assert found == account.account(make("full"), Budget(1), shape)
                json.dumps(found.record())


def test_what_is_not_known_is_said() -> None:
    found = account.account(Secretive(), Budget(64), SEVEN)
    assert found.flops.method is None and found.flops.total is None and "text tower" in found.record()["note"]
    assert account.account(Secretive(), Budget(576), SEVEN).flops.method == 0.0, "the unpatched model has no such cost"
    blind = account.account(make("consensusdrop"), Budget(64), SEVEN._replace(question=None))
    assert blind.flops.total is None and "question" in blind.note
    with pytest.raises(OptionError, match="text tower"):
        account.match(Secretive(), Budget(64), SEVEN, "flops")


def test_match_by_average_is_the_equivalent_column_and_says_what_is_impossible() -> None:
    """What a cut after layer 2 must keep to see T tokens per layer in the mean."""
    for shape, column in ((SEVEN, {192: 166, 128: 98, 64: 30}), (NEXT, {640: 491, 320: 149})):
        for tokens, given in column.items():
            assert account.match(Late(), Budget(tokens), shape, "average") == Budget(given)
    for by, tokens in (("average", 32), ("entering", 64), ("flops", 32)):
        with pytest.raises(OptionError, match=rf"match={by}: no budget .* nearest: tokens=.*match=kept"):
            account.match(Late(), Budget(tokens), SEVEN, by)


def test_match_by_flops_counts_tower_and_own_work() -> None:
    plain = account.account(make("random"), Budget(64), SEVEN).flops.total
    costly = make("consensusdrop")
    fewer = account.match(costly, Budget(64), SEVEN, "flops")
    more = account.match(Inside(), Budget(64), SEVEN, "flops")
    assert fewer.tokens < 64 < more.tokens, "its own work takes tokens; what the tower saves gives some"
    for method, found in ((costly, fewer), (Inside(), more)):
        totals = [account.account(method, Budget(found.tokens + by), SEVEN).flops.total for by in (-1, 0, 1)]
        gaps = [abs(total - plain) for total in totals]  # type: ignore[operator]
        assert gaps[1] == min(gaps)


def answers(method: Any, *kinds: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Records of answers with (text, question, images) rows, by a method with 64 tokens."""
    counted = AnswerCosts(method, Budget(64), RUN)
    rows = []
    for text, question, pictures in kinds:
        found = account.account(make("random"), Budget(64), RUN._replace(text=text, images=pictures))
        prefill = Prefill(text, question, found.layers, found.kv_layers)
        rows.append({"metadata": json.loads(json.dumps(counted.of(prefill, pictures)))})
    return rows


def test_account_of_a_run_is_the_mean_over_its_questions() -> None:
    records = answers(make("random"), (60, 20, 1), (61, 21, 1), (60, 20, 1), (50, 20, 0))
    found = run_costs(records, "kept")
    assert found is not None and found["text"] == 57.75 and found["entering"] == 48.0 == found["measured"]["kept"]
    assert found["kv_bytes"] == found["measured"]["kv_bytes"] == sum(found["measured"]["kv_bytes_per_layer"])
    shapes = [SEVEN._replace(text=text, images=pictures) for text, pictures in ((60, 1), (61, 1), (60, 1), (50, 0))]
    mean = sum(account.account(make("random"), Budget(64), shape).flops.llm for shape in shapes) / 4
    assert found["flops"]["llm"] == pytest.approx(mean) and found["flops"]["method"] == 0.0
    assert run_costs([], "kept") is None, "a host does not tell"
    assert run_costs([*answers(make("random"), (60, 20, 1)), {"metadata": {"before": 576}}], "kept") is None
    assert AnswerCosts(make("random"), Budget(64), RUN).of(None, 1) == {}


def test_a_typical_prompt_stands_for_the_run(host: Any, tmp_path: Path) -> None:
    place = make_place(tmp_path)
    texts = {"one two": ("a.png",), "one two three four five six": ("b.png",), "none at all": ()}
    questions = [Question(number, number, shown, text) for number, (text, shown) in enumerate(texts.items())]
    plan = replace(prepare(config(place, place / "model", match="flops")), questions=questions)
    lengths = [host.rows(plan.prompt(question), 1) for question in questions[:2]]
    text, question = (round(sum(column) / 2) for column in zip(*lengths, strict=True))
    shape = host.shape(text)._replace(question=question)
    found = budget_of(plan, host)
    assert found == account.match(plan.method, Budget(64), shape, "flops") and found.tokens < 64
