"""Assembled sequences of a batch: what every row is, which visual tokens are reduced together and how the budget of a
picture is shared over its tiles (`read_layout`, plain bookkeeping on the CPU); and the one edit there is (`edit`): rows
leave, others come in at their places, and what is left is padded on the right, before the first layer and between
layers.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llava_consensus.reduction.budget import Auto, Budget, Share
from llava_consensus.reduction.method import Method, Tiled

# A row's place is one number by which rows are sorted; spaced so that inserted rows need no renumbering.
NEVER = torch.iinfo(torch.int64).max  # place of rows that leave
ROW = 1 << 40  # distance of the places of two rows; between them is room for what stands after the first:
HEADS, TAILS, NEXT = 1 << 36, 2 << 36, 3 << 36  # three stretches, the last one for what belongs ahead of the second row
KIND, KINDS = "kind ", ("picture", "tile", "token")  # channels that say what a row is
PART = 1 << 20  # in each of them, one block for each part of a picture, or for each cut


class RowKinds(NamedTuple):
    """Kind of every row of assembled sequences, on the CPU. All [R, S]."""

    real: Tensor  # true where the row is not padding
    picture: Tensor  # which picture of the call the row belongs to, -1 for text and padding
    tile: Tensor  # which tile of that picture
    token: Tensor  # which token of that tile; -1 for structural rows, such as newlines, which are never candidates
    answer: Tensor | None = None  # true where the row has a label: the answer in training
    videos: frozenset[int] = frozenset()  # which pictures of the call are videos, whose tiles are their frames
    tiles: tuple[int, ...] = ()  # of each picture of the call; where that is not given, as many as have rows
    marked: tuple[tuple[int, int], ...] = ()  # rows of markers in front of and behind each picture; () for none


@dataclass(frozen=True)
class Sharing:
    """Rule by which the budget of a picture is split over its tiles."""

    method: Method
    budget: Budget | Share | Auto
    tile_tokens: int  # of one tile; the most there can be
    most_tiles: int  # of a picture of this model
    varies: bool = False  # whether a tile has as many tokens as its picture's size asks for
    budgets: tuple[Budget | Share | Auto, ...] = ()  # of each picture of the call, where they differ

    def of_call(self, picture: int) -> "Sharing":
        """The rule for one picture of the call, by its index."""
        return replace(self, budget=self.budgets[picture]) if self.budgets else self

    @property
    def before_sequence(self) -> bool:
        """True if tiles are reduced whole, before it is known which of their tokens the sequence holds."""
        return self.method.acts_inside and bool(self.tile_tokens) and not self.varies

    def of_picture(self, sizes: list[int], video: bool = False) -> list[Budget]:
        """Budgets of one picture: one for all of its tiles, or one for each. They add up to the budget that was asked
        for, but for `tile_budget=most_tiles`; a budget of all its tokens leaves a picture as it is.

        Args:
            sizes: tokens of each tile.
            video: whether the tiles are frames.
        Raises:
            OptionError: for fewer tokens than tiles, by a method that cannot rank all tiles together.
        """
        tiles, available = len(sizes), sum(sizes)
        budget = self.budget.of(available)
        if not self.method.reduces or budget.tokens >= available:
            return [Budget(max(available, 1))]
        if tiles == 1 or self.method.tile_budget == "global":
            return [budget]
        if self.method.tile_budget == "most_tiles" and not video and isinstance(self.budget, Budget):
            return budget.share(max(tiles, self.most_tiles))[:tiles]
        if budget.tokens < tiles and isinstance(self.method, Tiled):
            return [budget]  # some tiles would keep nothing, so all are ranked together
        return budget.over(sizes)

    def of_tiles(self, tiles: int, size: int = 0) -> list[int]:
        """Tokens left of each tile, for methods that act before the projector; `size` is that of a tile where it
        varies.
        """
        size = size or self.tile_tokens or 1
        shares = self.of_picture([size] * tiles)
        return [min(share.tokens, size) for share in shares] if len(shares) == tiles else [size] * tiles

    @property
    def reads_prompts(self) -> bool:
        """True if the kept tokens of a picture depend on its prompt."""
        most = self.most_tiles * self.tile_tokens
        return self.method.reduces and self.budget.of(most).tokens < most and self.method.reads_prompt


@dataclass(frozen=True, eq=False)
class Unit:
    """Visual tokens that are ranked together: one picture, or one tile of it."""

    picture: int  # index into `Layout.pictures`
    places: Tensor  # [N] in the sequence
    tile: Tensor  # [N] of the picture
    patch: Tensor  # [N] token of the tile
    tiles: int
    part: int  # which part of its picture this is: 0, 1, ...
    budget: Budget

    @property
    def is_reduced(self) -> bool:
        """True if there are more tokens than the budget; otherwise the unit passes through untouched."""
        return self.budget.tokens < len(self.places)


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture in one prompt."""

    source: int  # which picture of the call
    row: int  # of the batch
    before: int  # visual tokens
    structural: int  # structural rows that stay
    end: int  # place of its last row in the sequence
    text: Tensor  # [L] places of the text rows after it
    leaving: tuple[int, ...] = ()  # places of structural rows that leave with its reduction


@dataclass(frozen=True, eq=False)
class Layout:
    """A batch of assembled sequences."""

    kinds: RowKinds
    asked: Tensor  # [R, S] true where a row can ask: no padding, and in training no answer unless the method wants it
    pictures: list[Picture]
    units: list[Unit]

    @property
    def real(self) -> Tensor:
        """True where a row is not padding: [R, S]."""
        return self.kinds.real

    @property
    def positions(self) -> Tensor:
        """The place of every row among the real ones of its sequence: [R, S]."""
        return (self.real.cumsum(1) - 1).clamp_min(0)

    def longer(self, rows: int) -> "Layout":
        """The same prompts extended by `rows` rows of text, which are no questions."""
        if not rows:
            return self
        real, asked = pad(self.real, (0, rows), value=True), pad(self.asked, (0, rows), value=False)
        picture, tile, token = (pad(values, (0, rows), value=-1) for values in self.kinds[1:4])
        kinds = self.kinds._replace(real=real, picture=picture, tile=tile, token=token, answer=None)
        return replace(self, kinds=kinds, asked=asked)

    def reduced(self) -> list[Unit]:
        """Units with more tokens than their budget; the others pass through untouched."""
        return [unit for unit in self.units if unit.is_reduced]

    @cached_property
    def texts(self) -> tuple[list[Picture], list[int]]:
        """One picture for each text that follows pictures of a prompt, which all frames of a video share, and for every
        picture which of them has its text.
        """
        first: dict[tuple[int, ...], int] = {}
        keys = [(picture.row, *picture.text.tolist()) for picture in self.pictures]
        which = [first.setdefault(key, len(first)) for key in keys]
        return [self.pictures[keys.index(key)] for key in first], which

    @cached_property
    def probes(self) -> tuple[dict[int, Tensor], list[int]]:
        """Places [L] of the text rows that ask in each sequence with pictures, ascending, and for every picture which
        of these sequences it is in. What stands between two pictures asks about the first alone (`asking`).
        """
        after: dict[int, list[Tensor]] = defaultdict(list)
        for picture in self.pictures:
            after[picture.row].append(picture.text)
        places = {row: torch.cat(texts).unique() for row, texts in after.items()}  # sorted
        number = {row: index for index, row in enumerate(places)}
        return places, [number[picture.row] for picture in self.pictures]

    def asking(self, picture: int) -> Tensor:
        """True for the text rows of its sequence's probe that ask about a picture: [L]."""
        own = self.pictures[picture]
        return torch.isin(self.probes[0][own.row], own.text)

    def origin(self, picture: Picture) -> tuple[Tensor, Tensor]:
        """Tile, and token of that tile, of each visual token of a picture, in order: [before] each."""
        token = self.kinds.token[picture.row]
        here = (self.kinds.picture[picture.row] == picture.source) & (token >= 0)
        return self.kinds.tile[picture.row][here], token[here]

    def picture_rows(self) -> Tensor:
        """Picture index of every visual token, else -1: [R, S]."""
        kinds, numbers = self.kinds, torch.full(self.real.shape, -1)
        for index, picture in enumerate(self.pictures):
            own = (kinds.picture[picture.row] == picture.source) & (kinds.token[picture.row] >= 0)
            numbers[picture.row][own] = index
        return numbers

    def groups(self, by: Callable[[Unit], object]) -> list[list[Unit]]:
        """Reduced units that fit in one batch: equal numbers of tokens and tiles, equal budgets, and equal in what
        `by` says of them.
        """
        groups: dict[tuple[object, ...], list[Unit]] = defaultdict(list)
        for unit in self.reduced():
            groups[len(unit.places), unit.tiles, unit.budget, by(unit)].append(unit)
        return list(groups.values())


def read_layout(kinds: RowKinds, sharing: Sharing) -> Layout:
    """The layout of assembled sequences whose rows are of these kinds."""
    method = sharing.method
    pictures: list[Picture] = []
    units: list[Unit] = []
    words = kinds.real & (kinds.picture < 0)
    if kinds.answer is not None and not method.answer_rows:
        words &= ~kinds.answer
    asked = words | (kinds.real & (kinds.picture >= 0))  # a row of a picture is no answer, though it may have a label
    places_all = torch.arange(kinds.real.shape[1])
    for row in range(len(kinds.real)):
        sources = [source for source in kinds.picture[row].unique().tolist() if source >= 0]
        spans = [(kinds.picture[row] == source).nonzero()[[0, -1], 0].tolist() for source in sources]
        for source in sources:
            in_picture = kinds.picture[row] == source
            places = (in_picture & (kinds.token[row] >= 0)).nonzero()[:, 0]
            if not len(places):
                continue
            end = int(in_picture.nonzero()[-1])
            asking = words[row] & (places_all > end)
            for later, (first, last) in zip(sources, spans, strict=True):
                # breaks within a later picture and markers around it are no words
                if first > end:
                    front, behind = kinds.marked[later] if kinds.marked else (0, 0)
                    asking[max(first - front, end + 1) : last + behind + 1] = False
            text = asking.nonzero()[:, 0]
            video = source in kinds.videos
            tiles = kinds.tiles[source] if kinds.tiles else int(kinds.tile[row, places].max()) + 1
            own = _units(
                len(pictures),
                places,
                kinds.tile[row, places],
                kinds.token[row, places],
                sharing.of_call(source),
                tiles,
                video,
            )
            structural = tuple((in_picture & (kinds.token[row] < 0)).nonzero()[:, 0].tolist())
            leave = method.newlines == "drop" and not video and any(unit.is_reduced for unit in own)
            staying, leaving = ((), structural) if leave else (structural, ())
            pictures.append(Picture(source, row, len(places), len(staying), end, text, leaving))
            units += own
    return Layout(kinds, asked, pictures, units)


def _units(
    picture: int, places: Tensor, tile: Tensor, token: Tensor, sharing: Sharing, tiles: int, video: bool
) -> list[Unit]:
    """Units of one picture: the whole of it under one budget, or each tile under its own."""
    numbers, counts = (part.tolist() for part in tile.unique(return_counts=True))
    if sharing.before_sequence:  # unpadding may have left no row of a tile, which was reduced all the same
        budgets = sharing.of_picture([sharing.tile_tokens] * tiles, video)
        shares = budgets if len(budgets) == 1 else [budgets[number] for number in numbers]
    else:
        shares = sharing.of_picture(counts, video)
    if len(shares) == 1:
        return [Unit(picture, places, tile, token, len(numbers), 0, shares[0])]
    units = []
    for number, share in zip(numbers, shares, strict=True):
        here = (tile == number).nonzero()[:, 0]
        units.append(Unit(picture, places[here], tile[here], token[here], 1, number - numbers[0], share))
    return units


def fingerprints(ids: Tensor, real: Tensor) -> Tensor:
    """A number for each prompt [R, S], the same wherever padding stands: int64 [R]."""
    mask = real.to(ids.dtype)
    return (ids * mask * (mask.cumsum(1) * 0x2545F4914F6CDD1D)).sum(1)


class Rule(Enum):
    """Value of a reduced token in a channel."""

    SOURCE = "the value of the token it stands for: itself, or its anchor"
    MEAN = "the mean over the tokens it was made of"
    BLANK = "the value of padding"


class Channel(NamedTuple):
    """Values that go with the rows of a sequence, such as labels, positions or token types."""

    values: Tensor  # [R, S, ...]
    blank: float  # of padding
    rule: Rule = Rule.SOURCE


@dataclass(frozen=True)
class Assembled:
    """Assembled sequences of a batch: what the language model reads, row by row."""

    embeds: Tensor  # [R, S, D]
    real: Tensor  # [R, S] true where the row is not padding
    positions: Tensor  # [R, S], or [R, S, A] of A axes
    channels: dict[str, Channel] = field(default_factory=dict)  # whatever else goes with the rows
    unpadded: bool = False  # whether all rows are known to be real
    attending: Any = None  # kernel call of the first attention, where a host has recorded it and no decoder is asked

    def everything(self) -> dict[str, Channel]:
        """All channels, positions and embeddings among them."""
        return {"embeds": Channel(self.embeds, 0, Rule.BLANK), "positions": Channel(self.positions, 0), **self.channels}

    def with_kinds(self, kinds: RowKinds) -> "Assembled":
        """These sequences with channels that say what each row is."""
        found = {KIND + name: Channel(getattr(kinds, name).to(self.embeds.device), -1) for name in KINDS}
        if kinds.answer is not None:
            found[KIND + "answer"] = Channel(kinds.answer.to(self.embeds.device), 0, Rule.BLANK)
        return replace(self, channels=self.channels | found)

    def kinds(self, before: RowKinds) -> RowKinds:
        """Kind of every row, on the CPU, of sequences that were edited since `with_kinds`."""
        names = [name for name in self.channels if name.startswith(KIND)]
        found: dict[str, Any] = {name[len(KIND) :]: self.channels[name].values.cpu() for name in names}
        return before._replace(real=self.real.cpu(), **found)

    def with_values(self, real: Tensor, values: dict[str, Tensor], unpadded: bool = False) -> "Assembled":
        """A copy of these channels with other values."""
        channels = {name: channel._replace(values=values[name]) for name, channel in self.channels.items()}
        return Assembled(values["embeds"], real, values["positions"], channels, unpadded)


class Inserts(NamedTuple):
    """Rows that come into the sequences of a batch."""

    sequence: list[int]  # [t] which sequence each belongs to
    place: Tensor  # [t]
    values: dict[str, Tensor]  # [t, ...] by channel


class Edited(NamedTuple):
    """Result of `edit`."""

    values: dict[str, Tensor]  # [R, S', ...] by channel
    real: Tensor  # [R, S'] true where a row is no padding
    unpadded: bool  # whether all rows are real


def edit(channels: Mapping[str, Channel], place: Tensor, lengths: list[int], inserts: Inserts | None = None) -> Edited:
    """The sequences with their rows, and those that come in, in the order of their places, padded on the right.

    It is one gather over the whole batch. How many rows are left is known beforehand, so nothing waits for the device.

    Args:
        channels: values [R, S, ...] that go with the rows.
        place: [R, S] int64, NEVER for rows that leave and for padding; of row i that stays, i times ROW.
        lengths: rows each new sequence has; those at the end of a longer one are cut off.
        inserts: the rows that come in.
    """
    (count, width), device = place.shape, place.device
    longest, came = max(lengths), inserts is not None
    unpadded = min(lengths) == longest
    real = (torch.arange(longest) < torch.tensor(lengths)[:, None]).to(device)
    pool_places = [place.flatten()]  # of the pool: all rows, sequence after sequence, what comes in, and a blank row
    candidates = torch.arange(count * width, device=device).view(count, width)  # rows of the pool for each sequence
    blank = count * width
    if inserts is not None:
        own: dict[int, list[int]] = defaultdict(list)
        for number, sequence in enumerate(inserts.sequence):
            own[sequence].append(blank + number)
        blank += len(inserts.sequence)
        most = max(map(len, own.values()), default=0)
        added = [own[row] + [blank] * (most - len(own[row])) for row in range(count)]
        candidates = torch.cat((candidates, torch.tensor(added, dtype=torch.long).to(device)), dim=1)
        pool_places += [inserts.place, place.new_full((1,), NEVER)]
    places = torch.cat(pool_places)[candidates] if came else place
    # Rows that leave and padding have the greatest place, so one sort moves them to the end, where they are cut off.
    index = candidates.gather(1, places.sort(dim=1, stable=True).indices[:, :longest])
    if not unpadded:
        index = index.where(real, blank)
    values = {}
    for name, channel in channels.items():
        pool = [channel.values.flatten(0, 1)]
        if inserts is not None:
            pool.append(inserts.values[name].to(pool[0].dtype))
        if not unpadded:
            pool.append(pool[0].new_full((1, *pool[0].shape[1:]), channel.blank))
        values[name] = (torch.cat(pool) if len(pool) > 1 else pool[0])[index]
    return Edited(values, real, unpadded)


def pad_left(full: Assembled) -> Assembled:
    """Moves the padding of the sequences to the front."""
    if full.unpadded:
        return full
    size = full.real.shape[1]
    shift = size - full.real.sum(1, keepdim=True)
    index = (torch.arange(size, device=shift.device) - shift) % size
    real = full.real.gather(1, index)
    moved = {name: rows_of(channel.values, index) for name, channel in full.everything().items()}
    blanks = {name: channel.blank for name, channel in full.everything().items()}
    return full.with_values(real, {name: value.where(wide(real, value), blanks[name]) for name, value in moved.items()})


def rows_of(values: Tensor, index: Tensor) -> Tensor:
    """Rows of [R, S, ...] named by an index [R, K]: [R, K, ...]."""
    return values.gather(1, wide(index, values).expand(*index.shape, *values.shape[2:]))


def wide(flat: Tensor, like: Tensor) -> Tensor:
    """[R, S] with as many dimensions as `like` [R, S, ...]."""
    return flat.reshape(*flat.shape, *(1,) * (like.ndim - 2))
