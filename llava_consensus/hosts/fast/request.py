"""What one call of `generate` asks for, where it asks for what is captured: greedy answers of a bounded length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from llava_consensus.hosts.fast.decoding import Choice
from llava_consensus.hosts.fast.sizes import WORDS, rounded

READ = frozenset({"max_new_tokens", "min_new_tokens", "eos_token_id", "pad_token_id"})
WITHOUT_EFFECT = frozenset(  # on greedy answers of a number of tokens
    {"bos_token_id", "max_length", "transformers_version", "temperature", "top_k", "top_p", "top_h", "min_p"}
    | {"typical_p", "epsilon_cutoff", "eta_cutoff"}
)
NEUTRAL: Mapping[str, Any] = {
    "use_cache": True,
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
}


class DeclinedError(Exception):
    """This call is answered as without `fast`; the text says why."""


@dataclass(frozen=True)
class Request:
    """One call of `generate`."""

    rows: list[Tensor]  # ids of each prompt without padding, on the CPU
    placeholder: int  # id that stands for a picture
    choice: Choice
    pixels: Tensor | None  # [T, ...] tiles of all pictures, where they are not encoded yet
    tiles: list[int]  # of each picture
    given: Any = None  # what the host wants to know again

    def words_behind(self) -> list[int]:
        """Words of each prompt behind its last picture."""
        return [len(row) - 1 - _last(row, self.placeholder) for row in self.rows]

    @property
    def front(self) -> tuple[int, ...]:
        """Words that all prompts begin with, before any picture; none where a prompt has no picture."""
        sees = [(row == self.placeholder).nonzero()[:, 0].tolist() for row in self.rows]
        if not all(sees):
            return ()
        fronts = [row[: places[0]].tolist() for row, places in zip(self.rows, sees, strict=True)]
        equal = takewhile(lambda words: len(set(words)) == 1, zip(*fronts, strict=False))
        return tuple(words[0] for words in equal)

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """The prompts as [R, L] with the words behind the last picture rounded up in number: ids, true where a row is a
        word or stands for a picture, and true where it is that or a row to spare. All on the CPU.
        """
        behind = self.words_behind()
        room = rounded(max(behind), WORDS)
        lengths = torch.tensor([len(row) for row in self.rows])
        ends = lengths + room - torch.tensor(behind)
        width = int(ends.max())
        ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in self.rows])
        place = torch.arange(width)
        return ids, place < lengths[:, None], place < ends[:, None]


def unpadded(ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """The rows of a batch [R, L] without their padding, on the CPU."""
    ids = ids.cpu()
    if mask is None:
        return list(ids)
    if mask.ndim != 2:
        raise DeclinedError("attention_mask of other than two dimensions")
    kept = mask.cpu().bool()
    if not kept.any(1).all():
        raise DeclinedError("a prompt without a word")
    return [row[real] for row, real in zip(ids, kept, strict=True)]


def choice_of(module: Any, arguments: Mapping[str, Any]) -> Choice:
    """How tokens are chosen, given what of the arguments of `generate` is not about the prompt.

    Raises:
        DeclinedError: for anything but greedy answers of at most `max_new_tokens`.
    """
    arguments = dict(arguments)
    config = arguments.pop("generation_config", None)
    settings: dict[str, Any] = {}
    for source in (module.generation_config, config):
        names = () if source is None else vars(type(source)())  # others are of the model's own configuration
        known = [name for name in names if name[0] != "_"]
        settings |= {name: getattr(source, name) for name in known if getattr(source, name) is not None}
    settings |= arguments
    for name, value in settings.items():
        silent = value is None or value is False or name in READ | WITHOUT_EFFECT
        if not silent and (name not in NEUTRAL or NEUTRAL[name] != value):
            raise DeclinedError(f"generate({name}=...): captured are greedy answers alone")
    if settings.get("use_cache") is False:
        raise DeclinedError("generate(use_cache=False): captured is decoding with a cache")
    most = settings.get("max_new_tokens")
    if not isinstance(most, int) or most < 1:
        raise DeclinedError("generate() without max_new_tokens: the length of a fixed cache follows from it")
    ends, padding = _ids(settings.get("eos_token_id")), _ids(settings.get("pad_token_id"))
    return Choice(ends, (*padding, *ends, 0)[0], most, settings.get("min_new_tokens") or 0)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    found: Sequence[int] = value.tolist() if isinstance(value, Tensor) else value
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)  # type: ignore[call-overload]


def _last(row: Tensor, placeholder: int) -> int:
    """The last place of a placeholder, -1 where there is none."""
    places = (row == placeholder).nonzero()[:, 0]
    return int(places[-1]) if len(places) else -1
