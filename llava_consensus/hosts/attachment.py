"""A method attached to one model instance: everything that is true of any vision-language model.

    host -> attachment -> reduction -> attachment -> host

The host says how its model is entered and assembles sequences; the attachment collects what the method needs, gives
every picture its budget, reduces, puts the reduced tokens back, and reports. Hooks are installed when a method is
attached and removed by `detach`; what one call collects and reports lives in that call (`call.py`), so that calls in
several threads never meet. The class of the model is never touched.
"""

import copy
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts import call as calls
from llava_consensus.hosts.base import Model, Tiles, Tower
from llava_consensus.hosts.cache import cached_layers
from llava_consensus.hosts.call import Call, Caller
from llava_consensus.hosts.cuts import DecoderHooks
from llava_consensus.hosts.inside import acts_inside, check_inside, install_inside, run_inside
from llava_consensus.hosts.layout import Layout, RowKinds, Shares, content, copied, read_layout
from llava_consensus.hosts.reduce import (
    Group,
    Source,
    counted,
    inserts,
    outcomes,
    picture_rows,
    planned,
    probe_text,
    shared_fronts,
    with_pictures,
)
from llava_consensus.hosts.remembered import Remembered
from llava_consensus.hosts.sequence import Rule, Sequence, cut, splice
from llava_consensus.hosts.shadow import Shadow
from llava_consensus.hosts.towers import attending_block, chosen_block, fingerprint, install_taps, skip_unread
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need, Reduction, Stopwatch, VisualTokens

NO_TEXT = "no text after the image: reduced by vision saliency alone"
STRUCTURES = 64  # of prompts, that are remembered
GIVEN = frozenset({Need.PROBE, Need.FINGERPRINT, Need.QUESTION, Need.WHOLE_PICTURES})  # whatever the tower is


class Attachment(Caller, Shares):
    """A method on one model; leaving the `with` block detaches it. `outcomes` says what became of the pictures of the
    last call.

    Args:
        model: a host's view of the model.
        method: what reduces.
        budget: of one picture, a number of tokens or a share of those it has.
    Raises:
        OptionError: for a method this model has no parts for, or a model that has a method already.
    """

    def __init__(self, model: Model, method: Method, budget: Budget | Share) -> None:
        self.model, self.method, self.budget = model, method, budget
        self.active = False
        self.structures = Remembered(STRUCTURES)  # of prompts, with all that follows from them alone
        self._check()
        self._clip = model.clip_text() if Need.QUESTION in method.needs else None
        self._warned = False
        self._handles: list[Any] = []
        self._shadows: list[Shadow] = []
        self.decoder: DecoderHooks | None = None
        try:
            self._install()
        except BaseException:
            self.detach()
            raise
        self.active = True

    def _install(self) -> None:
        """Hooks and shadows, silent until a call is under way."""
        module, tower = self.model.module, self.model.tower
        self._handles.append(module.register_forward_pre_hook(self._enter_model))
        self._handles.append(module.register_forward_hook(calls.leave_model, always_call=True))
        self._handles.append(module.register_forward_hook(self._read_cache))
        if tower is not None:
            self._handles += install_taps(self, tower)
            shadows, handles = install_inside(self, tower)
            self._shadows += shadows
            self._handles += handles
            self._shadows += skip_unread(self, tower)
        if self.method.place is Place.DECODER:
            self.decoder = DecoderHooks(self)
            self._handles += self.decoder.install(self.model.decoder)
            self._shadows += self.decoder.shadows(self.model.decoder)
        for name, entrance in self.model.entrances(self).items():
            owner, _, attribute = name.rpartition(".")
            self._shadows.append(Shadow(module.get_submodule(owner), attribute, entrance))

    def _check(self) -> None:
        """Raises OptionError for what cannot be attached, with the remedy."""
        hooks = self.model.module._forward_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), Attachment) for hook in hooks):
            raise OptionError("this model has a method attached already: detach it first")
        tower, needs = self.model.tower, self.method.needs
        if tower is None:
            return
        missing_needs = sorted(need.name.lower() for need in needs - tower.offers - GIVEN)
        if missing_needs:
            raise OptionError(
                f"{type(self.method).__name__} needs {', '.join(missing_needs)}, which the vision side of "
                f"{type(self.model.module).__name__} does not have: take another method (llava-consensus list)"
            )
        self.attention_block(tower)
        if acts_inside(self.method):
            check_inside(tower, self.method, [*self.tile_tokens(1), *self.tile_tokens(self.model.most_tiles)])

    def attention_block(self, tower: Tower) -> int:
        """The vision block whose queries and keys the method reads."""
        features = chosen_block(tower, self.method.vision_layer)
        return attending_block(tower, features, self.method.blocks_ahead)

    def detach(self) -> None:
        """Gives the model back as it was, bit for bit. Detaching twice does nothing."""
        for handle in self._handles:
            handle.remove()
        for shadow in reversed(self._shadows):
            shadow.restore()
        self._handles, self._shadows, self.active = [], [], False

    def __repr__(self) -> str:
        amount = f"{self.budget.share:g} of the" if isinstance(self.budget, Share) else f"{self.budget.tokens}"
        method, model = self.method.title or type(self.method).__name__, type(self.model.module).__name__
        before, after = (sum(getattr(one, side) for one in self.outcomes) for side in ("before", "after"))
        last = f"last call {before} -> {after} ({after / before:.1%} kept)" if before else "no call yet"
        return f"<{method} on {model}, {amount} tokens, {last if self.active else 'detached'}>"

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *error: Any) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Attachment":
        """A copy of an attached model is attached; what its calls reported stays with the original."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, None if name == "_latest" else copy.deepcopy(value, memo))
        return twin

    @property
    def here(self) -> Model:
        """The model whose forward runs: this one, or its replica on another device."""
        module = calls.called(self.model.module)
        return self.model if module is self.model.module else self.model.of(module)

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        """Begins a call where none is under way: every forward of the model belongs to one."""
        calls.enter_model(module)
        if calls.current(self) is None:
            self.current()

    def _read_cache(self, module: nn.Module, args: Any, output: Any) -> None:
        """Sizes of the cache behind the first forward of a call."""
        call, cache = calls.current(self), getattr(output, "past_key_values", None)
        if call is not None and call.scoped and cache is not None and not call.cache:
            call.cache = cached_layers(cache, getattr(self.model.decoder, "cache_axis", -2))

    def encode(self, pixels: Tensor, tiles: list[int]) -> list[Tiles]:
        """Tiles [T, ...] of pictures of so many tiles each, through tower and projector, with the parts the method
        needs: what was encoded before where there is some, one `Tiles` for each picture.
        """
        call = self.current(fresh=False)
        if call.encoded is not None:
            return call.encoded
        tower = self.here.tower
        assert tower is not None
        with self.collecting() as parts:
            if acts_inside(self.method):
                tokens = [count for number in tiles for count in self.tile_tokens(number)]
                projected, slot = run_inside(self.method, call, tower, pixels, tokens)
            else:
                projected, slot = tower.encode(pixels), None
        if slot is not None:
            parts["slot"] = slot
        if Need.FINGERPRINT in self.method.needs:
            parts["fingerprint"] = fingerprint(pixels)
        split = {name: value.split(tiles) for name, value in parts.items()}
        return [
            Tiles(picture_tiles, {name: values[i] for name, values in split.items()})
            for i, picture_tiles in enumerate(projected.split(tiles))
        ]

    @contextmanager
    def collecting(self) -> Iterator[dict[str, Tensor]]:
        """The parts that hooks take from the tower while the body runs."""
        call = self.current(fresh=False)
        parts: dict[str, Tensor] = {}
        call.parts = parts
        try:
            yield parts
        finally:
            call.parts = None

    def layout(self, kinds: RowKinds, structure: Hashable = None) -> Layout:
        """Where the pictures of assembled sequences stand, and what of them is reduced. Remembered: most prompts have
        the structure of one before.

        Args:
            kinds: what every row is.
            structure: equal for equal kinds, where the host knows such a key; else they are compared themselves.
        """
        answer_rows, drops_newlines = self.method.answer_rows, self.method.newlines == "drop"
        key = ("layout", structure or content(kinds), self.model.most_tiles)
        return self.structures.get(key, lambda: read_layout(copied(kinds), self.budgets, answer_rows, drops_newlines))

    def pass_by(self, call: Call, layout: Layout, limit: int | None = None) -> None:
        """Reports the pictures of a call that stay as they are, `limit` being the rows that are left of a longer
        sequence.
        """
        call.outcomes, call.notes, call.watch = outcomes(layout, []), (), None
        if limit is not None:
            left = picture_rows(layout).where(layout.real.cumsum(1) <= limit, -1)
            call.outcomes = counted(call.outcomes, left)

    @property
    def cuts_by_tower(self) -> bool:
        """Whether the method cuts between decoder layers by what the vision tower says."""
        return self.decoder is not None and bool(self.method.needs)

    def arm(
        self, call: Call, layout: Layout, embeds: Tensor, tiles: "list[Tiles] | None" = None, limit: int | None = None
    ) -> None:
        """Reports pictures that stay as they are; sequences [R, S, D] that a method between decoder layers will cut
        while they are read are announced to it, with the tiles of each picture where it reads the tower.
        """
        self.pass_by(call, layout, limit)
        if self.decoder is not None:
            self.decoder.arm(call, layout, embeds, tiles or [])

    def reduce(
        self,
        call: Call,
        full: Sequence,
        layout: Layout,
        tiles: list[Tiles],
        prompts: Tensor | None,
        limit: int | None = None,
    ) -> Sequence:
        """The sequences with their visual tokens reduced, padded on the right; the call has the outcomes.

        Args:
            full: as the language model would have read them.
            tiles: of each picture of the call.
            prompts: [R] int64 fingerprint of each row's prompt; None where the method does not ask for it.
            limit: rows that are left of a longer sequence, as the host truncates.
        """
        watch = call.watch = call.watch or Stopwatch(full.embeds.device)
        model = self.here
        assert model.tower is not None
        if self.method.positions == "mean":
            full = replace(full, position_rule=Rule.MEAN)
        with torch.autocast(full.embeds.device.type, enabled=False):
            clip = (
                None if self._clip is None else self._clip.sides(model.tower, tiles, self._asked(call, len(full.real)))
            )
            probing = Need.PROBE in self.method.needs
            with watch.time("probe"):
                fronts = shared_fronts(layout, tiles) if probing and call.begin_alike else None
                probe = probe_text(full, layout, model.decoder, fronts, call.spare) if probing else None
            block = self.attention_block(model.tower)
            source = Source(full, layout, tiles, model.tower, block, self.method, prompts, probe, clip)
            groups = []
            for units in source.groups():
                with watch.time("gather"):
                    tokens = source.tokens(units)
                groups.append(Group(units, _timed(self.method, tokens, units[0].budget)))
        with watch.time("splice"):
            call.outcomes = outcomes(layout, groups)
            slots, keys = planned(full, layout, groups, self.method.order)
            truncated = limit is not None and max(slots.lengths) > limit
            full = with_pictures(full, layout) if truncated else full
            out = splice(full, inserts(full, groups, keys), slots)
            if truncated and limit is not None:
                out = cut(out, limit)
                call.outcomes = counted(call.outcomes, out.channels["picture"].values)
        self._note_missing_text(call, layout)
        return out

    def _asked(self, call: Call, rows: int) -> list[str]:
        """The question of each row, for methods that read it themselves. OptionError where they are not known."""
        if call.questions is None or len(call.questions) != rows:
            raise OptionError(
                "this method reads the question: say it around the call, `with attached.asking([...]):`, "
                f"{rows} texts, one for each prompt"
            )
        return [self.method.query(text) for text in call.questions]

    def _note_missing_text(self, call: Call, layout: Layout) -> None:
        """Says once, and in every record, that a prompt had nothing to probe with."""
        text_missing = Need.PROBE in self.method.needs and any(len(picture.text) == 0 for picture in layout.pictures)
        call.notes = (NO_TEXT,) if text_missing else ()
        if text_missing and not self._warned:
            self._warned = True
            warnings.warn(NO_TEXT, stacklevel=4)


def _timed(method: Method, tokens: VisualTokens, budget: Budget) -> Reduction:
    """The reduction with its time: by the method's own steps, or as one where it has none."""
    watch = Stopwatch(tokens.projected.device)
    with watch.time("method"):
        reduction = method.reduce(tokens, budget)
    return reduction if reduction.watch is not None else reduction._replace(watch=watch)
