"""One image whose tokens are pruned between layers, and its result."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llava_consensus.hosts.images import Integers
from llava_consensus.hosts.inputs import structural_rows
from llava_consensus.hosts.outcomes import ImageOutcome
from llava_consensus.hosts.prompts import Prompt
from llava_consensus.hosts.rows import Rows, upload
from llava_consensus.hosts.units import Unit
from llava_consensus.reduction import selection
from llava_consensus.reduction.decoder import Chosen, Cut
from llava_consensus.reduction.tokens import Reduction


@dataclass(eq=False)
class CutImage:
    """An image while its tokens are pruned, in one row of the batch."""

    unit: Unit
    row: int  # of the batch; beams repeat prompts
    end: int  # its last row in the prompt
    text: Integers  # columns of the rows whose queries are asked
    cuts: dict[int, Cut]  # by layer
    left: int  # visual tokens now
    reported: bool  # whether it is of the first beam of its prompt
    merged: int = 0  # of the tokens left, those made at the last cut
    entering: list[int] = field(default_factory=list)  # visual tokens that entered each layer so far
    measures: dict[str, list[Tensor]] = field(default_factory=dict)  # the method's statistics of its choices, per cut
    centres: Tensor | None = None  # [M] which of its n tokens those made at the last cut represent
    joined: Tensor | None = None  # [n] which of the M each of them went into, -1 for none

    @classmethod
    def of(cls, prompt: Prompt, unit: Unit, cuts: dict[int, Cut], asks: str) -> "CutImage":
        """An image before its first cut. If no text follows it, the last row of the prompt asks."""
        image, text = prompt.images[unit.image], prompt.text[unit.image]
        if asks == "last" or not len(text):
            text = np.flatnonzero(prompt.asks[image.row])[-1:]
        first = image.row % prompt.beams == 0
        return cls(unit, image.row, int(image.places[-1]), text, cuts, len(unit.places), first)

    def note(self, places: Tensor, chosen: Chosen, number: int) -> None:
        """Stores the result of one cut.

        Args:
            places: [v] rows of the prompt that its tokens are.
            number: of this image among those cut together.
        """
        self.merged = 0 if chosen.merged is None else chosen.merged.shape[1]
        for name, values in chosen.measures.items():
            self.measures.setdefault(name, []).append(values[number].detach())
        if chosen.centres is None:
            self.centres = self.joined = None
            return
        (whole,) = upload([self.unit.places], places.device)
        own = torch.searchsorted(whole, places)  # [v] which of its n tokens
        self.centres = own[chosen.centres[number]]
        if chosen.joined is not None:
            none = torch.full((len(whole),), -1, device=places.device)
            self.joined = none.scatter(0, own, chosen.joined[number])


def cut_outcome(prompt: Prompt, image: CutImage, number: int, rows: Rows, owner: Tensor, hidden: Any) -> ImageOutcome:
    """Result of one image after its last cut.

    Args:
        number: of the image in `owner` [R, S].
        rows: that are left.
        hidden: [R, S, D] last states.
    """
    own, count, device = prompt.images[image.unit.image], len(image.unit.places), owner.device
    index = rows.index[image.row]
    columns = selection.indices(((owner[image.row][index] == number) & rows.shown[image.row])[None], image.left)[0]
    places = index[columns]
    (whole,) = upload([image.unit.places], device)
    source = torch.searchsorted(whole, places)[None]  # [1, v]
    slots = torch.arange(image.left, device=device)[None]
    joined = torch.full((1, count), -1, device=device).scatter(1, source, slots)
    centres = source.new_empty(0) if image.centres is None else image.centres
    made = torch.isin(source, centres)
    if image.joined is not None:
        joined = joined.where(image.joined < 0, joined[:, centres[image.joined]])
    # how many were made is known, which they are only to the device: the sort lets nothing wait for it
    parted = source.gather(1, made.to(torch.uint8).argsort(dim=1, stable=True))
    kept, anchors = parted.split((image.left - image.merged, image.merged), 1)
    measures = {name: torch.stack(values)[None] for name, values in image.measures.items()}
    tokens = hidden[image.row, places][None].detach()
    reduction = Reduction(tokens, kept.sort(1).values, anchors, source, joined, measures=measures)
    origin = torch.from_numpy(image.unit.tile), torch.from_numpy(image.unit.token)
    return ImageOutcome(
        own.row, count, image.left, structural_rows(own), ((0, reduction),), tuple(image.entering), origin
    )
