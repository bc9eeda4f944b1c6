"""Models whose decoder reads images by cross attention answer as if they were given the rows that are left by hand."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import compatibility
import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts import ACROSS
from llava_consensus.hosts.cross_attention import SIDES

Choose = Callable[[Tensor], Tensor]  # rows of images [B, N, D] -> those that are left [B, K, D]
LESS = torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64)


def blip(model: Any, given: dict[str, Tensor], ids: Tensor, choose: Choose) -> Tensor:
    rows = choose(model.vision_model(given["pixel_values"]).last_hidden_state)
    return model.text_decoder(ids, encoder_hidden_states=rows).logits


def encoded(model: Any, given: dict[str, Tensor], ids: Tensor, choose: Choose) -> Tensor:
    encoder = model.get_encoder()
    rows = choose(encoder(**{name: value for name, value in given.items() if name != "decoder_input_ids"})[0])
    return model(encoder_outputs=BaseModelOutput(rows), decoder_input_ids=ids).logits


def formula(model: Any, given: dict[str, Tensor], ids: Tensor, choose: Choose) -> Tensor:
    rows = choose(model.model.encoder(given["pixel_values"]).pooler_output)
    return model(encoder_outputs=BaseModelOutputWithPooling(rows, rows), decoder_input_ids=ids).logits


def idefics(model: Any, given: dict[str, Tensor], ids: Tensor, choose: Choose) -> Tensor:
    rows = choose(model.model.vision_model(given["pixel_values"].flatten(0, 1)).last_hidden_state)
    return model(ids, image_encoder_embeddings=rows[:, None], image_attention_mask=torch.ones(*ids.shape, 1)).logits


def mllama(model: Any, given: dict[str, Tensor], ids: Tensor, choose: Choose) -> Tensor:
    images = {name: given[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
    rows = model.model.multi_modal_projector(model.model.vision_model(**images).last_hidden_state)
    rows = choose(rows.flatten(1, 3))
    mask = torch.where(rows.isnan().any(-1), LESS, 0)[:, None, None].expand(-1, 1, ids.shape[1], -1)
    whole = torch.ones(len(ids), 1, ids.shape[1], 1, dtype=torch.float64)
    more = {"cross_attention_mask": mask, "full_text_row_masked_out_mask": whole}
    return model.lm_head(model.model.language_model(ids, cross_attention_states=rows.nan_to_num(), **more)[0])


def sequence(model: Any, given: dict[str, Tensor], ids: Tensor, choose: Choose) -> Tensor:
    words, inner = given["input_ids"], model.model
    florence = hasattr(inner, "vision_tower")
    images = (inner if florence else inner.encoder).get_image_features(given["pixel_values"]).pooler_output
    rows = model.get_input_embeddings()(words)
    rows = torch.cat((rows[:, :1], choose(images), rows[:, 1 + images.shape[1] :]), 1)
    encoder = inner.language_model.encoder if florence else inner.encoder.text_model
    return model(encoder_outputs=encoder(inputs_embeds=rows), decoder_input_ids=ids).logits


BY_HAND = {
    "blip": blip,
    **dict.fromkeys(("vision-encoder-decoder", "pix2struct"), encoded),
    "pp_formulanet": formula,
    "idefics": idefics,
    "mllama": mllama,
    **dict.fromkeys(("florence2", "t5gemma2"), sequence),
}


def given_to(model: Any) -> dict[str, Tensor]:
    """Two prompts; the second image of Llama has one tile, and that of Pix2Struct fewer patches."""
    given = {name: value.double() if value.is_floating_point() else value
             for name, value in compatibility.across(model, 2).items()}  # fmt: skip
    if "aspect_ratio_ids" in given:
        given["aspect_ratio_ids"][1] = 1
        given["aspect_ratio_mask"][1, :, 1:] = given["cross_attention_mask"][1, ..., 1:] = 0
    if "flattened_patches" in given:
        given["attention_mask"][1, 40:] = 0
    return given


def chosen(attached: Any) -> Choose:
    """The choice of the last call; images that kept all of their rows are filled up with NaN."""
    outcomes = attached.outcomes

    def choose(states: Tensor) -> Tensor:
        found = []
        for own, outcome in zip(states, outcomes, strict=True):
            each = outcome.before // max(len(outcome.reductions), 1)
            kept = [part * each + reduction.kept[0] for part, reduction in outcome.reductions]
            found.append(own[torch.cat(kept).sort().values] if kept else own[: outcome.before])
        return torch.nn.utils.rnn.pad_sequence(found, True, float("nan"))

    return choose


def endless(kind: str) -> Any:
    """A tiny model whose answers do not end."""
    model = compatibility.small_model(kind).double()
    for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
        setattr(model.generation_config, name, None)
    if kind == "blip":
        model.config.text_config.sep_token_id = 1023
    return model


@pytest.mark.parametrize("kind", BY_HAND)
@torch.no_grad()
def test_answers_as_the_rows_that_are_left(kind: str) -> None:
    model, alone = endless(kind), dict[int, Tensor]()
    given, by_hand = given_to(model), BY_HAND[kind]
    plain = model(**given).logits
    with attach(model, "divprune", tokens=10_000):
        assert torch.equal(model(**given).logits, plain)
    with attach(model, "divprune", tokens=20) as attached:
        logits, choose = model(**given).logits, chosen(attached)
        assert [outcome.after for outcome in attached.outcomes] == [20, 17 if kind == "mllama" else 20]
        greedy = model.generate(**copied(given), max_new_tokens=3, do_sample=False)
        again = model.generate(**copied(given), max_new_tokens=3, do_sample=False, use_cache=False)
        more = {"num_beams": 3, "output_scores": True, "return_dict_in_generate": True}
        beams = model.generate(**copied(given), max_new_tokens=3, **more)
        beams = beams.sequences, beams.sequences_scores  # its cache needs the hooks of Llama
        threads = [Thread(target=asked, args=(model, given, row, alone)) for row in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert torch.equal(model(**given).logits, plain) and not any(part._forward_hooks for part in model.modules())
    ids = given["decoder_input_ids" if "decoder_input_ids" in given else "input_ids"]
    torch.testing.assert_close(logits, by_hand(model, given, ids, choose))
    assert (logits - plain)[0].abs().max() > 0.01
    torch.testing.assert_close(torch.cat([alone[0], alone[1]]), logits)
    told = by_hand(model, given, greedy, choose)[:, -4:-1]
    assert torch.equal(told.argmax(-1), greedy[:, -3:]) and torch.equal(greedy, again)
    scores = by_hand(model, given, beams[0], choose)[:, -4:-1].log_softmax(-1)
    scores = scores.gather(2, beams[0][:, -3:, None]).mean((1, 2))
    torch.testing.assert_close(scores.float(), beams[1].float())


def copied(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in given.items()}  # BLIP writes to its ids


@torch.no_grad()
def asked(model: Any, given: dict[str, Tensor], row: int, found: dict[int, Tensor]) -> None:
    found[row] = model(**{name: value[row : row + 1] for name, value in given.items()}).logits


@pytest.mark.parametrize("method", ["consensusdrop", "random", "fastv", "uniform_grid", "flashvid"])
def test_what_is_not_known_is_refused(method: str) -> None:
    for kind in ("blip", "florence2"):
        model = compatibility.small_model(kind)
        with pytest.raises(OptionError, match=r"cross attention|grid of an image"):
            attach(model, method, tokens=10)
    with pytest.raises(OptionError, match="positions=keep"):
        attach(model, "divprune", tokens=10, positions="keep")


def test_types_and_classes_are_the_same() -> None:
    assert set(SIDES) == set(ACROSS.types)
