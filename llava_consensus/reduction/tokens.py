"""The nouns of the reduction, with their shapes: the inputs of a method and its result.

Letters used everywhere: B units reduced together (a unit is one image, or one tile of it), N visual tokens of a unit,
U distinct tiles seen by the vision tower, n rows a tile has in a vision block (its patches; a merger may make one token
of several), I prompts that were probed, L text rows, S length of the full input sequence, H heads, D width. Torch only.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import NonFiniteError


class Need(Enum):
    """Parts that a method can ask a host to collect. The value is the field of `VisualTokens` that holds it."""

    ATTENTION = "attention"
    EARLIER = "earlier"
    FEATURES = "features"
    CLASS_FEATURE = "class_feature"
    PROJECTOR = "project"
    QUESTION = "clip"
    WORDS = "words"
    PROBE = "probe"
    FINGERPRINT = "fingerprint"
    WHOLE_IMAGES = "whole"


class VisionAttention(NamedTuple):
    """Inputs to the attention of one vision block, before the scale is applied."""

    query: Tensor  # [U, H, C + n, d]
    key: Tensor  # [U, H, C + n, d]
    scale: float
    classes: int  # C: class tokens in front of the patches, 0 or 1
    places: int = 0  # last channels of d, whose products are logits that the block adds by the places of two patches

    @property
    def content(self) -> Tensor:
        """The keys without channels of places: [U, H, C + n, d']."""
        return self.key[..., : self.key.shape[3] - self.places]

    def patch_keys(self) -> Tensor:
        """Keys of the patches, mean over heads, in float32: [U, n, d']."""
        return self.content[:, :, self.classes :].mean(1, dtype=torch.float32)


class TextProbe(NamedTuple):
    """Inputs to the attention of the language model's first layer, for the text rows only, not rotated nor scaled."""

    query: Tensor  # [I, H, L, d]
    key: Tensor  # [I, H_kv, S, d]
    cos: Tensor  # [I, S, d]; of width 0 for queries and keys that are rotated already
    sin: Tensor  # [I, S, d]
    scale: float
    rows: Tensor  # [I, L] place of each text row in the sequence, ascending, padded at the end
    row_mask: Tensor  # [I, L] true if the row is real
    key_mask: Tensor | None  # [I, S] true if the key is not padding; [I, L, S] true if a row sees it; None if all are
    padded: bool = True  # whether there may be padding among the text rows
    cap: float = 0.0  # of logits, tanh(x / cap) * cap; 0 for none
    angles: Callable[[], tuple[Tensor, Tensor]] | None = None  # cos, sin if queries and keys are rotated already
    bias: Tensor | None = None  # [I, H, L, S] added to the logits
    sink: Tensor | None = None  # [I, H, L, 1] logit without a key, which takes a part of the softmax


class ClipSides(NamedTuple):
    """Patches and question in one embedding space: of the vision tower's own CLIP model, or of the language model."""

    patches: Tensor  # [U, n, P]
    text: Tensor  # [U, M, P] segments of the question asked about each tile, or its words
    real: Tensor  # [U, M] true if there is a segment
    words: bool = False  # whether the space is that of the language model's embeddings


class Words(NamedTuple):
    """The text after the image of each unit, as the language model embeds it."""

    text: Tensor  # [B, M, D]
    real: Tensor  # [B, M] true if there is a word


class WholeImages(NamedTuple):
    """The U tiles are all tiles of the images that the units belong to, also those of other units."""

    image: Tensor  # [U] which image a tile belongs to, as in `VisualTokens.image`
    present: Tensor  # [U, N_tile] true if a patch is a token of its image; unpadding cuts others away


class VisualTokens(NamedTuple):
    """One batch of units to reduce; the parts that default to None are there when the method's `needs` name them."""

    projected: Tensor  # [B, N, D] tokens that the language model would have received
    tile: Tensor  # [B, N] which of the U tiles each token came from
    patch: Tensor  # [B, N] which token of that tile
    tiles_per_unit: int = 1
    side: int = 0  # tokens in a row of a tile, 0 if they form no grid
    members: Tensor | None = None  # [N_tile, m] the block rows each token was made of; None: one row each, in order
    pooling: Tensor | None = None  # [U, N_tile, n] share of each block row in each token, where a resampler made them
    slot: Tensor | None = None  # [U, N_tile] which merged token of its tile a patch is in, where a tower merged
    image: Tensor | None = None  # [B] which image of the call a unit belongs to
    prompt: Tensor | None = None  # [B] which of the I probed prompts asks about a unit
    asking: Tensor | None = None  # [B, L] true for the text rows of it that ask about a unit; None if all do
    columns: Tensor | None = None  # [B, N] place of each token in the full sequence
    attention: VisionAttention | None = None
    earlier: VisionAttention | None = None  # of the block that `early_layer` names
    features: Tensor | None = None  # [U, n, D_v]
    class_feature: Tensor | None = None  # [U, D_v]
    project: Callable[[Tensor], Tensor] | None = None  # [..., D_v] -> [..., D] the host's projector
    clip: ClipSides | None = None
    words: Words | None = None
    probe: TextProbe | None = None
    fingerprint: Tensor | None = None  # [B] int64 of image and prompt, the same in every batch
    whole: WholeImages | None = None

    def needed(self, need: Need) -> Any:
        """Part that the host collected for a need that the method has declared.

        Raises:
            LookupError: if it is not there, which is a mistake of the method or of the host.
        """
        value = getattr(self, need.value)
        if value is None:
            raise LookupError(f"{need.name.lower()} was not collected: the method must name it in `needs`")
        return value

    def by_token(self, values: Tensor) -> Tensor:
        """Rows of a tensor [U, n, ...] for each token of each tile, [U, N_tile, ...]: of several rows their mean, and
        where a resampler made the tokens, the mean weighted by how much each looked at every row.
        """
        if self.pooling is not None and values.shape[1] == self.pooling.shape[2]:
            return torch.einsum("utn,un...->ut...", self.pooling.float(), values.float())
        if self.members is None or values.shape[1] == len(self.members):
            return values
        return values[:, self.members].float().mean(2)

    def of_tiles(self, values: Tensor) -> Tensor:
        """Rows of a tensor [U, n, ...] for these tokens, [B, N, ...]; of a token made of several rows, their mean."""
        return self.by_token(values)[self.tile, self.patch]

    def only(self, index: Tensor) -> "VisualTokens":
        """These units restricted to the tokens named by `index` [B, R], for `of_tiles`."""
        return self._replace(tile=self.tile.gather(1, index), patch=self.patch.gather(1, index))


@dataclass
class Stopwatch:
    """Wall time of named stages. On CUDA it records events and waits for nothing until it is read."""

    device: torch.device
    marks: list[tuple[str, Any, Any]] = field(default_factory=list)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self.marks.append((name, start, self._now()))

    def milliseconds(self) -> dict[str, float]:
        """Time of each stage in milliseconds, summed over calls. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total: dict[str, float] = {}
        for name, start, end in self.marks:
            spent = start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else (end - start) * 1e3
            total[name] = total.get(name, 0.0) + spent
        return total


class Reduction(NamedTuple):
    """The reduced tokens and the bookkeeping of how they came about. Indices count the unit's own tokens."""

    tokens: Tensor  # [B, K + M, D] in output order, dtype of the projected tokens
    kept: Tensor  # [B, K] ascending
    anchors: Tensor  # [B, M] ascending: places of merged tokens
    source: Tensor  # [B, K + M] input token of each output slot: itself, a merged token's anchor, -1 for no patch
    owner: Tensor  # [B, N] output slot of every input token, -1 if dropped
    vision: Tensor | None = None  # [B, N] saliency by the vision tower
    cross: Tensor | None = None  # [B, N] saliency by the question
    fused: Tensor | None = None  # [B, N] the score of the ranking, if it is neither of the two
    watch: Stopwatch | None = None  # how long each step took
    zone: Tensor | None = None  # [B, K + M] zone of each slot: AHEAD, PLACE, AFTER, BEHIND; by `order` if None
    measures: Mapping[str, Tensor] = MappingProxyType({})  # [B, cuts, ...] numbers about the choice, for the record


AHEAD, PLACE, AFTER, BEHIND = range(4)  # before its unit, at its source, right after its unit, after its whole image


def ensure_finite(stage: str, values: Tensor) -> Tensor:
    """`values`, or NonFiniteError naming the stage. On an accelerator the check is queued, so nothing waits for it, and
    a failure ends the program later with the same message.
    """
    # The 2-norm is the fastest pass on a CPU. It can overflow where no value does, so then the largest value decides.
    if values.device.type == "cpu" and float(torch.linalg.vector_norm(values.detach())) < float("inf"):
        return values
    message = f"{stage}: NaN or infinite values. Check the weights, or use bfloat16 where float16 overflows"
    try:
        torch._assert_async(torch.linalg.vector_norm(values.detach(), ord=torch.inf) < torch.inf, message)
    except RuntimeError as error:
        raise NonFiniteError(message) from error
    return values
