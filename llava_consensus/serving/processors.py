"""vLLM's processor of a model with the placeholders of each image shortened to the tokens that are left of it.

What the engine must know of an image travels beside its pixels: the budget, a key, and for methods that read the prompt
the whole of it without reduction. The hash by which vLLM keeps images and prompts says all of that.
"""

import hashlib
import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from prometheus_client import Counter
from torch import Tensor
from transformers import BatchFeature
from vllm.multimodal.cache.base import MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import EmbeddingItems
from vllm.multimodal.processing import ProcessorInputs, PromptReplacement, PromptUpdateDetails

from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import Image
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.serving.plan import Plan
from llava_consensus.serving.server import admit_own_arguments, tell_bad_media
from llava_consensus.serving.setting import asked, check_keys
from llava_consensus.serving.supported import ASKED, ROWS, TOKENS

REQUEST = "llava_consensus_request"  # our key among vLLM's arguments, on its way through a processor
OWN = "reduction_"  # prefix of our fields
COUNT, SHARE = OWN + "count", OWN + "share"  # the budget: a number of tokens or a share, and 0 in the other field
KEY = OWN + "key"
PROMPT, NUMBERS, INDEX, QUESTION = (OWN + name for name in ("prompt", "pictures", "index", "question"))
KEYS, COUNTS, SHARES = OWN + "keys", OWN + "counts", OWN + "shares"  # of all images of a prompt
OF_ALL = {KEYS: KEY, COUNTS: COUNT, SHARES: SHARE}  # and of which fields of each
ALL = OWN + "all_"  # prefix of the fields of all images of a prompt
KNOWN_GIB = 1.0  # of preprocessed images, for methods that read the prompt
MOST = 1 << 31  # more tokens than an image has
ASPECT = 50  # longer over shorter side; CLIP's processor makes the shorter side 336 pixels, and memory grows with this

BEFORE = Counter("visual_reduction_tokens_before", "Tokens of images as the model would have read them", ["modality"])
AFTER = Counter("visual_reduction_tokens_after", "Tokens of images that were left", ["modality"])


@dataclass(frozen=True)
class Request:
    tokens: int | float  # as it was asked for
    question: str  # for methods that read it by CLIP's text tower
    whole: Any  # vLLM's result without reduction, for methods that read the prompt


@dataclass
class OwnInputs(ProcessorInputs):
    """vLLM's inputs of a prompt, whose images have a cache key of all that their embeddings depend on."""

    setting: Any = None  # of the server

    def get_mm_hashes(self, *named: Any) -> Any:
        """Keys of all images by modality, with vLLM's own in them."""
        (request, arguments), setting = _apart(self.hf_processor_mm_kwargs), self.setting
        assert request is not None
        whole, plain = request.whole, replace(self, hf_processor_mm_kwargs=arguments)
        hashes = whole["mm_hashes"] if whole else ProcessorInputs.get_mm_hashes(plain, *named)
        asked_for = repr((setting.method, sorted(setting.options.items()), request.tokens))
        asking = repr((whole["prompt_token_ids"], request.question, hashes)) if whole else ""

        def own(name: str, place: int) -> str:
            words = (asked_for, asking, name, str(place if asking else ""))
            return hashlib.sha256("\0".join(words).encode()).hexdigest()

        return {name: [own(one, i) for i, one in enumerate(group)] for name, group in hashes.items()}


class Reducing:
    """Mixed into vLLM's processor of a family, in front of it."""

    info: Any
    _sizing = False  # whether vLLM asks for made-up prompts, about which there is no question

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        admit_own_arguments()  # each server process has a processor
        tell_bad_media()
        size = SimpleNamespace(mm_processor_cache_gb=KNOWN_GIB)
        self._known: Any = MultiModalProcessorOnlyCache(SimpleNamespace(get_multimodal_config=lambda: size))

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.info.get_hf_config(), self.info.ctx.model_config.model)

    def apply(self: Any, inputs: Any, timing_ctx: Any) -> Any:
        """A prompt with its images. OptionError, which vLLM answers with 400, for a bad budget, for no question where
        one is read, and for whatever of a request cannot be processed.
        """
        given, setting = inputs.hf_processor_mm_kwargs, self.plan.setting
        check_keys(given)
        tokens = given.get(TOKENS)
        if tokens is None:
            tokens = setting.most if self._sizing else setting.tokens
        elif isinstance(tokens, float) and tokens >= 1 and tokens.is_integer():
            tokens = int(tokens)  # JSON clients that know one kind of number
        asked(tokens)
        question, arguments = given.get(ASKED), {}
        if self.plan.method.reduces:
            self._check(inputs.mm_data_items, question)
            question = question if self.plan.clip_name and not self._sizing else ""
        try:
            if self.plan.method.reduces:
                whole = None
                if self.plan.method.reads_prompt:  # vLLM's own cache would hold an image once for each prompt
                    inputs = replace(inputs, hf_processor_mm_kwargs={}, mm_uuid_items=None, cache=self._known)
                    whole = super().apply(inputs, timing_ctx)
                    inputs = replace(inputs, cache=None)
                arguments[REQUEST] = Request(tokens, question, whole)
                inputs = OwnInputs(**vars(inputs), setting=setting)
            return super().apply(replace(inputs, hf_processor_mm_kwargs=arguments), timing_ctx)
        except (ValueError, TypeError, OverflowError, NotImplementedError):  # vLLM reports it to the client
            raise
        except Exception as wrong:
            logging.getLogger("vllm").warning("llava-consensus: a request was refused", exc_info=True)
            raise OptionError(f"the images of this request cannot be processed: {wrong!r:.500}") from wrong

    def _maybe_apply_prompt_updates(self: Any, mm_items: Any, mm_res: Any) -> Any:
        """The prompt with its placeholders; counts its tokens for `/metrics`."""
        found = super()._maybe_apply_prompt_updates(mm_items, mm_res)
        for modality, visuals in {} if self._sizing else mm_res.prompt_updates.items():
            for content in (update.content for visual in visuals for update in visual):
                if isinstance(content, ShortenedContent):
                    BEFORE.labels(modality).inc(content.before)
                    AFTER.labels(modality).inc(content.after)
        return found

    def _check(self, items: Any, question: object) -> None:
        """Raises OptionError for images that cannot be reduced, or without a question that the method reads."""
        if any(isinstance(one, EmbeddingItems) for one in items.values()):
            raise OptionError("embeddings in place of images cannot be reduced: send the images")
        if not self._sizing:
            check_shapes(items)
        if not self.plan.method.reads_prompt:
            return
        if sum(bool(len(one)) for one in items.values()) > 1:
            raise OptionError(
                "images and videos in one prompt are not adapted to a method that reads the prompt: send them in two"
            )
        if any(part is None for one in items.values() for part in one.get_all()):
            raise OptionError("send the image itself, not only its id: all images of the prompt are looked at")
        if self.plan.clip_name and not self._sizing and not isinstance(question, str):
            raise OptionError(
                f"{ASKED}={question!r}: {self.plan.setting.method} compares patches with the question by CLIP's text "
                f'tower. Say it with the request: "mm_processor_kwargs": {{"{ASKED}": "What is this?"}}'
            )

    def get_dummy_mm_inputs(self: Any, mm_counts: Mapping[str, int], **more: Any) -> Any:
        """Dummy inputs by which vLLM sizes its caches; images and videos in separate prompts."""
        if len(mm_counts) < 2:
            self._sizing = True
            try:
                return super().get_dummy_mm_inputs(mm_counts, **more)
            finally:
                self._sizing = False
        made = [self.get_dummy_mm_inputs({name: count}, **more) for name, count in mm_counts.items()]
        places = {name: found for one in made for name, found in one["mm_placeholders"].items()}
        return {**made[0], "mm_placeholders": places}

    def _apply_hf_processor_main(self: Any, mm_items: Any, hf_kwargs: Any) -> Any:
        request, arguments = _apart(hf_kwargs)
        if request is None or not mm_items.get_all_counts():
            return super()._apply_hf_processor_main(mm_items, arguments)
        if request.whole is None:
            made = super()._apply_hf_processor_main(mm_items, arguments)
            items = MultiModalKwargsItems.from_hf_inputs(made, super()._get_mm_fields_config(made, arguments))
        else:
            items, made = request.whole["mm_kwargs"], BatchFeature()
            for own in items.values():
                made.update({name: own[0][name].field.reduce_data([item[name] for item in own]) for name in own[0]})
        updates = {update.modality: update for update in super()._get_prompt_updates(mm_items, arguments, items)}
        for modality, own_items in items.items():
            texts = [updates[modality].resolve(number).content for number in range(len(own_items))]
            images = [self._image(modality, *one) for one in zip(own_items, texts, strict=True)]
            fields = [fields_of(one) for one in self._budgets(request, images)]
            own = {COUNT: [count for count, _ in fields], SHARE: [share for _, share in fields]}
            own[ROWS] = [torch.tensor(len(image.places)) for image in images]
            own[KEY] = [key_of(item) for item in own_items]
            if self.plan.method.reads_prompt:
                own |= {name: [torch.stack(own[one])] * len(images) for name, one in OF_ALL.items()}
                own |= prompt_of(request, modality, made)
            made.update({f"{modality}_{name}": values for name, values in own.items()})
        return made

    def _budgets(self, request: Request, images: list[Image]) -> list[Budget | Share]:
        """Budgets of the images of a request. OptionError if one is more than the server allows."""
        budget, left, setting = asked(request.tokens), self.plan.left, self.plan.setting
        found: list[Budget | Share] = []
        for image in images:
            found.append(budget)
            if request.tokens == setting.tokens and setting.largest is None:
                continue
            tokens, most = left(image, found[-1]), left(image, asked(setting.most))
            if tokens > most:
                raise OptionError(
                    f"{TOKENS}={request.tokens}: {tokens} tokens of an image are more than this server allows, {most} "
                    f"(largest={setting.most})"
                )
        return found

    def _image(self, modality: str, item: Any, content: PromptUpdateDetails) -> Image:
        """The rows of an image without reduction, given the text that vLLM puts in its place."""
        inputs = {name: part.data[None] for name, part in item.items() if OWN not in name}
        return self.plan.image(modality, inputs, int(embeds_of(content).sum()))

    def _get_mm_fields_config(self: Any, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        fields = dict(super()._get_mm_fields_config(hf_inputs, _apart(hf_processor_mm_kwargs)[1]))
        for name in hf_inputs:
            modality, _, rest = name.partition("_")
            if rest.startswith(ALL):
                fields[name] = MultiModalFieldConfig.shared(modality, len(hf_inputs[f"{modality}_{ROWS}"]))
            elif rest.startswith(OWN):
                fields[name] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
        return fields

    def _get_prompt_updates(self: Any, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        request, arguments = _apart(hf_processor_mm_kwargs)
        updates = super()._get_prompt_updates(mm_items, arguments, out_mm_kwargs)
        if request is None:
            return updates
        return [self._shortened(update, out_mm_kwargs) for update in updates]

    def _shortened(self, update: Any, made: Any) -> Any:
        """A replacement with one placeholder for each remaining token."""

        def content(index: int) -> PromptUpdateDetails:
            item, modality = made[update.modality][index], update.modality
            whole = update.resolve(index).content
            budget = budget_of(*(item[f"{modality}_{name}"].data for name in (COUNT, SHARE)))
            return trimmed(whole, self.plan.left(self._image(modality, item, whole), budget))

        return PromptReplacement(modality=update.modality, target=update.target, replacement=content)


def check_shapes(items: Any) -> None:
    """Raises OptionError for an image or video so narrow that its processor would fill memory with it."""
    for modality, group in items.items():
        for index, item in enumerate(group.get_all() if modality in ("image", "video") else ()):
            if item is None:  # sent by its id; it was checked when it was sent whole
                continue
            size = group.get_image_size(index) if modality == "image" else group.get_frame_size(index)
            short, long = sorted((size.width, size.height))
            if long > ASPECT * short:
                raise OptionError(
                    f"an {modality} of {size.width} x {size.height} pixels: the longer side may be at most {ASPECT} "
                    "times the shorter. Crop or pad it"
                )


def prompt_of(request: Request, modality: str, made: Mapping[str, Any]) -> dict[str, Any]:
    """The whole prompt for each image: ids, the image of each, the place of this one, and if several all."""
    ids, items = torch.tensor(request.whole["prompt_token_ids"]), request.whole["mm_kwargs"][modality]
    count, visuals = len(items), torch.full((len(ids),), -1)
    for number, found in enumerate(request.whole["mm_placeholders"][modality]):
        place = torch.arange(found.length) + found.offset
        visuals[place if found.is_embed is None else place[found.is_embed]] = number
    own: dict[str, Any] = {
        PROMPT: [ids] * count,
        NUMBERS: [visuals] * count,
        INDEX: [torch.tensor(number) for number in range(count)],
        QUESTION: [torch.tensor(list(request.question.encode()), dtype=torch.uint8)] * count,
    }
    if count > 1:
        own |= {ALL + name: made[name] for name in items[0]}
    return own


def _apart(arguments: Mapping[str, Any]) -> tuple[Request | None, dict[str, Any]]:
    """Ours, and vLLM's arguments without it."""
    rest = dict(arguments)
    return rest.pop(REQUEST, None), rest


@dataclass
class ShortenedContent(PromptUpdateDetails):
    """The content of a replacement that was shortened."""

    before: int = 0  # tokens of the image
    after: int = 0  # and those that are left


def embeds_of(content: PromptUpdateDetails) -> Tensor:
    """Which words of a content are placeholders of tokens: [n] bool."""
    if content.is_embed is None:
        return torch.ones(len(content.full), dtype=torch.bool)
    found: Tensor = content.is_embed(content.full)
    return found


def trimmed(whole: PromptUpdateDetails, left: int) -> ShortenedContent:
    """The content of a replacement with only its first `left` placeholders, and everything around them."""
    embeds = embeds_of(whole)
    before, stays = int(embeds.sum()), ~embeds | (embeds.cumsum(0) <= left)
    full = [word for word, stay in zip(whole.full, stays.tolist(), strict=True) if stay]
    if whole.is_embed is None:
        return ShortenedContent(full, None, before, left)
    kept = embeds[stays]
    is_embed: Callable[[list[int]], Tensor] = lambda _: kept  # noqa: E731
    return ShortenedContent(full, is_embed, before, left)


def fields_of(budget: Budget | Share) -> tuple[Tensor, Tensor]:
    count, share = (budget.tokens, 0.0) if isinstance(budget, Budget) else (0, budget.share)
    return torch.tensor(min(count, MOST)), torch.tensor(share, dtype=torch.float64)


def budget_of(count: Tensor, share: Tensor) -> Budget | Share:
    return Budget(int(count)) if int(count) else Share(float(share))


def key_of(item: Any) -> Tensor:
    """Key of an image in the engine, from all its tensors: int64 [4]."""
    digest = hashlib.sha256()
    for name in sorted(item):
        value = item[name].data
        digest.update(f"{name}{getattr(value, 'shape', '')}".encode())
        for part in value if isinstance(value, list | tuple) else [value]:
            flat = torch.as_tensor(part).contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return torch.tensor(struct.unpack("<4q", digest.digest()))
