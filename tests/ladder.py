"""The ladder: every family of transformers x every method, climbed rung by rung (docs/ladder.md, which `main` writes).
A cell works, or is refused by an error of ours; whatever else comes out is a third state, which is a bug.

What an answer must be is computed by a twin that no method was ever attached to, given the rows that are left and their
positions (`Trial.truth`). Between decoder layers it is given them layer by layer.
"""

import argparse
import contextlib
import copy
import dataclasses
import itertools
import logging
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import torch
import torch._dynamo
import transformers
from hf_models import CASES, Case, prompts
from models import tiny_llava, write_tower
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import ConsensusError
from llava_consensus.hosts.hf import reduce
from llava_consensus.hosts.hf.generate import contained
from llava_consensus.methods import METHODS
from llava_consensus.reduction.method import Place

PAGE = Path(__file__).parents[1] / "docs" / "ladder.md"
NEW = 3  # words of an answer
FIRST = hf_models.IMAGE  # of the ids that are no words
ALL = 4000  # a budget above every picture
MAKE_ROWS = (
    "flashvid",
    *("prumerge", "prumerge_plus", "visionzip", "pool", "tome", "resize", "sparsevlm", "vscan"),
    *("restore_calibrated", "pixelprune"),
)
# of a module's code, before which nothing may silently go back to what is not compiled
GRAPHS = {"recompile_limit": 99, "accumulated_recompile_limit": 9999, "fail_on_recompile_limit_hit": True}
Words = Callable[[Tensor], Tensor]


class Undefined(Exception):
    """A rung that means nothing for this method."""


def hold(true: bool, what: str) -> None:
    if not true:
        raise AssertionError(what)


def near(found: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding."""
    room = 1e-4 * max(1.0, float(expected.abs().max()))
    return found.shape == expected.shape and torch.allclose(found, expected, atol=room, rtol=0)


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    given = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    given["suppress_tokens"] = [0, *range(FIRST, 512)]  # padding and placeholders: a later turn could not read them
    return model.generate(**inputs, **{**given, **options})


def longer(inputs: dict[str, Any], words: Tensor) -> dict[str, Any]:
    """A prompt with words [1, t] after it."""
    none = torch.zeros_like(words)
    more = {"input_ids": words, "attention_mask": none + 1, "mm_token_type_ids": none, "token_type_ids": none}
    return {**inputs, **{name: torch.cat((inputs[name], one), 1) for name, one in more.items() if name in inputs}}


@contextlib.contextmanager
def hooked(modules: Any, enter: Any, leave: Any = None) -> Iterator[None]:
    """What each module is given passes through `enter(its number, module, args, kwargs)`, its output by `leave`."""
    handles = [one.register_forward_pre_hook(partial(enter, i), with_kwargs=True) for i, one in enumerate(modules)]
    handles += [one.register_forward_hook(leave) for one in modules if leave is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def text_rows(inputs: dict[str, Any]) -> Tensor:
    """Which rows [S] of one prompt are words."""
    return inputs["input_ids"][0] < FIRST


class Official(torch.nn.Module):
    """Official LLaVA, called as models of transformers are: with ids that have a placeholder for each visual token."""

    def __init__(self, official: Any) -> None:
        super().__init__()
        self.official = official

    def get_decoder(self) -> Any:
        return self.official.model

    def asked(self, input_ids: Tensor, attention_mask: Any = None, pixel_values: Any = None) -> tuple[Any, Any, Any]:
        """Ids, mask and pictures as it takes them."""
        if pixel_values is None:
            return input_ids, attention_mask, None
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        again = (input_ids[:, 1:] == FIRST) & (input_ids[:, :-1] == FIRST)
        stays = real.bool() & ~torch.nn.functional.pad(again, (1, 0))
        rows = [row[one] for row, one in zip(input_ids.masked_fill(input_ids == FIRST, -200), stays, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
        return ids, (ids != 0).long(), pixel_values

    def edited(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What its language model is given of a prompt."""
        ids, mask, pictures = self.asked(**inputs)
        found = self.official.prepare_inputs_labels_for_multimodal(ids, None, mask, None, None, pictures)
        return {"position_ids": found[1], "attention_mask": found[2], "inputs_embeds": found[4]}

    def forward(self, input_ids: Any, attention_mask: Any = None, pixel_values: Any = None, **more: Any) -> Any:
        if "position_ids" in more:  # and a mask of all rows
            more["inputs_embeds"] = self.edited(dict(input_ids=input_ids, pixel_values=pixel_values))["inputs_embeds"]
            return self.official(attention_mask=attention_mask, **more)
        ids, mask, pictures = self.asked(input_ids, attention_mask, pixel_values)
        return self.official(ids, attention_mask=mask, images=pictures, **more)

    def generate(self, input_ids: Any, attention_mask: Any = None, pixel_values: Any = None, **more: Any) -> Any:
        ids, mask, pictures = self.asked(input_ids, attention_mask, pixel_values)
        found = self.official.generate(ids, images=pictures, attention_mask=mask, **more)
        asked = input_ids.repeat_interleave(len(found.sequences) // len(ids), 0)
        found.sequences = torch.cat((asked, found.sequences[:, -NEW:]), 1)
        return found


@cache
def tower() -> Any:
    """A folder with the tower of official LLaVA."""
    folder = tempfile.TemporaryDirectory()
    write_tower(Path(folder.name))
    return folder


def official() -> Any:
    """Official LLaVA, tiny and random."""
    sizes = dict(num_hidden_layers=4, tokenizer_padding_side="left", eos_token_id=None)
    return Official(tiny_llava(Path(tower().name), **sizes))


FAMILIES = {"official LLaVA": Case(official, hf_models.square, lambda model: []), **CASES}


class Family:
    """A model, a twin for what is true, and one that guesses; prompts, and what the plain model makes of them."""

    def __init__(self, case: Case) -> None:
        torch._dynamo.reset()
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
        self.case, self.model = case, case.build()
        self.twin, self.other = copy.deepcopy(self.model), copy.deepcopy(self.model)
        for parameter in self.other.parameters():
            parameter.data.mul_(1.01)  # so that some of its guesses are right
        a, b, c = (case.picture(number) for number in range(3))
        rows = [1, 5, a, 6, b, 7, 8], [1, c, 9, 11]
        self.one, self.batch = prompts([1, 5, 6, a, 7, 8, 9]), prompts(*rows)
        self.singles = [prompts(row) for row in rows]
        self._entering: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def plain(self) -> tuple[Tensor, Tensor]:
        """Logits and ids of the plain model for the batch."""
        return self.model(**self.batch).logits, generate(self.model, self.batch).sequences

    def entering(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Embeddings and positions [..., S] of a prompt, as the plain language model is given them."""
        if id(inputs) not in self._entering:
            found: dict[str, Any] = {}
            with hooked([self.twin.get_decoder()], lambda _, module, args, given: found.update(given)):
                self.twin(**inputs)
            embeds, places = found["inputs_embeds"], found.get("position_ids")
            self._entering[id(inputs)] = embeds, torch.arange(embeds.shape[1])[None] if places is None else places
        return self._entering[id(inputs)]


class Trial:
    """A method on a family; or the plain model, which must do what a method is held to."""

    def __init__(self, family: Family, method: str | None) -> None:
        self.family, self.method, self.model = family, method, family.model
        self._truths: dict[int, Words] = {}

    def attach(self, tokens: int | None = None, **options: Any) -> Any:
        if self.method is None:
            return contextlib.nullcontext()
        case, cls = self.family.case, METHODS[self.method]
        if "tile_budget" in cls.__dataclass_fields__:
            options = {"tile_budget": case.tile_budget, **options}
        budget = case.square if cls.place is Place.PICTURE else case.tokens
        return attach(getattr(self.model, "official", self.model), self.method, tokens or budget, **options)

    def truth(self, attached: Any, inputs: dict[str, Any]) -> Words:
        """Given the words [1, t] that follow a prompt, the logits [1, t, V] that say each of them."""
        if self.method is None:
            return lambda words: self.family.twin(**longer(inputs, words), use_cache=False).logits[:, -NEW - 1 : -1]
        if id(inputs) not in self._truths:
            make = self._layers if attached.method.place is Place.DECODER else self._edited
            self._truths[id(inputs)] = make(attached, inputs)
            least = attached.budget.tokens if attached.method.reduces else ALL
            free = attached.method.place is Place.CELLS  # the picture decides
            less = [free or one.after < one.before or one.before <= least for one in attached.outcomes]
            hold(all(less) and bool(attached.outcomes), "pictures stay whole")
        return self._truths[id(inputs)]

    def _edited(self, attached: Any, inputs: dict[str, Any]) -> Words:
        """By the plain model that is given the rows that are left, and their positions."""
        if isinstance(self.model, Official):
            return self._embedded(inputs)
        reduced = contained(attached.model, reduce(self.model, **inputs))
        places, whole = reduced.get("position_ids"), self.family.entering(inputs)[1]
        full, left = text_rows(inputs), text_rows(reduced)
        hold(torch.equal(inputs["input_ids"][:, full], reduced["input_ids"][:, left]), "words of the prompt")
        if places is not None:  # a row of counts may stand in front of three axes
            axes = 3 if places.ndim == 3 else 1
            hold(torch.equal(places[-axes:][..., left], whole[-axes:][..., full]), "positions of words")

        def of(words: Tensor) -> Tensor:
            count, given = words.shape[1], longer(reduced, words)
            if places is not None:
                given["position_ids"] = torch.cat((places, places[..., -1:] + 1 + torch.arange(count)), -1)
            if "mm_encoder_outputs" in given:
                given["mm_encoder_outputs"] = dict(given["mm_encoder_outputs"])
            logits: Tensor = self.family.twin(**given, use_cache=False).logits
            return logits[:, -count - 1 : -1]

        return of

    def _embedded(self, inputs: dict[str, Any]) -> Words:
        """The same of official LLaVA, whose rows are embeddings."""
        rows, twin = self.model.edited(inputs), self.family.twin.official
        places = rows["position_ids"]

        def of(words: Tensor) -> Tensor:
            count, given = words.shape[1], torch.cat((rows["inputs_embeds"], twin.get_input_embeddings()(words)), 1)
            more = None if places is None else torch.cat((places, places[:, -1:] + 1 + torch.arange(count)), 1)
            mask = torch.ones(given.shape[:2])
            logits: Tensor = twin(inputs_embeds=given, position_ids=more, attention_mask=mask, use_cache=False).logits
            return logits[:, -count - 1 : -1]

        return of

    def entered(self, inputs: dict[str, Any]) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """What enters every decoder layer of the attached model: states [1, W, D]; cosines and sines [..., W, d]."""
        found: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []

        def keep(index: int, layer: Any, args: Any, given: Any) -> None:
            found.append((args[0] if args else given["hidden_states"], given["position_embeddings"]))

        with hooked(self.model.get_decoder().layers, keep):
            self.model(**inputs)
        return found

    def _layers(self, attached: Any, inputs: dict[str, Any]) -> Words:
        """By the plain layers, each given the rows that are left of the prompt, their positions, and the words after
        them.
        """
        with laid_out(attached) as layouts:
            entered, visual = self.entered(inputs), (~text_rows(inputs)).nonzero()[:, 0].tolist()
        size, pictures = inputs["input_ids"].shape[1], attached.outcomes
        ahead, behind = range(visual[0]), range(visual[-1] + 1 - size, 0)  # rows of words, these from the end
        keeps, layers = getattr(attached.model, "keeps_positions", False), self.family.twin.get_decoder().layers
        planes = hasattr(self.family.twin.get_decoder(), "_deepstack_process")  # are added to rows between layers

        def of(words: Tensor) -> Tensor:
            count, out = words.shape[1], torch.empty(0)

            def enter(index: int, layer: Any, args: Any, given: Any) -> Any:
                (rows, angles), plain = entered[index], given["position_embeddings"]
                anew = rows.shape[1] < size and attached.method.closes_gaps(index) and not keeps
                first = rows.shape[1] if anew else size  # position of the first word
                known = range(-first, 0) if anew else [*ahead, *behind]  # rows whose positions are known here
                places = [place + first if place < 0 else place for place in known]
                pairs = zip(angles, plain, strict=True)
                hold(all(near(a[..., known, :], b[..., places, :]) for a, b in pairs), "positions")
                hold(not index or near(rows[:, [*ahead, *behind]], out[:, [*ahead, *behind]]), f"words at {index}")
                if index and not planes and (rows.shape == out.shape or self.method not in MAKE_ROWS):
                    same = torch.cdist(rows, out)[0].argmin(-1)
                    hold(near(rows, out[:, same]) and bool((same.diff() > 0).all()), f"rows at {index}")
                more = (one[..., first : first + count, :] for one in plain)
                angles = tuple(torch.cat(both, -2) for both in zip(angles, more, strict=True))
                hidden = torch.cat((rows, (args[0] if args else given["hidden_states"])[:, -count:]), 1)
                left = (one.entering[index] for one in pictures)
                mask = self._mask(hidden, inputs.get("token_type_ids"), left, index)
                if attached.method.calibrates:
                    angle = torch.atan2(*reversed(entered[index][1]))[0] * turns(layer.self_attn)
                    still = getattr(layer.self_attn, "head_dim", angle.shape[-1]) - angle.shape[-1]
                    angle = torch.nn.functional.pad(angle, (0, still))
                    mask = calibrated(mask, stands_for(layouts[-1], pictures, index), angle, hidden)
                near_by = torch.arange(hidden.shape[1])[None]  # for layers that scale by how far on a row stands
                given = {**given, "position_embeddings": angles, "attention_mask": mask, "position_ids": near_by}
                return ((hidden, *args[1:]), given) if args else (args, {**given, "hidden_states": hidden})

            def leave(layer: Any, args: Any, output: Tensor) -> Tensor:
                nonlocal out
                out = output[:, :-count]
                return torch.cat((output.new_zeros(1, size - 1, output.shape[-1]), output[:, -count - 1 :]), 1)

            with hooked(layers, enter, leave):
                logits: Tensor = self.family.twin(**longer(inputs, words), use_cache=False).logits
            return logits[:, -count - 1 : -1]

        return of

    def _mask(self, hidden: Tensor, types: Any, left: Iterator[int], layer: int) -> Any:
        """As transformers masks a layer for rows [1, W, D], given the types of the full prompt's and how many rows are
        left of each picture.
        """
        twin = self.family.twin
        config, more = twin.get_decoder().config, {}
        if types is not None:  # every run of ones is a picture
            runs = [list(run) for _, run in itertools.groupby(types[0].tolist())]
            rows = [one for run in runs for one in (run if run[0] == 0 else [1] * next(left))]
            more = {"token_type_ids": torch.tensor([rows + [0] * (hidden.shape[1] - len(rows))])}
        make = getattr(twin, "create_masks_for_generate", transformers.masking_utils.create_masks_for_generate)
        masks = make(config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=None, **more)
        return masks[config.layer_types[layer]] if isinstance(masks, dict) else masks


@contextlib.contextmanager
def laid_out(attached: Any) -> Iterator[list[Any]]:
    """The layouts that an attachment makes meanwhile."""
    found: list[Any] = []
    original = attached.layout
    attached.layout = lambda kinds: found.append(original(kinds)) or found[-1]
    yield found
    del attached.layout


def stands_for(layout: Any, pictures: Any, index: int) -> list[float]:
    """How many tokens each row of a prompt stands for in RESTORE's calibration of a layer."""
    sizes = dict.fromkeys(range(layout.real.shape[1]), 1.0)
    reductions = [one for picture in pictures for _, one in picture.reductions]
    for unit, reduction in zip(layout.reduced(), reductions, strict=True):
        source, places = reduction.source[0].tolist(), unit.places.tolist()
        members = [len(places) / len(source)] * len(source)  # in the first layer an equal part of the picture
        members = members if not index else torch.bincount(reduction.owner[0][reduction.owner[0] >= 0]).tolist()
        for place in places:
            del sizes[place]
        sizes |= {places[token]: count for token, count in zip(source, members, strict=True)}
    return [sizes[place] for place in sorted(sizes)]


def turns(attention: Any) -> bool:
    """Whether a layer rotates what it is given angles for."""
    if type(attention).__name__.startswith("Cohere2"):
        return attention.sliding_window is not None
    return bool(getattr(attention, "use_rope", True))


def calibrated(mask: Any, sizes: list[float], angle: Tensor, hidden: Tensor) -> Tensor:
    """RESTORE's additive mask, log s_n + log(2 - D(m - n)), the second for rows of the prompt alone, given the angles
    [W, d] of their channels.
    """
    width, prompt = hidden.shape[1], len(sizes)
    if mask is None:
        mask = torch.ones(1, 1, width, width).bool().tril()
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    decay = (angle[:, None] - angle[None]).cos().mean(-1)
    added = torch.zeros(width, width)
    added[:prompt, :prompt] = (2 - decay).log()
    added[:, :prompt] += torch.tensor(sizes).log()
    return added.masked_fill(~seen, torch.finfo(hidden.dtype).min)


# ---- the rungs


def keep_all(trial: Trial) -> None:
    family = trial.family
    logits, ids = family.plain
    with trial.attach(ALL):
        hold(torch.equal(trial.model(**family.batch).logits, logits), "logits")
        hold(torch.equal(generate(trial.model, family.batch).sequences, ids), "ids")


def detach(trial: Trial) -> None:
    logits, _ = trial.family.plain
    before = {name: set(vars(one)) for name, one in trial.model.named_modules()}
    with trial.attach():
        generate(trial.model, trial.family.batch)
    hold(torch.equal(trial.model(**trial.family.batch).logits, logits), "logits")
    hold({name: set(vars(one)) for name, one in trial.model.named_modules()} == before, "attributes are left")


def decoding(trial: Trial, **options: Any) -> None:
    if "assistant_model" in options:
        options["assistant_model"] = getattr(trial.family.other, "official", trial.family.other)
    with trial.attach() as attached:
        truth = trial.truth(attached, trial.family.one)
        found = generate(trial.model, trial.family.one, **options)
        hold(near(torch.stack(found.logits, 1), truth(found.sequences[:, -NEW:])), "logits")


def loop(model: Any, inputs: dict[str, Any], words: Tensor) -> Tensor:
    """Logits of a loop of one's own that says these words, on the cache and without positions."""
    output = model(**inputs, use_cache=True)
    found = [output.logits[:, -1]]
    for word in words[:, :-1].T[..., None]:
        output = model(input_ids=word, past_key_values=output.past_key_values, use_cache=True)
        found.append(output.logits[:, -1])
    return torch.stack(found, 1)


def own_loop(trial: Trial, compiled: bool = False) -> None:
    words = torch.arange(20, 20 + NEW)[None]
    with trial.attach() as attached:
        truth = trial.truth(attached, trial.family.one)
        model = torch.compile(trial.model, backend="eager") if compiled else trial.model
        with torch._dynamo.config.patch(GRAPHS):
            hold(near(loop(model, trial.family.one, words), truth(words)), "logits")


def mixed(trial: Trial) -> None:
    with trial.attach() as attached:
        found = generate(trial.model, trial.family.batch)
        logits, ids = torch.stack(found.logits, 1), found.sequences[:, -NEW:]
        for row, single in enumerate(trial.family.singles):
            hold(near(logits[row : row + 1], trial.truth(attached, single)(ids[row : row + 1])), f"row {row}")


def beams(trial: Trial) -> None:
    with trial.attach() as attached:
        found = generate(trial.model, trial.family.batch, num_beams=2, num_return_sequences=2, output_scores=True)
        for row, words in enumerate(found.sequences[:, None, -NEW:]):
            logits = trial.truth(attached, trial.family.singles[row // 2])(words).log_softmax(-1)
            score = logits.gather(-1, words[..., None]).mean()
            hold(near(found.sequences_scores[row], score), f"beam {row}")


def second_turn(trial: Trial) -> None:
    inputs = trial.family.one
    with trial.attach() as attached:
        truth = trial.truth(attached, inputs)
        turn = generate(trial.model, inputs)
        whole = torch.cat((turn.sequences, torch.arange(11, 14)[None]), 1)
        more = {"pixel_values": inputs["pixel_values"]} if isinstance(trial.model, Official) else {}  # it asks for them
        found = generate(trial.model, {"input_ids": whole, **more}, past_key_values=turn.past_key_values)
        after = found.sequences[:, inputs["input_ids"].shape[1] :]
        hold(near(torch.stack(found.logits, 1), truth(after)[:, -NEW:]), "logits")


def masking(trial: Trial) -> None:
    wanted = {"positions": "keep", "order": "raster"}
    options = {name: value for name, value in wanted.items() if name in METHODS[trial.method].__dataclass_fields__}
    inputs, twin = trial.family.one, trial.family.twin
    embeds, places = trial.family.entering(inputs)
    places, size, decoder = places[-3:] if places.ndim == 3 else places, embeds.shape[1], twin.get_decoder()
    diagonal, mask, entered = torch.eye(size).bool(), inputs["attention_mask"].clone(), []
    with trial.attach(merged=0, **options) as attached:
        if trial.method in MAKE_ROWS or (getattr(decoder.config, "sliding_window", None) or size) < size:
            raise Undefined  # windows are counted in rows
        if attached.method.place is Place.DECODER:
            entered = trial.entered(inputs)
        with laid_out(attached) as layouts:
            found = trial.model(**inputs).logits[:, -1]
        hold(not attached.method.reduces or all(one.after < one.before for one in attached.outcomes), "whole")
        if not entered:
            for unit, (_, one) in zip(layouts[-1].reduced(), attached.outcomes[0].reductions, strict=True):
                mask[0, unit.places] = 0
                mask[0, unit.places[one.kept[0]]] = 1

    def enter(index: int, layer: Any, args: Any, given: Any) -> Any:
        angles, ours, seen = given["position_embeddings"][0], entered[index][1][0], given["attention_mask"]
        stays = (angles[..., :, None, :] == ours[..., None, :, :]).all(-1).flatten(0, -3).all(0).any(-1)
        seen = torch.ones(1, 1, size, size).bool().tril() if seen is None else seen
        return args, {**given, "attention_mask": diagonal | (stays & seen)}

    with hooked(decoder.layers if entered else [], enter):
        hold(near(found, twin(**{**inputs, "attention_mask": mask}, position_ids=places).logits[:, -1]), "logits")


def quantized(trial: Trial) -> None:
    with mock.patch.object(transformers.cache_utils.Fp8QuantizedLayer, "fp8_dtype", torch.float32):
        decoding(trial, cache_implementation="quantized", cache_config={"backend": "fp8"})


RUNGS: dict[str, tuple[Callable[[Trial], None], str]] = {
    "keep-all": (keep_all, "a budget of all tokens changes no logit, bit for bit"),
    "detach": (detach, "the model is as before, bit for bit"),
    "rows and positions": (decoding, "`generate` answers as the twin"),
    "own loop": (own_loop, "so does a loop over the KV cache that passes no positions"),
    "mixed batch": (mixed, "prompts of one and of two pictures, padded on the left, are answered as each alone"),
    "masking": (
        masking,
        "with kept positions, dropped rows equal rows masked out of the twin; not defined for rows made of several",
    ),
    "second turn": (second_turn, "a conversation continues from the reduced cache, without pixels"),
    "static": (partial(decoding, cache_implementation="static"), "`generate` with a static cache"),
    "quantized": (quantized, "with an fp8 cache, whose numbers stay in float32 here"),
    "no cache": (partial(decoding, use_cache=False), "without a cache"),
    "beams": (beams, "the scores of two beams of each prompt of the mixed batch are the twin's"),
    "assisted": (partial(decoding, assistant_model=True), "with an assistant model"),
    "compiled": (partial(own_loop, compiled=True), "the own loop on the compiled model, backend `eager`"),
}


QUICK = [rung for rung in RUNGS if rung != "compiled"]  # which takes most of the time


def climbed(family: Family, method: str, rungs: Iterable[str] = RUNGS) -> dict[str, str]:
    """What becomes of a method on every rung, in one of these words: `works`; `undefined`, for what has no meaning;
    `refused: why`; `plain: why`, for what ends in the same error without a method; `third: what`.
    """
    trial = Trial(family, method)
    return {rung: state(trial, rung) for rung in rungs}


@torch.no_grad()
def state(trial: Trial, rung: str) -> str:
    try:
        RUNGS[rung][0](trial)
    except Undefined:
        return "undefined"
    except ConsensusError as error:
        words = str(error).replace(type(trial.model).__name__, "the model").replace(tower().name, "its folder")
        return "refused: " + words.replace(METHODS[trial.method].__name__, "the method")
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        plain = "" if trial.method is None else state(Trial(trial.family, None), rung)
        return f"{'plain' if plain.endswith(words) else 'third'}: {words}"
    return "works"


# ---- configurations that no test uses

KINDS = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite", "ministral", "ministral3", "seed_oss", "glm"),
    *("helium", "qwen3_moe", "olmo", "olmo3", "olmoe", "apertus", "internlm3", "jais2", "smollm3", "arcee", "cohere"),
]
TOWERS = ("clip_vision_model", "siglip_vision_model")


def changed(config: Any, **values: Any) -> Any:
    """A configuration with other values, of those that it has."""
    known = {name: value for name, value in values.items() if hasattr(config, name)}
    return type(config)(**{name: one for name, one in config.to_dict().items() if name != "layer_types"} | known)


def drawn(seed: int) -> tuple[str, Case]:
    """A family with sizes, budget, tower and language model drawn at random."""
    draw = random.Random(seed)
    name = draw.choice(list(CASES))
    case, family = CASES[name], name.split()[0]
    config, tokens, picture = case.build().config, case.tokens + draw.randint(0, 3), case.picture
    heads, layers, see, blocks = draw.choice((2, 4, 6, 8)), draw.randint(2, 5), draw.choice((2, 4)), draw.randint(3, 5)
    text = dict(num_attention_heads=heads, num_hidden_layers=layers, intermediate_size=draw.choice((40, 72, 120)))
    text |= dict(num_key_value_heads=draw.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    text |= dict(hidden_size=16 * heads, head_dim=16)
    kind, tower = config.text_config.model_type, config.vision_config.model_type
    if family.startswith(("qwen", "glm4v")) or family == "gemma3":
        config.text_config = changed(config.text_config, **text)
    else:
        kind = draw.choice(KINDS)
        text |= dict(head_dim=draw.choice((8, 16, 24)), hidden_size=heads * draw.choice((8, 16, 20)))
        other = transformers.CONFIG_MAPPING[kind](**{**hf_models.TEXT, **text})
        window = dict(sliding_window=draw.choice((None, 8, 4096)), use_sliding_window=True, max_window_layers=1)
        config.text_config = changed(other, **window, num_experts_per_tok=2, num_experts=4, num_local_experts=4)
    if family == "ovis2":
        config.hidden_size = config.text_config.hidden_size
    if family in ("llava", "llava_next", "llava_onevision", "llava_next_video"):
        tower, config.vision_feature_layer = draw.choice(TOWERS), draw.choice((-1, -2, -3))
        config.vision_feature_select_strategy = "default" if tower == TOWERS[0] else "full"
        config.vision_config = transformers.CONFIG_MAPPING[tower](**hf_models.SQUARE, vision_use_head=False)
    vision = dict(num_attention_heads=see, num_heads=see, num_hidden_layers=blocks, depth=blocks, intermediate_size=56)
    vision |= dict(hidden_size=see * draw.choice((8, 16)), out_hidden_size=16 * heads)
    vision |= dict(fullatt_block_indexes=sorted({draw.randrange(blocks), blocks - 1}))
    vision |= dict(deepstack_visual_indexes=sorted(draw.sample(range(blocks), draw.randint(1, min(blocks, layers)))))
    if family == "llava":
        side = draw.randint(3, 7)
        vision["image_size"], config.image_seq_length, tokens = 14 * side, side**2, draw.randint(1, side**2 - 1)

        def picture(number: int) -> hf_models.Picture:
            pixels = hf_models.noise(1, 3, 14 * side, 14 * side, seed=number)
            return hf_models.Picture([FIRST] * side**2, {"pixel_values": pixels})

    config.vision_config = changed(config.vision_config, **vision)
    build = partial(hf_models.ready, type(case.build()), config, seed)
    return f"{name}, {tower}, {kind}", dataclasses.replace(case, tokens=tokens, picture=picture, build=build)


def at_random(seed: int, count: int) -> Iterator[tuple[str, str, dict[str, str]]]:
    """The cells of `count` configurations by five methods each, those left out whose plain model does not answer."""
    number = found = 0
    while found < count:
        number += 1
        name, case = drawn(1000 * seed + number)
        try:
            family = Family(case)
            generate(family.twin, family.batch)
        except Exception as error:
            print(f"{name}: no model ({type(error).__name__}: {str(error)[:120]})", file=sys.stderr)
            continue
        found += 1
        for method in random.Random(number).sample(list(METHODS), 5):
            yield f"{1000 * seed + number} {name}", method, climbed(family, method, QUICK)


# ---- the page

HEAD = """# The ladder

Look up here whether a method works with a model of transformers in every way of calling it. Every (model, method) pair
either works or raises a clear error of this package in one line; where the plain model itself fails, the error is the
plain model's. The models are tiny and have random weights; the shapes of their parts are real.

`make ladder` climbs every cell (twenty minutes on a core) and writes this page; `make ladder ARGS=gemma3` prints every
cell of one family that does not work. `tests/hosts/test_ladder.py` climbs one family for each mechanism in every run of
the tests.

{cells}

## Rungs

The *twin* is the plain model, which gets the rows that are left and their positions, layer by layer where a method cuts
between layers.

{rungs}

## By family

How many methods attach, which do not, and how many are refused on which rungs; `-` is none.

{families}

{notes}

## Random configurations

Sizes, budgets, towers (CLIP, SigLIP) and language models drawn at random, five methods each, on every rung but
`compiled`:

{others}
"""
FINE = ("works", "undefined")
Cells = dict[tuple[str, str], dict[str, str]]  # by family and method, the state on each rung


def reason(state: str) -> str:
    """Why a rung does not work: a refusal in its own words, which are ours."""
    return (
        re.sub("^plain", "without a method too", state.removeprefix("refused: ")).replace("|", "or").replace("\n", " ")
    )


def page(cells: Cells, others: str) -> str:
    """docs/ladder.md."""
    notes: list[str] = []

    def note(state: str) -> str:
        words = reason(state)
        notes.extend([] if words in notes else [words])
        return f"[{notes.index(words) + 1}]"

    rows = []
    for family in dict.fromkeys(name for name, _ in cells):
        of = {method: states for (name, method), states in cells.items() if name == family}
        attached = [method for method, states in of.items() if "works" in states.values()]
        without = [f"{method} {note(of[method]['keep-all'])}" for method in of if method not in attached]
        refused: dict[str, list[str]] = {}
        for rung in RUNGS:
            why = Counter(note(of[one][rung]) for one in attached if of[one][rung] not in FINE)
            if why:
                refused.setdefault(", ".join(f"{count} {number}" for number, count in why.items()), []).append(rung)
        told = "; ".join(f"{', '.join(rungs)}: {counts}" for counts, rungs in refused.items())
        rows.append([family, str(len(attached)), ", ".join(without) or "-", told or "-"])
    return HEAD.format(
        cells=counted(list(cells.values())),
        rungs=table(["rung", "holds when"], [[name, what] for name, (_, what) in RUNGS.items()]),
        families=table(["family", "methods", "not", "refused"], rows),
        notes="\n".join(f"- [{number}] {words}" for number, words in enumerate(notes, 1)),
        others=others,
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def counted(found: list[dict[str, str]]) -> str:
    """How many cells are in which state."""
    states = Counter(one.split(":")[0] for states in found for one in states.values())
    return (
        f"{sum(states.values()):,} cells: {states['works']:,} work, {states['refused']:,} are refused, "
        f"{states['undefined']:,} are not defined, {states['plain']:,} end in the same error without a method, "
        f"{states['third']:,} are a third state."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="print these cells, write no page")
    parser.add_argument("--random", nargs=2, type=int, metavar=("SEED", "COUNT"), default=(25, 74))
    given = parser.parse_args()
    cells: Cells = {}
    for name in given.families or FAMILIES:
        family = Family(FAMILIES[name])
        cells |= {(name, method): climbed(family, method) for method in METHODS}
        print(name, counted([states for (one, _), states in cells.items() if one == name]), flush=True)
    everything = [(*at, one) for at, one in cells.items()]
    if not given.families:
        seed, count = given.random
        others = list(at_random(seed, count))
        said = f"`python tests/ladder.py --random {seed} {count}`: {counted([states for *_, states in others])}"
        PAGE.write_text(page(cells, said))
        everything += others
    shown = "third" if not given.families else ("refused", "plain", "third")
    bad = [(*at, rung, state) for *at, one in everything for rung, state in one.items() if state.startswith(shown)]
    print(*bad, sep="\n")
    third = sum(state.startswith("third") for *_, state in bad)
    print(f"{third} third states")
    sys.exit(bool(third))


if __name__ == "__main__":
    main()
