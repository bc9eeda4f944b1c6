"""Word probes: while the language model learns to see, every object word is asked about every scene at once.

A probe is a segment of one token, an object's word, that sees the system prompt and the visual prefix. Small heads on
its states say how often the object is there, in which colours, where (if it is there once) and whether it is large:
some sixty answers a scene instead of the few that questions pay. The heads are thrown away afterwards.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from playground.mini.catalogue import NAMES
from playground.mini.labels import COLOUR_NAMES
from playground.mini.scenes import UNITS, Scene

PROBES, MOST = len(NAMES), 4
COLOURS = len(COLOUR_NAMES)


def truth(scene: Scene) -> torch.Tensor:
    """For every object word: count (at most 4), large, x, y (0 to 1, of a single one), colours; [62, 4 + colours]."""
    rows = torch.zeros(PROBES, 4 + COLOURS)
    dx, dy = scene.offset
    for item in scene.items:
        row = rows[NAMES.index(item.name)]
        row[0] = min(MOST, int(row[0]) + 1)
        row[1] = float(item.large)
        row[2], row[3] = (item.centre[0] + dx) / UNITS, (item.centre[1] + dy) / UNITS
        row[4 + COLOUR_NAMES.index(item.colour)] = 1
    return rows


class Heads(nn.Module):
    """What is read from a probe at one depth."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.read = nn.Linear(hidden, MOST + 1 + 3 + COLOURS)

    def forward(self, states: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """The loss of states [B, 62, hidden] against `truth`."""
        said = self.read(self.norm(states))
        count = known[..., 0].long()
        weight = torch.tensor([0.3, 1.0, 1.0, 1.0, 1.0], device=said.device)
        loss = F.cross_entropy(said[..., : MOST + 1].flatten(0, 1), count.flatten(), weight=weight)
        once, some = count == 1, count > 0
        if once.any():
            loss = loss + F.binary_cross_entropy_with_logits(said[..., MOST + 1][once], known[..., 1][once])
            loss = loss + 8 * F.mse_loss(said[..., MOST + 2 : MOST + 4][once], known[..., 2:4][once])
        return loss + 2 * F.binary_cross_entropy_with_logits(said[..., MOST + 4 :][some], known[..., 4:][some])
