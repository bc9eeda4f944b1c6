"""Units of assembled sequences, as a method sees them: `VisualTokens` of the parts that were collected."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llava_consensus.hosts.base import Decoder, Tiles, Tower
from llava_consensus.hosts.sequence.layout import Layout, Unit
from llava_consensus.hosts.sequence.splice import Sequence
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import ClipSides, Need, TextProbe, VisionAttention, VisualTokens, WholePictures


@dataclass(frozen=True)
class Source:
    """Where a method's inputs come from."""

    full: Sequence
    layout: Layout
    tiles: list[Tiles]  # of each picture of the call
    tower: Tower
    attention: int  # the vision block whose queries and keys were read
    method: Method
    prompts: Tensor  # [R] int64 fingerprint of each row's prompt
    probe: TextProbe | None = None
    clip: ClipSides | None = None  # patches of all tiles of the call; text of each row

    def groups(self) -> list[list[Unit]]:
        """Reduced units that go through the method together; one by one where their lengths are not known before."""
        if self.method.adaptive:
            return [[unit] for unit in self.layout.reduced()]
        probing = Need.PROBE in self.method.needs
        return self.layout.groups(lambda unit: (self._sizes(unit), probing and self.layout.has_text(unit)))

    def _sizes(self, unit: Unit) -> tuple[int, ...]:
        """Numbers of tokens and block rows of a tile of the unit's picture, and of tokens in a row of it."""
        tiles = self._tiles(unit)
        rows = (tiles.parts.get(name) for name in ("key", "features"))
        shapes = [value.shape[-2] for value in (tiles.projected, *rows) if value is not None]
        return (*shapes, self._side(unit))

    def _tiles(self, unit: Unit) -> Tiles:
        return self.tiles[self.layout.pictures[unit.picture].source]

    def _side(self, unit: Unit) -> int:
        side = self._tiles(unit).side
        return self.tower.side if side is None else side

    def tokens(self, units: list[Unit]) -> VisualTokens:
        """What the method reads of a group of units, on the device of the sequences."""
        device, pictures = self.full.embeds.device, self.layout.pictures
        row = torch.tensor([pictures[unit.picture].row for unit in units], device=device)
        columns = torch.stack([unit.places for unit in units]).to(device)
        used_tiles, tile = self._tiles_of(units)
        parts = {name: self._part(name, used_tiles) for name in self._names()}
        fingerprint = parts.pop("fingerprint", None)
        query, key = parts.pop("query", None), parts.pop("key", None)
        attention = None
        if query is not None and key is not None:
            attention = VisionAttention(query, key, self.tower.scale(self.attention), self.tower.classes)
        tile = tile.to(device)
        tile_members = self._tiles(units[0]).members
        members = self.tower.members if tile_members is None else tile_members
        return VisualTokens(
            projected=self.full.embeds[row[:, None], columns],
            tile=tile,
            patch=torch.stack([unit.patch for unit in units]).to(device),
            tiles_per_unit=units[0].tiles,
            side=self._side(units[0]),
            members=None if members is None else members.to(device),
            picture=torch.tensor([unit.picture for unit in units], device=device),
            prompt=torch.tensor([self.layout.probes[1][unit.picture] for unit in units], device=device),
            columns=columns,
            attention=attention,
            project=self.tower.project if Need.PROJECTOR in self.method.needs else None,
            clip=self._clip(used_tiles),
            probe=self._probe(units[0]),
            fingerprint=None if fingerprint is None else fingerprint[tile[:, 0]] ^ self.prompts.to(device)[row],
            whole=self._whole(used_tiles) if Need.WHOLE_PICTURES in self.method.needs else None,
            **parts,
        )

    def _tiles_of(self, units: list[Unit]) -> tuple[list[tuple[int, int]], Tensor]:
        """The tiles these units need, as (picture of the layout, tile of it), each once, in order; and which of them
        each token came from [B, N].
        """
        if Need.WHOLE_PICTURES in self.method.needs:
            pictures = sorted({unit.picture for unit in units})
            sources = [self.layout.pictures[picture].source for picture in pictures]
            sizes = [len(self.tiles[source].projected) for source in sources]
            used_tiles = [
                (picture, tile) for picture, size in zip(pictures, sizes, strict=True) for tile in range(size)
            ]
        else:
            used_tiles = sorted({(unit.picture, tile) for unit in units for tile in unit.tile.unique().tolist()})
        tile_keys = torch.tensor([picture * _MOST + tile for picture, tile in used_tiles])
        token_keys = torch.stack([unit.tile + unit.picture * _MOST for unit in units])
        return used_tiles, torch.searchsorted(tile_keys, token_keys)

    def _names(self) -> list[str]:
        return list(self.tiles[0].parts) if self.tiles else []

    def _part(self, name: str, used_tiles: list[tuple[int, int]]) -> Tensor:
        """One part of these tiles: [U, ...]."""
        device = self.full.embeds.device
        values = [self.tiles[self.layout.pictures[picture].source].parts[name][tile] for picture, tile in used_tiles]
        return torch.stack(values).to(device)

    def _probe(self, unit: Unit) -> TextProbe | None:
        """The probe, without text rows where none follow the pictures of a group."""
        if self.probe is None or self.layout.has_text(unit):
            return self.probe
        none = self.probe.rows[:, :0]
        return self.probe._replace(query=self.probe.query[:, :, :0], rows=none, row_mask=self.probe.row_mask[:, :0])

    def _clip(self, used_tiles: list[tuple[int, int]]) -> ClipSides | None:
        """Patches and question of these tiles."""
        if self.clip is None:
            return None
        pictures = self.layout.pictures
        start = [0]
        for tiles in self.tiles:
            start.append(start[-1] + len(tiles.projected))
        device = self.clip.patches.device
        place = torch.tensor([start[pictures[picture].source] + tile for picture, tile in used_tiles], device=device)
        row = torch.tensor([pictures[picture].row for picture, _ in used_tiles], device=device)
        return ClipSides(self.clip.patches[place], self.clip.text[row], self.clip.real[row])

    def _whole(self, used_tiles: list[tuple[int, int]]) -> WholePictures:
        """The picture each of these tiles belongs to, and which of its tokens are in the sequence."""
        device, layout = self.full.embeds.device, self.layout
        present = torch.zeros(len(used_tiles), self.tiles[0].projected.shape[1], dtype=torch.bool)
        for place, (index, tile) in enumerate(used_tiles):
            picture = layout.pictures[index]
            kinds = layout.kinds
            in_tile = (kinds.picture[picture.row] == picture.source) & (kinds.tile[picture.row] == tile)
            token = kinds.token[picture.row][in_tile]
            present[place, token[token >= 0]] = True
        return WholePictures(torch.tensor([picture for picture, _ in used_tiles], device=device), present.to(device))


_MOST = 1 << 20  # tiles of a picture


def probe_text(full: Sequence, layout: Layout, decoder: Decoder) -> TextProbe:
    """The decoder's layer 0 as the text rows after each picture see it, once where several pictures have the same
    text: their queries, and the keys of the whole sequence, by the layer's own modules. Nothing runs but the two
    projections (paper section 3.2).
    """
    device, (pictures, _) = full.embeds.device, layout.probes
    rows = torch.nn.utils.rnn.pad_sequence([picture.text for picture in pictures], batch_first=True)
    count = torch.tensor([len(picture.text) for picture in pictures])
    row_mask = (torch.arange(rows.shape[1]) < count[:, None]).to(device)
    batch = torch.tensor([picture.row for picture in pictures], device=device)
    rows = rows.to(device)
    with torch.no_grad():
        normed = decoder.normed(0, full.embeds)
        query = decoder.query(0, normed[batch[:, None], rows])
        key, (cos, sin) = decoder.key(0, normed), decoder.rotary(normed, full.positions)
    if not len(batch) == len(normed) == 1:  # one prompt is not copied
        key, cos, sin = key[batch], cos[batch], sin[batch]
    return TextProbe(query, key, cos, sin, decoder.scale(0), rows, row_mask, full.real[batch])
