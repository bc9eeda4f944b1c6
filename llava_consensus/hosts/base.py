"""What a host offers: pictures in, answers out, with a method attached or not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.shape import Shape
from llava_consensus.reduction.tokens import Reduction

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Prompt:
    """One question: its text without image tokens, the conversation template, and the bounds on the answer's length
    (the lower one for timing alone).
    """

    text: str
    conversation: str | None = None  # the host's default
    max_new_tokens: int = 128
    min_new_tokens: int = 0


class VisionTaps(NamedTuple):
    """What was taken from the vision tower while it encoded T tiles. Everything but `projected` is there only when
    it was asked for.
    """

    projected: Tensor  # [T, N, D]
    features: Tensor | None = None  # [T, N, D_v]
    query: Tensor | None = None  # [T, H, C + N, d]
    key: Tensor | None = None  # [T, H, C + N, d]
    scale: float = 1.0
    classes: int = 1
    fingerprint: Tensor | None = None  # [T] int64
    slot: Tensor | None = None  # [T, N] which merged token a patch is in, where a method acted inside the tower
    class_feature: Tensor | None = None  # [T, D_v]
    project: Callable[[Tensor], Tensor] | None = None  # [..., D_v] -> [..., D]


@dataclass(frozen=True, eq=False)
class Encoded:
    """One picture after the vision tower, ready for any number of questions."""

    taps: VisionTaps
    tiled: bool  # several tiles of one picture (anyres), as against one square
    size: tuple[int, int]  # width and height of the picture in pixels


class ImageOutcome(NamedTuple):
    """What happened to one picture of one prompt."""

    row: int  # of the batch
    before: int  # visual tokens the language model would have received
    after: int  # visual tokens it received; of methods that cut between its layers, those left after the last cut
    structural: int  # newline tokens, which are never candidates
    reductions: tuple[tuple[int, Reduction], ...]  # (tile, its reduction, one unit) for every unit that was reduced
    entering: tuple[int, ...] = ()  # visual tokens that entered each decoder layer, where that differs by layer


class Prefill(NamedTuple):
    """What was read before the first token of one answer, and the cache it left."""

    text: int  # rows that are not visual tokens
    question: int  # of these, rows after the last picture
    entering: tuple[int, ...]  # visual tokens that entered each decoder layer
    kv_bytes: tuple[int, ...]  # keys and values each layer's cache holds, without padding


class Answer(NamedTuple):
    """One answer and the tokens it was given from."""

    text: str
    before: int
    after: int
    structural: int
    notes: tuple[str, ...]
    outcomes: tuple[ImageOutcome, ...]
    prefill: Prefill | None = None


class Attachment(Protocol):
    """A method attached to one model instance; leaving the `with` block detaches it."""

    @property
    def outcomes(self) -> list[ImageOutcome]: ...
    def milliseconds(self) -> dict[str, float]:
        """Time the last reduction took, by stage: the host's bookkeeping and the method's own work."""
        ...

    def detach(self) -> None: ...
    def __enter__(self) -> "Attachment": ...
    def __exit__(self, *error: Any) -> None: ...


class Host(Protocol):
    """An adapted model."""

    visual_tokens: int  # patches of one picture, or of one tile of it

    def attach(self, method: Method, budget: Budget) -> Attachment: ...
    def encode(self, images: "list[Image]") -> list[Encoded]: ...
    def shape(self, text: int = 0) -> Shape:
        """Sizes of the model, with a prompt of one picture of the most tiles and `text` other rows."""
        ...

    def rows(self, prompt: Prompt, pictures: int = 1) -> tuple[int, int]:
        """Rows of a prompt that are no pictures, and how many of them follow the last picture."""
        ...

    def answer(self, encoded: list[list[Encoded]], prompts: list[Prompt]) -> list[Answer]:
        """One answer to each prompt about its pictures: none for a question about text alone, several for a video."""
        ...
