"""A Hugging Face model as the harness uses it: pictures and clips in, answers out, by the model's own processor, chat
template (`prompts.py`) and `generate`. A picture goes through the tower once, however many questions it has.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Answer, Clip, Encoded, Prompt
from llava_consensus.hosts.call import prefills
from llava_consensus.hosts.harness import HarnessHost, answer_of
from llava_consensus.hosts.hf.host import HfHost
from llava_consensus.hosts.hf.model import Features, HfModel
from llava_consensus.hosts.hf.prompts import Processed, Prompts
from llava_consensus.hosts.hf.rows import Rows
from llava_consensus.hosts.hf.shape import read_shape
from llava_consensus.reduction.method import Shape


@dataclass(frozen=True, eq=False)
class HfEncoded(Encoded):
    """One picture or clip with what the model itself needs of it."""

    modality: str  # image | video
    text: str  # that stands for it in prompts
    rows: Rows  # where its tokens come from
    features: Features
    inputs: dict[str, Tensor]  # what the positions of its tokens follow from


class ProcessorHost(HfHost, HarnessHost):
    """A model with its processor.

    Args:
        view: of the model.
        processor: of the same checkpoint.
    """

    def __init__(self, view: HfModel, processor: Any) -> None:
        HfHost.__init__(self, view)
        HarnessHost.__init__(self)
        self.model, self.processor, self.tokenizer = view.module, processor, processor.tokenizer
        self.prompts = Prompts(processor)
        view.image_processor = processor.image_processor

    @property
    def visual_tokens(self) -> int:
        """Tokens of one picture, or of one tile of it; the most where that depends on the picture."""
        tokens: int = self.view.tower.tokens
        return tokens

    def shape(self, text: int = 0) -> Shape:
        """Sizes of the model, with a prompt of one picture and `text` other rows."""
        return read_shape(self.view, text)

    def grid_columns(self, size: tuple[int, int]) -> int:
        """Tiles in a row of the grid after the base view of a picture of this width and height; 0 without a grid."""
        return self.view.grid_columns(size)

    def rows(self, prompt: Prompt, pictures: int = 1) -> tuple[int, int]:
        """Rows of a prompt that are no pictures, and how many of them follow the last picture; tags between the tiles
        of a picture are not counted.
        """
        placeholder = self.prompts.placeholder("image")
        return _text_rows(self.prompt_ids(prompt, pictures), self.tokenizer.convert_tokens_to_ids(placeholder))

    @torch.inference_mode()
    def encode(self, pictures: list[Image | Clip]) -> list[Encoded]:
        """Pictures and clips through the processor, tower and projector, in one batch where they have one shape."""
        processed = [self.prompts.process(picture, self.view.preprocessing) for picture in pictures]
        with self.attachment() as attachment, attachment.call():
            alike = len({_shapes(one) for one in processed}) == 1
            groups = [processed] if alike else [[one] for one in processed]
            encoded = [part for group in groups for part in self._encode(attachment, group)]
        sizes = [picture.frames[0].size if isinstance(picture, Clip) else picture.size for picture in pictures]
        return [
            HfEncoded(
                features.tiles[0],
                rows.tiles > 1,
                size,
                attachment.method,
                attachment.budget,
                one.modality,
                one.text if not self.view.lays_out else self.prompts.placeholder(one.modality) * len(rows.token),
                rows,
                features,
                {name: one.inputs[name] for name in self.view.placed_by if name in one.inputs},
            )
            for one, size, (rows, features) in zip(processed, sizes, encoded, strict=True)
        ]

    def _encode(self, attachment: Attachment, processed: list[Processed]) -> list[tuple[Rows, Features]]:
        """Rows and features of every picture of a batch of one shape."""
        modality = processed[0].modality
        names = [name for name, value in processed[0].inputs.items() if isinstance(value, Tensor)]
        joined = {name: torch.cat([one.inputs[name] for one in processed]) for name in names}
        inputs = {
            name: value.to(self.model.device, self.model.dtype if value.is_floating_point() else None)
            for name, value in self.view.encoder_inputs(joined)[modality].items()
        }
        pictures = self.view.pictures(modality, inputs, torch.cat([one.ids for one in processed]))
        features = self.view.encode(attachment, modality, inputs, pictures)
        sizes = [len(rows.token) for rows in pictures]
        tokens = features.tokens.split(sizes)
        planes = [plane.split(sizes) for plane in features.planes]
        return [
            (rows, Features([features.tiles[index]], tokens[index], tuple(plane[index] for plane in planes)))
            for index, rows in enumerate(pictures)
        ]

    def own_inputs(self, prompt: Prompt, image: Image, folder: Path) -> dict[str, Any]:
        """What the model's own `generate` is given for one prompt about a picture, by its processor."""
        content = [{"type": "image"}, {"type": "text", "text": prompt.text}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = self.processor(images=[image], text=text, return_tensors="pt")
        return {
            name: value.to(self.model.device, self.model.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
        }

    def answer_group(
        self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor], prompts: list[Prompt]
    ) -> list[Answer]:
        """Answers of prompts that are asked together, in one left-padded batch."""
        padded, mask = self.pad(ids)
        pictures: list[Any] = [picture for row_pictures in encoded for picture in row_pictures]
        more = self.view.row_inputs(padded, mask.bool(), _together(pictures)) if pictures else {}
        with attachment.call(encoded=pictures or None, questions=[prompt.text for prompt in prompts]) as call:
            output = self.model.generate(input_ids=padded, attention_mask=mask, **more, **self.generation(prompts[0]))
        texts = self.decode(output[:, padded.shape[1] :])
        outcomes = [[outcome for outcome in call.report.outcomes if outcome.row == row] for row in range(len(ids))]
        placeholders = [self.view.placeholder(modality) for modality in {picture.modality for picture in pictures}]
        text_rows = [_text_rows(row_ids, *placeholders) for row_ids in ids]
        row_prefills = prefills(call.report.cache, text_rows, outcomes)
        limit = None if self.view.keeps_positions else self.view.decoder.reach
        return [answer_of(call, row, text, row_prefills[row], limit) for row, text in enumerate(texts)]

    def question_ids(self, prompt: Prompt, pictures: list[Any]) -> Tensor:
        """Ids [L] of a prompt about these pictures, with a row for every token of theirs.

        Raises:
            OptionError: for several pictures where the model would have encoded each of them in another way alone.
        """
        if self.view.tiled_alone and sum(picture.modality == "image" for picture in pictures) > 1:
            raise OptionError(
                f"{len(pictures)} pictures in one prompt: {type(self.model).__name__} cuts a picture into tiles only "
                "where it is alone, and the harness encodes each by itself. Ask about one picture"
            )
        text = self.prompts.text(prompt.text, [picture.modality for picture in pictures])
        return self.prompts.ids(text, [(picture.modality, picture.text) for picture in pictures])

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> Tensor:
        """Ids [L] of a prompt by the model's own chat template, one placeholder for each picture."""
        placeholder = self.prompts.placeholder("image")
        text = self.prompts.text(prompt.text, ["image"] * pictures)
        return self.prompts.ids(text, [("image", placeholder)] * pictures)

    def check_prompts(self) -> None:
        """Raises OptionError where the processor makes another prompt than this host does."""
        self.prompts.check(type(self.model).__name__)


def _shapes(processed: Processed) -> tuple[Any, ...]:
    """Equal for pictures that can be encoded in one batch."""
    tensors = {name: value.shape for name, value in processed.inputs.items() if isinstance(value, Tensor)}
    return processed.modality, processed.ids.shape, *tensors.items()


def _together(pictures: list[HfEncoded]) -> dict[str, Tensor]:
    """What the positions of tokens follow from, of all pictures."""
    names = {name for picture in pictures for name in picture.inputs}
    return {name: torch.cat([picture.inputs[name] for picture in pictures if name in picture.inputs]) for name in names}


def _text_rows(ids: Tensor, *placeholders: int) -> tuple[int, int]:
    """Rows of a prompt that are no placeholders, and how many of them follow the last one."""
    places = torch.isin(ids, torch.tensor(placeholders, dtype=ids.dtype)).nonzero()[:, 0].tolist()
    return len(ids) - len(places), len(ids) - 1 - places[-1] if places else len(ids)
