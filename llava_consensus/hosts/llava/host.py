"""Official LLaVA as the harness uses it: pictures in, answers out, by the package's own loader (`loading.py`),
templates and `generate`.

The vision tower runs once for a picture, however many questions are asked about it; prompts are answered in
left-padded batches.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Answer, Encoded, Prompt
from llava_consensus.hosts.call import prefills
from llava_consensus.hosts.harness import HarnessHost, answer_of, last_row_alone
from llava_consensus.hosts.layouts import STOCK
from llava_consensus.hosts.llava.adapter import LlavaModel
from llava_consensus.hosts.llava.prepare import View
from llava_consensus.hosts.llava.prompts import image_place, text_rows, to_ids
from llava_consensus.hosts.llava.shape import read_shape
from llava_consensus.hosts.llava.shared import REPEATS, ask_behind_pictures, ask_behind_words
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method, Place, Shape

SAVED = 2  # pictures that need not be read again: from so many on it pays to read pictures apart from questions
LEFT, RIGHT = {"tokenizer_padding_side": "left"}, {"tokenizer_padding_side": "right"}


class LlavaHost(HarnessHost):
    """A LLaVA model with its tokenizer and image processor.

    Args:
        model: a `LlavaLlamaForCausalLM` or `LlavaMistralForCausalLM` with its vision tower loaded.
        tokenizer, image_processor: as the official loader returns them; only `encode` and `answer` need them.
        options: of the host, all of them.
    """

    view_class = LlavaModel
    shares = REPEATS  # whether prompts that begin alike are read once as far as they do so

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
        """Tiles in a row of the grid after the base view of a picture of this width and height; 0 without a grid."""
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
        """Answers of prompts that are asked together; what they begin with alike is read once (`shared.py`)."""
        places, shown = self._places(attachment, encoded)
        pictures = [picture for row_pictures in shown for picture in row_pictures]
        questions = [prompt.text for prompt in prompts]
        repeats = self.shares and len(ids) > 1 and bool(pictures) and _plain(attachment)
        fields: dict[str, Any] = {"encoded": [picture.tiles for picture in pictures] or None, "questions": questions}
        under_way = attachment.call(**fields, settings=RIGHT if repeats else LEFT, begin_alike=repeats)
        with under_way as call, last_row_alone(self.model.get_output_embeddings(), call):
            if len(shown) < len(ids):
                texts = ask_behind_pictures(self, shown, places, ids, prompts[0])
            else:
                texts = (partial(ask_behind_words, self) if repeats else self._ask)(pictures, ids, prompts[0])
        row_outcomes = [[outcome for outcome in call.report.outcomes if outcome.row == place] for place in places]
        row_prefills = prefills(call.report.cache, [text_rows(row) for row in ids], row_outcomes)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return [
            answer_of(call, place, text, prefill, limit)
            for place, text, prefill in zip(places, texts, row_prefills, strict=True)
        ]

    def _places(self, attachment: Attachment, encoded: list[list[Encoded]]) -> tuple[list[int], list[list[Encoded]]]:
        """For each prompt which list of pictures it shows, and these lists: each once where that saves something, else
        one for each prompt.
        """
        distinct: dict[tuple[int, ...], int] = {}
        places = [distinct.setdefault(tuple(map(id, shown)), len(distinct)) for shown in encoded]
        saved = len(places) - len(distinct)
        alone = not self.shares or saved < SAVED or attachment.sharing.reads_prompts
        if alone or not all(encoded) or not _plain(attachment):
            return list(range(len(encoded))), encoded
        return places, [encoded[places.index(number)] for number in range(len(distinct))]

    def groups(self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor]) -> list[list[int]]:
        """Rows that are answered together: all without pictures, and those with pictures that begin alike."""
        by_front: dict[Any, list[int]] = {}
        for row in range(len(ids)):
            front = tuple(ids[row][: image_place(ids[row])].tolist()) if encoded[row] else None
            by_front.setdefault(front if self.shares or front is None else (), []).append(row)
        return list(by_front.values())

    def _ask(self, pictures: list[Encoded], rows: list[Tensor], prompt: Prompt) -> list[str]:
        """Texts by the official `generate`, in one left-padded batch; the call has the pictures' features."""
        ids, mask = self.pad(rows)
        output = self.model.generate(
            ids,
            images=self.blank(pictures) if pictures else None,
            image_sizes=[picture.size for picture in pictures],
            attention_mask=mask,
            **self.generation(prompt),
        )
        return self.decode(output)

    def blank(self, encoded: list[Encoded]) -> Any:
        """Pictures without pixels, of the shape the official function looks at."""
        device, dtype = self.model.device, self.model.dtype
        blank = [torch.empty(len(picture.tiles.projected), 3, 0, 0, device=device, dtype=dtype) for picture in encoded]
        return blank if any(picture.tiled for picture in encoded) else torch.cat(blank)

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> Tensor:
        """Token ids of a prompt with its image placeholders in front of its text: [L] on the CPU."""
        wrapped = getattr(self.model.config, "mm_use_im_start_end", False)
        return to_ids(prompt, pictures, self.tokenizer, wrapped)


def _plain(attachment: Attachment) -> bool:
    """Whether the language model reads all rows it is given, at positions that are counted, and reads the first ones
    alike whatever follows.
    """
    method, decoder = attachment.method, attachment.model.decoder
    cuts = method.place is Place.DECODER and attachment.sharing.reads_prompts
    return not cuts and method.positions == "renumber" and not decoder.follows_length


def wrap(model: Any, options: Mapping[str, str]) -> LlavaHost:
    """The host of a model that is loaded already, with all options of the host."""
    return LlavaHost(model, options=options)
