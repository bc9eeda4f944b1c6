"""What becomes of attention when the positions of the tokens that stay are closed up, as LLaVA does after a reduction,
and which decoder layers that matters in.

`ClosedFrom` drops tokens before the first layer and closes positions up from a layer of choice on; `attention_by_place`
reads what the words behind a picture look at, layer by layer, from the model's own attention.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts import Encoded, Host, Prompt
from llava_consensus.hosts.base import Answer
from llava_consensus.hosts.probe.watch import watching
from llava_consensus.paper.study.selection import vision_saliency
from llava_consensus.reduction import selection
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.checks import whole_or_none
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Need, Stopwatch


@dataclass(frozen=True, kw_only=True)
class ClosedFrom(InDecoder):
    """Keep the T patches that the class token looks at most, before the first decoder layer. Their positions stay as
    they were in the layers before `closed_from`, and are closed up from that layer on.

    Args:
        closed_from: that layer, counted from 0; None closes positions up nowhere.
    Raises:
        OptionError: for anything but a whole number, or a layer that the model does not have.
    """

    positions: str = "keep"
    closed_from: int | None = None

    title: ClassVar[str] = "Positions closed up from a layer on"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION})
    asks: ClassVar[str] = "text"
    attention: ClassVar[str] = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_or_none("closed_from", self.closed_from, "the first layer, from 0, whose positions are closed up")

    def closes_gaps(self, layer: int) -> bool:
        """From `closed_from` on."""
        return self.closed_from is not None and layer >= self.closed_from

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """A cut before the first layer that leaves T, and a stop before the one where positions are closed up."""
        if self.closed_from is not None and not 0 <= self.closed_from < layers:
            raise OptionError(f"closed_from={self.closed_from} must be in 0..{layers - 1}, the model's decoder layers")
        return [Cut(layer, tokens) for layer in sorted({0, self.closed_from or 0})]

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        """The T best patches at the first stop, all of them at the second."""
        if view.columns.shape[1] > view.cut.kept:
            with watch.time("selection"), torch.no_grad():
                return Chosen(selection.top(vision_saliency(view.tower), view.cut.kept))
        everything = torch.arange(view.cut.kept, device=view.columns.device).expand_as(view.columns)
        return Chosen(everything)


Ask = tuple[list[Encoded], Prompt]  # the pictures of a question, and its prompt


def attention_by_place(
    host: Host, method: Method, tokens: int, questions: Sequence[Callable[[], Ask]], stretches: int
) -> list[list[float]]:
    """Where the last word of a prompt looks: the share of its attention in each equal stretch of the patches, in every
    decoder layer, mean over heads and questions.

    Args:
        host: a model with its language model in reach.
        method: reduces; only methods that act before the language model, so that every layer has one length.
        tokens: of the budget.
        questions: each gives its picture, encoded for what is attached, and its prompt. One untiled picture each.
        stretches: how many.
    Returns:
        [layers][stretches], each stretch's share of all attention, text included.
    """
    total: Tensor | None = None
    with host.attach(method, Budget(tokens)) as attached:
        for question in questions:
            encoded, prompt = question()
            with ExitStack() as stack:
                watches = [stack.enter_context(watching(layer)) for layer in attached.here.decoder.layers]
                (answer,) = host.answer([encoded], [prompt])
            rows = torch.stack([watch.weights[0].mean(1)[0, -1] for watch in watches])  # [layers, n]
            found = _by_stretch(rows, answer, stretches)
            total = found if total is None else total + found
    return [] if total is None else (total / len(questions)).tolist()


def _by_stretch(rows: Tensor, answer: Answer, stretches: int) -> Tensor:
    """Attention [layers, n] of a prompt's last row, added up over equal stretches of a picture: [layers, stretches]."""
    (outcome,) = answer.outcomes
    parts = [reduction.source[0].cpu() for _, reduction in outcome.reductions]
    places = torch.cat(parts) if parts else torch.arange(outcome.before)
    assert answer.prefill is not None
    start = answer.prefill.text - answer.prefill.question
    visual, of_patches = rows[:, start : start + len(places)], places >= 0  # some tokens stand for no patch
    stretch = places[of_patches] * stretches // outcome.before
    return torch.zeros(len(rows), stretches).index_add(1, stretch, visual[:, of_patches])
