"""Sequences of official LLaVA while methods reduce them, between LLaVA's function and the decoder."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llava_consensus.hosts.arguments import IGNORE, compact, joined_outcomes
from llava_consensus.hosts.before_tower import Left, tiles_left, whole_tiles
from llava_consensus.hosts.images import Integers
from llava_consensus.hosts.inputs import EncodedImage, Inputs, Prompt
from llava_consensus.hosts.outcomes import ImageOutcome, Report, reduced, unchanged
from llava_consensus.hosts.pinned import angles_of
from llava_consensus.hosts.rows import Rows, drop_rows, gather, reduced_rows, upload
from llava_consensus.hosts.units import Unit
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.saliency import rotate
from llava_consensus.reduction.tokens import Need, TextProbe


class After(NamedTuple):
    """By how much positions behind a prompt are ahead of the rows that its cache holds, each [R, 1]."""

    offset: Tensor
    last: Tensor  # if they are counted on from the last row that is left


class Sequences:
    """Results of LLaVA's function, without the rows that left.

    Args:
        model: whose decoder is probed.
        prompt: what each row is.
        results: of the function.
    """

    def __init__(self, model: Any, prompt: Prompt, results: tuple[Any, ...]) -> None:
        self.model, self.prompt = model, prompt
        _, self.positions, self.mask, self.past, self.embeds, self.labels = results
        (self.places,) = self._upload(np.maximum(prompt.real.cumsum(1) - 1, 0))  # [R, W] position of each row
        self.following = prompt.real.sum(1)[:, None]  # [R, 1] position behind each prompt
        self.keeps, self.report = False, Report(unchanged(prompt.images))
        self.rows: Rows | None = None  # that the last reduction left
        self.real = prompt.real  # [R, W]

    def _upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        return upload(arrays, self.embeds.device)

    def reduce(
        self, method: Method, units: list[Unit], needs: frozenset[Need], clip: Any, follows: bool, ends: bool
    ) -> None:
        """Units through a method.

        Args:
            follows: whether another method has acted before.
            ends: whether none follows, so that the prompt can stay as it was.
        """
        prompt, decoder = self.prompt, self.model.get_model()
        inputs = Inputs(prompt, self.embeds, method, needs, decoder.mm_projector, clip)
        if Need.PROBE in needs:
            with inputs.watch.time("probe"), torch.autocast(self.embeds.device.type, enabled=False), torch.no_grad():
                self._probe(inputs, decoder, getattr(method, "scap_rope", True))
        groups = inputs.reduce(units)
        drops = [method.newlines == "drop"] * len(prompt.images)
        with inputs.watch.time("splice"):
            rows, pool = reduced_rows(self.embeds, prompt.real, prompt.images, groups, method, drops)
            self.embeds = pool.take(self.embeds, [group.reduction.tokens for group in groups])
            self.labels = None if self.labels is None else drop_rows(self.labels, rows)
            self.keeps, self.rows, self.real = method.positions != "renumber", rows, rows.real
            if method.positions == "mean":
                self.places = pool.mean(self.places)
            elif self.keeps:
                self.places = drop_rows(self.places, rows)
            else:
                self.following = rows.real.sum(1)[:, None]
                (self.places,) = self._upload(np.maximum(rows.real.cumsum(1) - 1, 0))
        outcomes, notes = reduced(unchanged(prompt.images), groups, drops), inputs.notes
        if follows:
            outcomes = joined_outcomes(self.report.outcomes, dict(enumerate(outcomes)), True)
            notes = self.report.notes + notes
        self.report = Report(outcomes, notes, inputs.watch)
        if not ends:
            self.prompt, self.rows = compact(prompt, rows, self.model.config), None

    def _probe(self, inputs: Inputs, decoder: Any, rotated: bool) -> None:
        """Reads queries of the text and keys of all rows of the first layer (SCAP), by its own projections."""
        layer = decoder.layers[0]
        attention, normed = layer.self_attn, layer.input_layernorm(self.embeds)
        which, where, mask, keys, padded = inputs.asking_rows()

        def heads(states: Tensor) -> Tensor:  # [R, n, H d] -> [R, H, n, d]
            return states.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        query, key = heads(attention.q_proj(normed[which, where])), heads(attention.k_proj(normed))
        cos, sin = angles_of(decoder, normed, self.places if rotated else torch.zeros_like(self.places))
        query, key = rotate(query, cos[which, where], sin[which, where]), rotate(key, cos, sin)
        turned = key.new_empty(len(key), key.shape[2], 0)
        scale = attention.head_dim**-0.5
        inputs.probe = TextProbe(query, key, turned, turned, scale, where, mask, keys, padded)

    def align(self, left: bool, limit: int | None, cuts: bool) -> None:
        """Puts padding on this side, and cuts sequences to a limit. They are padded on the left so far.

        Args:
            cuts: whether a method between layers follows.
        """
        width = self.real.shape[1]
        cropped = limit is not None and width > limit
        if not cropped and (left or self.real.all()):
            return
        real, order = aligned(self.real, left, limit)
        (index,) = self._upload(order)
        self.embeds, self.places = gather(self.embeds, index, 1), self.places.gather(1, index)
        self.labels = None if self.labels is None else self.labels.gather(1, index)
        if cuts or cropped:
            config = self.model.config
            prompt = self.prompt if self.rows is None else compact(self.prompt, self.rows, config)
            shown = index.bool()
            rows = Rows(width, index, None, real, shown, index[:, :1], True)
            self.prompt, self.rows = compact(prompt, rows, config), None
        self.real = real
        if cropped:
            self.report = replace(self.report, outcomes=counted(self.report.outcomes, self.prompt, real))

    @property
    def after(self) -> After | None:
        """Positions of what follows, if they are kept."""
        if not self.keeps:
            return None
        size = self.real.shape[1]
        (offset,) = self._upload(self.following - size)
        return After(offset, self.places[:, -1:] + 1 - size)

    def results(self) -> tuple[Any, ...]:
        """The six results."""
        (shown,) = self._upload(self.real)
        shown = shown.bool()
        embeds, labels, positions, mask = self.embeds, self.labels, self.positions, self.mask
        if not self.real.all():
            embeds = embeds.masked_fill(~shown[..., None], 0.0)
            labels = None if labels is None else labels.masked_fill(~shown, IGNORE)
        if self.keeps:
            positions = self.places * shown
        elif positions is not None:
            positions = (self.places * shown).to(positions.dtype)
        # without a mask, gaps between positions would be taken for the ends of packed sequences
        if mask is not None or self.keeps:
            mask = shown if mask is None else shown.to(mask.dtype)
        return None, positions, mask, self.past, embeds, labels


def aligned(real: NDArray[np.bool_], left: bool, limit: int | None) -> tuple[NDArray[np.bool_], Integers]:
    """Rows [R, W] padded on the left as they are with padding on this side, and cut to a limit: which are no padding,
    and the column that each is taken from.
    """
    lengths, width = real.sum(1)[:, None], real.shape[1]
    most = width if limit is None else min(width, limit)
    kept = np.minimum(lengths, most)
    place = np.arange(most)[None] - (most - kept if left else 0)
    own = (place >= 0) & (place < kept)
    return own, np.where(own, width - lengths + place, 0)


def counted(outcomes: list[ImageOutcome], prompt: Prompt, real: NDArray[np.bool_]) -> list[ImageOutcome]:
    """Outcomes of truncated prompts, of which these rows [R, S] are left."""
    return [
        outcome._replace(after=int(real[image.row, image.places[image.token >= 0]].sum()))
        for outcome, image in zip(outcomes, prompt.images, strict=True)
    ]


def with_encoded(prompt: Prompt, own: list[EncodedImage]) -> Prompt:
    """Prompts with what was read of each of their images."""
    pixels = [{} if one.pixels is None else {"pixel_values": one.pixels} for one in own]
    tiles, left = [one.tiles for one in own], [one.left for one in own]
    if None in left:
        return prompt._replace(tiles=tiles, encoded=pixels)
    smaller, _ = tiles_left(None, Left(left, None), prompt.images, True, True)  # type: ignore[arg-type]
    later = [read._replace(size=one.size, side=one.side) for read, one in zip(tiles, smaller, strict=True)]
    tiles = [whole_tiles(*of) for of in zip(prompt.images, left, strict=True)]
    return prompt._replace(tiles=tiles, encoded=pixels, left=left, later=later)


def for_beams(prompt: Prompt, beams: int) -> Prompt:
    """Prompts each of which is repeated."""
    ids, real, asks = prompt.ids.repeat(beams, 0), prompt.real.repeat(beams, 0), prompt.asks.repeat(beams, 0)
    images = [one._replace(row=one.row * beams + beam) for beam in range(beams) for one in prompt.images]
    return prompt._replace(
        ids=ids, real=real, asks=asks, images=images, tiles=prompt.tiles * beams, encoded=prompt.encoded * beams,
        text=prompt.text * beams, beams=beams,
    )  # fmt: skip
