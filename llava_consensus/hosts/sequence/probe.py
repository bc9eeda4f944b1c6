"""The language model's first layer as the words behind each picture see it (paper section 3.2): what SCAP reads."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from llava_consensus.hosts.base import EXPERTS, Decoder, ExpertDecoder, Tiles
from llava_consensus.hosts.sequence.gather import same_pictures
from llava_consensus.hosts.sequence.layout import Layout
from llava_consensus.hosts.sequence.splice import Sequence
from llava_consensus.reduction.saliency import sight_of
from llava_consensus.reduction.tokens import FrontKeys, Sight, TextProbe


class Fronts(NamedTuple):
    """Rows that several prompts of a batch begin with alike: their words and their picture."""

    rows: list[int]  # one prompt for each front
    which: list[int]  # [R] front of each prompt
    size: int  # rows of a front


def shared_fronts(layout: Layout, tiles: list[Tiles]) -> Fronts | None:
    """The fronts of prompts that begin with the same words and show one picture each; None where they end at different
    places, or none is that of two prompts.

    Args:
        layout: of sequences without padding in front of the pictures.
        tiles: of each picture of the call.
    """
    pictures = {picture.row: picture for picture in layout.pictures}
    ends = {picture.end for picture in layout.pictures}
    if len(pictures) != len(layout.pictures) or len(pictures) != len(layout.real) or len(ends) != 1:
        return None
    same, first = same_pictures(tiles), dict[int, int]()
    shown = [same[pictures[row].source] for row in range(len(pictures))]
    which = [first.setdefault(source, len(first)) for source in shown]
    if len(first) == len(shown):
        return None
    return Fronts([shown.index(source) for source in first], which, ends.pop() + 1)


def probe_text(
    full: Sequence, layout: Layout, decoder: Decoder, fronts: Fronts | None = None, spare: Tensor | None = None
) -> TextProbe:
    """The decoder's layer 0 as the text rows after each picture see it, once where several pictures have the same
    text: their queries, and the keys of the whole sequence, by the layer's own modules. Nothing runs but the two
    projections (paper section 3.2); what prompts begin with alike is projected once, and comes apart, as a front.

    Args:
        spare: [R] rows at the end of each sequence that are no words and ask nothing, though they count as real; no
            word sees them.
    """
    device = full.embeds.device
    asked = layout.once(("asked", device), lambda: _asked(layout, device))
    if EXPERTS in full.channels:
        decoder, fronts = cast(ExpertDecoder, decoder).choosing(full.channels[EXPERTS].values), None
    start = 0 if fronts is None else fronts.size
    front = None
    positions, real = full.positions[:, start:], full.real[:, start:]
    rows = (asked.rows - start).clamp_min(0) if start else asked.rows  # of padding among the text rows is no place
    with torch.no_grad():
        normed = decoder.normed(0, full.embeds[:, start:] if start else full.embeds)
        query = decoder.query(0, normed[asked.row, rows])
        key = decoder.key(0, normed)
        if fronts is not None:
            shared = decoder.normed(0, full.embeds[fronts.rows, :start])
            angles = decoder.rotary(shared, full.positions[fronts.rows, :start])
            which = torch.tensor(fronts.which, device=device)[asked.row[:, 0]]
            front = FrontKeys(decoder.key(0, shared), *angles, which)
        if not asked.every:  # what is asked of every prompt, once and in order, is not copied
            key = key[asked.row[:, 0]]
        row_mask = asked.row_mask
        if spare is not None:
            row_mask = row_mask & (asked.rows < (full.real.sum(1) - spare)[asked.row])

        def look() -> tuple[Tensor, Tensor, Tensor, Sight]:
            """Angles, mask and sight of the prompts."""
            cos, sin = decoder.rotary(normed, positions)
            cos, sin, mask = (values[asked.row[:, 0]] for values in (cos, sin, real))
            probe = TextProbe(query, key, cos, sin, decoder.scale(0), rows, row_mask, mask)
            return cos, sin, mask, sight_of(probe, padded=asked.padded or spare is not None)

        known = full.positions is layout.places_on(device) and full.real is layout.real_on(device)
        alone = len(normed) == 1  # of a batch, what is remembered would be large
        if known and alone and spare is None and not decoder.follows_length:
            cos, sin, mask, sight = layout.once(("sight", device, normed.dtype), look)
        else:
            cos, sin, mask, sight = look()
    return TextProbe(query, key, cos, sin, decoder.scale(0), rows, row_mask, mask, sight, front)


class Asked(NamedTuple):
    """The text rows of I probes, on the device of the sequences."""

    row: Tensor  # [I, 1] of the batch
    rows: Tensor  # [I, L] places in the sequence
    row_mask: Tensor  # [I, L] true where there is one
    every: bool  # whether there is one probe for each prompt
    padded: bool  # whether there is no text row somewhere


def _asked(layout: Layout, device: torch.device) -> Asked:
    pictures = layout.probes[0]
    rows = torch.nn.utils.rnn.pad_sequence([picture.text for picture in pictures], batch_first=True)
    count = torch.tensor([[len(picture.text)] for picture in pictures])
    row = torch.tensor([[picture.row] for picture in pictures])
    mask = torch.arange(rows.shape[1]) < count
    every = row[:, 0].tolist() == list(range(len(layout.real)))
    return Asked(row.to(device), rows.to(device), mask.to(device), every, not bool(mask.all()))
