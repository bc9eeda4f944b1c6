"""Official LLaVA as the harness uses it: pictures in, answers out, by the package's own loader (`loading.py`),
templates and `generate`.

The vision tower runs once for a picture, however many questions are asked about it; prompts are answered in
left-padded batches.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Answer, Encoded, Prompt
from llava_consensus.hosts.decoder.cache import prefills
from llava_consensus.hosts.harness import HarnessHost, answer_of
from llava_consensus.hosts.layouts import STOCK
from llava_consensus.hosts.llava.adapter import LlavaModel
from llava_consensus.hosts.llava.prepare import PREPARE, View
from llava_consensus.hosts.llava.prompts import image_place, text_rows, to_ids
from llava_consensus.hosts.llava.shape import read_shape
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.shape import Shape

# Questions that share a picture's cache: from three on it pays, where the cache can be repeated at all.
SHARED = 3 if hasattr(transformers.DynamicCache, "batch_repeat_interleave") else 1 << 30
LEFT = {"tokenizer_padding_side": "left"}


class LlavaHost(HarnessHost):
    """A LLaVA model with its tokenizer and image processor.

    Args:
        model: a `LlavaLlamaForCausalLM` or `LlavaMistralForCausalLM` with its vision tower loaded.
        tokenizer, image_processor: as the official loader returns them; only `encode` and `answer` need them.
        options: of the host, all of them.
    """

    view_class = LlavaModel

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        image_processor: Any = None,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.options = options
        self.view = self.view_class(model, options.get("layout", STOCK))
        self.model, self.tokenizer, self.image_processor = model, tokenizer, image_processor

    @property
    def visual_tokens(self) -> int:
        """Patches of one picture, or of one tile of it."""
        patches: int = self.model.get_vision_tower().num_patches
        return patches

    def shape(self, text: int = 0) -> Shape:
        """Sizes of the model, with a prompt of one picture of the most tiles and `text` other rows."""
        return read_shape(View(self.model, config=self.view.config), text)

    def grid_columns(self, size: tuple[int, int]) -> int:
        """Tiles in a row of the grid behind the base view of a picture of this width and height; 0 without a grid."""
        from llava.mm_utils import get_anyres_image_grid_shape

        config, tile = self.view.config, self.model.get_vision_tower().config.image_size
        if getattr(config, "image_aspect_ratio", None) != "anyres":
            return 0
        return int(get_anyres_image_grid_shape(size, config.image_grid_pinpoints, tile)[0])

    def rows(self, prompt: Prompt, pictures: int = 1) -> tuple[int, int]:
        """Rows of a prompt that are no pictures, and how many of them follow the last picture."""
        return text_rows(self.prompt_ids(prompt, pictures))

    def attach(self, method: Method, budget: Budget | Share) -> Attachment:
        """Attaches a method to this model instance; a context manager, or call `.detach()`."""
        self.view.check(method)
        self._attached = Attachment(self.view, method, budget)
        return self._attached

    @torch.inference_mode()
    def encode(self, images: list[Image.Image]) -> list[Encoded]:
        """Pictures through preprocessing, vision tower and projector, in one batch where they have one shape."""
        from llava.mm_utils import process_images

        pixels = [process_images([image], self.image_processor, self.view.config)[0] for image in images]
        tiles = [picture if picture.ndim == 4 else picture[None] for picture in pixels]
        batch = torch.cat(tiles).to(self.model.device, self.model.dtype)
        with self.attachment() as attachment, attachment.call():
            encoded = attachment.encode(batch, [len(picture) for picture in tiles])
        attached = attachment.method, attachment.budget
        return [
            Encoded(part, picture.ndim == 4, image.size, *attached)
            for image, picture, part in zip(images, pixels, encoded, strict=True)
        ]

    def own_inputs(self, prompt: Prompt, image: Image.Image, folder: Path) -> dict[str, Any]:
        """What the model's own `generate` is given for one prompt about a picture, as official LLaVA's runners do."""
        from llava.mm_utils import process_images

        ids = self.prompt_ids(prompt)[None].to(self.model.device)
        pixels = process_images([image], self.image_processor, self.model.config)
        pictures = pixels.to(self.model.device, self.model.dtype)
        return {
            "inputs": ids,
            "attention_mask": torch.ones_like(ids),
            "images": pictures,
            "image_sizes": [image.size],
        }

    def answer_group(
        self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor], prompts: list[Prompt]
    ) -> list[Answer]:
        """Answers of prompts that are asked together; several questions about one picture share the work on it."""
        shared = self._share(attachment, encoded)
        pictures = [picture for row_pictures in (encoded[:1] if shared else encoded) for picture in row_pictures]
        questions = [prompt.text for prompt in prompts]
        fields = {"encoded": [picture.tiles for picture in pictures] or None, "questions": questions, "settings": LEFT}
        with attachment.call(**fields) as call:
            ask = self._ask_shared if shared else self._ask
            texts = ask(pictures, ids, prompts[0])
        places = [0 if shared else place for place in range(len(ids))]
        row_outcomes = [[outcome for outcome in call.outcomes if outcome.row == place] for place in places]
        row_prefills = prefills(call.cache, [text_rows(row) for row in ids], row_outcomes)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return [
            answer_of(call, place, text, prefill, limit)
            for place, text, prefill in zip(places, texts, row_prefills, strict=True)
        ]

    def _share(self, attachment: Attachment, encoded: list[list[Encoded]]) -> bool:
        """Whether these prompts are about one and the same picture, whose cache they can share."""
        same_picture = all(len(pictures) == 1 and pictures[0] is encoded[0][0] for pictures in encoded)
        return same_picture and len(encoded) >= SHARED and not attachment.reads_prompts and attachment.fast is None

    def groups(self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor]) -> list[list[int]]:
        """Rows that are answered together: all with pictures and all without, or where prompts do not matter picture
        by picture.
        """
        if attachment.reads_prompts:
            return super().groups(attachment, encoded, ids)
        bare = [row for row, pictures in enumerate(encoded) if not pictures]
        seeing = [row for row, pictures in enumerate(encoded) if pictures]
        by_picture: dict[Any, list[int]] = {}
        for row in seeing:
            front = tuple(ids[row][: image_place(ids[row])].tolist())
            by_picture.setdefault((tuple(map(id, encoded[row])), front), []).append(row)
        shared = [rows for rows in by_picture.values() if len(rows) >= SHARED and len(encoded[rows[0]]) == 1]
        unshared = sorted(set(seeing) - {row for rows in shared for row in rows})
        return [rows for rows in (*shared, unshared, bare) if rows]

    def _ask(self, pictures: list[Encoded], rows: list[Tensor], prompt: Prompt) -> list[str]:
        """Texts by the official `generate`, in one left-padded batch; the call has the pictures' features."""
        ids, mask = self.pad(rows)
        output = self.model.generate(
            ids,
            images=self._blank(pictures) if pictures else None,
            image_sizes=[picture.size for picture in pictures],
            attention_mask=mask,
            **self.generation(prompt),
        )
        return self.decode(output)

    def _ask_shared(self, pictures: list[Encoded], rows: list[Tensor], prompt: Prompt) -> list[str]:
        """Texts of several questions about one picture: system prompt and picture are read once, into one cache."""
        start = image_place(rows[0]) + 1
        front = rows[0][None, :start].to(self.model.device)
        prepare = getattr(self.model, PREPARE)
        embeds = prepare(front, None, None, None, None, self._blank(pictures), [pictures[0].size])[4]
        cache = self.model.get_model()(inputs_embeds=embeds, use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(rows))
        ids, mask = self.pad([row[start:] for row in rows])
        read = mask.new_ones(len(rows), embeds.shape[1])  # their ids are never looked at: the cache stands for them
        ids, mask = torch.cat((read, ids), dim=1), torch.cat((read, mask), dim=1)
        output = transformers.GenerationMixin.generate(
            self.model, ids, attention_mask=mask, past_key_values=cache, **self.generation(prompt)
        )
        return self.decode(output[:, ids.shape[1] :])

    def _blank(self, encoded: list[Encoded]) -> Any:
        """Pictures without pixels, of the shape the official function looks at."""
        device, dtype = self.model.device, self.model.dtype
        blank = [torch.empty(len(picture.tiles.projected), 3, 0, 0, device=device, dtype=dtype) for picture in encoded]
        return blank if any(picture.tiled for picture in encoded) else torch.cat(blank)

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> Tensor:
        """Token ids of a prompt with its image placeholders in front of its text: [L] on the CPU."""
        wrapped = getattr(self.model.config, "mm_use_im_start_end", False)
        return to_ids(prompt, pictures, self.tokenizer, wrapped)


def wrap(model: Any, options: Mapping[str, str]) -> LlavaHost:
    """The host of a model that is loaded already, with all options of the host."""
    return LlavaHost(model, options=options)
