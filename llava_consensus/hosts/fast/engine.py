"""Answers in fixed shapes, for one attachment: what of a call is captured is looked up or captured now, and replayed.

    pixels -> tower -> selection -> prompt -> token, token, ...

Each arrow is one replay. Graphs are bounded in number; the ones not asked for the longest go first. One call at a time
uses the buffers: threads wait for each other.
"""

import copy
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.hosts.base import Tiles
from llava_consensus.hosts.call import Call
from llava_consensus.hosts.decoder.cache import CachedLayer
from llava_consensus.hosts.fast.cache import FixedCache, Layer, seen_by_prompt
from llava_consensus.hosts.fast.capture import Capturing
from llava_consensus.hosts.fast.checks import check_method, check_model
from llava_consensus.hosts.fast.decoding import Answers, LanguageModel
from llava_consensus.hosts.fast.phases import FixedHost, Leaves, Plan, SelectionPhase, TowerPhase
from llava_consensus.hosts.fast.request import DeclinedError, Request
from llava_consensus.hosts.fast.sizes import cache_length
from llava_consensus.hosts.remembered import Remembered
from llava_consensus.reduction.stopwatch import Stopwatch

Parts = list[tuple[dict[str, Any], dict[str, Any]]]  # parameters and modules of every module
TOWERS, SELECTIONS, CACHES, FRONTS = 4, 16, 4, 4  # how many of each are remembered


class Fast:
    """What makes an attachment answer in fixed shapes.

    Args:
        attachment: of a model and a method that can.
    Raises:
        OptionError: for a model or method that cannot, with the reason.
    """

    def __init__(self, attachment: Any) -> None:
        check_method(attachment.method)
        check_model(attachment.model)
        self.attachment = attachment
        self.declined: Counter[str] = Counter()  # why calls were answered without
        self._listeners: list[Callable[[Answers], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._door = threading.RLock()
        self._parts: Parts = []  # of the model that was captured
        self._known_places: list[int] = []
        self._towers, self._selections = Remembered(TOWERS), Remembered(SELECTIONS)
        self._caches, self._fronts = Remembered(CACHES), Remembered(FRONTS)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Fast":
        """Of a copied attachment: nothing is captured yet."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.attachment = copy.deepcopy(self.attachment, memo)
        twin.declined, twin._listeners = Counter(), []
        twin._reset()
        return twin

    @property
    def graphs(self) -> dict[str, int]:
        """How many functions are captured, by phase."""
        caches: list[Answers] = self._caches.values()
        counts = {"tower": len(self._towers), "selection": len(self._selections)}
        return {**counts, "language model": sum(answers.graphs for answers in caches)}

    @property
    def cache_bytes(self) -> int:
        """What all fixed caches take now."""
        return sum(answers.cache.size.bytes for answers in self._caches.values())

    @contextmanager
    def listening(self, listener: Callable[[Answers], None]) -> Iterator[None]:
        """Calls `listener` with the buffers behind every token while the body runs."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def generate(self, arguments: dict[str, Any]) -> Tensor | None:
        """What `generate` returns for these arguments, all by name; None for a call that is to be answered as without
        `fast`. A call of the attachment must be under way.
        """
        try:
            with self._door, torch.inference_mode(False), torch.no_grad():
                return self._generate(arguments)
        except DeclinedError as error:
            if not self.declined[str(error)]:
                warnings.warn(f"fast: answered without it: {error}", stacklevel=4)
            self.declined[str(error)] += 1
            return None

    def encode(self, pixels: Tensor, tiles: list[int]) -> list[Tiles] | None:
        """Pictures through the captured tower, in tensors of their own; None where that is not possible now."""
        try:
            with self._door, torch.inference_mode(False), torch.no_grad():
                self._check_now()
                found = Leaves(self._tower(pixels, tiles)(pixels))
                copies: list[Tiles] = found.with_tensors([tensor.clone() for tensor in found.tensors])
                return copies
        except DeclinedError:
            return None

    def _generate(self, arguments: dict[str, Any]) -> Tensor:
        self._check_now()
        call: Call = self.attachment.current(fresh=False)
        host = self._host
        request = host.request(arguments, call)
        ids, words, real = request.padded()
        if self.attachment.reads_prompts and not all(request.words_behind()):
            raise DeclinedError("a prompt without words behind its picture, for a method that reads them")
        device = self._capturing.device
        watch = Stopwatch(device)
        plan = host.plan(request, ids, real, call)
        tiles = Leaves(self._tiles(request, call))
        prompt = ids.to(device), words.to(device), (real & ~words).sum(1).to(device)
        key = plan.key, ids.shape, tiles.shapes()
        selection = self._selections.get(key, lambda: self._selection(plan, prompt, tiles))
        with watch.time("selection"):
            selected = selection(prompt, tiles)
        answers = self._answers(request, plan, selected.embeds)
        front = request.front
        begin = min(len(front), selected.embeds.shape[1] - 1)
        if begin:
            answers.begin(front[:begin], self._fronts.get(front[:begin], lambda: self._front(front[:begin])))
        answers.choose_by(request.choice)
        answers.prompt(begin, selected.embeds[:, begin:], selected.lengths)
        call.outcomes, call.notes, call.watch = selection.outcomes(), selected.notes, watch
        call.cache = _used(answers, selected.embeds.shape[1] - int((real & ~words).sum(1).min()))
        return host.result(request, self._decode(answers, request.choice.most))

    def _decode(self, answers: Answers, most: int) -> Tensor:
        """Replays until every answer has ended: [R, n]. It waits for the device once for each token, as it must to
        know that.
        """
        count = 1
        self._token_done(answers)
        while count < most and not bool(answers.finished.all()):
            answers.next()
            count += 1
            self._token_done(answers)
        return answers.answers(count)

    def _token_done(self, answers: Answers) -> None:
        for listener in self._listeners:
            listener(answers)

    @property
    def _host(self) -> FixedHost:
        host: FixedHost = self.attachment.model.fixed(self.attachment)
        return host

    def _tiles(self, request: Request, call: Call) -> list[Tiles]:
        """The pictures behind the tower: encoded before, or now."""
        if call.encoded is not None or request.pixels is None:
            return [getattr(picture, "tiles", picture) for picture in call.encoded or []]
        return self._tower(request.pixels, request.tiles)(request.pixels)

    def _tower(self, pixels: Tensor, tiles: list[int]) -> TowerPhase:
        key = pixels.shape, pixels.dtype, tuple(tiles)
        return self._towers.get(key, lambda: TowerPhase(self._host, pixels, tiles, self._capturing))

    def _selection(self, plan: Plan, prompt: tuple[Tensor, Tensor, Tensor], tiles: Leaves) -> SelectionPhase:
        return SelectionPhase(self.attachment, plan, prompt, tiles, self._capturing)

    def _answers(self, request: Request, plan: Plan, embeds: Tensor) -> Answers:
        """Buffers for the answers of these prompts [R, S, D]."""
        rows, length = embeds.shape[:2]
        reach: int = self.attachment.model.decoder.reach
        if length > (plan.limit or length) or length + request.choice.most > reach:
            raise DeclinedError("a prompt or an answer longer than the model's limit")
        capacity = cache_length(length, request.choice.most)
        return self._caches.get(
            (rows, capacity), lambda: Answers(self._language_model, rows, capacity, self._capturing)
        )

    def _front(self, ids: tuple[int, ...]) -> list[Layer]:
        """Keys and values of words that prompts begin with: [1, H_kv, P, d] for each layer."""
        model = self._language_model
        words = torch.tensor([ids], device=model.like.device)
        cache = FixedCache(model.size(1, len(ids)), model.like).at(slice(0, len(ids)))
        positions = torch.arange(len(ids), device=words.device)[None]
        model.read(model.embed(words), seen_by_prompt(0, len(ids), words.device), positions, cache)
        return cache.first_rows(len(ids))

    def _check_now(self) -> None:
        """Raises DeclinedError where the model is not as it was captured, and forgets graphs of weights that moved."""
        module = self.attachment.model.module
        if self.attachment.here.module is not module:
            raise DeclinedError("a replica of the model, whose weights are elsewhere")
        if module.training:
            raise DeclinedError("a model that is being trained")
        device = module.device
        if torch.is_autocast_enabled(device.type):
            raise DeclinedError("autocast, under which nothing was captured")
        if not self._parts or _places(self._parts) != self._known_places:
            self._reset_graphs(module, device)

    def _reset_graphs(self, module: nn.Module, device: torch.device) -> None:
        door = self._door
        self._reset()
        self._door = door
        self._parts = [(part._parameters, part._modules) for part in module.modules()]
        self._known_places = _places(self._parts)
        self._capturing = Capturing(device)
        self._language_model = LanguageModel.of(self.attachment.model)


def _places(parts: Parts) -> list[int]:
    """Where all weights are, and which modules there are. Walking over the model anew would take milliseconds."""
    weights = [weight.data_ptr() for parameters, _ in parts for weight in parameters.values() if weight is not None]
    return weights + [id(module) for _, modules in parts for module in modules.values()]


def _used(answers: Answers, length: int) -> list[CachedLayer]:
    """What of the fixed cache the prompts fill; the rest of it is for the answers and for rounding."""
    size = answers.cache.size._replace(length=length, layers=1)
    return [CachedLayer(size.bytes, size.rows, length)] * answers.cache.size.layers
