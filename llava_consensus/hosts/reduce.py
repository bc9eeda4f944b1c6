"""One reduction, before the language model's first layer: what a method reads is gathered from the parts a host has
collected, the method reduces, and the reduced tokens take the place of the others in the sequences.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from llava_consensus.hosts.base import EXPERTS, Decoder, ExpertDecoder, PictureOutcome, Tiles, Tower
from llava_consensus.hosts.layout import Layout, Unit
from llava_consensus.hosts.sequence import NEVER, Channel, Inserts, Rule, Sequence, Slots, rows_of, wide
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.saliency import sight_of
from llava_consensus.reduction.tokens import (
    BEHIND,
    PLACE,
    ClipSides,
    FrontKeys,
    Need,
    Reduction,
    Sight,
    TextProbe,
    VisionAttention,
    VisualTokens,
    WholePictures,
)


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


class Reduced(NamedTuple):
    """Numbers of a group of units that went through the method together."""

    units: tuple[Unit, ...]
    kept: int
    tokens: int  # K + M


class Keys(NamedTuple):
    """Of what the sort keys of a group's B units are made. A key is the place in the sequence times `stride`, plus a
    rank: behind each row there is room for three blocks: heads, tails, and what goes ahead of the next row.
    """

    row: Tensor  # [B, 1] of the batch
    columns: Tensor  # [B, N] places of the unit's tokens
    by_zone: Tensor  # [B, 4, K + M] key of each slot in the zones AHEAD, PLACE (0), AFTER, BEHIND
    fixed: Tensor | None  # [B, K + M] keys of slots that stand behind the picture, where the method names no zones
    at_source: Tensor  # [K + M] true where a slot stands at its source's place, where the method names no zones
    stride: int


def slots_of(layout: Layout, groups: list[Reduced], order: str, device: torch.device) -> tuple[Slots, list[Keys]]:
    """Where the reduced tokens of these groups go, remembered with the layout."""
    key = ("slots", tuple(groups), order, device)
    return layout.once(key, lambda: (_slots(layout, groups, device), _keys(layout, groups, order, device)))


def _stride(layout: Layout, groups: list[Reduced]) -> tuple[int, int]:
    """Distance of the sort keys of two rows, and of two units in a block."""
    longest = max(group.tokens for group in groups) + 1
    return 3 * (longest * (1 + max(unit.part for unit in layout.units)) + 1), longest


def _slots(layout: Layout, groups: list[Reduced], device: torch.device) -> Slots:
    rows, width = layout.real.shape
    stays = layout.real.clone()
    own: list[list[int]] = [[] for _ in range(rows)]  # rows of the pool that are reduced tokens of each sequence
    for picture in layout.pictures:
        stays[picture.row, list(picture.leaving)] = False
    count = rows * width
    for group in groups:
        for unit in group.units:
            row = layout.pictures[unit.picture].row
            stays[row, unit.places] = False
            own[row] += range(count, count + group.tokens)
            count += group.tokens
    most = max(map(len, own))
    added = torch.tensor([ids + [count] * (most - len(ids)) for ids in own])
    candidates = torch.cat((torch.arange(rows * width).view(rows, width), added), dim=1)
    lengths = [left + len(ids) for left, ids in zip(stays.sum(1).tolist(), own, strict=True)]
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    keys = torch.where(stays, torch.arange(width) * _stride(layout, groups)[0], NEVER).flatten()
    unpadded = min(lengths) == max(lengths)
    return Slots(
        lengths, real.to(device), keys.to(device), torch.tensor([NEVER]).to(device), candidates.to(device), unpadded
    )


def _keys(layout: Layout, groups: list[Reduced], order: str, device: torch.device) -> list[Keys]:
    stride, longest = _stride(layout, groups)
    found = []
    for units, kept, tokens in groups:
        slots = torch.arange(tokens)
        zones = torch.tensor([_zones(layout, unit, stride, longest) for unit in units])  # [B, 4]
        by_zone = zones[..., None] + slots
        by_zone[:, PLACE] = 0
        at_source = (slots < kept) | (order == "raster")
        fixed = None if bool(at_source.all()) else by_zone[:, BEHIND].to(device)
        row = torch.tensor([[layout.pictures[unit.picture].row] for unit in units], device=device)
        columns = torch.stack([unit.places for unit in units]).to(device)
        found.append(Keys(row, columns, by_zone.to(device), fixed, at_source.to(device), stride))
    return found


def _zones(layout: Layout, unit: Unit, stride: int, longest: int) -> list[int]:
    """Key of the first slot in each zone of a unit: ahead of it, (at the source's place), right after it, or behind the
    last row of its picture. A unit whose rows are mixed with those of other tiles has no place of its own: what belongs
    ahead of it stands behind the picture, and what belongs after it behind that.
    """
    picture = layout.pictures[unit.picture]
    first, last = int(unit.places[0]), int(unit.places[-1])
    heads = picture.end * stride + unit.part * longest + 1
    tails = heads + stride // 3
    stands_alone = last - first == len(unit.places) - 1 or len(unit.places) == picture.before
    if stands_alone:
        return [first * stride - longest, 0, last * stride + stride // 3 + 1, tails]
    return [heads, 0, tails, tails]


class Group(NamedTuple):
    """Units that went through the method together."""

    units: list[Unit]
    reduction: Reduction


def outcomes(layout: Layout, groups: list[Group]) -> list[PictureOutcome]:
    """Tokens before and after of every picture, with the bookkeeping of its units in order."""
    after = [picture.before for picture in layout.pictures]
    parts: list[list[tuple[int, Reduction]]] = [[] for _ in layout.pictures]
    for units, reduction in groups:
        for index, unit in enumerate(units):
            after[unit.picture] += reduction.tokens.shape[1] - len(unit.places)
            parts[unit.picture].append((unit.part, _of_unit(reduction, index)))
    return [
        PictureOutcome(
            picture.row,
            picture.before,
            after[i],
            picture.structural,
            tuple(sorted(parts[i], key=lambda part: part[0])),
            origin=layout.origin(picture),
        )
        for i, picture in enumerate(layout.pictures)
    ]


def _of_unit(reduction: Reduction, index: int) -> Reduction:
    """What one unit of a group became."""
    if len(reduction.tokens) == 1:
        return reduction
    return Reduction._make(value[index : index + 1] if isinstance(value, Tensor) else value for value in reduction)


def planned(full: Sequence, layout: Layout, groups: list[Group], order: str) -> tuple[Slots, list[Keys]]:
    """Where the reduced tokens go, and of what their sort keys are made."""
    reduced = [Reduced(tuple(units), one.kept.shape[1], one.tokens.shape[1]) for units, one in groups]
    return slots_of(layout, reduced, order, full.embeds.device)


def inserts(full: Sequence, groups: list[Group], keys: list[Keys]) -> Inserts:
    """The reduced tokens with what goes with them, and their places."""
    values: dict[str, list[Tensor]] = {name: [] for name in full.everything()}
    sort_keys = []
    for group, group_keys in zip(groups, keys, strict=True):
        place = group_keys.columns.gather(1, group.reduction.source.clamp_min(0))  # of no patch: the unit's first
        for name, value in _values(full, group.reduction, group_keys, place).items():
            values[name].append(value.flatten(0, 1))
        sort_keys.append(_sort_keys(group.reduction, group_keys, place).flatten())
    return Inserts(values, sort_keys)


def _values(full: Sequence, reduction: Reduction, keys: Keys, place: Tensor) -> dict[str, Tensor]:
    """What the reduced tokens of a group, whose sources stand at `place` [B, K + M], get in each channel:
    [B, K + M, ...].
    """
    values = {"embeds": reduction.tokens}
    for name, channel in full.everything().items():
        if name == "embeds":
            continue
        if channel.rule is Rule.BLANK:
            values[name] = channel.values.new_full((*place.shape, *channel.values.shape[2:]), channel.blank)
        elif channel.rule is Rule.SOURCE:
            values[name] = channel.values[keys.row, place]
        else:
            values[name] = _means(channel.values[keys.row, keys.columns], reduction)
    return values


def _sort_keys(reduction: Reduction, keys: Keys, place: Tensor) -> Tensor:
    """Sort keys [B, K + M] of reduced tokens, by the zones of the method or else by its order."""
    at_source = place * keys.stride
    if reduction.zone is not None:
        by_zone = keys.by_zone.gather(1, reduction.zone[:, None])[:, 0]
        return torch.where(reduction.zone == PLACE, at_source, by_zone)
    return at_source if keys.fixed is None else torch.where(keys.at_source, at_source, keys.fixed)


def _means(values: Tensor, reduction: Reduction) -> Tensor:
    """Mean of a channel over the tokens each slot was made of, rounded where its values are whole numbers:
    [B, N, ...] -> [B, K + M, ...]. Kept tokens have their own value, bit for bit; a slot that stands for no patch is
    zero.
    """
    slots = reduction.source.shape[1]
    whole = not values.is_floating_point()
    dtype = torch.float32 if whole else values.dtype
    member = one_hot(reduction.owner + 1, slots + 1)[..., 1:].transpose(1, 2).to(dtype)  # [B, K + M, N]
    flat = (values.flatten(2) if values.ndim > 2 else values[..., None]).to(dtype)
    count = member.sum(-1, keepdim=True)
    mean = (member @ flat / count.clamp_min(1)).reshape(len(values), slots, *values.shape[2:])
    if whole:
        mean = mean.round().to(values.dtype)
    source_values = rows_of(values, reduction.source.clamp_min(0))
    return torch.where(wide(count[..., 0] == 1, source_values), source_values, mean)


def with_pictures(full: Sequence, layout: Layout) -> Sequence:
    """The sequences with a channel that says which picture a visual token belongs to, to count what truncation left."""
    channel = Channel(picture_rows(layout).to(full.embeds.device), -1, Rule.SOURCE)
    return replace(full, channels={**full.channels, "picture": channel})


def picture_rows(layout: Layout) -> Tensor:
    """Which picture of the layout every visual token belongs to, else -1: [R, S]."""
    kinds, numbers = layout.kinds, torch.full(layout.real.shape, -1)
    for index, picture in enumerate(layout.pictures):
        numbers[picture.row][(kinds.picture[picture.row] == picture.source) & (kinds.token[picture.row] >= 0)] = index
    return numbers


def counted(outcomes: list[PictureOutcome], picture: Tensor) -> list[PictureOutcome]:
    """The outcomes with the visual tokens that are left in the sequences [R, S]. Waits for the device."""
    return [outcome._replace(after=int((picture == index).sum())) for index, outcome in enumerate(outcomes)]
