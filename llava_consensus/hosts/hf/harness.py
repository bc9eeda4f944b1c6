"""A Hugging Face model as the harness uses it: pictures in, answers out, by the model's own processor, chat template
and `generate`. A picture goes through the tower once, however many questions are asked about it.

Adapted are models whose processor turns the placeholder of a picture into as many of its kind as the picture has tokens
and into nothing else (LLaVA, Qwen-VL); whether it does is tried when a checkpoint is loaded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from llava_consensus.errors import DataError, OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Answer, Encoded, Prompt
from llava_consensus.hosts.decoder.cache import prefills
from llava_consensus.hosts.harness import HarnessHost, answer_of
from llava_consensus.hosts.hf.host import HfHost, check_version, view_of
from llava_consensus.hosts.hf.model import Features, HfModel
from llava_consensus.hosts.hf.rows import Rows
from llava_consensus.hosts.hf.shape import read_shape
from llava_consensus.hosts.weights import Loaded, refuse_incomplete, refuse_not_finite
from llava_consensus.reduction.shape import Shape


@dataclass(frozen=True, eq=False)
class HfEncoded(Encoded):
    """One picture with what the model itself needs of it."""

    rows: Rows  # where its tokens come from
    features: Features


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

    @property
    def visual_tokens(self) -> int:
        """Tokens of one picture, or of one tile of it; the most where that depends on the picture."""
        tokens: int = self.view.tower.tokens
        return tokens

    def shape(self, text: int = 0) -> Shape:
        """Sizes of the model, with a prompt of one picture and `text` other rows."""
        return read_shape(self.view, text)

    def rows(self, prompt: Prompt, pictures: int = 1) -> tuple[int, int]:
        """Rows of a prompt that are no pictures, and how many of them follow the last picture."""
        return self._text_rows(self.prompt_ids(prompt, pictures))

    @torch.inference_mode()
    def encode(self, images: list[Image.Image]) -> list[Encoded]:
        """Pictures through the processor, tower and projector, in one batch where they have one shape."""
        with self.attachment() as attachment, attachment.call():
            inputs = [self._pixels(image) for image in images]
            if len({tuple(value.shape for value in tensors.values()) for tensors in inputs}) == 1:
                encoded = self._encode(
                    attachment, {name: torch.cat([tensors[name] for tensors in inputs]) for name in inputs[0]}
                )
            else:
                encoded = [picture for tensors in inputs for picture in self._encode(attachment, tensors)]
        return [
            HfEncoded(
                features.tiles[0], rows.tiles > 1, image.size, attachment.method, attachment.budget, rows, features
            )
            for image, (rows, features) in zip(images, encoded, strict=True)
        ]

    def _pixels(self, image: Image.Image) -> dict[str, Tensor]:
        """What the encoder takes for one picture."""
        inputs = self.processor.image_processor(images=[image], return_tensors="pt")
        return {
            name: value.to(self.model.device, self.model.dtype) if value.is_floating_point() else value
            for name, value in self.view.encoder_inputs(dict(inputs))["image"].items()
        }

    def _encode(self, attachment: Attachment, inputs: dict[str, Tensor]) -> list[tuple[Rows, Features]]:
        """Rows and features of every picture of a batch."""
        pictures = self.view.pictures("image", inputs, torch.empty(0, 0, dtype=torch.long))
        features = self.view.encode(attachment, "image", inputs, pictures)
        sizes = [len(rows.token) for rows in pictures]
        tokens = features.tokens.split(sizes)
        planes = [plane.split(sizes) for plane in features.planes]
        return [
            (rows, Features([features.tiles[index]], tokens[index], tuple(plane[index] for plane in planes)))
            for index, rows in enumerate(pictures)
        ]

    def answer_group(
        self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor], prompts: list[Prompt]
    ) -> list[Answer]:
        """Answers of prompts that are asked together, in one left-padded batch."""
        full_ids = [self._expanded(row_ids, pictures) for row_ids, pictures in zip(ids, encoded, strict=True)]
        padded, mask = self.pad(full_ids)
        pictures = [picture for row_pictures in encoded for picture in row_pictures]
        with attachment.call(encoded=pictures or None, questions=[prompt.text for prompt in prompts]) as call:
            output = self.model.generate(input_ids=padded, attention_mask=mask, **self.generation(prompts[0]))
        texts = self.decode(output[:, padded.shape[1] :])
        outcomes = [[outcome for outcome in call.outcomes if outcome.row == row] for row in range(len(ids))]
        row_prefills = prefills(call.cache, [self._text_rows(row_ids) for row_ids in ids], outcomes)
        return [answer_of(call, row, text, row_prefills[row]) for row, text in enumerate(texts)]

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> Tensor:
        """Ids [L] of a prompt by the model's own chat template, one placeholder for each picture."""
        content = [{"type": "image"}] * pictures + [{"type": "text", "text": prompt.text}]
        turns = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(turns, add_generation_prompt=True)
        ids: Tensor = self.tokenizer(text, return_tensors="pt").input_ids[0]
        return ids

    def check_prompts(self) -> None:
        """Tries the processor on a picture of one colour.

        Raises:
            OptionError: where it makes another prompt than this host does.
        """
        image = Image.new("RGB", (64, 48))
        content = [{"type": "image"}, {"type": "text", "text": "What?"}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        expected = self.processor(images=[image], text=text, return_tensors="pt").input_ids[0]
        ids = self.prompt_ids(Prompt("What?"), 1)
        if int((ids == self.view.placeholder("image")).sum()) == 1:
            expanded = self._expanded(ids, self.encode([image]))
            if torch.equal(expanded, expected):
                return
        raise OptionError(
            f"the processor of {type(self.model).__name__} puts more than placeholders where a picture stands: the "
            "harness is not adapted to it. attach(model, ...) works in your own generate call"
        )

    def _expanded(self, ids: Tensor, encoded: list[Any]) -> Tensor:
        """Every placeholder as often as its picture has tokens."""
        counts = torch.ones_like(ids)
        sizes = [len(picture.rows.token) for picture in encoded]
        counts[ids == self.view.placeholder("image")] = torch.tensor(sizes, dtype=torch.long)
        return ids.repeat_interleave(counts)

    def _text_rows(self, ids: Tensor) -> tuple[int, int]:
        places = (ids == self.view.placeholder("image")).nonzero()[:, 0].tolist()
        return len(ids) - len(places), len(ids) - 1 - places[-1] if places else len(ids)


def load(path: str, device: str, dtype: str, view: str) -> ProcessorHost:
    """A checkpoint with its processor.

    Args:
        path: folder or hub name.
        device, dtype: see `hosts.load`.
        view: the family's view, as `file:class`.
    Raises:
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
        OptionError: for a version of transformers or a processor that is not adapted, or a device that is not there.
    """
    check_version(transformers.__version__)
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if target.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError(f"device={device!r}: no CUDA device here, use cpu or auto")
    weights_dtype = (
        torch.float32 if dtype == "auto" and target == "cpu" else "auto" if dtype == "auto" else getattr(torch, dtype)
    )
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        cls = getattr(transformers, config.architectures[0])
        model, info = cls.from_pretrained(path, dtype=weights_dtype, output_loading_info=True)
        processor = transformers.AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"model={path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    refuse_incomplete(path, [Loaded.of(cls, info)])
    refuse_not_finite(path, model)
    text_side = next(Path(path).glob("official/*/config.json"), None)
    if text_side is not None:  # the CLIP model that `convert` has put beside the weights
        model.config.vision_config._name_or_path = str(text_side.parent)
    host = ProcessorHost(view_of(model.eval().to(target), view), processor)
    host.check_prompts()
    return host
