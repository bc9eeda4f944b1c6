"""vLLM's processor of a model with the placeholders of each picture shortened to the tokens that are left of it.

What the engine must know of a picture travels beside its pixels: the budget, a key of the picture, and for methods that
read the prompt the whole of it as it would have been without reduction. The hash by which vLLM keeps pictures, their
embeddings and the cache of prompts says all of that, so that nothing is taken for another.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import EmbeddingItems
from vllm.multimodal.processing import PromptReplacement, PromptUpdateDetails

from llava_consensus.errors import OptionError
from llava_consensus.hosts.hf.rows import PictureRows
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.serving.plan import Plan
from llava_consensus.serving.setting import ASKED, TOKENS, asked

REQUEST = "llava_consensus_request"  # where ours stands among vLLM's arguments, on its way through a processor
OWN = "reduction_"  # what fields of ours begin with
BUDGET, KEY, ROWS = (OWN + name for name in ("budget", "key", "rows"))  # rows: of the picture without reduction
PROMPT, PICTURES, INDEX, QUESTION = (OWN + name for name in ("prompt", "pictures", "index", "question"))
KEYS = OWN + "keys"  # of all pictures of a prompt
ALL = OWN + "all_"  # what the fields of all pictures of a prompt begin with
MOST = 1 << 40  # tokens of a picture


@dataclass(frozen=True)
class Request:
    """One prompt on its way through a processor."""

    tokens: int | float  # as it was asked for
    budget: Budget | Share
    prompt: list[int]  # before placeholders are put in
    items: Any  # all pictures of the prompt, as vLLM holds them
    question: str  # for methods that read it by CLIP's text tower
    wanted: Mapping[str, Sequence[int]] = field(default_factory=dict)  # which of a modality are to be made; all others


class Reducing:
    """Mixed into vLLM's processor of a family, in front of it."""

    info: Any
    _sizing = False  # whether vLLM asks for made-up prompts, about which there is no question

    @cached_property
    def plan(self) -> Plan:
        """Of the model."""
        return Plan(self.info.get_hf_config(), self.info.ctx.model_config.model)

    def apply(self: Any, inputs: Any, timing_ctx: Any) -> Any:
        """A prompt with its pictures. OptionError, which vLLM answers with 400, for a bad budget or no question where
        one is read.
        """
        arguments = dict(inputs.hf_processor_mm_kwargs)
        tokens = arguments.pop(TOKENS, self.plan.setting.tokens)
        budget, question = asked(tokens), arguments.pop(ASKED, None)
        if self.plan.method.reduces:
            self._check(inputs.mm_data_items, question)
            question = question if self.plan.clip_name and not self._sizing else ""
            arguments[REQUEST] = Request(tokens, budget, list(inputs.prompt), inputs.mm_data_items, question)
        return super().apply(replace(inputs, hf_processor_mm_kwargs=arguments), timing_ctx)

    def _check(self, items: Any, question: object) -> None:
        """Raises OptionError for pictures that cannot be reduced, or a question that is none where one is read."""
        if any(isinstance(one, EmbeddingItems) for one in items.values()):
            raise OptionError("embeddings in place of pictures cannot be reduced: send the pictures")
        if not self.plan.method.reads_prompt:
            return
        if sum(bool(len(one)) for one in items.values()) > 1:
            raise OptionError(
                "this method reads the prompt, and pictures and videos in one prompt are not adapted to it"
            )
        if any(part is None for one in items.values() for part in one.get_all()):
            raise OptionError("this method reads the prompt: send the picture itself, not its id alone")
        if self.plan.clip_name and not self._sizing and not isinstance(question, str):
            raise OptionError(
                f"{ASKED}={question!r}: {self.plan.setting.method} compares patches with the question by CLIP's text "
                f'tower. Say it with the request: "mm_processor_kwargs": {{"{ASKED}": "What is this?"}}'
            )

    def get_dummy_mm_inputs(self: Any, mm_counts: Mapping[str, int], **more: Any) -> Any:
        """What vLLM sizes its caches by; pictures and videos in prompts of their own, as a method may want them."""
        if len(mm_counts) < 2:
            self._sizing = True
            try:
                return super().get_dummy_mm_inputs(mm_counts, **more)
            finally:
                self._sizing = False
        made = [self.get_dummy_mm_inputs({name: count}, **more) for name, count in mm_counts.items()]
        places = {name: found for one in made for name, found in one["mm_placeholders"].items()}
        return {**made[0], "mm_placeholders": places}

    def _get_mm_hashes(self: Any, inputs: Any) -> Any:
        """What each picture is known by: by all that its embeddings depend on."""
        request, arguments = _apart(inputs.hf_processor_mm_kwargs)
        hashes = super()._get_mm_hashes(replace(inputs, hf_processor_mm_kwargs=arguments))
        if request is None:
            return hashes
        setting = repr((self.plan.setting.method, sorted(self.plan.setting.options.items()), request.tokens))
        asking = repr((request.prompt, request.question, hashes)) if self.plan.method.reads_prompt else ""

        def own(name: str, place: int) -> str:
            words = (setting, asking, name, str(place if asking else ""))
            return hashlib.sha256("\0".join(words).encode()).hexdigest()

        return {name: [own(one, i) for i, one in enumerate(group)] for name, group in hashes.items()}

    def _get_cache_missing_processor_kwargs(self: Any, inputs: Any, mm_is_cached: Any) -> Any:
        """Says which pictures are to be made."""
        arguments = dict(super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached))
        if REQUEST in arguments:
            wanted = {name: [i for i, kept in enumerate(group) if not kept] for name, group in mm_is_cached.items()}
            arguments[REQUEST] = replace(arguments[REQUEST], wanted=wanted)
        return arguments

    def _apply_hf_processor_main(self: Any, mm_items: Any, hf_kwargs: Any) -> Any:
        """The pictures as tensors, with what the engine must know beside them."""
        request, arguments = _apart(hf_kwargs)
        made = super()._apply_hf_processor_main(mm_items, arguments)
        if request is None or not mm_items.get_all_counts():
            return made
        for modality, items in self._items(made, arguments).items():
            rows = [torch.tensor(len(self._rows(modality, item).token)) for item in items]
            own = {BUDGET: [packed(request.tokens)] * len(items), KEY: [key_of(item) for item in items], ROWS: rows}
            if self.plan.method.reads_prompt:
                own |= self._prompt(request, modality, arguments, made)
            made.update({f"{modality}_{name}": values for name, values in own.items()})
        return made

    def _items(self: Any, made: Any, arguments: Any) -> Any:
        """Pictures as vLLM hands them to the engine."""
        return MultiModalKwargsItems.from_hf_inputs(made, super()._get_mm_fields_config(made, arguments))

    def _rows(self, modality: str, item: Any) -> PictureRows:
        """The rows of a picture without reduction."""
        return self.plan.rows(modality, {name: part.data[None] for name, part in item.items() if OWN not in name})[0]

    def _prompt(self: Any, request: Request, modality: str, arguments: Any, made: Any) -> dict[str, list[Any]]:
        """The whole prompt for each picture that is to be made: ids, which picture each of them is of, which of the
        pictures this one is, and where there are several all of them.
        """
        count = request.items.get_all_counts()[modality]
        wanted = list(request.wanted.get(modality, range(count)))
        every = made if len(wanted) == count else super()._apply_hf_processor_main(request.items, arguments)
        items = self._items(every, arguments)
        updates = self._get_mm_prompt_updates(request.items, arguments, items)
        ids, placeholders = self._apply_prompt_updates(list(self._postprocess_prompt(request.prompt)), updates)
        pictures = torch.full((len(ids),), -1)
        for number, found in enumerate(placeholders[modality]):
            place = torch.arange(len(found.tokens)) + found.start_idx
            pictures[place if found.is_embed is None else place[found.is_embed]] = number
        own: dict[str, list[Any]] = {
            PROMPT: [torch.tensor(ids)] * len(wanted),
            PICTURES: [pictures] * len(wanted),
            INDEX: [torch.tensor(number) for number in wanted],
            QUESTION: [torch.tensor(list(request.question.encode()), dtype=torch.uint8)] * len(wanted),
            KEYS: [torch.stack([key_of(item) for item in items[modality]])] * len(wanted),
        }
        if count > 1:
            for name in items[modality][0]:
                own[ALL + name] = [every[name]] * len(wanted)
        return own

    def _get_mm_fields_config(self: Any, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        """How the fields are divided over pictures."""
        fields = dict(super()._get_mm_fields_config(hf_inputs, _apart(hf_processor_mm_kwargs)[1]))
        for name in hf_inputs:
            modality, _, rest = name.partition("_")
            if rest.startswith(OWN):
                fields[name] = MultiModalFieldConfig.batched(modality, keep_on_cpu=not rest.startswith(ALL))
        return fields

    def _get_prompt_updates(self: Any, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        """The placeholders of each picture, as many as tokens are left."""
        request, arguments = _apart(hf_processor_mm_kwargs)
        updates = super()._get_prompt_updates(mm_items, arguments, out_mm_kwargs)
        if request is None:
            return updates
        return [self._shortened(update, request, out_mm_kwargs) for update in updates]

    def _shortened(self, update: Any, request: Request, made: Any) -> Any:
        """A replacement with fewer placeholders. OptionError where there would be more than the server allows."""

        def content(index: int) -> PromptUpdateDetails:
            whole = update.resolve(index).content
            rows = self._rows(update.modality, made[update.modality][index])
            left = self.plan.left(update.modality, rows, request.budget)
            most = self.plan.left(update.modality, rows, asked(self.plan.setting.most))
            if left > most:
                raise OptionError(
                    f"{TOKENS}={request.tokens}: {left} tokens of a picture are more than this server allows, {most} "
                    f"(largest={self.plan.setting.most})"
                )
            return trimmed(whole, left)

        return PromptReplacement(modality=update.modality, target=update.target, replacement=content)


def _apart(arguments: Mapping[str, Any]) -> tuple[Request | None, dict[str, Any]]:
    """Ours, and vLLM's arguments without it."""
    rest = dict(arguments)
    return rest.pop(REQUEST, None), rest


def trimmed(whole: PromptUpdateDetails, left: int) -> PromptUpdateDetails:
    """The content of a replacement with its first `left` placeholders alone, and everything around them."""
    embeds = torch.ones(len(whole.full), dtype=torch.bool) if whole.is_embed is None else whole.is_embed(whole.full)
    stays = ~embeds | (embeds.cumsum(0) <= left)
    full = [word for word, stay in zip(whole.full, stays.tolist(), strict=True) if stay]
    if whole.is_embed is None:
        return PromptUpdateDetails(full)
    kept = embeds[stays]
    is_embed: Callable[[list[int]], Tensor] = lambda _: kept  # noqa: E731
    return PromptUpdateDetails(full, is_embed)


def packed(tokens: int | float) -> Tensor:
    """A budget as a number that no change of precision touches: of a share, its bits, which are beyond every count."""
    bits = struct.unpack("<q", struct.pack("<d", tokens))[0]
    return torch.tensor(tokens if isinstance(tokens, int) else bits)


def unpacked(value: int) -> Budget | Share:
    """The budget of `packed`."""
    return asked(value if value < MOST else struct.unpack("<d", struct.pack("<q", value))[0])


def key_of(item: Any) -> Tensor:
    """What a picture is known by in the engine, from all its tensors: int64 [4]."""
    digest = hashlib.sha256()
    for name in sorted(item):
        value = item[name].data
        digest.update(f"{name}{getattr(value, 'shape', '')}".encode())
        for part in value if isinstance(value, list | tuple) else [value]:
            flat = torch.as_tensor(part).contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return torch.tensor(struct.unpack("<4q", digest.digest()))
