"""CLIP's own view of picture and question: the text tower and the two projections a LLaVA checkpoint leaves out.

LLaVA keeps only the vision tower; its text tower is in the same folder or hub name when that is a whole CLIP model, and
is loaded from there for methods that need `question`. Checked when a method is attached, before anything is asked.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Tiles
from llava_consensus.reduction.tokens import ClipSides


class ClipText:
    """Text tower, tokenizer and projections of one CLIP model, in float32 on one device.

    Args:
        name: folder or hub name of the vision tower.
    Raises:
        OptionError: where there is no text tower beside the vision tower.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        try:
            config = transformers.AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise OptionError(f"vision tower {name!r}: its configuration cannot be read: {error}") from error
        if not hasattr(config, "text_config"):
            raise OptionError(
                f"vision tower {name!r} is a vision model alone: this method compares patches with the question by "
                "CLIP's text tower. Use a checkpoint whose mm_vision_tower is a whole CLIP model "
                "(openai/clip-vit-large-patch14-336), or another method"
            )
        try:
            with without_unused_report():
                self._text: Any = transformers.CLIPTextModelWithProjection.from_pretrained(name).float().eval()
                clip_model: Any = transformers.CLIPVisionModelWithProjection.from_pretrained(name)
                self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise OptionError(f"vision tower {name!r}: its text tower cannot be loaded: {error}") from error
        self._text.to(device)
        self.projection = clip_model.visual_projection.float().to(device)
        self._length: int = config.text_config.max_position_embeddings

    def embed(self, question: str) -> Tensor:
        """Embeddings [M, P] of a question cut into segments of the text tower's length, the last filled with zeros."""
        ids = self._tokenizer(question, return_tensors="pt").input_ids[0].to(self.projection.weight.device)
        room = -len(ids) % self._length
        mask = torch.nn.functional.pad(torch.ones_like(ids), (0, room)).view(-1, self._length)
        pieces = torch.nn.functional.pad(ids, (0, room)).view(-1, self._length)
        embeds: Tensor = self._text(input_ids=pieces, attention_mask=mask).text_embeds
        return embeds

    @torch.no_grad()
    def sides(self, tower: Any, tiles: list[Tiles], questions: list[str]) -> ClipSides:
        """Embeddings of the patches of all tiles [T, n, P] (the tower's features after its last norm), and of the
        question of each row [R, M, P].
        """
        features = torch.cat([picture.parts["features"] for picture in tiles])
        patches = self.projection(tower.last_norm(features).float())
        texts = [self.embed(question) for question in questions]
        real = [torch.ones(len(text), dtype=torch.bool, device=text.device) for text in texts]
        pad = torch.nn.utils.rnn.pad_sequence
        return ClipSides(patches, pad(texts, batch_first=True), pad(real, batch_first=True))


@contextmanager
def without_unused_report() -> Iterator[None]:
    """Keeps transformers from listing weights a model has no place for, as of a whole CLIP model where only one side is
    wanted. A report of missing or misshapen weights is shown.
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
    """The text side of a CLIP model, loaded once."""
    return ClipText(name, device)
