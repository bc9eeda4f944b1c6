"""A method attached to one model instance: everything that is true of any vision-language model.

    host -> attachment -> reduction -> attachment -> host

The host says how its model is entered and assembles sequences; the attachment lets the tower give what the method
reads, has the sequences reduced (`reduce.py`, or between decoder layers `layer_hooks.py`), and reports. Hooks are
installed when a method is attached and removed by `detach`; they look for the call under way (`call.py`) and do nothing
where there is none. The class of the model is never touched.
"""

import copy
import inspect
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Model, PictureOutcome, Tiles, Tower
from llava_consensus.hosts.caches import cache_given, cached_layers
from llava_consensus.hosts.call import (
    Call,
    Given,
    Report,
    Shadow,
    begin,
    called,
    code_of,
    collecting,
    current_call,
    enter_model,
    install_taps,
    latest_call,
    leave_model,
    on_stack,
    scope,
    skip_unread,
    uncompiled,
)
from llava_consensus.hosts.reduce import NO_TEXT, compact, reduce, untouched
from llava_consensus.hosts.sequence import Assembled, Layout, RowKinds, Sharing, read_layout
from llava_consensus.hosts.towers import GIVEN, blocks_read, earlier_block, fingerprint, lacking
from llava_consensus.reduction.budget import AUTO, Auto, Budget, Share, amount, of_prompts
from llava_consensus.reduction.composition import Composition
from llava_consensus.reduction.detail import auto_share
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import ClipSides, Need, Stopwatch

LEFT = "left"  # layout and tiles of what the methods before the language model have left, in the state of a call
POLL = 0.002  # seconds between looks at what other threads run


class BudgetedMethod(NamedTuple):
    """A method with its budget."""

    method: Method
    budget: Budget | Share | Auto


def check_stages(model: Any, stages: list[BudgetedMethod]) -> None:
    """Raises OptionError for methods that do not act one after the other on this model."""
    names = [type(stage.method).__name__ for stage in stages]
    if sum(bool(stage.method.needs - GIVEN) for stage in stages) > 1:
        raise OptionError(f"{' and '.join(names)} both read the vision tower, once each. Take one that reads none")
    inside = stages[0].method.acts_inside and not getattr(model, "reads_inside", False)
    for name, stage in zip(names[1:], stages[1:], strict=True):
        if inside and stage.method.needs:
            raise OptionError(
                f"{name} behind {names[0]}: what it reads of a smaller picture is known on LLaVA and Qwen-VL, not on "
                f"{type(model.module).__name__}. Take one that reads tokens alone (divprune, uniform_grid)"
            )
    closes = stages[-1].method.place is Place.DECODER and stages[-1].method.positions == "renumber"
    if closes and stages[-2].method.positions != "renumber" and not getattr(model, "keeps_positions", False):
        raise OptionError(f"positions=renumber of {names[-1]} behind {names[-2]}, which keeps them. Give both the same")


class Attachment:
    """A method on one model; leaving the `with` block detaches it. `outcomes` holds the per-picture results of the last
    call.

    Args:
        model: a host's view of the model.
        method: what reduces.
        budget: of one picture, a number of tokens, a share of those it has, or `Auto`.
        total: the most tokens of the pictures of one prompt; None is any number.
    Raises:
        OptionError: for a method this model has no parts for, or a model that has a method already.
    """

    def __init__(self, model: Model, method: Method, budget: Budget | Share | Auto, total: int | None = None) -> None:
        # A view of its own: views keep the parts they have read, and the model may have changed since then.
        self.model, self.asked, self.budget, self.total = model.of(model.module), method, budget, total
        self.stages = [BudgetedMethod(method, budget)]
        if isinstance(method, Composition):
            own = method.budgets(budget)
            self.stages = [BudgetedMethod(part.method, one) for part, one in zip(method.parts, own, strict=True)]
        methods = [stage.method for stage in self.stages]
        self.method = methods[0]  # which acts first
        self.inside = self.method.acts_inside  # before the projector
        self.needs: frozenset[Need] = frozenset().union(*(one.needs for one in methods))  # parts that one of them reads
        # the method that reads the tower; the first one where none does
        self.reader: Method = next((one for one in methods if one.needs - GIVEN), self.method)
        self.active = False
        self._open = False  # whether calls that begin are reduced
        self._check()
        self._clip = model.clip_text() if Need.QUESTION in self.needs else None
        self._warned = False
        self._latest: Call | None = None
        self.settled = False  # whether a host that derives its record at the first pictures has installed what it names
        self._handles: list[Any] = []
        self._shadows: list[Shadow] = []
        self.cuts: Any = None  # hooks between decoder layers
        try:
            self._install()
        except BaseException:
            self.detach()
            raise
        self.active = self._open = True

    def _install(self) -> None:
        """Hooks and shadows, silent until a call is under way."""
        module, tower = self.model.module, self.model.tower
        if self.stages[-1].method.place is Place.DECODER:
            from llava_consensus.hosts.layer_hooks import Cuts

            self.cuts = Cuts(self)
        asks = Need.PROBE in self.needs or (self.cuts is not None and self.cuts.method.attention == "own")
        if (asks or self.cuts is not None) and not getattr(self.model, "records", False):
            check = getattr(self.model.decoder, "check_attention", None)
            if check is not None:
                check(self.cuts is not None, asks)
        self._handles.append(module.register_forward_pre_hook(self._enter_model))
        self._handles.append(module.register_forward_hook(leave_model, always_call=True))
        self._handles.append(module.register_forward_hook(self._read_cache))
        if tower is not None:
            self._handles += install_taps(self, tower)
            if self.inside:
                from llava_consensus.hosts.tower_hooks import install_inside

                shadows, handles = install_inside(self, tower)
                self._shadows += shadows
                self._handles += handles
            self._shadows += skip_unread(self, tower)
        if self.cuts is not None:
            self._handles += self.cuts.install(self.model.decoder)
            self._shadows += self.cuts.shadows(self.model.decoder)
        getattr(self.model, "install", lambda attachment: None)(self)
        for name, entrance in self.model.entrances(self).items():
            owner, _, attribute = name.rpartition(".")
            self._shadows.append(Shadow(module.get_submodule(owner), attribute, entrance))

    def plain(self, module: Any) -> Any:
        """The model, or its replica, without what this attachment has replaced: the same weights and submodules."""
        twin = copy.copy(module)
        for shadow in self._shadows:
            if shadow.target is self.model.module:
                shadow.uncover(twin)
        for name in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_hooks_always_called",
        ):
            object.__setattr__(twin, name, OrderedDict())
        return twin

    def add(self, shadows: list[Shadow], handles: list[Any]) -> None:
        """Keeps shadows and hooks of the host's own until `detach`."""
        self._shadows += shadows
        self._handles += handles

    def _check(self) -> None:
        """Raises OptionError for what cannot be attached, with the remedy."""
        for stage in self.stages:
            self.model.check(stage.method)
        if len(self.stages) > 1:
            check_stages(self.model, self.stages)
        if (self.total is not None or isinstance(self.budget, Auto)) and self.method.place is not Place.TOKENS:
            raise OptionError(
                f"tokens={AUTO!r} and total are for methods that act after the vision tower, and "
                f"{type(self.method).__name__} acts elsewhere: give tokens as a number or a share"
            )
        config: Any = getattr(self.model.module, "config", None)
        width = getattr(getattr(config, "text_config", None) or config, "hidden_size", None)
        for trained in (stage.method for stage in self.stages if stage.method.width not in (None, width) and width):
            raise OptionError(
                f"{type(trained).__name__}: trained for tokens of width {trained.width}, and those of "
                f"{type(self.model.module).__name__} have {width}. Take weights that were trained for this model"
            )
        hooks = self.model.module._forward_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), Attachment) for hook in hooks):
            raise OptionError("this model has a method attached already: detach it first")
        self.check_tower()

    def check_tower(self) -> None:
        """Raises OptionError for a method that reads what the vision side, where it is known, does not have."""
        tower = self.model.tower
        if tower is None:
            return
        if missing := lacking(tower, self.reader):
            raise OptionError(
                f"{type(self.reader).__name__} needs {missing}, which the vision side of "
                f"{type(self.model.module).__name__} does not have: take another method (llava-consensus list)"
            )
        blocks_read(tower, self.reader)
        earlier_block(tower, self.reader)
        if self.inside:
            from llava_consensus.hosts.tower_hooks import check_inside

            sharing = self.sharing
            check_inside(tower, self.method, [*sharing.of_tiles(1), *sharing.of_tiles(self.model.most_tiles)])

    def detach(self) -> None:
        """Gives the model back as it was, bit for bit. Detaching twice does nothing. Waits for calls that other threads
        have begun, which end with the method; those that begin meanwhile are plain.

        Raises:
            OptionError: inside a call of the model, which would wait for itself.
        """
        shadows = [one.value for one in self._shadows if isinstance(one.value, partial)]
        entrances = [inspect.unwrap(one.func) for one in shadows if one.args and one.args[0] is self]
        codes = {code_of(one): one.__code__.co_varnames[0] for one in entrances}
        if on_stack(sys._getframe(), codes, self):
            raise OptionError("detach: a call of this model is under way in this thread. Detach once it has returned")
        self._open = False
        # No lock: a thread that has looked at `_open` is in an entrance, where it is seen, and any later one is plain.
        while any(on_stack(frame, codes, self) for frame in sys._current_frames().values()):
            sleep(POLL)
        for handle in self._handles:
            handle.remove()
        for shadow in reversed(self._shadows):
            shadow.restore()
        self._handles, self._shadows, self.active = [], [], False

    def __repr__(self) -> str:
        given = f"{self.budget.share:g} of the" if isinstance(self.budget, Share) else f"{amount(self.budget)}"
        names = (stage.method.title or type(stage.method).__name__ for stage in self.stages)
        method, model = " + ".join(names), type(self.model.module).__name__
        before, after = (sum(getattr(one, side) for one in self.outcomes) for side in ("before", "after"))
        last = f"last call {before} -> {after} ({after / before:.1%} kept)" if before else "no call yet"
        return f"<{method} on {model}, {given} tokens, {last if self.active else 'detached'}>"

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *error: Any) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Attachment":
        """A copy of an attached model is attached; what its calls reported stays with the original."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, None if name == "_latest" else copy.deepcopy(value, memo))
        return twin

    def __reduce__(self) -> Any:
        """Raises OptionError: what is attached belongs to this process."""
        raise OptionError("a model with a method attached cannot be pickled: detach first, or save its state_dict()")

    @contextmanager
    def call(self, **given: Any) -> Iterator[Call]:
        """One call of the model with what is known beforehand: the fields of `Given`."""
        with scope(Call(self, Given(**given))) as new_call:
            self._latest = new_call
            yield new_call

    def asking(self, questions: list[str]) -> Any:
        """A call for methods that read the question itself: `with attached.asking(["..."]): model.generate(...)`, with
        the text asked in each row of the batch.
        """
        return self.call(questions=questions)

    def seeing(self, pictures: list[Any], questions: list[str] | None = None) -> Any:
        """A call for `tokens="auto"`, with the pictures of PIL that the batch shows, in order; `questions` as in
        `asking`.
        """
        return self.call(pictures=pictures, questions=questions)

    @uncompiled
    def entered(self, fresh: bool = False) -> Call | None:
        """The call that the function called now belongs to, as `current` has it; None where it runs plainly: after
        `detach`, and within a `generate` that began before somebody attached.
        """
        call = current_call(self)
        if call is not None and call.scoped:
            return call
        generating = {code_of(type(self.model.module).generate): "self"}
        if not self._open or on_stack(sys._getframe(), generating, self.model.module):
            return None
        return self.current(fresh)

    def current(self, fresh: bool = True) -> Call:
        """The active call. Without a scoped one a new call starts here and lasts until the next; `fresh` starts a new
        one unless the active call is scoped.
        """
        call = current_call(self)
        if call is None or (fresh and not call.scoped):
            call = self._latest = begin(Call(self))
        return call

    @property
    def _report(self) -> Report:
        """Report of the last call of this thread, or of any thread if this one made none."""
        call = latest_call(self) or self._latest
        return call.report if call else Report()

    @property
    def outcomes(self) -> list[PictureOutcome]:
        """Per-picture outcomes of the last call of this thread, or of any thread if this one made none."""
        return self._report.outcomes

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the last call that go into its record."""
        return self._report.notes

    def milliseconds(self) -> dict[str, float]:
        """Time the last reduction took, by step: the host's bookkeeping and the method's own work."""
        reductions = [reduction for outcome in self.outcomes for _, reduction in outcome.reductions]
        watches = {id(reduction.watch): reduction.watch for reduction in reductions}
        spent: dict[str, float] = {}
        for watch in (self._report.watch, *watches.values()):
            for name, time in watch.milliseconds().items() if watch else ():
                spent[name] = spent.get(name, 0.0) + time
        return spent

    @property
    def here(self) -> Model:
        """View of the module that runs now: the attached one, or its replica on another device."""
        module = called(self.model.module)
        return self.model if module is self.model.module else self.model.of(module)

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        """Begins a call where none is under way: every forward of the model belongs to one."""
        enter_model(module)
        if current_call(self) is None:
            self.current()

    def _read_cache(self, module: nn.Module, args: Any, output: Any) -> None:
        """Sizes of the cache after the first forward of a call."""
        call, cache = current_call(self), cache_given(output) if isinstance(output, Mapping) else None
        if call is not None and call.scoped and cache is not None and not call.report.cache:
            layers = cached_layers(cache, getattr(self.model.decoder, "cache_axis", -2))
            call.report = replace(call.report, cache=tuple(layers))

    @property
    def positions(self) -> str:
        """Positions of the sequence that the language model is given."""
        return self.asked.positions

    @property
    def sharing(self) -> Sharing:
        """Rule by which the budget of a picture is split over its tiles, of the method that acts first."""
        return self._sharing(self.stages[0])

    def _sharing(self, stage: BudgetedMethod) -> Sharing:
        tower, most = self.model.tower, self.model.most_tiles
        if tower is None:
            return Sharing(*stage, 0, most)
        return Sharing(*stage, tower.tokens, most, getattr(tower, "varies", False))

    @property
    def cuts_by_tower(self) -> bool:
        """True if the method prunes between decoder layers by signals of the vision tower."""
        return self.cuts is not None and bool(self.stages[-1].method.needs)

    def encode(self, pixels: Tensor, tiles: list[int], tower: Tower | None = None) -> list[Tiles]:
        """Encodes tiles [T, ...] (`tiles` holds the number per picture) with tower and projector and collects the parts
        the method needs: one `Tiles` per picture. Features that the call was given are returned as they are. `tower` is
        one of several, or the one for pictures of this size.
        """
        call = self.current(fresh=False)
        if call.given.encoded is not None:
            return call.given.encoded
        tower = self.here.tower if tower is None else tower
        assert tower is not None
        with self.collecting() as parts:
            if self.inside:
                from llava_consensus.hosts.tower_hooks import run_inside

                sharing = self.sharing
                tokens = [count for number in tiles for count in sharing.of_tiles(number, tower.tokens)]
                if len(set(tokens)) > 1 and self.reader.needs - GIVEN:
                    raise OptionError(
                        f"{type(self.reader).__name__} reads the tower, and {type(self.method).__name__} leaves tiles "
                        f"of several sizes ({', '.join(map(str, sorted(set(tokens))))}). Give it a number of tokens "
                        "that the tiles share equally"
                    )
                projected, parts["slot"] = run_inside(self.method, call, tower, pixels, tokens)
            else:
                projected = tower.encode(pixels)
        if Need.FINGERPRINT in self.needs:
            parts["fingerprint"] = fingerprint(pixels)
        split = {name: value.split(tiles) for name, value in parts.items()}
        return [
            Tiles(picture_tiles, {name: values[i] for name, values in split.items()})
            for i, picture_tiles in enumerate(projected.split(tiles))
        ]

    def collecting(self) -> Any:
        """The parts that hooks take from the tower while the body of a `with` runs."""
        return collecting(self.current(fresh=False))

    def layout(self, kinds: RowKinds) -> Layout:
        """Layout of the pictures in assembled sequences: their rows, and the units that the first method reduces."""
        self.current(fresh=False).whole = ()
        return read_layout(kinds, replace(self.sharing, budgets=self._budgets(kinds)))

    def reduces(self, layout: Layout) -> bool:
        """True if one of the methods leaves fewer tokens of a picture than there are."""
        if layout.reduced():
            return True
        return any(read_layout(layout.kinds, self._sharing(one)).reduced() for one in self.stages[1:])

    def _budgets(self, kinds: RowKinds) -> tuple[Budget | Share, ...]:
        """Budgets of the pictures of a call where they differ; none where all have the same."""
        if not self.method.reduces or (self.total is None and not isinstance(self.budget, Auto)):
            return ()
        count = int(kinds.picture.max()) + 1
        found: list[Budget | Share]
        if isinstance(self.budget, Auto):
            pictures = self.current(fresh=False).given.pictures
            if pictures is None or len(pictures) != count:
                raise OptionError(
                    f"tokens={AUTO!r} looks at the pictures: say them around the call, `with attached.seeing([...]):`, "
                    f"{count} of PIL, one for each that the batch shows"
                )
            found = [auto_share(picture) for picture in pictures]
        else:
            found = [self.budget] * count
        if self.total is None:
            return tuple(found)
        places = [(kinds.picture == picture) & (kinds.token >= 0) for picture in range(count)]
        sizes = [int(place.sum()) for place in places]
        rows = [int(place.any(1).nonzero()[0, 0]) if size else -1 for place, size in zip(places, sizes, strict=True)]
        return of_prompts(found, sizes, rows, self.total)

    def pass_by(self, call: Call, layout: Layout, limit: int | None = None) -> None:
        """Reports the pictures of a call that stay as they are, `limit` being the rows that are left of a longer
        sequence.
        """
        call.tell(Report(untouched(layout, limit)))

    def arm(
        self, call: Call, layout: Layout, embeds: Tensor, tiles: list[Tiles] | None = None, limit: int | None = None
    ) -> None:
        """Reports pictures that stay as they are; sequences [R, S, D] that a method between decoder layers will cut
        while they are read are announced to it, with the tiles of each picture where it reads the tower.
        """
        self.pass_by(call, layout, limit)
        if self.cuts is not None:
            self.cuts.arm(call, layout, embeds, tiles or [])

    def reduce(
        self,
        call: Call,
        full: Assembled,
        layout: Layout,
        tiles: list[Tiles],
        prompts: Tensor | None = None,
        limit: int | None = None,
        watch: Stopwatch | None = None,
    ) -> Assembled:
        """The sequences with their visual tokens reduced (see `reduce.reduce`); the call has the outcomes."""
        model, own = self.here, [stage for stage in self.stages if stage.method.place is not Place.DECODER]
        if len(self.stages) > 1:
            full = full.with_kinds(layout.kinds)
        notes: tuple[str, ...] = ()
        for number, stage in enumerate(own):
            if number:
                call.whole = call.whole or call.report.outcomes
                layout, full, tiles = self._following(stage, own[number - 1].method, full, layout, tiles)
            if not layout.reduced():
                call.tell(Report(untouched(layout)))
                continue
            reads = Need.QUESTION in stage.method.needs
            clip = self._clip_sides(call, model, tiles, len(full.real)) if reads else None
            last = limit if stage is own[-1] else None
            full, report = reduce(
                full, layout, tiles, stage.method, model, clip=clip, prompts=prompts, limit=last, watch=watch
            )
            notes += report.notes
            call.tell(replace(report, notes=tuple(dict.fromkeys(notes))))
        if NO_TEXT in notes and not self._warned:
            self._warned = True
            warnings.warn(NO_TEXT, stacklevel=3)
        call.state[LEFT] = layout, tiles
        if limit is not None and full.real.shape[1] > limit:
            raise OptionError(
                f"tokenizer_model_max_length={limit}: a prompt has {full.real.shape[1]} rows after a composition that "
                "leaves its pictures as they are. Give fewer tokens"
            )
        return full

    def _following(
        self, stage: BudgetedMethod, before: Method, full: Assembled, layout: Layout, tiles: list[Tiles]
    ) -> tuple[Layout, Assembled, list[Tiles]]:
        """Layout, sequences and tiles as the next method of a composition is given them. Waits for the device."""
        kinds = full.kinds(layout.kinds)
        if before.acts_inside:
            tiles, kinds = compact(tiles, kinds, self.here.tower)
        if before.positions == "renumber" and full.positions.ndim == 2:
            full = replace(full, positions=(full.real.cumsum(1) - 1).clamp_min(0))
        return read_layout(kinds, self._sharing(stage)), full, tiles

    def follow(self, call: Call, out: Assembled, read: Tensor) -> None:
        """Announces the sequences that methods before the language model have left to one that cuts between its layers;
        `read` is what of them the model is handed.
        """
        if self.cuts is None:
            return
        layout, _, tiles = self._following(self.stages[-1], self.stages[-2].method, out, *call.state.pop(LEFT))
        call.whole = call.whole or call.report.outcomes
        self.arm(call, layout, read, tiles)

    def _clip_sides(self, call: Call, model: Model, tiles: list[Tiles], rows: int) -> ClipSides | None:
        """Patches and questions in CLIP's space, for methods that read the question itself. OptionError where the
        questions are not known.
        """
        if self._clip is None:
            return None
        questions = call.given.questions
        if questions is None or len(questions) != rows:
            raise OptionError(
                "this method reads the question: say it around the call, `with attached.asking([...]):`, "
                f"{rows} texts, one for each prompt"
            )
        # as in `reduce`: autocast would compare patches and question in half precision
        with torch.autocast(tiles[0].projected.device.type, enabled=False):
            sides: ClipSides = self._clip.sides(model.tower, tiles, [self.method.query(text) for text in questions])
        return sides
