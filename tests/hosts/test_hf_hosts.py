"""What methods read of models of transformers, held against what the plain model computes: attention of towers and of
language models, and which tokens are those of an image.
"""

import copy
from collections.abc import Iterator
from typing import Any

import compatibility
import pytest
import torch
import transformers
from hf_models import CASES, IMAGE, LLAVA, TEXT, Case, Picture, built, double, noise, over, prompts, ready, rows_read
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.facts import SHUFFLED, Facts
from llava_consensus.methods import METHODS
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.saliency import class_saliency, text_attention

RECORDED: dict[Any, list[Tensor]] = {}


def registers(number: int) -> Picture:
    """An image whose four registers are tokens too."""
    return Picture([IMAGE] * 20, CASES["llava"].picture(number).pixels)


OWN = CASES["llava dinov2"]
READ = CASES | {"registers": Case("llava", over("dinov2_with_registers"), registers, OWN.attention)}


# ---- attention


def _record(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any) -> Any:
    """An attention function of our own, plain and slow, that keeps what it computes."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(-1, -2) * options["scaling"]
    weights = torch.softmax(logits if attention_mask is None else logits + attention_mask[..., : key.shape[2]], -1)
    RECORDED.setdefault(vars(module).get("own", module), []).append(weights)  # a tap hands on its own view of it
    return (weights @ value).transpose(1, 2).contiguous(), weights


@pytest.fixture
def recording() -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("recorded", _record)
    AttentionMaskInterface.register("recorded", eager_mask)
    RECORDED.clear()
    yield
    RECORDED.clear()


@pytest.mark.parametrize("name", READ)
def test_what_a_method_reads_is_what_the_model_computes(name: str, recording: None, seen: list[Any]) -> None:
    case = READ[name]
    model = case.build()
    model.set_attn_implementation("recorded")
    # the tower's
    with attach(model, "consensusdrop", case.tokens, tile_budget="global"):
        model(**case.inputs())
    weights = torch.cat(RECORDED[model.model.get_submodule(case.attention)]).mean(1)  # [T, n, n]
    received = (weights.sum(1) - weights.diagonal(dim1=1, dim2=2)) / (weights.shape[1] - 1)
    expected = weights[:, 0, 1:] if seen[0].attention.classes else received
    found = torch.cat([class_saliency(one.attention) for one in seen])
    if name.startswith("qwen2_5_vl"):  # whose patches are in the order of windows
        expected, found = expected.sort(1).values, found.sort(1).values
    assert torch.allclose(expected, found, atol=1e-6)
    # the language model's
    seen.clear()
    RECORDED.clear()
    a, b, c = map(case.picture, range(3))
    inputs = prompts([1, 5, a, 6, 7, 8], [1, b, 9, c, 11, 12])
    model(**inputs)
    full = RECORDED[model.get_decoder().layers[0].self_attn][0].mean(1)  # [R, S, S]
    with attach(model, "consensusdrop", case.tokens, tile_budget="global") as attached:
        model(**inputs)
        rows = [one.row for one in attached.outcomes]
    for tokens in seen:
        probe, found = tokens.probe, text_attention(tokens.probe)
        for number, index in enumerate(tokens.prompt.tolist()):
            row = rows[int(tokens.image[number])]
            places = probe.rows[index][probe.row_mask[index]]
            assert torch.allclose(found[index][probe.row_mask[index]], full[row][places], atol=1e-5)


def llava(kind: str, **options: Any) -> Any:
    """LLaVA over another language model."""
    text = {**TEXT, "model_type": kind} | ({"head_dim": 16} if kind != "falcon" else {"num_kv_heads": 2})
    if kind == "granite":
        text |= {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3}
    config = transformers.LlavaConfig(**LLAVA | {"text_config": text}, **options)
    return ready(transformers.LlavaForConditionalGeneration, config)


TEXTS = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "smollm3", "mixtral", "cohere2", "hunyuan_v1_dense"),
    *("phi3", "olmo2", "glm4", "stablelm", "gemma2", "gpt_neox", "nanochat", "opt", "gpt2", "gpt_oss"),
]


@pytest.mark.parametrize("kind", TEXTS)
def test_the_probe_is_the_attention_of_the_plain_model(kind: str) -> None:
    model, inputs = llava(kind, attn_implementation="eager"), CASES["llava"].inputs()
    model.get_input_embeddings().weight.data.mul_(0.003)  # so small that norms feel what embeddings are multiplied with
    rows = model(**inputs, output_attentions=True).attentions[0][0].mean(0)[19:, 3:19]  # of words behind the image
    expected = (rows / (rows.sum(-1, keepdim=True) + 1e-6)).mean(0)
    with attach(model, "consensusdrop", tokens=5) as attached:
        model(**inputs)
        ((_, reduction),) = attached.outcomes[0].reductions
    assert torch.allclose(reduction.cross[0], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize(
    ("name", "window", "kernel"), [("gemma3", 4096, "eager"), ("gemma3", 14, "sdpa"), ("aya_vision", 4096, "eager")]
)
def test_layers_of_two_kinds_are_cut_by_the_attention_of_each(name: str, window: int, kernel: str, layer: int) -> None:
    """Some rotate in another way, or not at all, and a window can hide rows of the image from the last one; FastV reads
    the layer before, PyramidDrop its own.
    """
    case, inputs = CASES[name], CASES[name].inputs(1)
    model = built(case.kind, **case.config | {"text_config": case.config["text_config"] | {"sliding_window": window}})
    model.set_attn_implementation("eager")
    shown = (inputs["input_ids"][0] == IMAGE).nonzero()[:, 0]
    maps = [one[0, :, -1].mean(0)[shown] for one in model(**inputs, output_attentions=True).attentions]
    assert [int((one == 0).sum()) > 0 for one in maps] == [window == 14, False] * 2
    model.set_attn_implementation(kernel)
    ways = ("fastv", layer - 1, {"layer": layer}), ("pyramiddrop", layer, {"layers": str(layer)})
    for method, own, options in ways:
        with attach(model, method, tokens=7, **options) as attached:
            model(**inputs)
            ((_, reduction),) = attached.outcomes[0].reductions
        assert torch.equal(reduction.kept[0], maps[own].topk(7).indices.sort().values)


@pytest.mark.parametrize("kind", ["mpt", "falcon", "diffllama", "bloom"])
def test_what_cannot_be_read_is_named_and_what_asks_nothing_works(kind: str) -> None:
    model, inputs = llava(kind), CASES["llava"].inputs()
    before, unread = copy.deepcopy(model.state_dict()), "the attention of this language model is not"
    with attach(model, "consensusdrop", tokens=5), pytest.raises(OptionError, match=unread):
        model(**inputs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with attach(model, "visionzip", tokens=5) as attached:
        logits = model(**inputs).logits[0, -1]
        ((_, reduction),) = attached.outcomes[0].reductions
    words = model.get_input_embeddings()(torch.tensor([[1, 5, 6, 7, 8, 9]]))
    embeds = torch.cat((words[:, :3], reduction.tokens, words[:, 3:]), dim=1)
    expected = model.lm_head(model.model.language_model(inputs_embeds=embeds).last_hidden_state)[0, -1]
    assert torch.allclose(logits, expected * getattr(model, "logit_scale", 1), atol=1e-4)


def test_weights_that_are_not_there_or_quantised_are_taken() -> None:
    from accelerate import cpu_offload

    model, inputs = llava("llama"), CASES["llava"].inputs()
    given = {**inputs, "max_new_tokens": 3, "do_sample": False}
    with attach(model, "consensusdrop", tokens=5):
        expected = model.generate(**given)
        cpu_offload(model)
        assert torch.equal(model.generate(**given), expected)
    with torch.device("meta"):
        empty = transformers.LlavaForConditionalGeneration(copy.deepcopy(model.config))
    attach(empty, "consensusdrop", tokens=5).detach()
    quantised = llava("llama")
    inner = quantised.model.language_model
    torch.ao.quantization.quantize_dynamic(inner, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    for method in ("consensusdrop", "fastv"):
        with attach(quantised, method, tokens=5) as attached:
            quantised.generate(**given)
            assert attached.outcomes[0].after == 5


# ---- towers whose attention asks no kernel of transformers

SMALL = {
    "got_ocr2": {"vision_config.image_size": 256, "image_seq_length": 16},
    "perception_lm": {"projector_pooling_ratio": 2},
    "aria": {},
}


def told(module: Any, run: Any) -> tuple[Tensor, Any]:
    """Input and output of a module in a run."""
    seen: list[Any] = []
    with module.register_forward_hook(lambda module, args, output: seen.extend((args and args[0], output))):
        run()
    return seen[0], seen[1]


def by_hand(kind: str, model: Any, run: Any) -> tuple[Tensor, Tensor]:
    """Attention [H, n, n] of the last block, and the share [N, n] of each patch in each token."""
    tower, place = model.model.vision_tower, torch.arange(16)
    if kind == "got_ocr2":  # two convolutions of 3 x 3 with a stride of 2 behind one of 3 x 3
        near = ((place - 4 * torch.arange(4)[:, None]).abs() <= 4).double()
        share = torch.einsum("ir,jc->ijrc", near, near).flatten(2).flatten(0, 1)
        return told(tower.layers[-1].attn, run)[1][1], share / share.sum(1, keepdim=True)
    if kind == "perception_lm":
        attention = tower.timm_model.blocks[-1].attn
        attention.fused_attn = False
        corner = 2 * (torch.arange(4) // 2) * 4 + 2 * (torch.arange(4) % 2)
        near = (place == corner[:, None] + torch.tensor([0, 1, 4, 5])[:, None, None]).any(0).double()
        return told(attention.attn_drop, run)[1][0], near / 4
    attention = tower.encoder.layers[-1].self_attn
    query, key = (
        told(part, run)[1][0].unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
        for part in (attention.q_proj, attention.k_proj)
    )
    share = told(model.model.multi_modal_projector.cross_attn.multihead_attn, run)[1][1][0]
    return (query @ key.transpose(1, 2) * query.shape[-1] ** -0.5).softmax(-1), share


@pytest.mark.parametrize("kind", SMALL)
def test_saliency_is_that_of_attention_by_hand(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "perception_lm":
        pytest.importorskip("timm")
    monkeypatch.setitem(compatibility.FIXED, kind, {**compatibility.FIXED.get(kind, {}), **SMALL[kind]})
    model = compatibility.small_model(kind)
    one = double(compatibility.prompt_of(model).inputs)
    twice = {name: torch.cat((value, value), int(name != "pixel_values")) for name, value in one.items()}
    half = len(one["pixel_values"])
    twice["pixel_values"][half:] = noise(*one["pixel_values"].shape, seed=1)
    with attach(model.double(), "consensusdrop", tokens=3, merged=1) as attached:
        model(**twice)
        reductions = [found for outcome in attached.outcomes for _, found in outcome.reductions]
    for found, pixels in zip(reductions, twice["pixel_values"].split(half), strict=True):
        weights, share = by_hand(kind, model, lambda pixels=pixels: model.model.get_image_features(pixels))
        weights = weights.mean(0)
        received = (weights.sum(0) - weights.diagonal()) / (len(weights) - 1)
        saliency = weights[0, 1:] if kind == "perception_lm" else received  # which has a class token
        torch.testing.assert_close(found.vision[0].double(), share @ saliency, rtol=1e-4, atol=1e-8)
        assert found.vision.std() > 1e-3 * found.vision.mean()


# ---- the tokens of an image


def shown_to_a_method(name: str) -> Any:
    model = CASES[name].build()
    with attach(model, "consensusdrop", CASES[name].tokens, tile_budget="global"):
        model(**CASES[name].inputs())
    return model


def test_a_token_of_a_resized_map_counts_as_the_patch_in_its_middle(seen: list[Any]) -> None:
    shown_to_a_method("llava_onevision")  # 2 x 2 tiles of 4 x 4 patches, resized to 5 x 5
    tile, patch = seen[0].tile[0, 16:].view(5, 5), seen[0].patch[0, 16:].view(5, 5)
    assert torch.equal(seen[0].patch[0, :16], torch.arange(16)) and not seen[0].tile[0, :16].any()
    row = (tile - 1) // 2 * 4 + patch // 4
    column = (tile - 1) % 2 * 4 + patch % 4
    middle = ((torch.arange(5) + 0.5) * 8 / 5 - 0.5).round().long()
    assert torch.equal(row, middle[:, None].expand(5, 5)) and torch.equal(column, middle.expand(5, 5))


@pytest.mark.parametrize("name", ["llava_next_video video", "llava_onevision video", *SHUFFLED])
def test_the_grid_of_a_tile(name: str, seen: list[Any]) -> None:
    """That of the tokens of a pooled frame, and the one that the configuration says."""
    model = shown_to_a_method(name)
    if name in SHUFFLED:
        facts = Facts(model, {}).tower
        assert {(int(tokens.patch.max()) + 1, tokens.side) for tokens in seen} == {(facts.tokens, facts.side)}
    else:
        assert [tokens.side**2 for tokens in seen] == [len(tokens.members) for tokens in seen] and seen


@pytest.mark.parametrize("tile_budget", ["global", "per_tile"])
@pytest.mark.parametrize(("name", "classes"), [("llava_next_video video", 0), ("video_llava video", 4)])
def test_frames_of_a_video_share_its_budget(name: str, classes: int, tile_budget: str) -> None:
    """The class tokens of frames stay, and do not count."""
    model = CASES[name].build()
    with attach(model, "consensusdrop", 10, tile_budget=tile_budget) as attached:
        rows = rows_read(model, CASES[name].inputs())
        (outcome,) = attached.outcomes
    assert (outcome.after, outcome.structural, rows) == (10, classes, 6 + 10 + classes)
    counts = [one.tokens.shape[1] for _, one in outcome.reductions]
    assert counts == ([10] if tile_budget == "global" else [3, 3, 2, 2])


def test_rows_that_left_show_the_last_row_before_them() -> None:
    """So that a label right behind an image is predicted by what precedes it."""
    model, inputs = CASES["llava"].build(), CASES["llava"].inputs()
    with attach(model, "divprune", 5) as attached:
        logits = model(**inputs).logits[0]
        kept = attached.outcomes[0].reductions[0][1].kept[0].tolist()
    assert len(logits) == inputs["input_ids"].shape[1]
    for place in set(range(16)) - set(kept):
        last = max((one for one in kept if one < place), default=-1)  # of the image, which begins at row 3
        assert torch.equal(logits[3 + place], logits[3 + last])
    assert len({tuple(row.tolist()) for row in logits}) == len(logits) - 16 + len(kept)


def test_blocks_of_windows_are_refused() -> None:
    case = CASES["qwen2_5_vl"]
    model = case.build()
    with pytest.raises(OptionError, match=r"within windows.*Take one of 1, 3"):
        attach(model, "consensusdrop", case.tokens, vision_layer=-2)
    with attach(model, "consensusdrop", case.tokens, vision_layer=1) as attached:
        model(**case.inputs())
        assert attached.outcomes[0].after == case.tokens
    with pytest.raises(OptionError, match="CLIP and SigLIP towers only"):
        attach(CASES["llava dinov2"].build(), "tome", 5)


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl", "gemma3", "internvl"])
def test_prompts_and_pictures_that_do_not_match(name: str) -> None:
    model, inputs = CASES[name].build(), CASES[name].inputs()
    visual = inputs["input_ids"][0] == IMAGE
    first = visual & ~torch.nn.functional.pad(visual, (1, 0))[:-1]
    shape = inputs["input_ids"].shape
    with attach(model, "consensusdrop", CASES[name].tokens):
        for keep in (~first, ~visual | first, ~visual):  # one is missing; not expanded; none
            wrong = {key: one[:, keep] if one.shape == shape else one for key, one in inputs.items()}
            with pytest.raises((OptionError, ValueError, IndexError, RuntimeError)):
                model(**wrong)


# ---- on a GPU


def ids_and_sources(model: Any, inputs: dict[str, Any], method: str, tokens: int) -> tuple[list[Any], list[Any]]:
    """The ids of an answer, and of every image how many tokens it had and which sources the rest have."""
    with attach(model, method, tokens) as attached:
        ids = model.generate(**inputs, max_new_tokens=2, do_sample=False).tolist()
        kept = [(*one[:3], [part.source.tolist() for _, part in one.reductions]) for one in attached.outcomes]
    return ids, kept


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl", "gemma3"])  # plain, tiles, windows, two-way
def test_methods_answer_on_a_gpu_as_on_the_cpu(name: str) -> None:
    case = CASES[name]
    a, b, c, d = (case.picture(number) for number in range(4))
    inputs = double(prompts([1, 5, a, 6, 7, 8], [1, b, 9, c, 11, 12], [1, 21, 22, 23, 24], [1, 5, 6, 7, d, 31]))
    moved = {key: value.cuda() for key, value in inputs.items()}
    plain, device = case.build().double(), case.build().double().cuda()
    worked = 0
    for method, made in METHODS.items():
        tokens = case.square if made.place is Place.IMAGE else case.tokens
        try:
            expected = ids_and_sources(plain, inputs, method, tokens)
        except OptionError:
            continue  # refused, see the matrix
        assert ids_and_sources(device, moved, method, tokens) == expected, method
        worked += 1
    assert worked > 10
