"""KV caches of language models: the metadata of a reduced prompt that is kept with its cache, and the size of a cache.

The original length of a prompt, the rows that are left and the position after it are an attribute of the cache, so that
every continuation finds them: `generate`, a user-written loop, a later turn, a copy of the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.call import CachedLayer
from llava_consensus.hosts.sequence import Assembled

KNOWN, CUTS = "_llava_consensus", "_llava_consensus_cuts"  # attributes of a cache
CACHE = ("past_key_values", "cache", "past_key_value")  # in transformers up to 5.23, from 5.24 on, in layers of 4.37


@dataclass(frozen=True, eq=False)
class Shortened:
    """A batch of prompts that were reduced before the first layer: S rows each, of which S' are left."""

    size: int  # S
    real: Tensor  # [R, S'] true where a row that is left is no padding
    following: Tensor  # [R] position after the full prompt, or [A, R] of A axes
    keeps: bool  # whether positions are those of the full prompt; else the rows that are left are numbered anew

    @property
    def left(self) -> int:
        """S'."""
        return self.real.shape[1]

    def mask(self, given: Any, cached: int, new: int) -> Any:
        """The mask of `new` rows after `cached` ones: of a mask of the full prompt, the columns that are left."""
        full = self.size - self.left + cached + new
        if not isinstance(given, Tensor) or given.ndim != 2 or given.shape[1] != full:
            return given
        return torch.cat((_repeated(self.real, len(given)).to(given), given[:, self.size :]), dim=1)

    def counted(self, given: Tensor, cached: int) -> Tensor:
        """Positions [R, n] or [axes, R, n] of rows after `cached` ones, where `generate` counted on from the last row,
        which stands for another one where a picture ends the prompt.
        """
        new, rows = given.shape[-1], given.shape[-2]
        prompt = max(self.left - cached, 0)  # rows of the prompt itself among the new ones
        if not self.keeps or prompt >= new:
            return given
        after = self._after(rows, cached + prompt, new - prompt).to(given)
        if after.ndim == 3:
            after = torch.cat((given[: -len(after), :, prompt:], after))  # an axis of rows may stand in front
        return torch.cat((given[..., :prompt], after), dim=-1) if prompt else after

    def own(self, given: Tensor | None, cached: int, new: int, rows: int) -> Tensor | None:
        """Position ids [R, n] of `new` rows after `cached` ones in a user-written decoding loop. Missing ids, and ids
        counted on the full prompt or on the cache, become those `generate` would use; others stay.
        """
        if self.following.ndim > 1 or (given is None and not self.keeps):
            return given
        after = self._after(rows, cached, new)
        if given is None:
            return after
        places = torch.arange(cached, cached + new, device=after.device)
        if self.keeps:
            return after.where(given == places, given)
        return (_repeated(self.real.sum(1), rows)[:, None] + places - self.left).where(given == after, given)

    def _after(self, rows: int, first: int, new: int) -> Tensor:
        """Positions of the full prompt's count for rows of the cache from `first` on: [R, n] or [A, R, n]."""
        places = torch.arange(first - self.left, first - self.left + new, device=self.following.device)
        return _repeated(self.following, rows, -1)[..., None] + places


def shortened(full: Assembled, out: Assembled, keeps: bool) -> Shortened:
    """Prompt metadata after a reduction, given the sequences before and after."""
    size = full.real.shape[1]
    last = size - 1 - full.real.int().flip(1).argmax(1)
    following = full.positions[torch.arange(len(last), device=last.device), last] + 1
    return Shortened(size, out.real, following.T if following.ndim > 1 else following, keeps)


def remember(cache: Any, known: Any, name: str = KNOWN) -> None:
    """Attaches prompt metadata to a KV cache; None for none. The tuples of transformers 4.37 cannot hold it."""
    if hasattr(cache, "__dict__") and (known is not None or name in vars(cache)):
        setattr(cache, name, known)


def begin_cache(cache: Any, prompt: Any) -> None:
    """Attaches the metadata of a prompt that an empty cache is given, in place of all that it held."""
    remember(cache, prompt)
    remember(cache, None, CUTS)


def known(cache: Any, name: str = KNOWN) -> Any:
    """Prompt metadata kept on a KV cache; None if there is none. `CUTS` is that of cuts between layers."""
    return getattr(cache, name, None)


def cache_of(output: Any) -> Any:
    """The cache among the results of a forward; None where there is none."""
    parts = output.values() if hasattr(output, "values") else output if isinstance(output, tuple) else ()
    return next((part for part in parts if hasattr(part, "get_seq_length")), None)


def cached_rows(cache: Any) -> int:
    """Rows that a cache holds."""
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0


def check_counted(cache: Any) -> None:
    """Raises OptionError for a later turn of `generate` on a cache whose first layer holds fewer rows than its prompt
    had: `generate` takes for new what stands after that many ids.
    """
    if cached_rows(cache) and getattr(known(cache, CUTS), "behind", 0):
        raise OptionError(
            "past_key_values: the method leaves the first layer fewer rows than the prompt has, by which generate() "
            "counts the conversation. Pass it whole, with its pictures and without a cache"
        )


def going_on(inputs: dict[str, Any], cached: int, counted: bool) -> dict[str, Any]:
    """Rewrites the arguments of a forward on a cache of `cached` rows for the reduced prompt.

    Args:
        counted: whether `generate` counted the positions.
    Raises:
        OptionError: for a cache whose rows are no longer those of its prompts.
    """
    prompt = known(cache_given(inputs))
    if not isinstance(prompt, Shortened):
        return inputs
    ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
    rows, new = (inputs["inputs_embeds"] if ids is None else ids).shape[:2]
    if counted and positions is not None:
        positions = prompt.counted(positions, cached)
    elif not counted:
        positions = prompt.own(positions, cached, new, rows)
    return {
        **inputs,
        "attention_mask": prompt.mask(inputs.get("attention_mask"), cached, new),
        "position_ids": positions,
    }


def _repeated(values: Tensor, rows: int, axis: int = 0) -> Tensor:
    """Values of R prompts for `rows` rows, the beams of a prompt together. OptionError where they do not go up."""
    beams, rest = divmod(rows, values.shape[axis])
    if rest:
        raise OptionError(
            f"past_key_values: the cache was filled by {values.shape[axis]} prompts and goes on with {rows} rows: give "
            "attention_mask and position_ids of your own, or pass the whole prompts"
        )
    return values if beams == 1 else values.repeat_interleave(beams, axis)


def cache_given(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model or a layer, or the results of one, by name; None where there is none."""
    return next((arguments[name] for name in CACHE if arguments.get(name) is not None), None)


def cached_layers(cache: Any, axis: int = -2) -> list[CachedLayer]:
    """Sizes of a cache of transformers 5 (`layers`, of which some may hold no keys, or hold them quantized, and are not
    counted), of 4.37 (`key_cache`) or of the older tuples, whose keys have their positions along `axis`.
    """
    pairs: list[tuple[Tensor, Tensor]]
    if hasattr(cache, "layers"):
        pairs = [(one.keys, one.values) for one in cache.layers if getattr(getattr(one, "keys", None), "ndim", 0) == 4]
    elif hasattr(cache, "key_cache"):
        pairs = list(zip(cache.key_cache, cache.value_cache, strict=True))
    else:
        pairs = [(layer[0], layer[1]) for layer in cache]
    return [CachedLayer(key.nbytes + value.nbytes, key.shape[0], key.shape[axis]) for key, value in pairs]
