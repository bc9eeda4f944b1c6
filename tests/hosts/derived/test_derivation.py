"""What derivation rests on: a family that this project has never heard of, and the silent failures of naive captures,
each of which a check here finds.
"""

import copy
import dataclasses
import functools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.19")

import hf_models  # noqa: E402
from families import END, FAMILIES, IMAGE, START, TEXT, build, by_grid, filled, prompts  # noqa: E402
from reference import answer, probabilities  # noqa: E402
from transformers import AttentionInterface  # noqa: E402

from llava_consensus import attach  # noqa: E402
from llava_consensus.errors import OptionError  # noqa: E402
from llava_consensus.hosts.derived import model as derived  # noqa: E402
from llava_consensus.hosts.derived import tap  # noqa: E402
from llava_consensus.hosts.derived.rows import fed_rows  # noqa: E402

QWEN = FAMILIES["glm_ocr"]


@pytest.fixture(autouse=True)
def no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived, "_RECORDS", {})
    monkeypatch.setattr(derived, "_MAPS", {})
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)


class Mirrored(nn.Module):
    """A merger that nobody has: pairs of rows, the last pair first, and one learned row after each picture."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.join, self.end = nn.Linear(2 * width, out), nn.Parameter(torch.zeros(1, out))

    def forward(self, states: Tensor) -> Tensor:
        return torch.cat((self.join(states.view(len(states) // 2, -1)).flip(0).tanh(), self.end))


def invented() -> Any:
    """The windowed tower of Qwen2.5-VL, the merger above, a language model of Mistral with a rotation of its own."""
    from transformers import LightOnOcrConfig, LightOnOcrForConditionalGeneration, LightOnOcrModel, Qwen2_5_VLConfig
    from transformers.modeling_outputs import BaseModelOutputWithPooling
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    class Inner(LightOnOcrModel):
        def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor, **_: Any) -> Any:
            grids = nn.functional.pad(image_sizes, (1, 0), value=1)
            states = self.vision_encoder(pixel_values, grid_thw=grids).pooler_output
            sizes = (image_sizes.prod(-1) // 4).tolist()
            return BaseModelOutputWithPooling(pooler_output=[self.merger(one) for one in states.split(sizes)])

    class Invented(LightOnOcrForConditionalGeneration):
        """No class that any host names."""

    text = dict(
        TEXT, head_dim=16, model_type="mistral", sliding_window=None,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    )  # fmt: skip
    small = dict(hidden_size=32, num_attention_heads=4, intermediate_size=48, num_hidden_layers=1, model_type="pixtral")
    model = Invented(LightOnOcrConfig(text_config=text, vision_config=small, image_token_id=IMAGE))
    tower = dict(
        depth=3, hidden_size=32, num_heads=4, intermediate_size=48, out_hidden_size=48, patch_size=14, window_size=56,
        fullatt_block_indexes=[2],
    )  # fmt: skip
    model.model.__class__ = Inner
    vision = Qwen2_5_VLConfig(vision_config=tower).vision_config
    vision._attn_implementation = "sdpa"
    model.model.vision_encoder = Qwen2_5_VisionTransformerPretrainedModel(vision)
    model.model.vision_projection = nn.Identity()
    model.model.merger = Mirrored(48, 64)
    return filled(model.to(torch.float64).eval())


def test_a_family_nobody_has_heard_of_is_attached_without_a_line() -> None:
    model = invented()

    def pixels(which: list[int]) -> dict[str, Any]:
        given = by_grid(3 * 2 * 14 * 14)(which)
        return {"pixel_values": given["pixel_values"], "image_sizes": given["image_grid_thw"][:, 1:]}

    family = type(QWEN)("invented", dict, pixels, (4, 5))  # six tokens in pairs and an end; eight
    inputs = prompts(model, family, [0, 1], [1])
    with torch.no_grad():
        plain = model(**inputs).logits
        with attach(model, "consensusdrop", tokens=2, merged=1, order="raster", positions="keep") as attached:
            logits, outcomes = model(**inputs).logits[:, -1], attached.outcomes
    assert [(one.before, one.structural, one.after) for one in outcomes] == [(3, 1, 2), (4, 1, 2), (4, 1, 2)]
    assert torch.equal(model(**inputs).logits.detach(), plain)
    own = [one for one in outcomes if one.row == 1]
    mask = inputs["attention_mask"][1].bool()
    single = prompts(model, family, [1])
    single |= {name: inputs[name][1:2, mask] for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(logits[1], answer(model, single, own, keeps=True), rtol=1e-5, atol=1e-5)
    found = attached.model.record
    assert found.block.endswith("blocks.2.attn") and found.layer == 0 and found.classes == 0


def test_a_kernel_under_a_name_of_its_own_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine families apply a sparse mask only under the name of their kernel."""
    model = build(FAMILIES["glm_ocr"], torch.float32)
    inputs = prompts(model, QWEN, [0, 1], dtype=torch.float32)
    attention = model.get_decoder().layers[1].self_attn
    own = type(attention).forward

    def asks(self: Any, *args: Any, **kwargs: Any) -> Any:
        states, weights = own(self, *args, **kwargs)
        return (states if self.config._attn_implementation == "sdpa" else -states), weights

    monkeypatch.setattr(type(attention), "forward", asks)
    with torch.no_grad(), attach(model, "divprune", tokens=0.5):
        model(**inputs)

    derived._RECORDS.clear()

    class Renamed(str):
        pass

    monkeypatch.setattr(tap, "KernelName", lambda name: Renamed("tapped_" + name))
    with pytest.raises(OptionError, match="all rows kept"), torch.no_grad(), attach(model, "divprune", tokens=0.5):
        model(**inputs)


def test_threads_do_not_meet() -> None:
    """A configuration that is swapped for the length of a call is another thread's too."""
    model = build(FAMILIES["llama4"], torch.float32)
    family = FAMILIES["llama4"]
    inputs = [prompts(model, family, shown, dtype=torch.float32) for shown in ([0, 1], [1])]
    with torch.no_grad(), attach(model, "consensusdrop", tokens=0.5):
        expected = [model(**one).logits for one in inputs]
        found: list[Any] = [[], []]

        def run(number: int) -> None:
            with torch.no_grad():
                for _ in range(8):
                    found[number].append(model(**inputs[number]).logits)

        threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for own, right in zip(found, expected, strict=True):
        assert len(own) == 8 and all(torch.equal(one, right) for one in own)


def test_other_modules_keep_their_kernel_and_a_copy_reads_its_own_name() -> None:
    model = build(QWEN, torch.float32)
    inputs = prompts(model, QWEN, [0], dtype=torch.float32)
    attention = model.get_decoder().layers[0].self_attn
    shadows = tap.install([attention])
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    assert (
        attention.config._attn_implementation
        == "sdpa"
        == model.get_decoder().layers[1].self_attn.config._attn_implementation
    )
    assert twin.get_decoder().layers[0].self_attn.config._attn_implementation == "eager"
    assert type(model.get_decoder().config._attn_implementation) is str
    with torch.no_grad(), tap.recording([attention]) as calls:
        weights = twin(**inputs, output_attentions=True).attentions[0]
        assert not calls
        model(**inputs)
    assert len(calls) == 1
    ours = probabilities(calls[0].query[0], calls[0].key[0], calls[0].scale, causal=True)
    torch.testing.assert_close(ours, weights[0].mean(0), rtol=1e-4, atol=1e-5)
    for shadow in shadows:
        shadow.restore()
    assert "Tapped" not in type(attention.config).__name__


def test_rows_are_told_apart_in_half_precision_where_one_factor_is_not_enough() -> None:
    count, width = 1000, 8
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(count, generator=generator)
    states = torch.randn(1, count, width, generator=generator).bfloat16().requires_grad_()
    rows = (states[0, order] @ torch.randn(width, width, generator=generator).bfloat16()).tanh()
    (found,) = fed_rows(rows, [states]) or []
    assert torch.equal(found[0], order.argsort())
    # One pass with row / count: what bfloat16 keeps of the factor names another row nearly everywhere.
    cotangent = torch.randn(rows.shape, generator=generator).bfloat16()
    factor = (torch.arange(count) / count).bfloat16()[:, None]
    whole, scaled = (
        torch.autograd.grad(rows, states, value, retain_graph=True)[0][0].double()
        for value in (cotangent, cotangent * factor)
    )
    single = ((whole * scaled).sum(-1) / whole.square().sum(-1) * count).round().long()
    assert (single == order.argsort()).double().mean() < 0.6


def test_flash_towers_that_read_all_pictures_in_one_call_are_split_by_picture() -> None:
    """A pretended flash kernel: pictures one after the other with their lengths, and masks of two dimensions."""
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    def flash(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> Any:
        key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
        seen, lengths = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool), options.get("cu_seq_lens_q")
        causal = options.get("is_causal")
        if lengths is not None:
            segment = torch.bucketize(torch.arange(len(seen)), lengths[1:].long(), right=True)
            seen = segment[:, None] == segment
        elif getattr(module, "is_causal", True) if causal is None else causal:
            seen = seen.tril()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=options.get("scaling")
        )
        return attended.transpose(1, 2), None

    AttentionInterface.register("pretended_flash", flash)
    AttentionMaskInterface.register("pretended_flash", flash_attention_mask)
    found = []
    for kernel in ("sdpa", "pretended_flash"):
        model = build(QWEN)
        for module in model.modules():
            if hasattr(getattr(module, "config", None), tap.NAME):
                setattr(module.config, tap.NAME, kernel)
        inputs = prompts(model, QWEN, [0, 1])
        with torch.no_grad(), attach(model, "consensusdrop", tokens=2, merged=0) as attached:
            model(**inputs)
        found.append([reduction for one in attached.outcomes for _, reduction in one.reductions])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.vision, other.vision)
        torch.testing.assert_close(one.cross, other.cross)


def test_a_refusal_names_the_one_thing() -> None:
    model = build(QWEN, torch.float32)

    class WithoutFeatures(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, pixel_values: Any = None) -> Any:
            """Takes pixels alone."""

    model.__class__ = WithoutFeatures
    with pytest.raises(OptionError, match="WithoutFeatures: forward takes no mm_encoder_outputs"):
        attach(model, "divprune", tokens=2)


def test_features_of_several_layers_are_derived_where_a_file_reads_one() -> None:
    model = hf_models.CASES["llava_next"].build()
    model.config.vision_feature_layer = [-3, -2]
    projector = model.model.multi_modal_projector
    projector.linear_1 = nn.Linear(2 * projector.linear_1.in_features, projector.linear_1.out_features)
    inputs = hf_models.prompts([1, 5, hf_models.CASES["llava_next"].picture(0), 6, 7, 8])
    with torch.no_grad():
        plain = model(**inputs).logits
        with attach(model, tokens=10_000):
            assert torch.equal(model(**inputs).logits, plain)
        with attach(model, tokens=5) as attached:
            model(**inputs)
    (outcome,) = attached.outcomes
    assert outcome.before > outcome.after == 5


def test_the_first_call_encodes_three_times_and_reads_what_the_second_reads() -> None:
    """To find the tower's modules, to map its patches, and without taps; the call itself takes the second."""
    model, runs, read = build(QWEN, torch.float32), [], []
    inputs, encoder = prompts(model, QWEN, [0, 1]), model.model.get_image_features

    @functools.wraps(encoder)
    def counted(*args: Any, **given: Any) -> Any:
        runs.append(1)
        return encoder(*args, **given)

    model.model.get_image_features = counted
    with attach(model, "consensusdrop", tokens=2) as attached, torch.no_grad():
        for _ in range(2):
            model(**inputs)
            read.append([one.reductions[0][1] for one in attached.outcomes])
            assert len(runs) == 2 + len(read)
    for one, other in zip(*read, strict=True):
        torch.testing.assert_close(one.tokens, other.tokens)
        torch.testing.assert_close(one.vision, other.vision)


def test_markers_of_a_later_picture_ask_about_no_earlier_one() -> None:
    model, read = build(QWEN, torch.float32), []
    inputs = prompts(model, QWEN, [0, 1])
    shown = (inputs["input_ids"][0] == IMAGE).nonzero()[:, 0]
    first, second = shown[[0]], shown[1:][shown.diff() > 1]
    ends = shown[:-1][shown.diff() > 1], shown[[-1]]
    inputs["input_ids"][0, torch.cat((first, second)) - 1] = START
    inputs["input_ids"][0, torch.cat(ends) + 1] = END
    with attach(model, "consensusdrop", tokens=2) as attached, torch.no_grad():
        layout = attached.layout
        attached.layout = lambda kinds: read.append(layout(kinds)) or read[-1]  # type: ignore[method-assign,func-returns-value]
        model(**inputs)
    words = [inputs["input_ids"][0][one.text] for one in read[-1].pictures]
    assert START not in words[0] and words[0].tolist().count(END) == words[1].tolist().count(END) == 1
    assert len(words[0]) > len(words[1])


def test_a_first_prompt_longer_than_a_sliding_window_is_understood() -> None:
    family = FAMILIES["gemma4"]
    config = family.config()
    config["text_config"]["sliding_window"] = 8
    family = dataclasses.replace(family, config=lambda: config)
    model = build(family, torch.float32)
    inputs = prompts(model, family, [0, 1], dtype=torch.float32)
    with torch.no_grad(), attach(model, "divprune", tokens=2) as attached:
        model(**inputs)
        assert [one.after for one in attached.outcomes] == [2, 2]


def test_videos_are_refused() -> None:
    model = build(QWEN, torch.float32)
    inputs = prompts(model, QWEN, [0], dtype=torch.float32)
    with attach(model, "divprune", tokens=2), pytest.raises(OptionError, match="videos"):
        model(**inputs, pixel_values_videos=inputs["pixel_values"], video_grid_thw=inputs["image_grid_thw"])


def test_a_second_process_finds_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    proofs, prove = [], derived.prove
    monkeypatch.setattr(derived, "prove", lambda *given: proofs.append(1) or prove(*given))

    def asked(model: Any, inputs: dict[str, Any]) -> Tensor:
        derived._RECORDS.clear()  # as in another process
        with torch.no_grad(), attach(model, "consensusdrop", tokens=2, merged=1):
            logits: Tensor = model(**inputs).logits
        return logits

    model = build(QWEN)
    inputs = prompts(model, QWEN, [0, 1])
    first = asked(model, inputs)
    assert torch.equal(asked(model, inputs), first) and len(proofs) == 1
    (file,) = tmp_path.rglob("*.json")
    for damage in ("", '{"fields": 1}', "[]", '{"name": 1}'):
        file.write_text(damage)
        assert torch.equal(asked(model, inputs), first)
    assert len(proofs) == 5
    type(model).__module__, own = "someone.else", type(model).__module__
    try:
        file.unlink()
        asked(build(QWEN), inputs)
    finally:
        type(model).__module__ = own
    assert not list(tmp_path.rglob("*.json"))
