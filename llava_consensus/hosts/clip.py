"""The text side of a CLIP model, for methods that compare patches with the question."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llava_consensus.errors import OptionError
from llava_consensus.hosts.environment import load_pretrained
from llava_consensus.reduction.tokens import ClipSides

if TYPE_CHECKING:
    from llava_consensus.hosts.prompts import Prompt


class ClipText:
    """Text tower, tokenizer and projections of one CLIP model, in float32 on one device.

    Args:
        name: folder or hub name of the vision tower.
    Raises:
        OptionError: if there is no text tower beside the vision tower.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        try:
            config = load_pretrained(transformers.AutoConfig, name)
        except (OSError, ValueError) as error:
            raise OptionError(f"vision tower {name!r}: its configuration cannot be read: {error}") from error
        if not hasattr(config, "text_config"):
            raise OptionError(
                f"vision tower {name!r} is only a vision model: this method compares patches with the question by "
                "CLIP's text tower. Use a checkpoint whose mm_vision_tower is a whole CLIP model "
                "(openai/clip-vit-large-patch14-336), or another method"
            )
        try:
            with without_unused_report():
                self._text = load_pretrained(transformers.CLIPTextModelWithProjection, name).float().eval()
                clip_model = load_pretrained(transformers.CLIPVisionModelWithProjection, name)
                self._tokenizer = load_pretrained(transformers.AutoTokenizer, name)
        except (OSError, ValueError) as error:
            raise OptionError(f"vision tower {name!r}: its text tower cannot be loaded: {error}") from error
        self._text.to(device)
        self.projection = clip_model.visual_projection.float().to(device)
        self.last_norm = clip_model.vision_model.post_layernorm.to(device)
        self._length: int = config.text_config.max_position_embeddings

    def embed(self, question: str) -> Tensor:
        """Embeddings [M, P] of a question cut into segments of the text tower's length, the last filled with zeros."""
        ids = self._tokenizer(question, return_tensors="pt").input_ids[0].to(self.projection.weight.device)
        room = -len(ids) % self._length
        mask = torch.nn.functional.pad(torch.ones_like(ids), (0, room)).view(-1, self._length)
        pieces = torch.nn.functional.pad(ids, (0, room)).view(-1, self._length)
        return self._text(input_ids=pieces, attention_mask=mask).text_embeds

    @torch.no_grad()
    def sides(self, prompt: "Prompt", questions: Sequence[str], norm: Any) -> Callable[[list[int]], ClipSides]:
        """Patches and questions in CLIP's space, given images of a prompt.

        Args:
            questions: one for each prompt.
            norm: the last norm of the vision tower.
        """
        texts = [self.embed(question) for question in questions]
        text = pad_sequence(texts, batch_first=True)
        real = pad_sequence([one.new_ones(len(one)) for one in texts], batch_first=True).bool()

        @torch.no_grad()
        def of(images: list[int]) -> ClipSides:
            features: Tensor = torch.cat([prompt.tiles[image].parts["features"] for image in images])
            patches = self.projection(norm(features).float())
            each = [
                prompt.images[image].row // prompt.beams for image in images for _ in range(prompt.tiles[image].count)
            ]
            row = torch.tensor(each, device=text.device)
            return ClipSides(patches, text[row], real[row])

        return of


@contextmanager
def without_unused_report() -> Iterator[None]:
    """Keeps transformers from listing weights a model has no place for, as of one side of a whole CLIP model. A report
    of missing or misshapen weights is printed.
    """

    def needs_reading(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "were not used when initializing" in text:  # transformers 4, which reports missing weights apart
            return False
        return "UNEXPECTED" not in text or any(word in text for word in ("MISSING", "MISMATCH", "CONVERSION"))

    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(needs_reading)
    try:
        yield
    finally:
        log.removeFilter(needs_reading)


@lru_cache(maxsize=1)
def load_clip_text(name: str, device: torch.device) -> ClipText:
    return ClipText(name, device)
