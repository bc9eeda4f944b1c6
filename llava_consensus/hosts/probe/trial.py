"""One model with two pictures and prompts to try it on, and the logits of whatever is run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor

from llava_consensus.hosts.base import Prompt
from llava_consensus.hosts.harness import FULL
from llava_consensus.hosts.probe.witness import TowerWitness, Witness
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Need

NEW = 3  # tokens that are generated
SIZES = ((224, 160), (160, 224))  # of the pictures
TEXTS = ("What is in this picture?", "Which colours does this picture have, and where are they?")
ROWS = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}  # arguments by row: what generated tokens get


class Trial:
    """A host under trial.

    Args:
        host: with tokenizer and preprocessing.
        method: the one to try.
        folder: for pictures of models that read files.
    """

    def __init__(self, host: Any, method: Method, folder: Path) -> None:
        self.host, self.method, self.module = host, method, host.model
        self.pictures = [_picture(size, seed) for seed, size in enumerate(SIZES)]
        self.prompts = [Prompt(text, max_new_tokens=NEW, min_new_tokens=NEW) for text in TEXTS]
        with host.attach(*FULL) as attached:
            self.view = attached.model
        self.inputs = host.own_inputs(self.prompts[0], self.pictures[0], folder)
        self.plain, _ = self.generate(self.inputs)
        with host.attach(self.witness(), Budget(1)) as attached:
            self.generate(self.inputs, 1)
            self.available = attached.outcomes[0].before
        self.budget = Budget(max(self.available // 2, 1))

    def witness(self) -> Witness:
        """A method that remembers what this model hands to it."""
        return TowerWitness() if Need.ATTENTION in self.view.tower.offers else Witness()

    @torch.no_grad()
    def generate(self, inputs: dict[str, Any], new: int = NEW) -> tuple[list[Tensor], Tensor]:
        """Greedy, by the model's own `generate`: the last row's logits [R, V] of every forward, and the new ids."""
        options = {"do_sample": False, "use_cache": True, "pad_token_id": self.host.padding}
        with self.logits() as found:
            ids = self.module.generate(**inputs, max_new_tokens=new, min_new_tokens=new, **options)
        return found, ids[:, -new:]

    def attached(self, method: Method, budget: Budget) -> tuple[list[Tensor], Tensor]:
        """The same for the first prompt with a method on the model."""
        with self.host.attach(method, budget) as attached, attached.asking([self.prompts[0].text]):
            return self.generate(self.inputs)

    @contextmanager
    def logits(self) -> Iterator[list[Tensor]]:
        """The last row's logits [R, V] of every forward of the model while the body runs."""
        found: list[Tensor] = []

        def keep(module: Any, args: Any, output: Any) -> None:
            found.append(output.logits[:, -1].detach().float().clone())  # generate of 4.37 writes to them

        handle = self.module.register_forward_hook(keep)
        try:
            yield found
        finally:
            handle.remove()

    def extended(self, ids: Tensor) -> dict[str, Any]:
        """The arguments of a prompt with these ids [1, n] behind it."""
        name = "input_ids" if "input_ids" in self.inputs else "inputs"
        longer = {name: torch.cat((self.inputs[name], ids.to(self.inputs[name].device)), dim=1)}
        for row, value in ROWS.items():
            if row in self.inputs:
                before = self.inputs[row]
                longer[row] = torch.cat((before, torch.full_like(ids, value).to(before)), dim=1)
        return {**self.inputs, **longer}


def _picture(size: tuple[int, int], seed: int) -> Image.Image:
    """A picture of soft patches of colour."""
    values = numpy.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
    return Image.fromarray(values).resize(size, Image.Resampling.BICUBIC)
