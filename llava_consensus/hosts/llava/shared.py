"""What several prompts begin with alike is read once, into a cache that all of them go on from.

Where a method reads the question these are the words in front of the picture. Where it does not, they are words and
pictures, and several pictures are read in one batch. Needs the caches of transformers 5.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor

from llava_consensus.hosts.base import Encoded, Prompt
from llava_consensus.hosts.llava.prepare import PREPARE
from llava_consensus.hosts.llava.prompts import image_place, text_rows

if TYPE_CHECKING:
    from llava_consensus.hosts.llava.host import LlavaHost

REPEATS = hasattr(transformers.DynamicCache, "batch_repeat_interleave")  # whether a cache can go to several rows


class Assembled(NamedTuple):
    """Sequences with their pictures, padding behind the words that all of them begin with."""

    embeds: Tensor  # [R, S, D]
    real: Tensor  # [R, S] true where a row is no padding
    words: int  # rows in front of the first picture


def ask_behind_words(host: "LlavaHost", pictures: list[Encoded], rows: list[Tensor], prompt: Prompt) -> list[str]:
    """Texts of prompts [L] each that begin with the same words; their pictures are put in for each of them.

    Args:
        host: whose model answers; a call with the encoded pictures is under way.
        pictures: of all prompts, in order.
        rows: the prompts' ids.
        prompt: one of them, for the bounds of the answers.
    """
    embeds, real, words = _assembled(host, rows, pictures)
    cache = _read(host.model, embeds[:1, :words])
    spread(cache, [0] * len(rows))
    output = _generate(host, prompt, inputs_embeds=embeds, attention_mask=real.long(), past_key_values=cache)
    return host.decode(output)


def ask_behind_pictures(
    host: "LlavaHost", pictures: list[list[Encoded]], owners: list[int], rows: list[Tensor], prompt: Prompt
) -> list[str]:
    """Texts of prompts whose pictures are read once, whatever is asked about them.

    Args:
        host, rows, prompt: as in `ask_behind_words`.
        pictures: distinct ones, each as the list of what one prompt shows.
        owners: which of these lists each prompt shows.
    """
    starts = [len(row) - text_rows(row)[1] for row in rows]
    fronts = [rows[owners.index(number)][: starts[owners.index(number)]] for number in range(len(pictures))]
    embeds, real, words = _assembled(host, fronts, [picture for shown in pictures for picture in shown])
    if len(fronts) == 1:
        cache = _read(host.model, embeds)
    else:
        cache = _read(host.model, embeds[:1, :words])
        cache.batch_repeat_interleave(len(fronts))
        cache = _read(host.model, embeds[:, words:], real, cache)
    spread(cache, owners)
    ids, mask = host.pad([row[start:] for row, start in zip(rows, starts, strict=True)])
    read = real.long()[owners]
    ids = torch.cat((torch.ones_like(read), ids), dim=1)  # of what was read nobody looks at the ids
    mask = torch.cat((read, mask), dim=1)
    output = _generate(host, prompt, ids, attention_mask=mask, past_key_values=cache)
    return host.decode(output[:, ids.shape[1] :])


def spread(cache: Any, owners: list[int]) -> None:
    """Makes the cache of several sequences one of prompts that go on from them."""
    from llava_consensus.hosts import room

    room.spread(cache, owners)


def _generate(host: "LlavaHost", prompt: Prompt, *ids: Tensor, **inputs: Any) -> Tensor:
    """Ids of answers, by the generation of transformers: the official one takes neither embeddings nor ids alone."""
    output: Tensor = transformers.GenerationMixin.generate(host.model, *ids, **inputs, **host.generation(prompt))
    return output


def _assembled(host: "LlavaHost", rows: list[Tensor], pictures: list[Encoded]) -> Assembled:
    """Sequences of prompts that begin with the same words, with their pictures."""
    words = image_place(rows[0])
    ids, mask = host.pad(rows, left=False)
    prepare = getattr(host.model, PREPARE)
    sizes = [picture.size for picture in pictures]
    _, _, mask, _, embeds, _ = prepare(ids, None, mask, None, None, host.blank(pictures), sizes)
    return Assembled(*padding_behind(words, embeds, mask.bool()), words)


def padding_behind(words: int, embeds: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences [R, S, D] that are padded on the right, with their padding behind the first `words` rows, and which of
    their rows are real [R, S].
    """
    place = torch.arange(real.shape[1], device=real.device)
    source = place - (~real).sum(1, keepdim=True)  # [R, S]
    front = place < words
    index = torch.where(front, place, source).clamp_min(0)
    return embeds.gather(1, index[..., None].expand_as(embeds)), front | (source >= words)


def _read(model: Any, embeds: Tensor, real: Tensor | None = None, cache: Any = None) -> Any:
    """The cache behind embeddings [R, n, D], which go on from a cache where there is one; `real` [R, S] is about all
    rows, those in the cache among them.
    """
    if real is None:
        return model.get_model()(inputs_embeds=embeds, use_cache=True).past_key_values
    mask = real.long()
    positions = (mask.cumsum(1) - 1)[:, -embeds.shape[1] :].clamp_min(0)
    inputs = {"inputs_embeds": embeds, "attention_mask": mask, "position_ids": positions}
    return model.get_model()(**inputs, past_key_values=cache, use_cache=True).past_key_values
