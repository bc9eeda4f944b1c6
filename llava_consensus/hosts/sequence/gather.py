"""Units of assembled sequences, as a method sees them: `VisualTokens` of the parts that were collected."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.base import Tiles, Tower
from llava_consensus.hosts.sequence.layout import Layout, Unit
from llava_consensus.hosts.sequence.splice import Sequence
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import ClipSides, Need, TextProbe, VisionAttention, VisualTokens, WholePictures


class Places(NamedTuple):
    """Where a group of B units stands, on the device of the sequences."""

    used_tiles: list[tuple[int, int]]  # the U tiles they need, as (picture of the layout, tile of it)
    row: Tensor  # [B, 1] of the batch
    columns: Tensor  # [B, N] in the sequence
    tile: Tensor  # [B, N] which of the U
    first_tile: Tensor  # [B]
    patch: Tensor  # [B, N]
    picture: Tensor  # [B] of the layout
    prompt: Tensor  # [B] which of the probes


@dataclass(frozen=True)
class Source:
    """Where a method's inputs come from."""

    full: Sequence
    layout: Layout
    tiles: list[Tiles]  # of each picture of the call
    tower: Tower
    attention: int  # the vision block whose queries and keys were read
    method: Method
    prompts: Tensor | None  # [R] int64 fingerprint of each row's prompt, where the method asks for it
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
        device = self.full.embeds.device
        sizes, sources = tuple(len(tiles.projected) for tiles in self.tiles), self._sources
        places = self.layout.once(("units", tuple(units), sizes, sources, device), lambda: self._places(units))
        parts = {name: self._part(name, places.used_tiles) for name in self._names()}
        fingerprint = parts.pop("fingerprint", None)
        query, key = parts.pop("query", None), parts.pop("key", None)
        attention = None
        if query is not None and key is not None:
            scale, own = self.tower.scale(self.attention), self._tiles(units[0]).class_is_token
            attention = VisionAttention(query, key, scale, self.tower.classes, own)
        tile_members = self._tiles(units[0]).members
        members = self.tower.members if tile_members is None else tile_members
        return VisualTokens(
            projected=self.full.embeds[places.row, places.columns],
            tile=places.tile,
            patch=places.patch,
            tiles_per_unit=units[0].tiles,
            side=self._side(units[0]),
            members=None if members is None else members.to(device),
            picture=places.picture,
            prompt=places.prompt,
            columns=places.columns,
            attention=attention,
            project=self.tower.project if Need.PROJECTOR in self.method.needs else None,
            clip=self._clip(places.used_tiles),
            probe=self._probe(units[0]),
            fingerprint=None if fingerprint is None else self._fingerprint(fingerprint, places),
            whole=self._whole_pictures(places.used_tiles) if Need.WHOLE_PICTURES in self.method.needs else None,
            **parts,
        )

    def _places(self, units: list[Unit]) -> Places:
        """Where these units stand, from the layout alone."""
        device, pictures = self.full.embeds.device, self.layout.pictures
        used_tiles, tile = self._tiles_of(units)
        return Places(
            used_tiles,
            torch.tensor([[pictures[unit.picture].row] for unit in units], device=device),
            torch.stack([unit.places for unit in units]).to(device),
            tile.to(device),
            tile[:, 0].to(device),
            torch.stack([unit.patch for unit in units]).to(device),
            torch.tensor([unit.picture for unit in units], device=device),
            torch.tensor([self.layout.probes[1][unit.picture] for unit in units], device=device),
        )

    def _fingerprint(self, tiles: Tensor, places: Places) -> Tensor:
        """Fingerprints [B] of the units' first tiles and of their prompts, in one."""
        assert self.prompts is not None  # it comes with the tiles' own
        return tiles[places.first_tile] ^ self.prompts.to(tiles.device)[places.row[:, 0]]

    def _tiles_of(self, units: list[Unit]) -> tuple[list[tuple[int, int]], Tensor]:
        """The tiles these units need, as (picture of the layout, tile of it), each once, in order; and which of them
        each token came from [B, N].
        """
        whole = Need.WHOLE_PICTURES in self.method.needs
        if whole:
            pictures = sorted({unit.picture for unit in units})
            sources = [self.layout.pictures[picture].source for picture in pictures]
            sizes = [len(self.tiles[source].projected) for source in sources]
            used_tiles = [
                (picture, tile) for picture, size in zip(pictures, sizes, strict=True) for tile in range(size)
            ]
        else:
            first = self._first_shown(units)
            used_tiles = sorted({(first[unit.picture], tile) for unit in units for tile in unit.tile.unique().tolist()})
        tile_keys = torch.tensor([picture * _MOST + tile for picture, tile in used_tiles])
        shown = {picture: picture for picture, _ in used_tiles} if whole else first
        token_keys = torch.stack([unit.tile + shown[unit.picture] * _MOST for unit in units])
        return used_tiles, torch.searchsorted(tile_keys, token_keys)

    @cached_property
    def _sources(self) -> tuple[int, ...]:
        """Of each picture of the call, the first that is the same one: prompts about one picture share its tiles, but
        where tiles go with the question (`_clip`).
        """
        return tuple(range(len(self.tiles))) if self.clip is not None else same_pictures(self.tiles)

    def _first_shown(self, units: list[Unit]) -> dict[int, int]:
        """For the picture of each of these units, the first picture of theirs that shows the same."""
        pictures = sorted({unit.picture for unit in units})
        first: dict[int, int] = {}
        sources = {picture: self._sources[self.layout.pictures[picture].source] for picture in pictures}
        return {picture: first.setdefault(source, picture) for picture, source in sources.items()}

    def _names(self) -> list[str]:
        return list(self.tiles[0].parts) if self.tiles else []

    def _part(self, name: str, used_tiles: list[tuple[int, int]]) -> Tensor:
        """One part of these tiles: [U, ...]."""
        device = self.full.embeds.device
        sources = [(self.layout.pictures[picture].source, tile) for picture, tile in used_tiles]
        first = self.tiles[sources[0][0]].parts[name]
        if sources == [(sources[0][0], tile) for tile in range(len(first))]:  # one picture is not copied
            return first if first.device == device else first.to(device)
        return torch.stack([self.tiles[source].parts[name][tile] for source, tile in sources]).to(device)

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
        device = self.clip.patches.device
        place, row = self.layout.once(
            ("clip", tuple(used_tiles), device), lambda: self._clip_places(used_tiles, device)
        )
        return ClipSides(self.clip.patches[place], self.clip.text[row], self.clip.real[row])

    def _clip_places(self, used_tiles: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
        """Place of each tile among all tiles of the call, and row of the batch it is asked about in: [U] each."""
        pictures, sizes = self.layout.pictures, [len(tiles.projected) for tiles in self.tiles]
        place = [sum(sizes[: pictures[picture].source]) + tile for picture, tile in used_tiles]
        row = [pictures[picture].row for picture, _ in used_tiles]
        return torch.tensor(place, device=device), torch.tensor(row, device=device)

    def _whole_pictures(self, used_tiles: list[tuple[int, int]]) -> WholePictures:
        key = ("whole", tuple(used_tiles), self.full.embeds.device)
        return self.layout.once(key, lambda: self._whole(used_tiles))

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


def same_pictures(tiles: list[Tiles]) -> tuple[int, ...]:
    """Of each picture of a call the first that is the same one, encoded once and asked about in several prompts."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(one), source) for source, one in enumerate(tiles))


_MOST = 1 << 20  # tiles of a picture
