"""The language model on fixed buffers: reading a prompt, and choosing one token after another.

A prompt stands in its buffers from the left; behind its last word there may be rows that are none, up to a rounded
length. By causality no word sees them, and the answer overwrites their keys and values one by one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.base import CutDecoder
from llava_consensus.hosts.fast.cache import FixedCache, Layer, seen_by_answer, seen_by_prompt
from llava_consensus.hosts.fast.capture import Captured, Capturing
from llava_consensus.hosts.fast.sizes import CacheSize
from llava_consensus.hosts.remembered import Remembered

PROMPTS = 8  # lengths of prompts that are captured for one cache


class Choice(NamedTuple):
    """How tokens are chosen, greedily."""

    ends: tuple[int, ...]  # ids that end an answer
    padding: int  # id behind the end
    most: int  # tokens of an answer
    least: int = 0  # tokens before which it does not end


class LanguageModel(NamedTuple):
    """What of a model decodes."""

    decoder: CutDecoder
    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    like: Tensor  # of the type and device of its states
    vocabulary: int

    @classmethod
    def of(cls, view: Any) -> "LanguageModel":
        """That of a host's view."""
        words, head = view.module.get_input_embeddings(), view.module.get_output_embeddings()
        return cls(view.decoder, words, head, words.weight, head.weight.shape[0])

    def size(self, rows: int, length: int) -> CacheSize:
        """Of a cache for so many sequences."""
        config = self.decoder.module.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = config.num_key_value_heads
        return CacheSize(len(self.decoder.layers), rows, heads, width, length, self.like.itemsize)

    def read(self, embeds: Tensor, seen: Tensor, positions: Tensor, cache: FixedCache) -> Tensor:
        """States [R, n, D] behind the last norm, keys and values being written where the cache says."""
        if self.decoder.kernel == "eager":
            seen = torch.zeros_like(seen, dtype=embeds.dtype).masked_fill(~seen, torch.finfo(embeds.dtype).min)
        output = self.decoder.module(
            inputs_embeds=embeds, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True
        )
        states: Tensor = output.last_hidden_state
        return states


class Answers:
    """Buffers for the answers of R prompts in a cache of one length, and what is captured on them.

    Args:
        model: what decodes.
        rows: R.
        length: of the cache.
        capturing: for the model's device.
    """

    def __init__(self, model: LanguageModel, rows: int, length: int, capturing: Capturing) -> None:
        device = model.like.device
        self.model, self.length, self._capturing = model, length, capturing
        self.cache = FixedCache(model.size(rows, length), model.like)
        self.front: Any = None  # whose rows stand first in the cache
        self.place = torch.zeros(rows, dtype=torch.long, device=device)  # of the token that is read next
        self.token = torch.zeros(rows, dtype=torch.long, device=device)
        self.logits = torch.zeros(rows, model.vocabulary, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self.written = torch.zeros(length, rows, dtype=torch.long, device=device)
        self.count = torch.zeros(1, dtype=torch.long, device=device)  # tokens that are written
        self._ends = torch.zeros(model.vocabulary, dtype=torch.bool, device=device)
        self._padding, self._least = torch.zeros_like(self.count), torch.zeros_like(self.count)
        self._chosen: Choice | None = None
        self._prompts = Remembered(PROMPTS)
        self._next = capturing(self._read_token)

    @property
    def graphs(self) -> int:
        """How many functions are captured here."""
        return 1 + len(self._prompts)

    def choose_by(self, choice: Choice) -> None:
        """Says how tokens are chosen from now on."""
        if choice == self._chosen:
            return
        self._ends.zero_()
        self._ends[torch.tensor(choice.ends, dtype=torch.long, device=self._ends.device)] = True
        self._padding.fill_(choice.padding)
        self._least.fill_(choice.least)
        self._chosen = choice

    def begin(self, key: Any, front: list[Layer]) -> None:
        """Puts the keys and values of a prompt's first rows in front of every sequence."""
        if key != self.front:
            self.cache.begin_with(front)
            self.front = key

    def prompt(self, begin: int, embeds: Tensor, lengths: Tensor) -> None:
        """Reads prompts from row `begin` on, [R, n, D], and chooses the first token of each answer.

        Args:
            begin: rows that stand in the cache already.
            embeds: n rows of each prompt, those behind its last word too.
            lengths: [R] rows of each prompt from its very first to its last word.
        """
        key = begin, embeds.shape[1]
        prompt: _Prompt = self._prompts.get(key, lambda: _Prompt(self, begin, embeds, self._capturing))
        if not begin:
            self.front = None  # its rows are overwritten
        prompt.embeds.copy_(embeds)
        prompt.lengths.copy_(lengths)
        prompt.captured.replay()

    def next(self) -> None:
        """Reads the token that was chosen last, and chooses another."""
        self._next.replay()

    def answers(self, count: int) -> Tensor:
        """The tokens of the answers: [R, count]."""
        return self.written[:count].t().clone()

    def read_prompt(self, begin: int, embeds: Tensor, lengths: Tensor) -> None:
        """What is captured of reading a prompt."""
        rows = embeds.shape[1]
        seen = seen_by_prompt(begin, rows, embeds.device).expand(len(embeds), -1, -1, -1)
        positions = torch.arange(begin, begin + rows, device=embeds.device).expand(len(embeds), -1)
        states = self.model.read(embeds, seen, positions, self.cache.at(slice(begin, begin + rows)))
        last = (lengths - 1 - begin)[:, None, None].expand(-1, 1, states.shape[2])
        self.count.zero_()
        self.finished.zero_()
        self.place.copy_(lengths)
        self._choose(states.gather(1, last)[:, 0])

    def _read_token(self) -> None:
        """What is captured of every further token. Behind the end of the cache nothing is written further."""
        place = self.place.clamp(max=self.length - 1)
        seen = seen_by_answer(place, self.length)
        embeds = self.model.embed(self.token)[:, None]
        states = self.model.read(embeds, seen, place[:, None], self.cache.at(place))
        self.place.add_(1)
        self._choose(states[:, 0])

    def _choose(self, states: Tensor) -> None:
        """The most likely token of each row, as `generate` chooses: padding behind an end, no end before the least."""
        logits = self.model.head(states).float()
        self.logits.copy_(logits)
        early = self._ends & (self.count < self._least)
        best = logits.masked_fill(early, float("-inf")).argmax(1)
        token = torch.where(self.finished, self._padding, best)
        self.token.copy_(token)
        self.written.index_copy_(0, self.count.clamp(max=self.length - 1), token[None])
        self.finished.logical_or_(self._ends[token])
        self.count.add_(1)


class _Prompt:
    """Prompts of one length, captured."""

    def __init__(self, answers: Answers, begin: int, embeds: Tensor, capturing: Capturing) -> None:
        self.embeds = torch.zeros_like(embeds, memory_format=torch.contiguous_format)
        self.lengths = torch.full((len(embeds),), begin + 1, dtype=torch.long, device=embeds.device)
        self.captured: Captured = capturing(lambda: answers.read_prompt(begin, self.embeds, self.lengths))
