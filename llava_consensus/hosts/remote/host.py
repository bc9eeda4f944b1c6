"""Qwen-VL and CogVLM as the harness uses them: pictures in, answers out, by the model's own prompts and `generate`.

The tower runs once for a picture, however many questions are asked about it; prompts are answered in left-padded
batches.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Answer, Encoded, Prompt
from llava_consensus.hosts.call import prefills
from llava_consensus.hosts.harness import HarnessHost, answer_of
from llava_consensus.hosts.remote.model import RemoteModel
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method, Shape


class RemoteHost(HarnessHost):
    """A model that carries its own code, with its tokenizer.

    Args:
        view: of the model.
        tokenizer: of the checkpoint; only `encode` and `answer` need it.
    """

    def __init__(self, view: RemoteModel, tokenizer: Any = None) -> None:
        super().__init__()
        self.view, self.model, self.tokenizer = view, view.module, tokenizer

    @property
    def visual_tokens(self) -> int:
        """Tokens of one picture."""
        tokens: int = self.view.tower.tokens
        return tokens

    def shape(self, text: int = 0) -> Shape:
        """Sizes of the model, with a prompt of one picture and `text` other rows."""
        return self.view.shape(text)

    @property
    def padding(self) -> int:
        """Id of padding; the end of a document for Qwen's tokenizer, which has none."""
        end: int | None = getattr(self.tokenizer, "eod_id", None)
        return super().padding if end is None else end

    def attach(self, method: Method, budget: Budget | Share) -> Attachment:
        """Attaches a method to this model instance; a context manager, or call `.detach()`.

        Raises:
            OptionError: for a method this model has no parts for, or a model that has a method already.
        """
        self.view.check(method)
        self._attached = Attachment(self.view, method, budget)
        return self._attached

    def own_inputs(self, prompt: Prompt, image: Image.Image, folder: Path) -> dict[str, Any]:
        """What the model's own `generate` is given for one prompt about a picture, which may be kept in a folder."""
        return self.view.own(self.tokenizer, prompt, image, folder)

    @torch.inference_mode()
    def encode(self, images: list[Image.Image]) -> list[Encoded]:
        """Pictures through the model's own preprocessing, tower and projector, in one batch."""
        pixels = torch.stack([self.view.picture(self.tokenizer, image) for image in images])
        with self.attachment() as attachment, attachment.call():
            tiles = attachment.encode(pixels.to(self.model.device, self.model.dtype), [1] * len(images))
        attached = attachment.method, attachment.budget
        return [Encoded(part, False, image.size, *attached) for image, part in zip(images, tiles, strict=True)]

    def rows(self, prompt: Prompt, pictures: int = 1) -> tuple[int, int]:
        """Rows of a prompt that are no pictures, and how many of them follow the last picture."""
        return self._text_rows(self.view.prompt(self.tokenizer, prompt, pictures))

    def _text_rows(self, words: dict[str, Tensor]) -> tuple[int, int]:
        kinds = self.view.kinds({name: value[None] for name, value in words.items()})
        if kinds is None:
            return (len(words["input_ids"]),) * 2
        visual = kinds.picture[0] >= 0
        return int((~visual).sum()), len(visual) - 1 - int(visual.nonzero()[-1])

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> Tensor:
        """Token ids [L] of a prompt, with a row for each token of its pictures, on the CPU."""
        return self.view.prompt(self.tokenizer, prompt, pictures)["input_ids"]

    def answer_group(
        self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor], prompts: list[Prompt]
    ) -> list[Answer]:
        """Answers of prompts that are asked together, in one left-padded batch."""
        counts = [len(pictures) for pictures in encoded]
        words = [self.view.prompt(self.tokenizer, *pair) for pair in zip(prompts, counts, strict=True)]
        padded, mask = self.pad([row["input_ids"] for row in words])
        types = {name: _padded([row[name] for row in words]).to(mask) for name in words[0] if name != "input_ids"}
        tiles = [picture.tiles for pictures in encoded for picture in pictures]
        fields = {"encoded": tiles or None, "questions": [prompt.text for prompt in prompts]}
        arguments = {**types, **self.view.stand_ins(counts), **self.generation(prompts[0])}
        with attachment.call(**fields) as call:
            output = self.model.generate(padded, attention_mask=mask, **arguments)
        texts = self.decode(output[:, padded.shape[1] :])
        outcomes = [[outcome for outcome in call.report.outcomes if outcome.row == row] for row in range(len(ids))]
        row_prefills = prefills(call.report.cache, [self._text_rows(row) for row in words], outcomes)
        return [answer_of(call, row, text, row_prefills[row]) for row, text in enumerate(texts)]


def _padded(rows: list[Tensor]) -> Tensor:
    """Rows padded on the left with zeros: [R, L]."""
    width = max(len(row) for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])


def wrap(model: Any, view: str, options: Mapping[str, str] | None = None) -> RemoteHost:
    """The host of a loaded model, whose family `view` names as `file:class`; it has no options."""
    return RemoteHost(view_of(model, view))


def view_of(model: Any, view: str) -> RemoteModel:
    """A family's view of a model, named as `file:class`."""
    file, name = view.split(":")
    family_view: RemoteModel = getattr(import_module(f"llava_consensus.hosts.remote.{file}"), name)(model)
    return family_view
