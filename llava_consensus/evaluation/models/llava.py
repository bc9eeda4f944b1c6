"""Official LLaVA, asked: by the package's own templates and `generate`.

The vision tower runs once for a picture, however many questions are asked about it, and prompts are answered in
left-padded batches. What several prompts begin with alike is read once too, into a cache that all of them go on from:
where a method reads the question these are the words in front of the picture; where it does not, words and pictures.
That needs the caches of transformers 5.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from llava_consensus.evaluation.models.base import (
    Answer,
    Encoded,
    Host,
    Prompt,
    answers_of,
    last_row_alone,
    shape_of,
    text_rows,
)
from llava_consensus.evaluation.models.llava_loading import CONVERSATION, check_conversation
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.llava import PREPARE, LlavaModel
from llava_consensus.reduction.method import Place, Shape

IMAGE_ID = -200  # IMAGE_TOKEN_INDEX of official LLaVA, which stands for a picture in a prompt
SAVED = 2  # pictures that need not be read again: from so many on it pays to read pictures apart from questions
LEFT, RIGHT = {"tokenizer_padding_side": "left"}, {"tokenizer_padding_side": "right"}
REPEATS = hasattr(transformers.DynamicCache, "batch_repeat_interleave")  # whether a cache can go to several rows


class LlavaHost(Host):
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
        super().__init__(self.view_class(model, options), tokenizer)
        self.image_processor = image_processor

    @property
    def reserved(self) -> tuple[str, ...]:
        """What LLaVA's templates put where a picture belongs."""
        from llava.constants import DEFAULT_IMAGE_TOKEN

        return (DEFAULT_IMAGE_TOKEN,)

    def shape(self, text: int = 0) -> Shape:
        """Sizes of the model, with a prompt of one picture of the most tiles and `text` other rows."""
        tower = self.model.get_vision_tower()
        projector = getattr(self.model.get_model(), "mm_projector", None)
        clip = _text_side(Path(tower.vision_tower_name))
        return shape_of(self.view, self.model.config, tower.vision_tower.config, projector, text, **clip)

    def grid_columns(self, size: tuple[int, int]) -> int:
        """Tiles in a row of the grid after the base view of a picture of this width and height; 0 without a grid."""
        from llava.mm_utils import get_anyres_image_grid_shape

        config, tile = self.view.config, self.model.get_vision_tower().config.image_size
        if getattr(config, "image_aspect_ratio", None) != "anyres":
            return 0
        return int(get_anyres_image_grid_shape(size, config.image_grid_pinpoints, tile)[0])

    def rows(self, prompt: Prompt, pictures: int = 1) -> tuple[int, int]:
        """Rows of a prompt that are no pictures, and how many of them follow the last picture."""
        return text_rows(self.prompt_ids(prompt, pictures), [IMAGE_ID])

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> Tensor:
        """Token ids of a prompt with its image placeholders in front of its text: [L] on the CPU."""
        return to_ids(prompt, pictures, self.tokenizer, getattr(self.model.config, "mm_use_im_start_end", False))

    @torch.inference_mode()
    def encode(self, images: list[Any]) -> list[Encoded]:
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

    def groups(self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor]) -> list[list[int]]:
        """Rows that are answered together: all without pictures, and those with pictures that begin alike."""
        by_front: dict[Any, list[int]] = {}
        for row in range(len(ids)):
            front = tuple(ids[row][: _image_place(ids[row])].tolist()) if encoded[row] else None
            by_front.setdefault(front if self.shares or front is None else (), []).append(row)
        return list(by_front.values())

    def answer_group(
        self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor], prompts: list[Prompt]
    ) -> list[Answer]:
        """Answers of prompts that are asked together; what they begin with alike is read once."""
        places, shown = self._places(attachment, encoded)
        pictures = [picture for row_pictures in shown for picture in row_pictures]
        questions = [prompt.text for prompt in prompts]
        repeats = self.shares and len(ids) > 1 and bool(pictures) and _begins_alike(attachment)
        fields: dict[str, Any] = {"encoded": [picture.tiles for picture in pictures] or None, "questions": questions}
        under_way = attachment.call(**fields, settings=RIGHT if repeats else LEFT, begin_alike=repeats)
        with under_way as call, last_row_alone(self.model.get_output_embeddings(), call):
            if len(shown) < len(ids):
                texts = self._ask_after_pictures(shown, places, ids, prompts[0])
            elif repeats:
                texts = self._ask_after_words(pictures, ids, prompts[0])
            else:
                texts = self._ask(pictures, ids, prompts[0])
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return answers_of(call, texts, [text_rows(row, [IMAGE_ID]) for row in ids], limit, places)

    def _places(self, attachment: Attachment, encoded: list[list[Encoded]]) -> tuple[list[int], list[list[Encoded]]]:
        """For each prompt which list of pictures it shows, and these lists: each once where that saves something, else
        one for each prompt.
        """
        distinct: dict[tuple[int, ...], int] = {}
        places = [distinct.setdefault(tuple(map(id, shown)), len(distinct)) for shown in encoded]
        saved = len(places) - len(distinct)
        alone = not self.shares or saved < SAVED or attachment.sharing.reads_prompts
        if alone or not all(encoded) or not _begins_alike(attachment):
            return list(range(len(encoded))), encoded
        return places, [encoded[places.index(number)] for number in range(len(distinct))]

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

    def _ask_after_words(self, pictures: list[Encoded], rows: list[Tensor], prompt: Prompt) -> list[str]:
        """Texts of prompts [L] each that begin with the same words; their pictures are put in for each of them.

        Args:
            pictures: of all prompts, in order.
            rows: the prompts' ids.
            prompt: one of them, for the bounds of the answers.
        """
        embeds, real, words = self._assembled(rows, pictures)
        cache = self._read(embeds[:1, :words])
        spread(cache, [0] * len(rows))
        output = self._generate(prompt, inputs_embeds=embeds, attention_mask=real.long(), past_key_values=cache)
        return self.decode(output)

    def _ask_after_pictures(
        self, pictures: list[list[Encoded]], owners: list[int], rows: list[Tensor], prompt: Prompt
    ) -> list[str]:
        """Texts of prompts whose pictures are read once, whatever is asked about them.

        Args:
            rows, prompt: as in `_ask_after_words`.
            pictures: distinct ones, each as the list of what one prompt shows.
            owners: which of these lists each prompt shows.
        """
        starts = [len(row) - text_rows(row, [IMAGE_ID])[1] for row in rows]
        fronts = [rows[owners.index(number)][: starts[owners.index(number)]] for number in range(len(pictures))]
        embeds, real, words = self._assembled(fronts, [picture for shown in pictures for picture in shown])
        if len(fronts) == 1:
            cache = self._read(embeds)
        else:
            cache = self._read(embeds[:1, :words])
            cache.batch_repeat_interleave(len(fronts))
            cache = self._read(embeds[:, words:], real, cache)
        spread(cache, owners)
        ids, mask = self.pad([row[start:] for row, start in zip(rows, starts, strict=True)])
        read = real.long()[owners]
        ids = torch.cat((torch.ones_like(read), ids), dim=1)  # of what was read nobody looks at the ids
        mask = torch.cat((read, mask), dim=1)
        output = self._generate(prompt, ids, attention_mask=mask, past_key_values=cache)
        return self.decode(output[:, ids.shape[1] :])

    def _generate(self, prompt: Prompt, *ids: Tensor, **inputs: Any) -> Tensor:
        """Ids of answers, by the generation of transformers: the official one takes neither embeddings nor ids
        alone.
        """
        output: Tensor = transformers.GenerationMixin.generate(self.model, *ids, **inputs, **self.generation(prompt))
        return output

    def _assembled(self, rows: list[Tensor], pictures: list[Encoded]) -> tuple[Tensor, Tensor, int]:
        """Sequences [R, S, D] of prompts that begin with the same words, with their pictures and with padding after
        those words; which rows [R, S] are no padding; and how many rows stand in front of the first picture.
        """
        words = _image_place(rows[0])
        ids, mask = self.pad(rows, left=False)
        prepare = getattr(self.model, PREPARE)
        sizes = [picture.size for picture in pictures]
        _, _, mask, _, embeds, _ = prepare(ids, None, mask, None, None, self.blank(pictures), sizes)
        return *padded_after(words, embeds, mask.bool()), words

    def _read(self, embeds: Tensor, real: Tensor | None = None, cache: Any = None) -> Any:
        """The cache after embeddings [R, n, D], which go on from a cache where there is one; `real` [R, S] is about all
        rows, those in the cache among them.
        """
        inner = self.model.get_model()
        if real is None:
            return inner(inputs_embeds=embeds, use_cache=True).past_key_values
        mask = real.long()
        positions = (mask.cumsum(1) - 1)[:, -embeds.shape[1] :].clamp_min(0)
        inputs = {"inputs_embeds": embeds, "attention_mask": mask, "position_ids": positions}
        return inner(**inputs, past_key_values=cache, use_cache=True).past_key_values

    def blank(self, encoded: list[Encoded]) -> Any:
        """Pictures without pixels, of the shape the official function looks at."""
        device, dtype = self.model.device, self.model.dtype
        blank = [torch.empty(len(picture.tiles.projected), 3, 0, 0, device=device, dtype=dtype) for picture in encoded]
        return blank if any(picture.tiled for picture in encoded) else torch.cat(blank)


def to_ids(prompt: Prompt, pictures: int, tokenizer: Any, wrapped: bool = False) -> Tensor:
    """Token ids [L] of a prompt with placeholders for its pictures in front of its text, as LLaVA's own runners build
    it; `wrapped` in the start and end tokens some checkpoints want (`mm_use_im_start_end`).
    """
    from llava.constants import DEFAULT_IM_END_TOKEN, DEFAULT_IM_START_TOKEN, DEFAULT_IMAGE_TOKEN
    from llava.conversation import conv_templates
    from llava.mm_utils import tokenizer_image_token

    conversation = prompt.conversation or CONVERSATION
    check_conversation(conversation)
    image = DEFAULT_IM_START_TOKEN + DEFAULT_IMAGE_TOKEN + DEFAULT_IM_END_TOKEN if wrapped else DEFAULT_IMAGE_TOKEN
    turns = conv_templates[conversation].copy()
    turns.append_message(turns.roles[0], f"{image * pictures}\n{prompt.text}" if pictures else prompt.text)
    turns.append_message(turns.roles[1], None)
    ids: Tensor = tokenizer_image_token(turns.get_prompt(), tokenizer, IMAGE_ID, return_tensors="pt")
    return ids


def spread(cache: Any, owners: list[int]) -> None:
    """Makes the cache of several sequences one of prompts that go on from them."""
    from llava_consensus.hosts import room  # only transformers 5 has such caches

    room.spread(cache, owners)


def padded_after(words: int, embeds: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences [R, S, D] that are padded on the right, with their padding after the first `words` rows instead, and
    which of their rows are real [R, S].
    """
    place = torch.arange(real.shape[1], device=real.device)
    source = place - (~real).sum(1, keepdim=True)  # [R, S]
    front = place < words
    index = torch.where(front, place, source).clamp_min(0)
    return embeds.gather(1, index[..., None].expand_as(embeds)), front | (source >= words)


def _image_place(ids: Tensor) -> int:
    """Where the first image placeholder stands in a prompt [L]."""
    return int((ids == IMAGE_ID).nonzero()[0])


def _begins_alike(attachment: Attachment) -> bool:
    """Whether the language model reads all rows it is given, at positions that are counted, and reads the first ones
    alike whatever follows.
    """
    method, decoder = attachment.method, attachment.model.decoder
    cuts = method.place is Place.DECODER and attachment.sharing.reads_prompts
    return not cuts and method.positions == "renumber" and not decoder.follows_length


def _text_side(folder: Path) -> dict[str, Any]:
    """What CLIP's text tower costs, from a folder that holds a whole CLIP model; nothing, so ViT-L's, for others."""
    file = folder / "config.json"
    text = json.loads(file.read_text()).get("text_config") if file.is_file() else None
    if not text:
        return {}
    width, inner, length = (text[name] for name in ("hidden_size", "intermediate_size", "max_position_embeddings"))
    weights = text["num_hidden_layers"] * (4 * width**2 + 2 * width * inner)
    return {"joint": text["projection_dim"], "text_tower": 2.0 * length * weights}
