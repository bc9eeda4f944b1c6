"""What hosts share when the harness asks them: who has a method on the model, padded batches, accounted answers."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Answer, Encoded, Prefill, Prompt
from llava_consensus.hosts.call import Call, current
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method, Place

COUNTS = ("before", "after", "structural")
FULL = make("full"), Budget(1)


class HarnessHost:
    """A model with its tokenizer, for any number of callers at once."""

    model: Any
    tokenizer: Any

    def __init__(self) -> None:
        self._attached: Attachment | None = None
        self._guests = 0  # callers that use the model without a method
        self._door = threading.Lock()

    def attach(self, method: Method, budget: Budget | Share) -> Attachment:
        """Attaches a method to this model instance; a context manager, or call `.detach()`."""
        raise NotImplementedError

    def grid_columns(self, size: tuple[int, int]) -> int:
        """Tiles in a row of the grid after the base view of a picture of this width and height; 0 without a grid."""
        return 0

    @contextmanager
    def attachment(self) -> Iterator[Attachment]:
        """What is attached, or for as long as anybody is inside the method that reduces nothing."""
        with self._door:
            if self._attached is None or not self._attached.active:
                self.attach(*FULL)
                self._guests = 0
            attachment = self._attached
            assert attachment is not None
            guest = (attachment.method, attachment.budget) == FULL
            self._guests += guest
        try:
            yield attachment
        finally:
            with self._door:
                self._guests -= guest
                if guest and not self._guests:
                    attachment.detach()

    @torch.inference_mode()
    def answer(self, encoded: list[list[Encoded]], prompts: list[Prompt]) -> list[Answer]:
        """Greedy answers to one prompt about each list of encoded pictures, in left-padded batches.

        Raises:
            ValueError: when the prompts differ in the length of answer they allow, or a picture was encoded for another
                method than the one that is attached.
        """
        with self.attachment() as attachment:
            check_batch(attachment, encoded, prompts)
            ids = [self.question_ids(prompt, pictures) for prompt, pictures in zip(prompts, encoded, strict=True)]
            answers: dict[int, Answer] = {}
            for rows in self.groups(attachment, encoded, ids):
                group_answers = self.answer_group(
                    attachment,
                    [encoded[row] for row in rows],
                    [ids[row] for row in rows],
                    [prompts[row] for row in rows],
                )
                answers.update(zip(rows, group_answers, strict=True))
        return [answers[row] for row in range(len(prompts))]

    def question_ids(self, prompt: Prompt, pictures: list[Any]) -> Tensor:
        """Token ids [L] of a prompt about these encoded pictures, on the CPU."""
        return self.prompt_ids(prompt, len(pictures))

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> Tensor:
        """Token ids [L] of a prompt, with one placeholder for each picture, on the CPU."""
        raise NotImplementedError

    def groups(self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor]) -> list[list[int]]:
        """Rows that are answered together: all with pictures, and all without."""
        seeing = [row for row, pictures in enumerate(encoded) if pictures]
        bare = [row for row, pictures in enumerate(encoded) if not pictures]
        return [rows for rows in (seeing, bare) if rows]

    def answer_group(
        self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor], prompts: list[Prompt]
    ) -> list[Answer]:
        """Answers of prompts that are asked together."""
        raise NotImplementedError

    def pad(self, rows: list[Tensor], left: bool = True) -> tuple[Tensor, Tensor]:
        """Ids and mask [R, L] of rows padded on the left, or on the right."""
        side = "left" if left else "right"
        ids = pad_sequence(rows, batch_first=True, padding_value=self.padding, padding_side=side)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
        return ids.to(self.model.device), mask.to(self.model.device)

    @property
    def padding(self) -> int:
        """Id of padding; the end of a text where a tokenizer has none."""
        pad: int | None = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    def generation(self, prompt: Prompt) -> dict[str, Any]:
        """Arguments of `generate`: greedy, as LLaVA evaluates."""
        greedy = {"do_sample": False, "use_cache": True, "pad_token_id": self.padding}
        longer = {"min_new_tokens": prompt.min_new_tokens} if prompt.min_new_tokens else {}
        return {**greedy, **longer, "max_new_tokens": prompt.max_new_tokens}

    def decode(self, output: Tensor) -> list[str]:
        """Texts of ids [R, L]."""
        texts: list[str] = self.tokenizer.batch_decode(output, skip_special_tokens=True)
        return texts


@contextmanager
def last_row_alone(head: nn.Module, call: Call) -> Iterator[None]:
    """While the body runs, this call's logits are made of the last row of states [R, S, D] alone: who answers reads no
    others.
    """

    def last(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return (args[0][:, -1:],) if current(call.owner) is call and args[0].ndim == 3 else None

    handle = head.register_forward_pre_hook(last)
    try:
        yield
    finally:
        handle.remove()


def check_batch(attachment: Attachment, encoded: list[list[Encoded]], prompts: list[Prompt]) -> None:
    """Raises ValueError when the prompts differ in the length of answer they allow, or a picture was encoded for
    another method than the one that is attached: what this one reads was not collected.
    """
    if len({prompt.max_new_tokens for prompt in prompts}) != 1:
        raise ValueError("the prompts of one batch must allow answers of one length")
    method, budget = attachment.method, attachment.budget
    inside = method.place in (Place.TOWER, Place.PICTURE)
    for picture in (picture for pictures in encoded for picture in pictures):
        if picture.method != method or (inside and picture.budget != budget):
            raise ValueError(
                f"a picture was encoded for {picture.method} and {picture.budget}, but {method} with {budget} is "
                "attached: encode it again"
            )


def answer_of(call: Call, row: int, text: str, prefill: Prefill, limit: int | None = None) -> Answer:
    """One row's text with the account of its tokens, and a note where its prompt has more rows than the `limit`
    positions the model was made for: it is answered, but from places never seen in training, or, where a checkpoint of
    official LLaVA sets `tokenizer_model_max_length`, cut there by the official code.
    """
    outcomes = tuple(outcome for outcome in call.report.outcomes if outcome.row == row)
    before, after, structural = (sum(getattr(outcome, name) for outcome in outcomes) for name in COUNTS)
    notes = call.report.notes
    if limit is not None and prefill.text + max(prefill.entering, default=after) > limit:
        notes += (f"prompt longer than the {limit} positions of the model",)
        warnings.warn(f"{notes[-1]}: take fewer tokens per image", stacklevel=2)  # Python says it once
    return Answer(text.strip(), before, after, structural, notes, outcomes, prefill)
