"""Inputs of a method (`MethodInputs`): parts collected from the vision tower, and the first layer of the language
model as the words after a picture see it (`probe_text`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from llava_consensus.hosts.base import EXPERTS, Decoder, ExpertDecoder, Heads, Tiles, Tower
from llava_consensus.hosts.derived.tap import heads_of
from llava_consensus.hosts.sequence import Assembled, Layout, Picture, Unit
from llava_consensus.hosts.towers import EARLIER, attention_blocks, needs_of
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import (
    ClipSides,
    Need,
    TextProbe,
    VisionAttention,
    VisualTokens,
    WholePictures,
    Words,
)

MOST_TILES = 1 << 20  # of a picture


def read_heads(
    decoder: Any, layer: int, hidden: Tensor, positions: Tensor, row: Tensor, columns: Tensor, **more: Any
) -> Heads:
    """Queries of the rows `columns` [P, L] of the sequences `row` [P] and all keys of a layer that states [R, S, D]
    enter; `more` is for decoders that are read by their layers (`derived/decoder.py`).
    """
    if hasattr(decoder, "read"):
        return decoder.read(layer, hidden, positions, row, columns, **more)
    normed, view = decoder.normed(layer, hidden), decoder.at(layer) if hasattr(decoder, "at") else decoder
    query, key = decoder.query(layer, normed[row[:, None], columns]), decoder.key(layer, normed)
    cos, sin = view.rotary(normed, positions)
    return Heads(query, key, cos, sin, decoder.scale(layer))


def probe_text(full: Assembled, layout: Layout, decoder: Decoder, rope: bool = True) -> TextProbe:
    """The decoder's layer 0 as the text rows of each sequence with pictures see it: their queries, and the keys of the
    whole sequence, once for all of its pictures, by the layer's own modules. Nothing runs but the two projections
    (paper section 3.2).
    """
    device, places = full.embeds.device, layout.probes[0]
    texts, row_mask = padded_rows(list(places.values()))
    padded = not bool(row_mask.all())
    rows = list(places)
    every = rows == list(range(len(layout.real)))  # then nothing is copied
    row, texts, row_mask = torch.tensor(rows, device=device), texts.to(device), row_mask.to(device)
    if full.attending is not None:
        query, key, cos, sin, scale, cap = heads_of(full.attending, row, texts)
    else:
        if EXPERTS in full.channels:
            decoder = cast(ExpertDecoder, decoder).choosing(full.channels[EXPERTS].values)
        more = {} if rope else {"rope": False}
        with torch.no_grad():
            embeds = full.embeds if decoder.embedding_scale == 1 else full.embeds * decoder.embedding_scale
            query, key, cos, sin, scale, cap = read_heads(decoder, 0, embeds, full.positions, row, texts, **more)
    key, cos, sin, real = (value if every else value[row] for value in (key, cos, sin, full.real))
    return TextProbe(query, key, cos, sin, scale, texts, row_mask, real, padded, cap)


def padded_rows(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Places of text rows, padded with 0, and which of them are real: [I, L] each."""
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return padded, torch.arange(padded.shape[1]) < torch.tensor([[len(text)] for text in texts])


def words_after(full: Assembled, layout: Layout) -> tuple[Tensor, Tensor]:
    """Embeddings [I, L, D] of the text rows after each picture, once where several have the same text, and which of
    them are real [I, L].
    """
    pictures, device = layout.texts[0], full.embeds.device
    texts, real = padded_rows([picture.text for picture in pictures])
    rows = torch.tensor([[picture.row] for picture in pictures], device=device)
    return full.embeds[rows, texts.to(device)], real.to(device)


class UnitBatch(NamedTuple):
    """B units of N tokens that go through the method together, with indexes on the device of the sequences."""

    units: list[Unit]
    used: list[tuple[int, int]]  # the U tiles they are of, as (picture of the layout, tile of it)
    row: Tensor  # [B, 1] row of the sequences
    columns: Tensor  # [B, N] place in the row
    tile: Tensor  # [B, N] into `used`
    patch: Tensor  # [B, N] token of the tile
    picture: Tensor  # [B] into the pictures of the layout
    text: Tensor  # [B] into `Layout.texts`, where words are read
    prompt: Tensor  # [B] into `Layout.probes`
    asking: Tensor  # [B, L] 1 for the rows of the probe that ask about the unit's picture; [B, 0] where all rows do


@dataclass(frozen=True)
class MethodInputs:
    """Inputs of a method for the units of assembled sequences."""

    full: Assembled
    layout: Layout
    tiles: list[Tiles]  # of each picture of the call
    tower: Tower
    method: Method
    prompts: Tensor | None = None  # [R] int64 fingerprint of each row's prompt, where the method asks for it
    probe: TextProbe | None = None
    clip: ClipSides | None = None  # patches of all tiles of the call; text of each row
    words: tuple[Tensor, Tensor] | None = None  # `words_after`, in place of CLIP

    def batches(self) -> list[UnitBatch]:
        """Reduced units that go through the method together; one by one where their lengths are not known before."""
        if self.method.adaptive:
            return self.indexed([[unit] for unit in self.layout.reduced()])
        probing = Need.PROBE in self.method.needs
        return self.indexed(self.layout.groups(lambda unit: (self._sizes(unit), probing and self._has_text(unit))))

    def indexed(self, groups: list[list[Unit]]) -> list[UnitBatch]:
        """Groups of units with their indexes, which go to the device in one copy however many groups there are."""
        pieces, used_tiles = [], []
        # only words need the texts told apart, which takes every place of every text
        texts = [0] * len(self.layout.pictures) if self.words is None else self.layout.texts[1]
        for units in groups:
            used, tile = self._used(units)
            used_tiles.append(used)
            pieces += [
                torch.tensor([[self._picture(unit).row] for unit in units]),
                torch.stack([unit.places for unit in units]),
                tile,
                torch.stack([unit.patch for unit in units]),
                torch.tensor([unit.picture for unit in units]),
                torch.tensor([texts[unit.picture] for unit in units]),
                torch.tensor([self.layout.probes[1][unit.picture] for unit in units]),
                self._asking(units),
            ]
        flat = torch.cat([piece.flatten() for piece in pieces]) if pieces else torch.empty(0)
        split = flat.to(self.full.embeds.device).split([piece.numel() for piece in pieces])
        moved = iter(values.view(piece.shape) for values, piece in zip(split, pieces, strict=True))
        return [
            UnitBatch(units, used, *(next(moved) for _ in range(8)))
            for units, used in zip(groups, used_tiles, strict=True)
        ]

    def _asking(self, units: list[Unit]) -> Tensor:
        """Which rows of the probe ask about each unit's picture: [B, L] of 1 and 0, or [B, 0] where all rows do."""
        if self.probe is None or not self._has_text(units[0]):
            return torch.zeros(len(units), 0, dtype=torch.long)
        mask = torch.zeros(len(units), self.probe.rows.shape[1], dtype=torch.long)
        for place, unit in enumerate(units):
            own = self.layout.asking(unit.picture)
            mask[place, : len(own)] = own
        return mask[:, :0] if bool(mask.all()) else mask

    def _sizes(self, unit: Unit) -> tuple[int, ...]:
        """Numbers of tokens and block rows of a tile of the unit's picture, and of tokens in a row of it."""
        tiles = self._tiles(unit)
        rows = (tiles.parts.get(name) for name in ("key", "features"))
        shapes = [value.shape[-2] for value in (tiles.projected, *rows) if value is not None]
        return (*shapes, self._side(unit))

    def _picture(self, unit: Unit) -> Picture:
        return self.layout.pictures[unit.picture]

    def _tiles(self, unit: Unit) -> Tiles:
        return self.tiles[self._picture(unit).source]

    def _has_text(self, unit: Unit) -> bool:
        """True if text follows the unit's picture."""
        return len(self._picture(unit).text) > 0

    def _side(self, unit: Unit) -> int:
        side = self._tiles(unit).side
        return self.tower.side if side is None else side

    def tokens(self, batch: UnitBatch) -> VisualTokens:
        """`VisualTokens` of a batch of units, on the device of the sequences."""
        units, used, row, columns, tile, patch, picture, text, prompt, asking = batch
        device, own, needs = self.full.embeds.device, self._tiles(units[0]), needs_of(self.tower, self.method)
        parts = {name: self._part(name, used) for name in (self.tiles[0].parts if self.tiles else ())}
        fingerprint = parts.pop("fingerprint", None)
        if fingerprint is not None and self.prompts is not None:  # of a unit's first tile and of its prompt
            fingerprint = fingerprint[tile[:, 0]] ^ self.prompts.to(device)[row[:, 0]]
        blocks = attention_blocks(self.tower, self.method)
        attention, earlier = (self._attention(parts, front, blocks.get(front), own) for front in ("", EARLIER))
        members = self.tower.members if own.members is None else own.members
        return VisualTokens(
            projected=self.full.embeds[row, columns],
            tile=tile,
            patch=patch,
            tiles_per_unit=units[0].tiles,
            side=self._side(units[0]),
            members=None if members is None else self._moved(members),
            picture=picture,
            prompt=prompt,
            columns=columns,
            attention=attention,
            earlier=earlier,
            project=self.tower.project if Need.PROJECTOR in needs else None,
            clip=self._clip(used),
            words=Words(*(side[text] for side in self.words or ())) if Need.WORDS in needs else None,
            probe=self._probe(units[0]),
            asking=asking.bool() if asking.shape[1] else None,
            fingerprint=fingerprint,
            whole=self._whole(used) if Need.WHOLE_PICTURES in needs else None,
            **{name: value for name, value in parts.items() if not name.startswith(EARLIER)},
        )

    def _moved(self, members: Tensor) -> Tensor:
        """The rows that tokens are made of on the device, where batches share them."""
        if id(members) not in self._members:
            self._members[id(members)] = members.to(self.full.embeds.device)
        return self._members[id(members)]

    @cached_property
    def _members(self) -> dict[int, Tensor]:
        return {}

    def _attention(self, parts: dict[str, Tensor], front: str, block: int | None, own: Tiles) -> VisionAttention | None:
        """The attention of a block, whose queries and keys leave the parts; None where the method reads none."""
        query, key = (parts.pop(front + name, None) for name in ("query", "key"))
        if query is None or key is None or block is None:
            return None
        return VisionAttention(query, key, self.tower.scale(block), self.tower.classes, own.class_is_token)

    def _used(self, units: list[Unit]) -> tuple[list[tuple[int, int]], Tensor]:
        """The U tiles these units need, as (picture of the layout, tile of it), each once, in order; and which of them
        each token came from [B, N]. Prompts about one picture share its tiles, but where tiles go with the question.
        """
        pictures = sorted({unit.picture for unit in units})
        if Need.WHOLE_PICTURES in self.method.needs:
            shown = {picture: picture for picture in pictures}
            sizes = {one: len(self.tiles[self.layout.pictures[one].source].projected) for one in pictures}
            used = [(picture, tile) for picture in pictures for tile in range(sizes[picture])]
        else:
            same = self._same
            first: dict[int, int] = {}
            shown = {one: first.setdefault(same[self.layout.pictures[one].source], one) for one in pictures}
            used = sorted({(shown[unit.picture], tile) for unit in units for tile in unit.tile.unique().tolist()})
        tile_keys = torch.tensor([picture * MOST_TILES + tile for picture, tile in used])
        token_keys = torch.stack([unit.tile + shown[unit.picture] * MOST_TILES for unit in units])
        return used, torch.searchsorted(tile_keys, token_keys)

    @cached_property
    def _same(self) -> tuple[int, ...]:
        """For each picture of the call, the index of the first that has the same tiles."""
        asked = self.clip is not None or self.words is not None  # a tile goes with the question of one prompt
        return tuple(range(len(self.tiles))) if asked else same_pictures(self.tiles)

    def _part(self, name: str, used: list[tuple[int, int]]) -> Tensor:
        """One part of these tiles: [U, ...]."""
        device = self.full.embeds.device
        sources = [(self.layout.pictures[picture].source, tile) for picture, tile in used]
        first = self.tiles[sources[0][0]].parts[name]
        if sources == [(sources[0][0], tile) for tile in range(len(first))]:  # one picture is not copied
            return first if first.device == device else first.to(device)
        return torch.stack([self.tiles[source].parts[name][tile] for source, tile in sources]).to(device)

    def _probe(self, unit: Unit) -> TextProbe | None:
        """The probe, without text rows where none follow the pictures of a group."""
        if self.probe is None or self._has_text(unit):
            return self.probe
        none = self.probe.rows[:, :0]
        return self.probe._replace(query=self.probe.query[:, :, :0], rows=none, row_mask=self.probe.row_mask[:, :0])

    def _clip(self, used: list[tuple[int, int]]) -> ClipSides | None:
        """Patches of these tiles, and the question of the row each is asked about in."""
        pictures, sizes = self.layout.pictures, [len(tiles.projected) for tiles in self.tiles]
        if self.words is not None and Need.QUESTION in self.method.needs:
            text, real = self.words
            tokens = [self.tiles[pictures[picture].source].projected[tile] for picture, tile in used]
            which = torch.tensor([self.layout.texts[1][picture] for picture, _ in used], device=text.device)
            return ClipSides(torch.stack(tokens).to(text.device), text[which], real[which], words=True)
        if self.clip is None:
            return None
        device = self.clip.patches.device
        place = [sum(sizes[: pictures[picture].source]) + tile for picture, tile in used]
        row = torch.tensor([pictures[picture].row for picture, _ in used], device=device)
        patches = self.clip.patches[torch.tensor(place, device=device)]
        return ClipSides(patches, self.clip.text[row], self.clip.real[row])

    def _whole(self, used: list[tuple[int, int]]) -> WholePictures:
        """The picture each of these tiles belongs to, and which of its tokens are in the sequence."""
        kinds, device = self.layout.kinds, self.full.embeds.device
        size = self.tiles[self.layout.pictures[used[0][0]].source].projected.shape[1]
        present = torch.zeros(len(used), size, dtype=torch.bool)
        for place, (index, tile) in enumerate(used):
            picture = self.layout.pictures[index]
            in_tile = (kinds.picture[picture.row] == picture.source) & (kinds.tile[picture.row] == tile)
            token = kinds.token[picture.row][in_tile]
            present[place, token[token >= 0]] = True
        return WholePictures(torch.tensor([picture for picture, _ in used], device=device), present.to(device))


def same_pictures(tiles: list[Tiles]) -> tuple[int, ...]:
    """For each picture of a call, the index of the first with the same tiles, encoded once for several prompts."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(one), source) for source, one in enumerate(tiles))
