"""The official LLaVA host on tiny random models. methods/test_golden_decoder.py holds what is cut."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from models import IMAGE, PATCHES, tiny_llava
from prompts import ANYRES, CASES, batch, row, tiles
from torch import Tensor

from llava_consensus import attach, timed
from llava_consensus.errors import OptionError
from llava_consensus.evaluation.bench import timing
from llava_consensus.evaluation.models.base import Encoding, Prompt
from llava_consensus.evaluation.models.llava import LlavaRunner
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.inputs import NO_TEXT
from llava_consensus.hosts.official import PREPARE
from llava_consensus.hosts.official_model import LlavaTower
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.saliency import class_saliency
from llava_consensus.reduction.tokens import VisionAttention

CURRENT = int(transformers.__version__.split(".")[0]) >= 5
needs_5 = pytest.mark.skipif(not CURRENT, reason="generate() of transformers 4 does not advance given positions")
CUTS = ("fastv", "sparsevlm")  # methods between layers that drop rows, and that make new ones
PLACES = ("consensusdrop", "tome", "resize", *CUTS)
DECODER = [  # a cut before the first layer is refused on transformers 4
    name for name, one in METHODS.items() if one.place is Place.DECODER and (CURRENT or one.attention != "none")
]
NEW, TOKENS = 5, 6
GENERATION = dict(do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def deep(tower_folder: Path) -> Any:
    return tiny_llava(tower_folder, num_hidden_layers=8, tokenizer_padding_side="left", eos_token_id=None)


def generate(model: Any, given: dict[str, Any], **options: Any) -> Any:
    return model.generate(**given, **GENERATION, return_dict_in_generate=True, output_scores=True, **options)


# ---- attach and detach


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", PLACES)
def test_full_budget_detach_and_exceptions_leave_the_model_bit_identical(
    tower_folder: Path, prompt: SimpleNamespace, name: str, family: str
) -> None:
    """And a second model beside it, while the first is attached."""
    model, other = (tiny_llava(tower_folder, family, num_hidden_layers=5) for _ in range(2))

    def state() -> dict[str, Any]:
        return {
            key: (set(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
            for key, module in model.named_modules()
        }

    def logits(model: Any) -> Tensor:
        return model(prompt.ids, images=prompt.images).logits

    dense, said = logits(model), model.generate(prompt.ids, images=prompt.images, **GENERATION)
    before, config = state(), model.config.to_json_string()
    with attach(model, name, tokens=PATCHES):
        assert torch.equal(logits(model), dense)
        assert torch.equal(model.generate(prompt.ids, images=prompt.images, **GENERATION), said)
    parts = (LlavaTower(model.get_vision_tower()).blocks[1].mlp, model.model.mm_projector, model.model.layers[3].mlp)
    with attach(model, name, tokens=6) as attached:
        reduced = logits(model)
        assert not torch.allclose(reduced[0, -1], dense[0, -1], atol=1e-4) and torch.equal(logits(other), dense)
        assert attached.outcomes[0][:2] == (0, PATCHES) and attached.outcomes[0].after in (4, 6)
        assert model.config.to_json_string() == config
        for part in parts:
            handle = part.register_forward_hook(Mock(side_effect=RuntimeError("boom")))
            with pytest.raises(RuntimeError, match="boom"):
                logits(model)
            handle.remove()
            assert torch.equal(logits(model), reduced)
    attached.detach()
    assert state() == before and model.config.to_json_string() == config and PREPARE not in vars(model)
    assert torch.equal(logits(model), dense)


@pytest.mark.parametrize(
    ("name", "options", "beams"),
    [*((name, {}, beams) for name in PLACES for beams in (1, 3)), ("prumerge", {"budget": "adaptive"}, 1)],
)
def test_left_padded_batches_of_any_number_of_images_equal_singles(
    tower_folder: Path, name: str, options: dict[str, Any], beams: int
) -> None:
    model = tiny_llava(tower_folder, num_hidden_layers=8, tokenizer_padding_side="left")
    rows = [row(5, 6), row(5, images=2, after=5), row(7, 8, 9, after=2), row(5, after=9)]
    images, spans = tiles(5, 1), (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 5))
    ids, mask = batch(*rows, left=True)
    given = {"inputs": ids, "images": images, "attention_mask": mask}
    with attach(model, name, tokens=6, **options) as attached:
        together = generate(model, given, num_beams=beams)
        of_batch, of_singles = list(attached.outcomes), []
        for index, (one, span) in enumerate(zip(rows, spans, strict=True)):
            alone = generate(model, {"inputs": torch.tensor([one]), "images": images[span]}, num_beams=beams)
            of_singles += attached.outcomes
            assert together.sequences[index].tolist() == alone.sequences[0].tolist()
            for batched, single in zip(together.scores, alone.scores, strict=True):
                assert beams > 1 or torch.allclose(batched[index], single[0], atol=5e-5)
    assert [one.row for one in of_batch] == [0, 1, 1, 2, 3]
    for one, other in zip(of_batch, of_singles, strict=True):
        assert one.entering == other.entering
        assert torch.equal(one.reductions[0][1].source, other.reductions[0][1].source)
    assert (len({one.after for one in of_batch}) > 1) == bool(options)


@pytest.mark.parametrize("name", ["consensusdrop", *CUTS])
@torch.enable_grad()
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


# ---- every branch of the official function


def numbered(model: Any) -> Any:
    """A stand-in whose visual rows are their own numbers, made independently of the host's."""
    inner, newline = SimpleNamespace(embed_tokens=lambda ids: torch.zeros(*ids.shape, 1)), torch.tensor([-1.0])
    given = dict(config=model.config, device=torch.device("cpu"), model=SimpleNamespace(image_newline=newline))
    given |= dict(get_model=lambda: inner, get_vision_tower=model.get_vision_tower)
    given["encode_images"] = lambda images: torch.arange(1.0, len(images) * PATCHES + 1).view(-1, PATCHES, 1)
    return SimpleNamespace(**given)


def reference(
    model: Any, given: dict[str, Any], outcomes: list[Any], ranges: list[range], order: str
) -> list[torch.Tensor]:
    """Reduced rows built the slow way: the official full rows without padding, dropped ones taken out one by one,
    reduced ones put in.
    """
    config, limit = model.config, getattr(model.config, "tokenizer_model_max_length", None)
    config.tokenizer_model_max_length = None
    _, _, mask, _, full, _ = model.prepare_inputs_labels_for_multimodal(**given)
    marks = type(model).prepare_inputs_labels_for_multimodal(numbered(model), **given)[4][..., 0]
    config.tokenizer_model_max_length = limit
    rows = []
    for index, real in enumerate(mask.bool()):
        mark = marks[index][real].long().tolist()
        tile = [(number - 1) // PATCHES if number > 0 else None for number in mark]
        entries = [((place, 0), token) for place, token in enumerate(full[index][real])]
        for own_tiles, outcome in zip(ranges, outcomes, strict=True):
            if outcome.row != index:
                continue
            visual = [place for place, number in enumerate(tile) if number in own_tiles]
            end = visual[-1]
            while mark[end + 1 : end + 2] == [-1]:
                end += 1
            for part, reduction in outcome.reductions:
                whole = len(outcome.reductions) == 1
                places = [place for place in visual if whole or tile[place] == own_tiles[part]]
                entries = [one for one in entries if one[0] not in {(place, 0) for place in places}]
                for slot, source in enumerate(reduction.source[0].tolist()):
                    tail = order == "top_then_merged" and slot >= reduction.kept.shape[1]
                    key = (end, 2 + part * 1000 + slot) if tail else (places[source], 1)
                    entries.append((key, reduction.tokens[0, slot]))
        rows.append(torch.stack([token for _, token in sorted(entries, key=lambda one: one[0])])[:limit])
    return rows


@pytest.mark.parametrize(("order", "tile_budget"), [("top_then_merged", "per_tile"), ("raster", "global")])
@pytest.mark.parametrize("case", CASES)
def test_every_branch_equals_the_slow_reference(tower_folder: Path, case: str, order: str, tile_budget: str) -> None:
    spec = CASES[case]
    left = spec.get("left", False)
    model = tiny_llava(tower_folder, **spec.get("config", {}), tokenizer_padding_side="left" if left else "right")
    ids, mask = batch(*spec["rows"], left=left)
    given = dict(input_ids=ids, images=spec["images"], image_sizes=spec.get("sizes"), attention_mask=mask)
    given |= dict.fromkeys(("position_ids", "past_key_values", "labels"))
    masked = spec.get("mask", True)
    tokens = 20 if max(len(one) for one in spec["ranges"]) > 1 else 6
    with attach(model, tokens=tokens, merged=tokens // 3, tile_budget=tile_budget, order=order) as attached:
        found = model.prepare_inputs_labels_for_multimodal(**given | {"attention_mask": mask if masked else None})
        _, positions, new_mask, _, embeds, labels = found
        outcomes = list(attached.outcomes)
    assert positions is None and labels is None and len(outcomes) == len(spec["ranges"])
    assert (new_mask is not None) == masked
    for index, want in enumerate(reference(model, given, outcomes, spec["ranges"], order)):
        real = torch.ones(embeds.shape[1], dtype=torch.bool) if new_mask is None else new_mask[index].bool()
        assert torch.equal(embeds[index][real], want)
        assert (embeds[index][~real] == 0).all()
        assert new_mask is None or bool(new_mask[index][-1 if left else 0])
    with attach(model, "full") as attached:
        model.prepare_inputs_labels_for_multimodal(**given)
    rows = type(model).prepare_inputs_labels_for_multimodal(numbered(model), **given)[4].gt(0).sum((1, 2)).tolist()
    assert rows == [sum(one.after for one in attached.outcomes if one.row == row) for row in range(len(rows))]


# ---- what comes out is right


@needs_5
def test_selection_with_kept_positions_equals_masking_the_dropped_tokens(
    llava_model: Any, prompt: SimpleNamespace
) -> None:
    given = {"images": prompt.images, "use_cache": False}
    with attach(llava_model, tokens=6, merged=0, positions="keep") as attached:
        reduced = llava_model(prompt.ids, attention_mask=torch.ones_like(prompt.ids), **given).logits
        kept = attached.outcomes[0].reductions[0][1].kept[0]
    embeds = llava_model.prepare_inputs_labels_for_multimodal(prompt.ids, *[None] * 4, prompt.images)[4]
    mask = torch.ones(1, embeds.shape[1], dtype=torch.long)
    mask[0, 5 : 5 + PATCHES] = 0
    mask[0, 5 + kept] = 1
    masked = llava_model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).logits
    assert torch.allclose(reduced[0], masked[0, mask[0].bool()], atol=1e-4)


@needs_5
def test_tokens_may_stand_at_the_mean_of_their_members_or_evenly(llava_model: Any, prompt: SimpleNamespace) -> None:
    given, placed = (prompt.ids, torch.zeros(1, 1), None, None, None, prompt.images), []
    for name, options in (("divprune", {"positions": "spread"}), ("consensusdrop", {"positions": "mean"})):
        with attach(llava_model, name, tokens=6, order="raster", **options) as attached:
            placed.append(llava_model.prepare_inputs_labels_for_multimodal(*given)[1][0, 5:12].tolist())
    ((_, reduction),) = attached.outcomes[0].reductions
    owner, source = reduction.owner[0], reduction.source[0].tolist()
    means = [float((owner == slot).nonzero().float().mean().round()) for slot in range(6)]
    assert means != source, "no token was merged, so nothing is tested"
    means = [5 + mean for _, mean in sorted(zip(source, means, strict=True))]
    assert placed == [[5, 8, 11, 14, 17, 20, 21], [*means, 21]]


def test_a_prompt_that_ends_in_its_picture_is_reduced_by_sight_and_says_so_once(llava_model: Any) -> None:
    ids, found = torch.tensor([[1, 5, 6, -200]]), []
    for alpha in (0.0, 1.0):
        with attach(llava_model, tokens=6, merged=0, alpha=alpha) as attached:
            with pytest.warns(UserWarning, match="vision saliency alone"):
                found.append(llava_model(ids, images=tiles(1)).logits)
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                llava_model(ids, images=tiles(1))
            assert attached.notes == (NO_TEXT,)
    assert torch.equal(*found)


# ---- saliencies against eager attention


def test_hooked_saliency_equals_eager_attention_and_changes_no_output(llava_model: Any, tower_folder: Path) -> None:
    from transformers import CLIPVisionModel

    images = tiles(2)
    plain = llava_model.encode_images(images)
    with attach(llava_model, tokens=6) as attached:
        encoded = attached.entrance.encode(images, [1, 1])
    assert torch.equal(torch.cat([one.projected for one in encoded]), plain)
    parts = {name: torch.cat([one.tiles.parts[name] for one in encoded]) for name in ("query", "key", "features")}
    options = {"attn_implementation": "eager"} if CURRENT else {}
    eager = CLIPVisionModel.from_pretrained(tower_folder, **options)
    out = eager(images, output_attentions=True, output_hidden_states=True)
    attention = VisionAttention(parts["query"], parts["key"], encoded[0].tiles.scale, encoded[0].tiles.classes)
    assert torch.allclose(class_saliency(attention), out.attentions[-2][:, :, 0, 1:].mean(1), atol=1e-5)
    assert torch.allclose(parts["features"], out.hidden_states[-2][:, 1:], atol=1e-5)


def test_probe_of_a_real_prompt_equals_the_models_own_first_layer(tower_folder: Path, prompt: SimpleNamespace) -> None:
    """The s_c in the record is Norm of the eager layer-0 rows of the full prompt."""
    with attach(model := tiny_llava(tower_folder), tokens=6, alpha=0.0) as attached:
        model(prompt.ids, images=prompt.images)
    cross = attached.outcomes[0].reductions[0][1].cross[0]
    eager = tiny_llava(tower_folder, _attn_implementation="eager")
    if CURRENT:
        eager.set_attn_implementation("eager")
    attention = eager(prompt.ids, images=prompt.images, output_attentions=True).attentions[0].mean(1)[0]
    rows = attention[5 + PATCHES :, 5 : 5 + PATCHES]
    assert torch.allclose(cross, (rows / (rows.sum(1, keepdim=True) + 1e-6)).mean(0), atol=1e-5)


# ---- cuts between decoder layers


@pytest.mark.parametrize("name", DECODER)
def test_the_cache_holds_what_each_layer_saw_and_takes_no_image(deep: Any, prompt: SimpleNamespace, name: str) -> None:
    with attach(deep, name, tokens=TOKENS) as attached:
        cache = deep(prompt.ids, images=prompt.images, use_cache=True).past_key_values
        entering = attached.outcomes[0].entering
        embeds = deep.prepare_inputs_labels_for_multimodal(prompt.ids, *[None] * 4, prompt.images)[4]
        with pytest.raises(OptionError, match="pass the whole conversation"):
            deep(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
    lengths = [(cache.layers[index].keys if CURRENT else cache[index][0]).shape[2] for index in range(8)]
    assert lengths == [12 + count for count in entering]


@pytest.mark.parametrize("name", ["consensusdrop", *CUTS])
def test_text_alone_decode_steps_and_a_prepared_sequence_that_is_never_read_are_left_alone(
    deep: Any, prompt: SimpleNamespace, name: str
) -> None:
    text = torch.arange(1, 1 + prompt.ids.shape[1] - 1 + PATCHES)[None]
    dense = deep(text).logits
    with attach(deep, name, tokens=TOKENS) as attached:
        deep.prepare_inputs_labels_for_multimodal(prompt.ids, None, None, None, None, prompt.images)
        for context, reported in ((nullcontext(), 0), (attached.call(), 1)):
            with context:
                deep(prompt.ids, images=prompt.images)
                assert torch.equal(deep(text).logits, dense) and len(attached.outcomes) == reported
        ids, *_, embeds, _ = deep.prepare_inputs_labels_for_multimodal(text[:, :1], *[None] * 4, prompt.images)
        assert ids is not None and embeds is None  # a decode step that is given the images again


@pytest.mark.parametrize("name", CUTS)
def test_eager_attention_gives_the_same(tower_folder: Path, prompt: SimpleNamespace, name: str) -> None:
    said = []
    for kernel in ("sdpa", "eager"):
        one = tiny_llava(tower_folder, num_hidden_layers=8, _attn_implementation=kernel)
        with attach(one, name, tokens=TOKENS):
            said.append(torch.cat(generate(one, {"inputs": prompt.ids, "images": prompt.images}).scores))
    assert torch.allclose(*said, atol=2e-5)


def test_tiled_pictures_are_ranked_as_a_whole_and_keep_their_newlines(tower_folder: Path) -> None:
    tiled = tiny_llava(tower_folder, num_hidden_layers=5, **ANYRES, mm_patch_merge_type="spatial_unpad")
    ids, mask = batch(row(5), row(6, 7))
    given = {"images": [tiles(5), tiles(3, 1)], "image_sizes": [(100, 60), (110, 30)], "attention_mask": mask}
    for name in DECODER:
        with attach(tiled, name, tokens=20) as attached:
            tiled(ids, **given)
        for one in attached.outcomes:
            assert one.structural > 0 and one.after < one.before
            assert one.entering == tuple(make(name).entering(Budget(20), one.before, 5))


def test_models_and_kernels_that_cannot_be_read_or_cut_say_why(tower_folder: Path, prompt: SimpleNamespace) -> None:
    one = tiny_llava(tower_folder, num_hidden_layers=1)
    with pytest.raises(OptionError, match=r"vision_layer=9 must be in -4\.\.3"):
        attach(one, vision_layer=9)
    with attach(one, "fastv", tokens=TOKENS), pytest.raises(OptionError, match="only 1"):
        one(prompt.ids, images=prompt.images)
    if not CURRENT:
        one.config._attn_implementation = "flash_attention_2"
        with pytest.raises(OptionError, match="needs sdpa or eager"):
            attach(one, "fastv", tokens=TOKENS)
        narrow = tiny_llava(tower_folder, "mistral", sliding_window=20)
        with attach(narrow, "fastv", tokens=TOKENS), pytest.raises(OptionError, match="sliding_window=20 is narrower"):
            narrow(prompt.ids, images=prompt.images)


# ---- loops of the user's own

WAYS: list[tuple[str, dict[str, Any]]] = [("consensusdrop", {}), ("sparsevlm", {})]
WAYS += [("consensusdrop", {"positions": "mean"})] if CURRENT else []  # version 4 is refused kept positions
KINDS = {
    "one": ([row(5, 6)], 1),
    "batch": ([row(5, 6), row(5, images=2, after=9)], 3),
    "picture last": ([[1, 5, 6, 7, 8, -200]], 1),
}


def inputs(kind: str) -> dict[str, Any]:
    rows, pictures = KINDS[kind]
    ids, mask = batch(*rows, left=True)
    return {"inputs": ids, "images": tiles(pictures), "attention_mask": mask}


def loop(model: Any, given: dict[str, Any], words: Tensor, masked: bool, keeps: bool = False) -> Tensor:
    """Logits of a loop of one's own that says these words [R, t], with masks of the rows that are read or with none.
    With masks, padding is between the prompt and the first word, and positions are given.
    """
    ids, images, mask = given["inputs"], given["images"], given["attention_mask"]
    output = model(ids, images=images, attention_mask=mask if masked else None, use_cache=True)
    found = [output.logits[:, -1]]
    real = model.prepare_inputs_labels_for_multimodal(ids, None, mask, None, None, images)[2]
    size = (mask.sum(1) + (ids < 0).sum(1) * (PATCHES - 1))[:, None] if keeps else torch.tensor(real.shape[1])
    for step, word in enumerate(words[:, :-1].T[..., None]):
        word = torch.nn.functional.pad(word, (int(masked and not step and (CURRENT or len(ids) == 1)), 0))  # a bug of 4
        real = torch.cat((real, word.sign().to(real)), 1)
        more = {"attention_mask": real, "position_ids": (size + step).expand_as(word)} if masked else {}
        output = model(word, past_key_values=output.past_key_values, use_cache=True, **more)
        found.append(output.logits[:, -1])
    return torch.stack(found, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "options"), WAYS)
def test_a_loop_of_ones_own_answers_like_generate(deep: Any, method: str, options: dict[str, Any], kind: str) -> None:
    given = inputs(kind)
    with attach(deep, method, TOKENS, **options):
        found = generate(deep, given)
        expected, words = torch.stack(found.scores, 1), found.sequences[:, -NEW:]
        if CURRENT:
            assert torch.equal(generate(deep, given, cache_implementation="static").sequences, found.sequences)
        for masked in (True,) if kind == "batch" else (True, False):
            assert torch.allclose(loop(deep, given, words, masked, bool(options)), expected, atol=1e-4)


@pytest.mark.skipif(not CURRENT, reason="version 4 counts the answer only")
@pytest.mark.parametrize("method", ["full", "consensusdrop", "consensusdrop+", "fastv"])
def test_lengths_count_the_full_prompt_wherever_they_are_set(deep: Any, method: str) -> None:
    given = inputs("one")
    size = given["inputs"].shape[1] - 1 + PATCHES
    config = transformers.GenerationConfig(max_length=size + 4, pad_token_id=0)
    places: list[int] = []

    def note(layer: Any, args: Any, kwargs: Any) -> None:
        places.append(int(kwargs["position_ids"][0, -1]))

    with attach(deep, method, TOKENS), deep.model.layers[0].register_forward_pre_hook(note, with_kwargs=True):
        for options in ({"max_length": size + 4}, {"generation_config": config}):
            assert deep.generate(**given, do_sample=False, **options).shape[1] == 4
        places.clear()
        assert deep.generate(**given, do_sample=False, max_new_tokens=3).shape[1] == 3
        loop(deep, given, torch.tensor([[5, 6, 7]]), masked=False)
    first = size - 1 if method != "consensusdrop" else TOKENS + len(row(5, 6)) - 2
    assert places == 2 * [first, first + 1, first + 2]


@pytest.mark.parametrize("method", ["consensusdrop", "fastv"])
def test_packed_prompts_are_refused(deep: Any, method: str) -> None:
    words = torch.tensor([[*row(5, 6), *row(7)]])
    positions = torch.cat((torch.arange(len(row(5, 6))), torch.arange(len(row(7)))))[None]
    with attach(deep, method, TOKENS), pytest.raises(OptionError, match="packed into one row"):
        deep(words, images=tiles(2), position_ids=positions)


# ---- prompts that the harness asks together

WORDS = [1, 5, 6, 7, 8]
QUESTIONS = ["9 10 11", "12 13 14 15 16", "9 17", "18 19 20 21", "22 9 11 13"]
DTYPE = torch.float64 if CURRENT else torch.float32


class NumberHost(LlavaRunner):
    """A host whose prompts are ids, written as numbers, and so are its answers."""

    padding = 0

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> Tensor:
        return torch.tensor([*WORDS, *[-200] * pictures, *map(int, prompt.text.split())])

    def decode(self, output: Tensor) -> list[str]:
        return [" ".join(map(str, row)) for row in output.tolist()]


@pytest.fixture
def host(tower_folder: Path) -> NumberHost:
    """In double precision, so that equal answers are no luck. transformers 4.37 makes no masks of padding in it."""
    return NumberHost(tiny_llava(tower_folder).to(DTYPE))


def encoded(attachment: Attachment, count: int) -> list[Encoding]:
    found = attachment.entrance.encode(tiles(count, 1).to(DTYPE), [1] * count)
    return [Encoding(one, False, (IMAGE, IMAGE), attachment.method, attachment.budget) for one in found]


def test_a_picture_that_was_encoded_for_something_else_is_refused(host: NumberHost) -> None:
    asked = [Prompt("9 10", max_new_tokens=2)]
    for name, other in (("random", "random"), ("random", "divprune"), ("tome", "tome")):
        with host.attach(make(name), Budget(6)) as attachment:
            pictures = encoded(attachment, 1)
        used = name == other == "random"  # what a method after the tower reads is there for any budget
        refused = nullcontext() if used else pytest.raises(ValueError, match="encode it again")
        with host.attach(make(other), Budget(5)), refused:
            assert host.answer([pictures], asked)[0].after == 5


@pytest.mark.parametrize("name", ["full", "visionzip", "consensusdrop", "tome", "fastv"])
@pytest.mark.parametrize("shown", [[[0]] * 5, [[0], [1], [2], [3], [4]], [[0, 1], [0, 1], [0]]])
def test_prompts_are_answered_together_as_each_is_alone(host: NumberHost, name: str, shown: list[list[int]]) -> None:
    prompts = [Prompt(text, max_new_tokens=6) for text in QUESTIONS[: len(shown)]]
    with host.attach(make(name), Budget(6)) as attachment:
        pictures = encoded(attachment, 5)
        own = [[pictures[number] for number in numbers] for numbers in shown]
        together = host.answer(own, prompts)
        alone = [host.answer([one], [prompt])[0] for one, prompt in zip(own, prompts, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert (one.text, one[1:4], one.prefill) == (other.text, other[1:4], other.prefill)


# ---- what a method gains, as `timed` says it


def test_rows_of_every_forward_are_what_is_timed(llava_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a second for each row that enters the language model."""
    words, images = torch.tensor([row(5, images=1, after=4)]), tiles(1, 0)
    clock, rows, layer = [0.0], [], llava_model.get_model().layers[0]

    def run(module: Any, args: Any, named: Any) -> None:
        rows.append((args[0] if args else named["hidden_states"]).shape[1])
        clock[0] += rows[-1]

    def call() -> Any:
        return llava_model.generate(words, images=images, max_new_tokens=3, min_new_tokens=3)

    monkeypatch.setattr(timing, "now", lambda device: clock[0])
    with layer.register_forward_pre_hook(run, with_kwargs=True):
        found = timed(llava_model, call, tokens=6, rounds=2)
        assert len(layer._forward_pre_hooks) == 1
    prompt = rows[0]
    assert rows == [prompt, 1, 1, prompt - found.before + 6, 1, 1] * 3
    assert (found.after, found.rounds) == (6, 2) and found.full_first_ms == 1e3 * prompt
    assert found.full_ms - found.full_first_ms == found.ms - found.first_ms == 2e3
    assert found.full_first_ms - found.first_ms == 1e3 * (found.before - 6)
    assert f"visual tokens {found.before} -> 6\n" in str(found) and "medians of 2 rounds" in str(found)
    assert not llava_model._forward_hooks and "generate" not in vars(llava_model)


@pytest.mark.parametrize(
    ("call", "options", "says"),
    [
        (lambda model: None, {}, "did not run the model"),
        (lambda model: model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=1), {}, "no image"),
        (lambda model: pytest.fail("called"), {"rounds": 0}, "rounds=0 must be a whole number of at least 1"),
        (lambda model: pytest.fail("called"), {"method": "randon"}, "Did you mean 'random'"),
    ],
)
def test_what_cannot_be_timed_says_why(llava_model: Any, call: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        timed(llava_model, lambda: call(llava_model), tokens=6, **{"rounds": 1, **options})
    assert not llava_model._forward_hooks
