"""The official LLaVA host on tiny random models: bit-exact attach and detach, every branch of the official function,
SCAP against eager attention.
"""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from models import PATCHES, tiny_llava
from prompts import ANYRES, CASES, batch, row, tiles

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.inputs import NO_TEXT
from llava_consensus.hosts.official import PREPARE
from llava_consensus.hosts.official_model import LlavaTower
from llava_consensus.reduction.saliency import class_saliency
from llava_consensus.reduction.tokens import VisionAttention

MAJOR = int(transformers.__version__.split(".")[0])
needs_5 = pytest.mark.skipif(MAJOR < 5, reason="generate() of transformers 4 does not advance given positions")


# ---- attach and detach

CUTS = ("fastv", "sparsevlm")  # methods between layers
PLACES = ("consensusdrop", "tome", "resize", *CUTS)
GENERATION = dict(do_sample=False, min_new_tokens=5, max_new_tokens=5)


def fail(*args: Any) -> None:
    raise RuntimeError("boom")


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", PLACES)
@torch.no_grad()
def test_full_budget_detach_and_exceptions_leave_the_model_bit_identical(
    tower_folder: Path, prompt: SimpleNamespace, name: str, family: str
) -> None:
    model = tiny_llava(tower_folder, family, num_hidden_layers=5)

    def state() -> dict[str, Any]:
        return {
            key: (set(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
            for key, module in model.named_modules()
        }

    dense = model(prompt.ids, images=prompt.images).logits
    said = model.generate(prompt.ids, images=prompt.images, **GENERATION)
    before, config = state(), model.config.to_json_string()
    with attach(model, name, tokens=PATCHES):
        assert torch.equal(model(prompt.ids, images=prompt.images).logits, dense)
        assert torch.equal(model.generate(prompt.ids, images=prompt.images, **GENERATION), said)
    with attach(model, name, tokens=6) as attached:
        assert not torch.allclose(model(prompt.ids, images=prompt.images).logits[0, -1], dense[0, -1], atol=1e-4)
        assert attached.outcomes[0][:2] == (0, PATCHES) and attached.outcomes[0].after in (4, 6)
    block = LlavaTower(model.get_vision_tower()).blocks[1]
    for part in (block.mlp, model.get_model().mm_projector, model.get_model().layers[3].mlp):
        handle = part.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="boom"), attach(model, name, tokens=6):
            model(prompt.ids, images=prompt.images)
        handle.remove()
    assert state() == before and model.config.to_json_string() == config and PREPARE not in vars(model)
    assert torch.equal(model(prompt.ids, images=prompt.images).logits, dense)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in PLACES), ("prumerge", {"budget": "adaptive"})])
@torch.no_grad()
def test_left_padded_batches_of_any_number_of_images_equal_singles(
    tower_folder: Path, name: str, options: dict[str, Any]
) -> None:
    model = tiny_llava(tower_folder, num_hidden_layers=8, tokenizer_padding_side="left")
    rows = [row(5, 6), row(5, images=2, after=5), row(7, 8, 9, after=2), row(5, after=9)]
    images, spans = tiles(5, 1), [range(1), range(1, 3), range(3, 4), range(4, 5)]
    ids, mask = batch(*rows, left=True)
    given = GENERATION | {"return_dict_in_generate": True, "output_scores": True}
    with attach(model, name, tokens=6, **options) as attached:
        together = model.generate(ids, images=images, attention_mask=mask, **given)
        of_batch, of_singles = list(attached.outcomes), []
        for index, (one, span) in enumerate(zip(rows, spans, strict=True)):
            alone = model.generate(torch.tensor([one]), images=images[span.start : span.stop], **given)
            of_singles += attached.outcomes
            assert together.sequences[index].tolist() == alone.sequences[0].tolist()
            for step in range(5):
                batched, single = together.scores[step][index], alone.scores[step][0]
                finite = torch.isfinite(single)
                assert torch.allclose(batched[finite], single[finite], atol=5e-5)
    for one, other in zip(of_batch, of_singles, strict=True):
        assert one.entering == other.entering
        assert torch.equal(one.reductions[0][1].source, other.reductions[0][1].source)
    assert (len({one.after for one in of_batch}) > 1) == bool(options)


@pytest.mark.parametrize("name", PLACES)
@torch.no_grad()
def test_beams_answer_like_beams_of_one(tower_folder: Path, name: str) -> None:
    model = tiny_llava(tower_folder, num_hidden_layers=8, tokenizer_padding_side="left")
    rows, given = (row(5, 6), row(5, after=9)), GENERATION | {"num_beams": 3}
    ids, mask = batch(*rows, left=True)
    with attach(model, name, tokens=6) as attached:
        found = model.generate(ids, images=tiles(2), attention_mask=mask, **given)
        assert [one.row for one in attached.outcomes] == [0, 1]
        for index, one in enumerate(rows):
            alone = model.generate(torch.tensor([one]), images=tiles(2)[index : index + 1], **given)
            assert found[index].tolist() == alone[0].tolist()


@pytest.mark.parametrize("name", ["consensusdrop", *CUTS])
def test_loss_counts_text_alone_and_gradients_reach_the_projector(tower_folder: Path, name: str) -> None:
    model = tiny_llava(tower_folder, num_hidden_layers=5).train()
    ids, mask = batch(row(5, 6), row(5, after=9))
    labels = torch.where(mask.bool(), ids, -100)
    with attach(model, name, tokens=6):
        out = model(ids, attention_mask=mask, labels=labels, images=tiles(2))
        targets = model.prepare_inputs_labels_for_multimodal(ids, None, mask, None, labels, tiles(2))[5]
    words = [[word for word in one if word > 0] for one in ids.tolist()]
    assert [[word for word in one if word != -100] for one in targets.tolist()] == words
    own = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    assert torch.allclose(out.loss, own, atol=1e-6)
    out.loss.backward()
    assert model.get_model().mm_projector[0].weight.grad.abs().sum() > 0


@torch.no_grad()
def test_a_second_model_is_untouched_and_attaching_twice_is_refused(
    tower_folder: Path, prompt: SimpleNamespace
) -> None:
    one, other = tiny_llava(tower_folder), tiny_llava(tower_folder)
    dense = other(prompt.ids, images=prompt.images).logits
    config = one.config.to_json_string()
    with attach(one, tokens=5):
        one(prompt.ids, images=prompt.images)
        assert torch.equal(other(prompt.ids, images=prompt.images).logits, dense)
        assert one.config.to_json_string() == config
        with pytest.raises(OptionError, match="detach it first"):
            attach(one, tokens=4)
    attached = attach(one, tokens=4)
    attached.detach()
    attached.detach()
    assert torch.equal(one(prompt.ids, images=prompt.images).logits, dense)


def test_what_cannot_be_attached_says_why(llava_model: Any) -> None:
    with pytest.raises(OptionError, match="no host"):
        attach(torch.nn.Linear(2, 2))
    with pytest.raises(OptionError, match=r"vision_layer=9 must be in -4\.\.3"):
        attach(llava_model, vision_layer=9)
    with pytest.raises(OptionError, match="tokens=0"):
        attach(llava_model, tokens=0)


# ---- every branch of the official function


def reference(
    model: Any, arguments: dict[str, Any], outcomes: list[Any], ranges: list[range], order: str
) -> list[torch.Tensor]:
    """Reduced rows built the slow way: the official full rows without padding, dropped ones taken out one by one,
    reduced ones put in.
    """
    config = model.config
    limit = getattr(config, "tokenizer_model_max_length", None)
    config.tokenizer_model_max_length = None
    numbers = NumberedModel(model)
    given = dict(position_ids=None, past_key_values=None, labels=None, image_sizes=None) | arguments
    given["attention_mask"] = (
        torch.ones_like(given["input_ids"]) if given["attention_mask"] is None else given["attention_mask"]
    )
    full = model.prepare_inputs_labels_for_multimodal(**given)
    marks = type(model).prepare_inputs_labels_for_multimodal(numbers, **given)[4][..., 0]
    config.tokenizer_model_max_length = limit
    rows = []
    for index in range(len(full[4])):
        real = full[2][index].bool()
        embeds, mark = full[4][index][real], marks[index][real].long().tolist()
        entries = [(place, 0, embeds[place]) for place in range(len(embeds))]
        for own_tiles, outcome in zip(ranges, outcomes, strict=True):
            if outcome.row != index:
                continue
            visual = [
                place for place in range(len(mark)) if mark[place] > 0 and (mark[place] - 1) // PATCHES in own_tiles
            ]
            end = visual[-1]
            while end + 1 < len(mark) and mark[end + 1] == -1:
                end += 1
            for part, reduction in outcome.reductions:
                places = (
                    visual
                    if len(outcome.reductions) == 1
                    else [p for p in visual if (mark[p] - 1) // PATCHES == own_tiles[part]]
                )
                entries = [entry for entry in entries if entry[0] not in places or entry[1]]
                kept = reduction.kept.shape[1]
                for slot, source in enumerate(reduction.source[0].tolist()):
                    tail = order == "top_then_merged" and slot >= kept
                    entries.append(
                        (
                            end if tail else places[source],
                            1 + (part * 1000 + slot if tail else 0),
                            reduction.tokens[0, slot],
                        )
                    )
        row_entries = sorted(entries, key=lambda entry: entry[:2])
        rows.append(torch.stack([entry[2] for entry in row_entries])[:limit])
    return rows


class NumberedModel:
    """A stand-in whose visual rows are their own numbers, made independently of the host's."""

    def __init__(self, model: Any) -> None:
        self.config, self.device = model.config, torch.device("cpu")
        tower = model.get_vision_tower()
        inner = SimpleNamespace(embed_tokens=lambda ids: torch.zeros(*ids.shape, 1))
        self.get_model, self.get_vision_tower = (lambda: inner), (lambda: tower)
        self.model = SimpleNamespace(image_newline=torch.tensor([-1.0]))

    def encode_images(self, images: torch.Tensor) -> torch.Tensor:
        return torch.arange(1, len(images) * PATCHES + 1).float().view(len(images), PATCHES, 1)


@pytest.mark.parametrize(("order", "tile_budget"), [("top_then_merged", "per_tile"), ("raster", "global")])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_branch_equals_the_slow_reference(tower_folder: Path, case: str, order: str, tile_budget: str) -> None:
    spec = CASES[case]
    model = tiny_llava(tower_folder, **spec.get("config", {}))
    left = spec.get("left", False)
    if left:
        model.config.tokenizer_padding_side = "left"
    ids, mask = batch(*spec["rows"], left=left)
    arguments = dict(
        input_ids=ids,
        attention_mask=mask if spec.get("mask", True) else None,
        images=spec["images"],
        image_sizes=spec.get("sizes"),
    )
    tokens = 20 if max(len(one) for one in spec["ranges"]) > 1 else 6
    with attach(model, tokens=tokens, merged=tokens // 3, tile_budget=tile_budget, order=order) as attached:
        given = dict(position_ids=None, past_key_values=None, labels=None) | arguments
        _, positions, new_mask, _, embeds, labels = model.prepare_inputs_labels_for_multimodal(**given)
        outcomes = list(attached.outcomes)
    expected = reference(model, arguments, outcomes, spec["ranges"], order)
    assert positions is None and labels is None and len(outcomes) == len(spec["ranges"])
    assert (new_mask is None) == (arguments["attention_mask"] is None)
    for index, want in enumerate(expected):
        real = torch.ones(embeds.shape[1], dtype=torch.bool) if new_mask is None else new_mask[index].bool()
        assert torch.equal(embeds[index][real], want)
        assert (embeds[index][~real] == 0).all()
        assert new_mask is None or bool(new_mask[index][-1 if left else 0])


@torch.no_grad()
def test_tile_budgets(tower_folder: Path) -> None:
    model = tiny_llava(tower_folder, **ANYRES, mm_patch_merge_type="spatial")
    ids, mask = batch(row(5), row(6, 7))
    arguments = dict(images=[tiles(5), tiles(3, 1)], image_sizes=[(100, 100), (110, 50)], attention_mask=mask)
    after = {"per_tile": 20, "global": 20, "most_tiles": 12}  # of three tiles, where an image can have five
    for tile_budget, left in after.items():
        with attach(model, tokens=20, tile_budget=tile_budget) as attached:
            model(ids, **arguments)
            assert [outcome[:4] for outcome in attached.outcomes] == [(0, 80, 20, 0), (1, 48, left, 0)]
    with attach(model, tokens=4) as attached:  # fewer tokens than tiles: ranked over all of them
        model(ids, **arguments)
        assert [outcome.after for outcome in attached.outcomes] == [4, 4]
    with attach(model, "uniform_grid", tokens=4), pytest.raises(OptionError, match="each of 5 tiles"):
        model(ids, **arguments)


# ---- what comes out is right


@needs_5
@torch.no_grad()
def test_selection_with_kept_positions_equals_masking_the_dropped_tokens(
    llava_model: Any, prompt: SimpleNamespace
) -> None:
    with attach(llava_model, tokens=6, merged=0, positions="keep") as attached:
        reduced = llava_model(
            prompt.ids, images=prompt.images, attention_mask=torch.ones_like(prompt.ids), use_cache=False
        ).logits
        kept = attached.outcomes[0].reductions[0][1].kept[0]
    _, _, _, _, embeds, _ = llava_model.prepare_inputs_labels_for_multimodal(
        prompt.ids, None, None, None, None, prompt.images
    )
    mask = torch.ones(1, embeds.shape[1], dtype=torch.long)
    mask[0, 5 : 5 + PATCHES] = 0
    mask[0, 5 + kept] = 1
    masked = (
        super(type(llava_model), llava_model).forward(inputs_embeds=embeds, attention_mask=mask, use_cache=False).logits
    )
    assert torch.allclose(reduced[0], masked[0, mask[0].bool()], atol=1e-4)


@needs_5
@torch.no_grad()
def test_a_merged_token_may_stand_at_the_mean_position_of_its_members(
    llava_model: Any, prompt: SimpleNamespace
) -> None:
    with attach(llava_model, tokens=6, positions="mean", order="raster") as attached:
        given = (prompt.ids, torch.zeros(1, 1), None, None, None, prompt.images)
        placed = llava_model.prepare_inputs_labels_for_multimodal(*given)[1][0]
        (reduction,) = (part for _, part in attached.outcomes[0].reductions)
    owner, source = reduction.owner[0], reduction.source[0]
    expected = []
    for slot in range(6):
        members = (owner == slot).nonzero()[:, 0].float()
        expected.append((float(source[slot]), float(members.mean().round())))
    assert any(anchor != mean for anchor, mean in expected), "no token was merged, so nothing is tested"
    assert placed[5:11].tolist() == [5 + mean for _, mean in sorted(expected)]


@torch.no_grad()
def test_decode_steps_and_prompts_without_pictures_pass_through(llava_model: Any) -> None:
    ids = torch.tensor([[1, 5, 6, 7]])
    dense = llava_model(ids).logits
    with attach(llava_model, tokens=6):
        assert torch.equal(llava_model(ids).logits, dense)
        out = llava_model.prepare_inputs_labels_for_multimodal(ids[:, :1], None, None, None, None, tiles(1))
    assert out[0] is not None and out[4] is None


@torch.no_grad()
def test_a_prompt_that_ends_in_its_picture_is_reduced_by_sight_and_says_so_once(llava_model: Any) -> None:
    ids = torch.tensor([[1, 5, 6, -200]])
    with attach(llava_model, tokens=6, merged=0, alpha=1.0), pytest.warns(UserWarning, match="vision saliency alone"):
        sight = llava_model(ids, images=tiles(1)).logits
    with attach(llava_model, tokens=6, merged=0, alpha=0.0) as attached:
        with pytest.warns(UserWarning, match="vision saliency alone"):
            blind = llava_model(ids, images=tiles(1)).logits
        assert attached.notes == (NO_TEXT,)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            llava_model(ids, images=tiles(1))
        assert attached.notes == (NO_TEXT,)
    assert torch.equal(sight, blind)


@torch.no_grad()
def test_half_precision_model_keeps_its_dtype(tower_folder: Path, prompt: SimpleNamespace) -> None:
    model = tiny_llava(tower_folder).bfloat16()
    with attach(model, tokens=6) as attached:
        out = model.prepare_inputs_labels_for_multimodal(prompt.ids, None, None, None, None, prompt.images.bfloat16())
    assert out[4].dtype == torch.bfloat16 and attached.outcomes[0].reductions[0][1].fused.dtype == torch.float32


# ---- saliencies against eager attention


@torch.no_grad()
def test_hooked_saliency_equals_eager_attention_and_changes_no_output(llava_model: Any, tower_folder: Path) -> None:
    from transformers import CLIPVisionModel

    images = tiles(2)
    plain = llava_model.encode_images(images)
    with attach(llava_model, tokens=6) as attached:
        first, second = attached.entrance.encode(images, [1, 1])
    assert torch.equal(torch.cat((first.projected, second.projected)), plain)
    query, key, features = (
        torch.cat((first.tiles.parts[n], second.tiles.parts[n])) for n in ("query", "key", "features")
    )
    eager = (
        CLIPVisionModel.from_pretrained(tower_folder, attn_implementation="eager")
        if MAJOR >= 5
        else CLIPVisionModel.from_pretrained(tower_folder)
    )
    out = eager(images, output_attentions=True, output_hidden_states=True)
    attention = VisionAttention(query, key, first.tiles.scale, first.tiles.classes)
    assert torch.allclose(class_saliency(attention), out.attentions[-2][:, :, 0, 1:].mean(1), atol=1e-5)
    assert torch.allclose(features, out.hidden_states[-2][:, 1:], atol=1e-5)


@torch.no_grad()
def test_probe_of_a_real_prompt_equals_the_models_own_first_layer(tower_folder: Path, prompt: SimpleNamespace) -> None:
    """The s_c in the record is Norm of the eager layer-0 rows of the full prompt."""
    model = tiny_llava(tower_folder)
    with attach(model, tokens=6, alpha=0.0) as attached:
        model(prompt.ids, images=prompt.images)
    cross = attached.outcomes[0].reductions[0][1].cross[0]
    if MAJOR >= 5:
        model.set_attn_implementation("eager")
    else:
        model = tiny_llava(tower_folder, _attn_implementation="eager")
    attention = model(prompt.ids, images=prompt.images, output_attentions=True).attentions[0].mean(1)[0]
    rows = attention[5 + PATCHES :, 5 : 5 + PATCHES]
    assert torch.allclose(cross, (rows / (rows.sum(1, keepdim=True) + 1e-6)).mean(0), atol=1e-5)
