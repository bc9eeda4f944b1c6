"""A model that can be asked (`Runner`): images in, answers out, with a method attached or not."""

import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList, PretrainedConfig, PreTrainedTokenizerBase

from llava_consensus.errors import ConsensusError, DataError, QuestionError
from llava_consensus.evaluation.files import HALF
from llava_consensus.evaluation.media import Clip
from llava_consensus.hosts import attach_view
from llava_consensus.hosts.attachment import Attachment, Call
from llava_consensus.hosts.kernels import in_this_thread
from llava_consensus.hosts.outcomes import CachedLayer, ImageOutcome
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method, Shape
from llava_consensus.reduction.tokens import Need

COUNTS = ("before", "after", "structural")
FULL = make("full"), Budget(1)


@dataclass(frozen=True)
class Prompt:
    """One question: its text without image tokens, the conversation template (None is the model's own), the bounds on
    the answer's length in tokens (the lower one only for timing), and whether the answer says how sure it is.
    """

    text: str
    conversation: str | None = None
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    sure: bool = False


@dataclass(frozen=True, eq=False)
class Encoding:
    """One image after the vision tower, ready for any number of questions."""

    tiles: Any  # with `side`, tokens in a row of a tile
    tiled: bool  # several tiles of one image, as against one square
    size: tuple[int, int]  # width and height of the image in pixels
    method: Method  # it was encoded for
    budget: Budget | Share


class Prefill(NamedTuple):
    """Rows of the prefill of one answer, and the KV cache it left."""

    text: int  # rows that are not visual tokens
    question: int  # of these, rows after the last image
    entering: tuple[int, ...]  # visual tokens that entered each decoder layer
    kv_bytes: tuple[int, ...]  # keys and values each layer's cache holds, without padding


class Answer(NamedTuple):
    text: str
    before: int
    after: int
    structural: int
    notes: tuple[str, ...]
    outcomes: tuple[ImageOutcome, ...]
    prefill: Prefill | None = None
    logprob: float | None = None  # mean over its tokens, the end included; None if the prompt does not ask for it


class Sureness(threading.local):
    """A logits processor that changes nothing and notes the log-probability [R] of each token that is taken."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.steps.append(scores.float().log_softmax(dim=-1).amax(dim=-1))
        return scores

    def means(self, output: Tensor, ends: int | list[int] | None) -> list[float | None]:
        """Means over the tokens of answers [R, L] up to their ends; None unless each of the L steps was seen."""
        if not self.steps or len(self.steps) != output.shape[1]:
            return [None] * len(output)
        end = torch.isin(output, torch.tensor([-1] if ends is None else ends, device=output.device))
        said = end.cumsum(dim=1) - end.long() == 0
        means = (torch.stack(self.steps, dim=1) * said).sum(dim=1) / said.sum(dim=1)
        return [round(mean, 4) + 0.0 for mean in means.tolist()]


class Runner:
    """A model, as its view (`hosts.facts.Facts`), with its tokenizer, which only questions need."""

    reserved: tuple[str, ...] = ()  # placeholder texts for images in prompts of this model
    limit: int | None = None  # rows of a prompt that the model was made for; None is any number

    def __init__(self, view: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.view = view
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.model: Any = view.module
        self._attached: Attachment | None = None
        self._sureness = Sureness()

    @property
    def visual_tokens(self) -> int:
        """Tokens of one image, or of one tile of it; the most if that depends on the image."""
        tokens: int = self.view.tower.tokens
        return tokens

    def attach(self, method: Method, budget: Budget | Share) -> Attachment:
        """Attaches a method to this model instance; a context manager, or call `.detach()`. OptionError for a method
        this model has no parts for, or a model that has a method already.
        """
        self._attached = attach_view(self.view, method, budget)
        return self._attached

    @contextmanager
    def attachment(self) -> Iterator[Any]:
        """The current attachment; without one, `full` is attached in the block."""
        if self._attached is not None and self._attached.active:
            yield self._attached
        else:
            with self.attach(*FULL) as attachment:
                yield attachment

    # ---- implemented by each kind of model

    def grid_columns(self, size: tuple[int, int]) -> int:
        """Tiles in a row of the grid after the base view of an image of this width and height; 0 without a grid."""
        return 0

    def pixels(self, image: Image) -> Tensor:
        """An image as the vision tower reads it: [3, H, W], or [T, 3, H, W] if it is cut into tiles."""
        raise NotImplementedError

    def shape(self, text: int = 0) -> Shape:
        """Sizes of the model, with a prompt of one image of the most tiles and `text` other rows."""
        raise NotImplementedError

    def rows(self, prompt: Prompt, images: int = 1) -> tuple[int, int]:
        """Rows of a prompt that are no images, and how many of them follow the last image."""
        raise NotImplementedError

    def asked_rows(self, prompt: Prompt, images: list[Any], ids: Tensor) -> tuple[int, int]:
        """`rows` of a prompt with the ids [L] of `question_ids`."""
        return self.rows(prompt, len(images))

    def own_inputs(self, prompt: Prompt, image: Image, folder: Path) -> dict[str, Any]:
        """Kwargs of the model's own `generate` for one prompt about an image, which may be read from the folder."""
        raise NotImplementedError

    def prompt_ids(self, prompt: Prompt, images: int = 1) -> Tensor:
        """Token ids [L] of a prompt, with one placeholder for each image, on the CPU."""
        raise NotImplementedError

    def question_ids(self, prompt: Prompt, images: list[Any]) -> Tensor:
        """Token ids [L] of a prompt about these encoded images, on the CPU."""
        return self.prompt_ids(prompt, len(images))

    def generate(self, ids: Tensor, mask: Tensor, encoded: list[list[Any]], prompts: list[Prompt]) -> Tensor:
        """Ids of the answers to left-padded prompts [R, S] about encoded images, by the model's own `generate`."""
        raise NotImplementedError

    def calling(self, attachment: Attachment, images: list[Any], questions: list[str]) -> AbstractContextManager[Any]:
        """The call of the attachment in which `generate` runs."""
        return attachment.call(questions)

    # ---- encoding and answering

    @torch.inference_mode()
    def encode(self, images: list[Any]) -> list[Encoding]:
        """Images, and of hosts that take them clips, through the vision tower, for the method that is attached."""
        pixels = [self.pixels(image) for image in images]
        tiles = [image if image.ndim == 4 else image[None] for image in pixels]
        batch = torch.cat(tiles).to(self.model.device, self.model.dtype)  # [all tiles, 3, H, W]
        with self.attachment() as attachment:
            encoded = attachment.entrance.encode(batch, [len(image) for image in tiles])
            own = attachment.asked, attachment.budget
        return [
            Encoding(one, made.ndim == 4, image.size, *own)
            for image, made, one in zip(images, pixels, encoded, strict=True)
        ]

    def groups(self, encoded: list[list[Encoding]]) -> list[list[int]]:
        """Rows that are answered together: all with images, and all without."""
        seeing = [row for row, images in enumerate(encoded) if images]
        bare = [row for row, images in enumerate(encoded) if not images]
        return [rows for rows in (seeing, bare) if rows]

    @torch.inference_mode()
    def answer(self, encoded: list[list[Encoding]], prompts: list[Prompt]) -> list[Answer]:
        """Greedy answers to one prompt about each list of encoded images (none for a question about text, several for a
        video), in left-padded batches.
        """
        for prompt in prompts:
            check_text(prompt.text, self.reserved)
        with self.attachment() as attachment:
            _check_batch(attachment, encoded, prompts)
            ids = [self.question_ids(prompt, images) for prompt, images in zip(prompts, encoded, strict=True)]
            answers: dict[int, Answer] = {}
            for rows in self.groups(encoded):
                own, asked = [encoded[row] for row in rows], [prompts[row] for row in rows]
                padded, mask = self.pad([ids[row] for row in rows])
                images = [visual for row_images in own for visual in row_images]
                with self.calling(attachment, images, [prompt.text for prompt in asked]) as call:
                    output = self.generate(padded, mask, own, asked)
                logprobs = self._sureness.means(output, self.model.generation_config.eos_token_id)
                text = [self.asked_rows(prompts[row], encoded[row], ids[row]) for row in rows]
                found = answers_of(call, self.decode(output), text, self.limit)
                answers |= {row: one._replace(logprob=p) for row, one, p in zip(rows, found, logprobs, strict=True)}
        return [answers[row] for row in range(len(prompts))]

    def ask(self, images: list[Image | Clip], prompt: Prompt) -> tuple[list[Encoding], Answer]:
        """Encodes images and answers one prompt about them. DataError for whatever the model's code raises."""
        try:
            encoded = self.encode(images)
            return encoded, self.answer([encoded], [prompt])[0]
        except ConsensusError:
            raise
        except Exception as error:
            raise DataError(
                f"the model cannot answer: {type(error).__name__}: {error}. If that is so for every image, fetch the "
                "checkpoint's config.json, generation_config.json, processor and tokenizer again"
            ) from error

    def pad(self, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Ids and mask [R, L] of rows padded on the left."""
        ids = pad_sequence(rows, batch_first=True, padding_value=self.padding, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        return ids.to(self.model.device), mask.to(self.model.device)

    @property
    def padding(self) -> int:
        """Id of padding; the end of a text if the tokenizer has none."""
        padding, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return int(end if padding is None else padding)

    def generation(self, prompt: Prompt) -> dict[str, Any]:
        """Arguments of `generate`: greedy, as LLaVA evaluates."""
        self._sureness.steps = []
        noted = {"logits_processor": LogitsProcessorList([self._sureness])} if prompt.sure else {}
        greedy = {"do_sample": False, "use_cache": True, "pad_token_id": self.padding, **noted}
        longer = {"min_new_tokens": prompt.min_new_tokens} if prompt.min_new_tokens else {}
        return {**greedy, **longer, "max_new_tokens": prompt.max_new_tokens}

    def decode(self, output: Tensor) -> list[str]:
        """Texts of ids [R, L]."""
        texts: list[str] = self.tokenizer.batch_decode(output, skip_special_tokens=True)
        return texts


@contextmanager
def last_row_alone(head: nn.Module) -> Iterator[None]:
    """In the block, the head gets the last row of states [R, S, D] of this thread only: generation reads no others."""

    @in_this_thread
    def last(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return (args[0][:, -1:],) if args[0].ndim == 3 else None

    handle = head.register_forward_pre_hook(last)
    try:
        yield
    finally:
        handle.remove()


def check_text(text: str, reserved: Sequence[str]) -> None:
    """Raises QuestionError for half of a character, or a word that represents an image."""
    if HALF.search(text):
        raise QuestionError(f"the question {text[:60]!r} holds half of a character. Save it as UTF-8")
    if taken := [word for word in reserved if word in text]:
        raise QuestionError(
            f"the question {text[:60]!r} holds {taken[0]}, which stands for an image in the prompts of this model; "
            "images are put in front of the question by themselves. Leave it out"
        )


def _check_batch(attachment: Attachment, encoded: list[list[Encoding]], prompts: list[Prompt]) -> None:
    """Raises ValueError for answers of unequal length, or an image that was encoded for another method."""
    if len({prompt.max_new_tokens for prompt in prompts}) != 1:
        raise ValueError("the prompts of one batch must allow answers of one length")
    method, budget = attachment.asked, attachment.budget
    for visual in (visual for images in encoded for visual in images):
        if visual.method != method or (method.acts_inside and visual.budget != budget):
            raise ValueError(
                f"an image was encoded for {visual.method} and {visual.budget}, but {method} with {budget} is "
                "attached: encode it again"
            )


def answers_of(
    call: Call, texts: Sequence[str], text_rows: Sequence[tuple[int, int]], limit: int | None
) -> list[Answer]:
    """Texts with the account of their tokens, and a note if a prompt has more rows than the `limit` positions the model
    was made for: it is answered, but from positions never seen in training, or official LLaVA has cut it.
    """
    outcomes = [tuple(outcome for outcome in call.report.outcomes if outcome.row == row) for row in range(len(texts))]
    answers = []
    for text, own, prefill in zip(texts, outcomes, prefills(call.report.cache, text_rows, outcomes), strict=True):
        before, after, structural = (sum(getattr(outcome, name) for outcome in own) for name in COUNTS)
        notes = call.report.notes
        if limit is not None and prefill.text + max(prefill.entering, default=after) > limit:
            notes += (f"prompt longer than the {limit} positions of the model",)
            warnings.warn(f"{notes[-1]}: take fewer tokens per image", stacklevel=2)  # Python says it once
        answers.append(Answer(text.strip(), before, after, structural, notes, own, prefill))
    return answers


def prefills(
    layers: Sequence[CachedLayer], text: Sequence[tuple[int, int]], outcomes: Sequence[Sequence[ImageOutcome]]
) -> list[Prefill]:
    """Prefill sizes of each row of a batch. A row's own padding is taken off its share of the cache; rows that the
    cache holds beyond the longest row stay in.
    """
    structural = [sum(outcome.structural for outcome in row_outcomes) for row_outcomes in outcomes]
    rows = [count + more for (count, _), more in zip(text, structural, strict=True)]
    entering = []  # visual tokens of each row that entered each layer; an outcome says so where a method cuts inside
    for row_outcomes in outcomes:
        counts = [outcome.entering or (outcome.after,) * len(layers) for outcome in row_outcomes]
        entering.append([sum(count[layer] for count in counts) for layer in range(len(layers))])
    cached: list[list[int]] = [[] for _ in text]
    for index, layer in enumerate(layers):
        lengths = [min(text_rows + count[index], layer.length) for text_rows, count in zip(rows, entering, strict=True)]
        position_bytes = layer.bytes // (layer.rows * layer.length)  # of one position; all of them are equally large
        for row, length in enumerate(lengths):
            cached[row].append(position_bytes * (layer.length - max(lengths) + length))
    return [
        Prefill(text_rows, after, tuple(count), tuple(size))
        for text_rows, (_, after), count, size in zip(rows, text, entering, cached, strict=True)
    ]


def text_rows(ids: Tensor, placeholders: Sequence[int]) -> tuple[int, int]:
    """Rows of a prompt [L] that are no placeholders, and how many of them follow the last one."""
    places = torch.isin(ids, torch.tensor(placeholders, dtype=ids.dtype)).nonzero()[:, 0].tolist()
    return len(ids) - len(places), len(ids) - 1 - places[-1] if places else len(ids)


def shape_of(
    view: Any,
    language: PretrainedConfig,
    vision: PretrainedConfig,
    projector: nn.Module | None,
    text: int,
    **more: Any,
) -> Shape:
    """Sizes that decide the cost of a prompt of one image of the most tiles and `text` other rows. Every block of the
    tower counts, whichever feeds the projector: models run them all. `more` are further fields of `Shape`.
    """
    tower, heads, size = view.tower, language.num_attention_heads, vision.patch_size
    experts = getattr(language, "num_experts_per_tok", None) or 1
    width = getattr(vision, "embed_dim", vision.hidden_size)
    members = getattr(tower, "members", None)
    sides = (size, size) if isinstance(size, int) else size
    assert tower is not None  # a host shows images
    linear = [] if projector is None else [one for one in projector.modules() if isinstance(one, nn.Linear)]
    return Shape(
        layers=language.num_hidden_layers,
        width=language.hidden_size,
        heads=heads,
        kv_heads=getattr(language, "num_key_value_heads", None) or heads,
        head_width=getattr(language, "head_dim", None) or language.hidden_size // heads,
        inner=experts * (getattr(language, "moe_intermediate_size", None) or language.intermediate_size),
        vocabulary=language.vocab_size,
        blocks=len(tower.blocks),
        vision_width=width,
        vision_heads=getattr(vision, "num_attention_heads", None) or vision.num_heads,
        vision_inner=getattr(vision, "intermediate_size", None) or int(width * vision.mlp_ratio),
        patches=tower.tokens,
        patch_values=getattr(vision, "num_channels", 3) * math.prod(sides) * getattr(vision, "temporal_patch_size", 1),
        text=text,
        tiles=view.most_tiles,
        classes=tower.classes,
        projector=sum(module.in_features * module.out_features for module in linear),
        number_bytes=view.module.dtype.itemsize,
        feature_blocks=tower.feature_block + 1,
        merged=getattr(tower, "merged", 1) if members is None else members.shape[1],
        varies=getattr(tower, "varies", False),
        single=Need.PROJECTOR in tower.offers,
        **more,
    )
