"""What the vision tower says of pictures that are cut between decoder layers, for methods that read both sides."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llava_consensus.hosts.sequence.gather import Source
from llava_consensus.hosts.sequence.splice import Sequence

if TYPE_CHECKING:
    from llava_consensus.hosts.decoder.forwards import Armed


def tower_source(attachment: Any, armed: "Armed", embeds: Tensor, positions: Tensor) -> Source | None:
    """Where parts of the tower are read; None for a method that needs none.

    Args:
        attachment: whose method cuts.
        armed: the sequences that are cut, with the tiles of their pictures.
        embeds, positions: of these sequences, [R, S, D] and [R, S] or [R, S, A].
    """
    if not attachment.cuts_by_tower:
        return None
    layout, tower = armed.layout, attachment.here.tower
    full = Sequence(embeds, layout.real.to(embeds.device), positions)
    block = attachment.attention_block(tower)
    prompts = torch.zeros(len(embeds), dtype=torch.long)  # no fingerprint is asked for here
    return Source(full, layout, armed.tiles, tower, block, attachment.method, prompts)
