"""A third of `make compatibility`: types that docs/compatibility.md calls working do. Those whose decoder reads images
by cross attention answer as if they were given the rows that are left by hand.
"""

import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import compatibility
import pytest
import torch
from hf_models import double
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.cross_attention import SIDES

Choose = Callable[[Tensor], Tensor]  # rows of images [B, N, D] -> those that are left [B, K, D]
LESS = torch.finfo(torch.float64).min
TILE = 17  # rows of a tile of Llama 3.2, and of an image
LLAMA = 4 * TILE


def by_hand(model: Any, given: dict[str, Tensor], ids: Tensor, choose: Choose) -> Tensor:
    """Logits of a decoder's rows, given the rows of images that `choose` leaves."""
    kind, inner = model.config.model_type, getattr(model, "model", model)
    if kind == "blip":
        rows = choose(model.vision_model(given["pixel_values"]).last_hidden_state)
        return model.text_decoder(ids, encoder_hidden_states=rows).logits
    if kind == "idefics":
        rows, mask = inner.vision_model(given["pixel_values"].flatten(0, 1))[0], torch.ones(*ids.shape, 1)
        if model.config.use_resampler:
            rows = choose(inner.perceiver_resampler(rows))[:, None]
            return model(ids, perceiver_embeddings=rows, image_attention_mask=mask).logits
        return model(ids, image_encoder_embeddings=choose(rows)[:, None], image_attention_mask=mask).logits
    if kind == "mllama":
        images = {name: given[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
        rows = choose(inner.multi_modal_projector(inner.vision_model(**images).last_hidden_state).flatten(1, 3))
        mask = given["cross_attention_mask"].repeat_interleave(TILE, 3).flatten(2).double()
        mask = torch.cat((mask, mask[:, -1:].expand(-1, ids.shape[1] - mask.shape[1], -1)), 1)
        seen = choose(mask.mT).mT[:, None]  # NaN in padding
        some = (seen == 1).any(3, keepdim=True).double()  # else HF's model attends to all rows
        mask = torch.where(seen == 1, 0.0, LESS * some).masked_fill(seen.isnan(), LESS)
        masks = {"cross_attention_mask": mask, "full_text_row_masked_out_mask": some}
        return model.lm_head(inner.language_model(ids, cross_attention_states=rows.nan_to_num(), **masks)[0])
    if "input_ids" in given:  # a text encoder, whose second row is the first of an image
        florence, rows = kind == "florence2", model.get_input_embeddings()(given["input_ids"])
        images = (inner if florence else inner.encoder).get_image_features(given["pixel_values"]).pooler_output
        rows = torch.cat((rows[:, :1], choose(images), rows[:, 1 + images.shape[1] :]), 1)
        encoder = inner.language_model.encoder if florence else inner.encoder.text_model
        rows = encoder(inputs_embeds=rows).last_hidden_state
    else:
        output = model.get_encoder()(**{name: given[name] for name in given if name != "decoder_input_ids"})
        rows = choose(output[0] if output[0].ndim == 3 else output.pooler_output)
    return model(encoder_outputs=BaseModelOutputWithPooling(rows, rows), decoder_input_ids=ids).logits


def chosen(attached: Any) -> Choose:
    """The choice of the last call, filled up with NaN. Prompts whose images keep all rows are whole."""
    outcomes = attached.outcomes

    def choose(states: Tensor) -> Tensor:
        found = []
        for row, own in enumerate(states):
            images = enumerate(one.reductions for one in outcomes if one.row == row)
            kept = [LLAMA * image + TILE * tile + one.kept[0] for image, tiles in images for tile, one in tiles]
            found.append(own[torch.cat(kept).sort().values] if kept else own)
        return torch.nn.utils.rnn.pad_sequence(found, True, float("nan"))

    return choose


def case(kind: str) -> tuple[Any, dict[str, Tensor]]:
    """A model whose answers do not end, and two prompts. The first of Llama has images of four and of two tiles, the
    second one of one tile; the second image of Pix2Struct has fewer patches.
    """
    model = compatibility.small_model(kind).double()
    for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
        setattr(model.generation_config, name, None)
    if kind == "blip":
        model.config.text_config.sep_token_id = 1023
    given = double(compatibility.across(model, 2))
    if kind == "mllama":
        given["pixel_values"] = torch.cat((given["pixel_values"], given["pixel_values"].flip(0)), 1)
        given["aspect_ratio_ids"] = torch.tensor([[6, 2], [1, 0]])
        given["aspect_ratio_mask"] = torch.tensor([[[1, 1, 1, 1], [1, 1, 0, 0]], [[1, 0, 0, 0], [0, 0, 0, 0]]])
        given["cross_attention_mask"] = given["aspect_ratio_mask"][:, None].repeat(1, 8, 1, 1)
        given["cross_attention_mask"][:, :2] = given["cross_attention_mask"][:, :5, 1] = 0
    if kind == "pix2struct":
        given["attention_mask"][1, 40:] = 0
    return model, given


@pytest.mark.parametrize("kind", [*SIDES, "idefics with a resampler"])
def test_answers_as_the_rows_that_are_left(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compatibility.GIVEN, "idefics", {"use_resampler": kind.endswith("resampler")})
    model, given = case(kind.split()[0])

    def answers(**options: Any) -> Any:
        copies = {name: value.clone() for name, value in given.items()}  # BLIP writes to its ids
        return model.generate(**copies, max_new_tokens=3, do_sample=False, **options)

    def alone(row: int) -> Tensor:
        return model(**{name: value[row : row + 1] for name, value in given.items()}).logits.detach()

    plain, said = model(**given).logits, answers()
    with attach(model, "divprune", tokens=10_000):
        assert torch.equal(model(**given).logits, plain) and torch.equal(answers(), said)
    with attach(model, "divprune", tokens=20) as attached:
        logits, choose = model(**given).logits, chosen(attached)
        assert torch.equal(model(**given, return_dict=False)[0], logits)
        assert [outcome.after for outcome in attached.outcomes] == ([20, 20, 17] if kind == "mllama" else [20, 20])
        greedy, again = answers(), answers(use_cache=False)
        beams = answers(num_beams=3, output_scores=True, return_dict_in_generate=True)
        beams = beams.sequences, beams.sequences_scores  # its cache needs the hooks of Llama
        with ThreadPoolExecutor(2) as threads:
            torch.testing.assert_close(torch.cat(list(threads.map(alone, (0, 1)))), logits)
    assert torch.equal(model(**given).logits, plain) and not any(part._forward_hooks for part in model.modules())
    ids = given["decoder_input_ids" if "decoder_input_ids" in given else "input_ids"]
    torch.testing.assert_close(logits, by_hand(model, given, ids, choose))
    assert (logits - plain)[0].abs().max() > 0.01
    told = by_hand(model, given, greedy, choose)[:, -4:-1]
    assert torch.equal(told.argmax(-1), greedy[:, -3:]) and torch.equal(greedy, again)
    scores = by_hand(model, given, beams[0], choose)[:, -4:-1].log_softmax(-1)
    torch.testing.assert_close(scores.gather(2, beams[0][:, -3:, None]).mean((1, 2)).float(), beams[1].float())


@torch.no_grad()
def test_a_cache_of_llama_is_continued_as_it_was_begun() -> None:
    model, given = case("mllama")
    step = {"input_ids": torch.tensor([[5], [6]]), "cross_attention_mask": given["cross_attention_mask"][:, -1:]}
    caches, said, bare = [], [], given | {"cross_attention_mask": None}
    for tokens in (0, 20, 10, 0):
        with attach(model, "divprune", tokens) if tokens else nullcontext() as attached:
            caches.append(model(**given).past_key_values)
            said.append([model(**step, past_key_values=one).logits for one in copy.deepcopy(caches)])
            assert model(**bare).logits.isfinite().all()
            assert not tokens or [one[1:3] for one in attached.outcomes] == [(LLAMA, tokens)] * 4
    assert torch.equal(said[3][0], said[3][3]) and (said[3][0] - said[3][1]).abs().max() > 0.01
    assert all(map(torch.equal, said[1], said[3])) and all(map(torch.equal, said[2], said[3]))


@pytest.mark.parametrize("method", ["consensusdrop", "fastv", "uniform_grid", "divprune:tokens=20+fastv", "divprune"])
def test_what_is_not_known_is_refused(method: str) -> None:
    options = {"positions": "keep"} if method == "divprune" else {}
    with pytest.raises(OptionError, match=r"cross attention|grid of an image|positions=keep"):
        attach(compatibility.small_model("florence2"), method, tokens=10, **options)


PAGE = compatibility.PAGE.read_text("utf-8")
LINES = re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE, re.MULTILINE)
WORKING = {kind: cells.split(" | ") for kind, cells in LINES if "works" in cells}
SLOW = {"deepseek_vl_hybrid", "got_ocr2", "pp_chart2table", "fast_vlm", "janus", "gemma3n", "muse_spark"}
# `make compatibility` tries the others too
THIRD = [kind for kind in WORKING if kind in compatibility.TYPES and kind not in SLOW][::3]


def test_the_page_has_its_versions() -> None:
    assert re.search(r"Last whole run: \d{4}-\d\d-\d\d, transformers 5\.\d+\.\d+, torch 2\.\d+", PAGE)
    assert len(LINES) > 90


@pytest.mark.parametrize("kind", THIRD)
def test_a_type_that_works(kind: str) -> None:
    row = compatibility.row(kind)
    if missing := next((state for state in row.cells.values() if "ModuleNotFoundError" in state), None):
        pytest.skip(missing)
    for found, told, name in zip(row.cells.values(), WORKING[kind], row.cells, strict=True):
        assert told != "works" or found == "works", f"{name}: {found}"
