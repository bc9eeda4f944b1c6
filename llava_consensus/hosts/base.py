"""What a host offers: pictures in, answers out, with a method attached or not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from llava_consensus.tokens import Budget, Method, Reduction

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Prompt:
    """One question: its text without image tokens, the conversation template, and the bound on the answer's length."""

    text: str
    conversation: str = "vicuna_v1"
    max_new_tokens: int = 128


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
    after: int  # visual tokens it received
    structural: int  # newline tokens, which are never candidates
    reductions: tuple[tuple[int, Reduction], ...]  # (tile, its reduction, one unit) for every unit that was reduced


class Answer(NamedTuple):
    """One answer and the tokens it was given from."""

    text: str
    before: int
    after: int
    structural: int
    notes: tuple[str, ...]
    outcomes: tuple[ImageOutcome, ...]


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
    def answer(self, encoded: list[list[Encoded]], prompts: list[Prompt]) -> list[Answer]:
        """One answer to each prompt about its pictures: none for a question about text alone, several for a video."""
        ...
