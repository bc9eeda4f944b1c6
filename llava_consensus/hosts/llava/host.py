"""Host: official LLaVA 1.5 and 1.6, Llama and Mistral language models, by the `llava` package's own loader, templates
and `generate`.

The vision tower runs once for a picture, however many questions are asked about it; prompts are answered in
left-padded batches.
"""

import contextlib
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from llava_consensus.errors import DataError, MissingDependency, OptionError
from llava_consensus.hosts.base import Answer, Encoded, Prefill, Prompt
from llava_consensus.hosts.checkpoints import DTYPES, check_checkpoint, tower_beside, without_unused_report
from llava_consensus.hosts.decoder.cache import CachedLayer, prefills, watched
from llava_consensus.hosts.llava.attachment import SEAM, LlavaAttachment
from llava_consensus.hosts.llava.encode import join_taps, slice_taps, take_taps
from llava_consensus.hosts.llava.prompts import image_place, text_rows, to_ids
from llava_consensus.hosts.llava.shape import read_shape
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.checks import choose
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.shape import Shape

SHARED = (
    3 if hasattr(transformers.DynamicCache, "batch_repeat_interleave") else 1 << 30
)  # questions that share a picture
LEFT = {"tokenizer_padding_side": "left"}


class LlavaHost:
    """A LLaVA model with its tokenizer and image processor.

    Args:
        model: a `LlavaLlamaForCausalLM` or `LlavaMistralForCausalLM` with its vision tower loaded.
        tokenizer, image_processor: as the official loader returns them; only `encode` and `answer` need them.
    """

    def __init__(self, model: Any, tokenizer: Any = None, image_processor: Any = None) -> None:
        self.model, self.tokenizer, self.image_processor = model, tokenizer, image_processor
        self.attachment: LlavaAttachment | None = None

    @property
    def visual_tokens(self) -> int:
        """Patches of one picture, or of one tile of it."""
        patches: int = self.model.get_vision_tower().num_patches
        return patches

    def shape(self, text: int = 0) -> Shape:
        """Sizes of the model, with a prompt of one picture of the most tiles and `text` other rows."""
        return read_shape(self.model, text)

    def rows(self, prompt: Prompt, pictures: int = 1) -> tuple[int, int]:
        """Rows of a prompt that are no pictures, and how many of them follow the last picture."""
        return text_rows(self.prompt_ids(prompt, pictures))

    def attach(self, method: Method, budget: Budget) -> LlavaAttachment:
        """Attaches a method to this model instance; a context manager, or call `.detach()`."""
        self.attachment = LlavaAttachment(self.model, method, budget)
        return self.attachment

    @torch.inference_mode()
    def encode(self, images: list[Image.Image]) -> list[Encoded]:
        """Pictures through preprocessing, vision tower and projector, in one batch where they have one shape."""
        from llava.mm_utils import process_images

        pixels = [process_images([image], self.image_processor, self.model.config)[0] for image in images]
        tiles = [one if one.ndim == 4 else one[None] for one in pixels]
        batch = torch.cat(tiles).to(self.model.device, self.model.dtype)
        attachment = self.attachment
        sizes = [len(own) for own in tiles]
        taps = attachment.taps(batch, sizes) if attachment else take_taps(self.model, batch, make("full"))
        parts, start = [], 0
        for image, one, own in zip(images, pixels, tiles, strict=True):
            parts.append(Encoded(slice_taps(taps, start, start + len(own)), one.ndim == 4, image.size))
            start += len(own)
        return parts

    @torch.inference_mode()
    def answer(self, encoded: list[list[Encoded]], prompts: list[Prompt]) -> list[Answer]:
        """Greedy answers to one prompt about each list of encoded pictures, in left-padded batches.

        Raises:
            ValueError: when the prompts differ in the length of answer they allow.
        """
        if len({prompt.max_new_tokens for prompt in prompts}) != 1:
            raise ValueError("the prompts of one batch must allow answers of one length")
        attached = self.attachment is not None and self.attachment.active
        attachment = self.attachment if attached and self.attachment else self.attach(make("full"), Budget(1))
        try:
            return self._generate(attachment, encoded, prompts)
        finally:
            attachment.encoded, attachment.overrides, attachment.questions = None, {}, None
            if not attached:
                attachment.detach()

    def _generate(
        self, attachment: LlavaAttachment, encoded: list[list[Encoded]], prompts: list[Prompt]
    ) -> list[Answer]:
        """Answers group by group; a group of several questions about one picture shares the work on the picture."""
        ids = [self.prompt_ids(prompt, len(own)) for prompt, own in zip(prompts, encoded, strict=True)]
        answers: dict[int, Answer] = {}
        for rows in self._groups(attachment, encoded, ids):
            same = all(encoded[row][:1] == encoded[rows[0]][:1] for row in rows)
            alone = all(len(encoded[row]) == 1 for row in rows)
            shared = same and alone and len(rows) >= SHARED and not attachment.reads_prompts
            ask = self._ask_shared if shared else self._ask
            attachment.questions = [prompts[row].text for row in rows]
            with watched(self.model) as cache:
                texts = ask(attachment, [encoded[row] for row in rows], [ids[row] for row in rows], prompts[0])
            read = self._prefills(attachment, cache, [ids[row] for row in rows], shared)
            for place, (row, text) in enumerate(zip(rows, texts, strict=True)):
                words = len(ids[row]) - len(encoded[row])
                answer = self._answer(attachment, 0 if shared else place, text.strip(), words)
                answers[row] = answer._replace(prefill=read[place])
        return [answers[row] for row in range(len(prompts))]

    def _groups(self, attachment: LlavaAttachment, encoded: list[list[Encoded]], ids: list[Tensor]) -> list[list[int]]:
        """Rows that are answered together: all with pictures and all without, or where prompts do not matter picture
        by picture.
        """
        bare = [row for row, own in enumerate(encoded) if not own]
        seeing = [row for row, own in enumerate(encoded) if own]
        if attachment.reads_prompts:
            return [rows for rows in (seeing, bare) if rows]
        found: dict[Any, list[int]] = {}
        for row in seeing:
            front = tuple(ids[row][: image_place(ids[row])].tolist())
            found.setdefault((tuple(map(id, encoded[row])), front), []).append(row)
        shared = [rows for rows in found.values() if len(rows) >= SHARED and len(encoded[rows[0]]) == 1]
        rest = sorted(set(seeing) - {row for rows in shared for row in rows})
        return [rows for rows in (*shared, rest, bare) if rows]

    def _ask(
        self, attachment: LlavaAttachment, encoded: list[list[Encoded]], rows: list[Tensor], prompt: Prompt
    ) -> list[str]:
        """Texts by the official `generate`, in one left-padded batch, with the pictures' features handed over."""
        ids, mask = self._pad(rows)
        pictures = [one for own in encoded for one in own]
        attachment.encoded, attachment.overrides = join_taps([one.taps for one in pictures]) if pictures else None, LEFT
        attachment.outcomes, attachment.notes = [], ()
        output = self.model.generate(
            ids,
            images=self._blank(pictures) if pictures else None,
            image_sizes=[one.size for one in pictures],
            attention_mask=mask,
            **self._generation(prompt),
        )
        return self._decode(output)

    def _ask_shared(
        self, attachment: LlavaAttachment, encoded: list[list[Encoded]], rows: list[Tensor], prompt: Prompt
    ) -> list[str]:
        """Texts of several questions about one picture: system prompt and picture are read once, into one cache."""
        one, start = encoded[0][0], image_place(rows[0]) + 1
        attachment.encoded, attachment.overrides = one.taps, LEFT
        front = rows[0][None, :start].to(self.model.device)
        seam = getattr(self.model, SEAM)
        embeds = seam(front, None, None, None, None, self._blank([one]), [one.size])[4]
        cache = self.model.get_model()(inputs_embeds=embeds, use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(rows))
        ids, mask = self._pad([row[start:] for row in rows])
        read = mask.new_ones(len(rows), embeds.shape[1])  # their ids are never looked at: the cache stands for them
        ids, mask = torch.cat((read, ids), dim=1), torch.cat((read, mask), dim=1)
        output = transformers.GenerationMixin.generate(
            self.model, ids, attention_mask=mask, past_key_values=cache, **self._generation(prompt)
        )
        return self._decode(output[:, ids.shape[1] :])

    def _pad(self, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Ids and mask [R, L] of rows padded on the left."""
        width = max(len(row) for row in rows)
        ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=self._padding) for row in rows])
        mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
        return ids.to(self.model.device), mask.to(self.model.device)

    def _blank(self, encoded: list[Encoded]) -> Any:
        """Pictures without pixels, of the shape the official function looks at."""
        device, dtype = self.model.device, self.model.dtype
        blank = [torch.empty(len(one.taps.projected), 3, 0, 0, device=device, dtype=dtype) for one in encoded]
        return blank if any(one.tiled for one in encoded) else torch.cat(blank)

    @property
    def _padding(self) -> int:
        pad: int | None = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    def _generation(self, prompt: Prompt) -> dict[str, Any]:
        """Greedy, as LLaVA evaluates."""
        greedy = {"do_sample": False, "use_cache": True, "pad_token_id": self._padding}
        longer = {"min_new_tokens": prompt.min_new_tokens} if prompt.min_new_tokens else {}
        return {**greedy, **longer, "max_new_tokens": prompt.max_new_tokens}

    def _decode(self, output: Tensor) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(output, skip_special_tokens=True)
        return texts

    def _answer(self, attachment: LlavaAttachment, row: int, text: str, words: int) -> Answer:
        """One row's text with the account of its tokens; `words` is the number of text tokens in its prompt."""
        own = tuple(one for one in attachment.outcomes if one.row == row)
        counts = [sum(getattr(one, name) for one in own) for name in ("before", "after", "structural")]
        notes = attachment.notes + self._beyond(words + counts[1] + counts[2])
        return Answer(text, counts[0], counts[1], counts[2], notes, own)

    def _beyond(self, length: int) -> tuple[str, ...]:
        """A note on a prompt of more rows than the model was made for: it is answered, but from places never seen
        in training, or, where the checkpoint sets `tokenizer_model_max_length`, cut there by the official code.
        """
        limit = getattr(self.model.config, "max_position_embeddings", None) or length
        if length <= limit:
            return ()
        note = f"prompt longer than the {limit} positions of the model"
        warnings.warn(f"{note}: take fewer tokens per image", stacklevel=2)  # Python says it once
        return (note,)

    def _prefills(
        self, attachment: LlavaAttachment, cache: list[CachedLayer], ids: list[Tensor], shared: bool
    ) -> list[Prefill]:
        """What each row read and cached; rows that share a picture have its one outcome in common."""
        places = [0 if shared else place for place in range(len(ids))]
        own = [[one for one in attachment.outcomes if one.row == place] for place in places]
        return prefills(cache, [text_rows(row) for row in ids], own)

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> Tensor:
        """Token ids of a prompt with its image placeholders in front of its text: [L] on the CPU."""
        wrapped = getattr(self.model.config, "mm_use_im_start_end", False)
        return to_ids(prompt, pictures, self.tokenizer, wrapped)


def wrap(model: Any) -> LlavaHost:
    """The host of a model that is loaded already."""
    return LlavaHost(model)


def load(path: str, device: str = "auto", dtype: str = "auto") -> LlavaHost:
    """Loads a checkpoint with LLaVA's own loader (`llava.model.builder`).

    A vision tower named in the checkpoint's config is looked for beside the checkpoint too, so that it is found from
    any folder.

    Raises:
        DataError: for a folder that is not there or cannot be loaded.
        OptionError: for a name LLaVA's loader would take for another model, or a bad device or dtype.
    """
    choose("dtype", dtype, DTYPES)
    check_checkpoint(path)
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if place.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError(f"device={device!r}: no CUDA device here, use cpu or auto")
    changes = tower_beside(path)
    try:
        from llava.mm_utils import get_model_name_from_path
        from llava.model.builder import load_pretrained_model
    except ImportError as error:
        raise MissingDependency(
            f"official LLaVA: {error}. Type: pip install --no-deps llava-torch==1.2.2.post1"
        ) from error
    name = get_model_name_from_path(path)
    if "llava" not in name.lower() or "lora" in name.lower():
        raise OptionError(
            f"model={path!r}: LLaVA's loader goes by the folder's name, "
            "which must contain 'llava' and not 'lora' (merge first)"
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()), without_unused_report():
            tokenizer, model, processor, _ = load_pretrained_model(path, None, name, device=place, **changes)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
        raise DataError(f"model={path!r} cannot be loaded: {error}") from error
    if dtype != "auto" or place == "cpu":
        model.to(torch.float32 if dtype == "auto" else getattr(torch, dtype))
    return LlavaHost(model.eval(), tokenizer, processor)
