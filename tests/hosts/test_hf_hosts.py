"""Models of transformers as hosts, on tiny random models: what every one of them must hold."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hf_models
import pytest
import torch
import transformers
from hf_models import CASES, prompts
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.facts import SHUFFLED, Facts
from llava_consensus.methods import METHODS
from llava_consensus.reduction.saliency import class_saliency, text_attention

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")
NEW = 4
MECHANISMS = ("llava", "llava_next", "qwen2_5_vl", "gemma3", "internvl")
RECORDED: dict[Any, list[Tensor]] = {}


class Tiny:
    """One host of the tests."""

    def __init__(self, name: str) -> None:
        self.name, self.case = name, CASES[name]
        self.model = self.case.build()

    def attach(self, method: str = "consensusdrop", tokens: int | None = None, **options: Any) -> Any:
        if "tile_budget" in METHODS[method].__dataclass_fields__:
            options = {"tile_budget": self.case.tile_budget, **options}
        return attach(self.model, method, self.case.tokens if tokens is None else tokens, **options)

    def rows(self) -> list[list[Any]]:
        a, b, c, d = (self.case.picture(n) for n in range(4))
        return [[1, 5, a, 6, 7, 8], [1, b, 9, c, 11, 12], [1, 21, 22, 23, 24], [1, 5, 6, 7, d, 31]]

    def one(self, number: int = 0) -> dict[str, Any]:
        return prompts([1, 5, 6, self.case.picture(number), 7, 8, 9, 10])


def built(request: Any) -> Tiny:
    if VERSION < (5, 19):
        pytest.skip("needs transformers >= 5.19")
    return Tiny(request.param)


tiny = pytest.fixture(built, scope="module", params=MECHANISMS)
family = pytest.fixture(built, scope="module", params=list(CASES))


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=NEW, **{"do_sample": False, **options})


def kept(attached: Any) -> list[list[int]]:
    return [one.kept[0].tolist() for outcome in attached.outcomes for _, one in outcome.reductions]


# ---- recording attention


def _record(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any) -> Any:
    """An attention function of our own, plain and slow, that keeps what it computes."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(-1, -2) * options["scaling"]
    weights = torch.softmax(logits if attention_mask is None else logits + attention_mask[..., : key.shape[2]], -1)
    RECORDED.setdefault(vars(module).get("own", module), []).append(weights)  # a tap hands on its own view of it
    return (weights @ value).transpose(1, 2).contiguous(), weights


@pytest.fixture
def recording(family: Tiny) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("recorded", _record)
    AttentionMaskInterface.register("recorded", eager_mask)
    family.model.set_attn_implementation("recorded")
    RECORDED.clear()
    yield
    family.model.set_attn_implementation("sdpa")
    RECORDED.clear()


def check_tower(family: Tiny, seen: list[Any]) -> None:
    with family.attach():
        family.model(**family.one())
    weights = torch.cat(RECORDED[family.model.model.get_submodule(family.case.attention)])  # [T, H, n, n]
    attention = seen[0].attention
    if attention.classes:
        expected = weights.mean(1)[:, 0, 1:]
    else:
        mean = weights.mean(1)
        expected = (mean.sum(1) - mean.diagonal(dim1=1, dim2=2)) / (mean.shape[1] - 1)
    found = torch.cat([class_saliency(one.attention) for one in seen])
    order = (
        (expected.sort(1).values, found.sort(1).values) if family.name.startswith("qwen2_5_vl") else (expected, found)
    )
    assert torch.allclose(*order, atol=1e-6)


def check_probe(family: Tiny, seen: list[Any]) -> None:
    inputs = prompts(*family.rows()[:2])
    family.model(**inputs)
    layer = family.model.get_decoder().layers[0].self_attn
    full = RECORDED[layer][0].mean(1)  # [R, S, S]
    with family.attach() as attached:
        family.model(**inputs)
        rows = [one.row for one in attached.outcomes]
    for tokens in seen:
        probe = tokens.probe
        found = text_attention(probe)
        for number, index in enumerate(tokens.prompt.tolist()):
            row = rows[int(tokens.image[number])]
            places = probe.rows[index][probe.row_mask[index]]
            assert torch.allclose(found[index][probe.row_mask[index]], full[row][places], atol=1e-5)


PLACEHOLDERS = torch.tensor([hf_models.IMAGE, hf_models.VIDEO])


def test_chunked_prefill(tiny: Tiny) -> None:
    inputs = prompts(*tiny.rows())
    for method in ("consensusdrop", "fastv"):
        with tiny.attach(method), pytest.raises(OptionError, match="prefill_chunk_size"):
            generate(tiny.model, inputs, prefill_chunk_size=5)


def test_a_loss_counts_the_answer_alone_and_reaches_the_projector(tiny: Tiny) -> None:
    inputs = tiny.one()
    labels = inputs["input_ids"].clone()
    labels[:, :-3] = -100
    with tiny.attach(answer_rows=True):
        output = tiny.model(**inputs, labels=labels)
    assert output.logits.shape[:2] == labels.shape and torch.isfinite(output.loss)
    output.loss.backward()
    grown = [parameter.grad for parameter in tiny.model.get_input_embeddings().parameters()]
    assert any(grad is not None and grad.abs().sum() > 0 for grad in grown)
    tiny.model.zero_grad(set_to_none=True)


@torch.no_grad()
def test_a_prompt_of_embeddings_is_read_as_one_of_ids(tiny: Tiny) -> None:
    inputs = tiny.one()
    embeds = torch.zeros(1, 4, 64)
    with tiny.attach():
        assert tiny.model(inputs_embeds=embeds).logits.shape[1] == 4
        read = tiny.model(**inputs, use_cache=True)
        step = tiny.model(inputs_embeds=embeds[:, :1], past_key_values=read.past_key_values)
        assert step.logits.shape[1] == 1


def test_prompts_and_pictures_that_do_not_match(tiny: Tiny) -> None:
    inputs = tiny.one()
    visual = torch.isin(inputs["input_ids"][0], PLACEHOLDERS)
    first = visual & ~torch.nn.functional.pad(visual, (1, 0))[:-1]
    shape = inputs["input_ids"].shape
    with tiny.attach():
        for keep in (~first, ~visual | first, ~visual):  # one is missing; not expanded; none
            wrong = {name: one[:, keep] if one.shape == shape else one for name, one in inputs.items()}
            with pytest.raises((OptionError, ValueError, IndexError, RuntimeError)):
                generate(tiny.model, wrong)
        with pytest.raises(OptionError, match="attached already"):
            tiny.attach()


# ---- where the tokens of an image come from


@torch.no_grad()
def test_what_a_method_reads_is_what_the_model_computes(family: Tiny, recording: None, seen: list[Any]) -> None:
    for check in (check_tower, check_probe):
        seen.clear()
        RECORDED.clear()
        check(family, seen)


@torch.no_grad()
def test_a_token_of_a_resized_map_counts_as_the_patch_in_its_middle(seen: list[Any]) -> None:
    tiny = Tiny("llava_onevision")
    with tiny.attach():
        tiny.model(**tiny.one(0))  # 2 x 2 tiles of 4 x 4 patches, resized to 5 x 5
    tile, patch = seen[0].tile[0, 16:].view(5, 5), seen[0].patch[0, 16:].view(5, 5)
    assert torch.equal(seen[0].patch[0, :16], torch.arange(16)) and not seen[0].tile[0, :16].any()
    row = (tile - 1) // 2 * 4 + patch // 4
    column = (tile - 1) % 2 * 4 + patch % 4
    middle = ((torch.arange(5) + 0.5) * 8 / 5 - 0.5).round().long()
    assert torch.equal(row, middle[:, None].expand(5, 5)) and torch.equal(column, middle.expand(5, 5))


@pytest.mark.parametrize("name", ["llava_next_video video", "llava_onevision video"])
@torch.no_grad()
def test_a_pooled_frame_has_the_grid_of_its_tokens(name: str, seen: list[Any]) -> None:
    tiny = Tiny(name)
    with tiny.attach():
        tiny.model(**tiny.one(0))
    assert [tokens.side**2 for tokens in seen] == [len(tokens.members) for tokens in seen] and seen


@pytest.mark.parametrize("name", SHUFFLED)
@torch.no_grad()
def test_a_tile_has_the_tokens_that_its_configuration_says(name: str, seen: list[Any]) -> None:
    tiny = Tiny(name)
    with tiny.attach():
        tiny.model(**tiny.one(0))
    facts = Facts(tiny.model, {}).tower
    assert {(int(tokens.patch.max()) + 1, tokens.side) for tokens in seen} == {(facts.tokens, facts.side)}


MIXED = {"qwen2_5_vl": "qwen2_5_vl video", "qwen3_vl": "qwen3_vl video", "video_llava": "video_llava video"}
MIXED |= {"llava_onevision": "llava_onevision video", "llava_next_video": "llava_next_video video"}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("method", ["consensusdrop", "fastv"])
def test_pictures_and_videos_in_one_prompt(name: str, method: str) -> None:
    tiny = Tiny(name)
    image, clip = tiny.case.picture(0), CASES[MIXED[name]].picture(1)
    rows = [[1, 5, clip, 6, image, 7, 8], [1, image, 9, 10]]
    with tiny.attach(method, 6) as attached:
        said = generate(tiny.model, prompts(*rows))[:, -NEW:]
        assert {(one.row, one.after) for one in attached.outcomes} == {(0, 6), (1, 6)}
        assert len(attached.outcomes) == 3
        singles = [generate(tiny.model, prompts(row))[:, -NEW:] for row in rows]
    assert torch.equal(said, torch.cat(singles))


def test_frames_of_a_video_share_the_whole_budget() -> None:
    tiny = Tiny("llava_next_video video")  # of a model whose images have up to five tiles
    with tiny.attach(tokens=10, tile_budget="per_tile") as attached:
        generate(tiny.model, tiny.one())
    assert [len(one[1].owner[0]) for one in attached.outcomes[0].reductions] == [4] * 4
    assert attached.outcomes[0].after == 10


def test_blocks_of_windows_are_refused() -> None:
    tiny = Tiny("qwen2_5_vl")
    with pytest.raises(OptionError, match=r"within windows.*Take one of 1, 3"):
        tiny.attach(vision_layer=-2)
    with tiny.attach(vision_layer=1) as attached:
        generate(tiny.model, tiny.one())
        assert attached.outcomes[0].after == tiny.case.tokens


# ---- what every attachment holds, on these models too


@pytest.mark.parametrize(("name", "method"), [("llava", "consensusdrop"), ("qwen3_vl", "fastv")])
def test_calls_in_several_threads_do_not_meet(name: str, method: str) -> None:
    tiny = Tiny(name)
    asked = [prompts([1, 5 + n, tiny.case.picture(n % 4), 6, 7 + n]) for n in range(8)]

    def ask(number: int) -> tuple[list[int], list[Any]]:
        return generate(tiny.model, asked[number])[0].tolist(), kept(attached)

    with tiny.attach(method) as attached, ThreadPoolExecutor(4) as pool:
        alone = [ask(number) for number in range(8)]
        assert list(pool.map(ask, range(8))) == alone


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
@torch.no_grad()
def test_a_deep_copy_is_attached_by_itself(name: str) -> None:
    tiny = Tiny(name)
    inputs = tiny.one()
    plain = tiny.model(**inputs).logits
    with tiny.attach():
        reduced = tiny.model(**inputs).logits
        twin = copy.deepcopy(tiny.model)
    assert torch.equal(tiny.model(**inputs).logits, plain)
    for parameter in tiny.model.parameters():
        parameter.zero_()  # whatever the copy still took from the original would show
    assert torch.equal(twin(**inputs).logits, reduced)
    next(hook.__self__ for hook in twin._forward_pre_hooks.values()).owner.detach()
    assert torch.equal(twin(**inputs).logits, plain)


@torch.no_grad()
def test_rows_that_left_show_the_last_row_before_them() -> None:
    """So that a label right behind an image is predicted by what precedes it."""
    tiny = Tiny("llava")
    with tiny.attach("divprune") as attached:
        logits = tiny.model(**tiny.one()).logits[0]
        kept = attached.outcomes[0].reductions[0][1].kept[0].tolist()
    assert len(logits) == tiny.one()["input_ids"].shape[1]
    for place in set(range(16)) - set(kept):
        last = max((one for one in kept if one < place), default=-1)  # of the image, which begins at row 3
        assert torch.equal(logits[3 + place], logits[3 + last])
    assert len({tuple(row.tolist()) for row in logits}) == len(logits) - 16 + len(kept)
