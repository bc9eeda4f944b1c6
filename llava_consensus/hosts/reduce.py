"""The heart: `reduce` takes assembled sequences and gives back shorter ones, before the language model reads them.

What a method reads of a picture is gathered from the parts that were collected (`Source`), and from the language
model's first layer as the words after the picture see it (`probe_text`); the method reduces units of equal size
together; and the reduced tokens take the place of the others in one edit of the sequences (`put_in`). Nothing here
knows an attachment, and nothing that is given is changed.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from llava_consensus.hosts.base import EXPERTS, Decoder, ExpertDecoder, Model, PictureOutcome, Tiles, Tower
from llava_consensus.hosts.caches import CachedLayer
from llava_consensus.hosts.sequence import (
    HEADS,
    NEVER,
    NEXT,
    PART,
    ROW,
    TAILS,
    Channel,
    Inserts,
    Layout,
    Picture,
    Rule,
    Sequence,
    Unit,
    edit,
    rows_of,
    wide,
)
from llava_consensus.hosts.towers import EARLIER, blocks_read, earlier_block, needs_of
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import (
    BEHIND,
    PLACE,
    ClipSides,
    FrontKeys,
    Need,
    Reduction,
    Stopwatch,
    TextProbe,
    VisionAttention,
    VisualTokens,
    WholePictures,
)

KEPT = "positions of three axes are kept"
NO_TEXT = "no text after the image: reduced by vision saliency alone"
BY_WORDS = "no CLIP text tower: relevance by the language model's own embeddings of the words after the image"
NO_WORDS = "no text after the image: all tokens are equally relevant"
MOST_TILES = 1 << 20  # of a picture


@dataclass(frozen=True)
class Report:
    """What became of a call."""

    outcomes: list[PictureOutcome] = field(default_factory=list)  # of each picture
    notes: tuple[str, ...] = ()  # remarks that go into the record
    watch: Stopwatch | None = None  # times of the last reduction
    cache: tuple[CachedLayer, ...] = ()  # sizes of the cache that the prefill left


class Group(NamedTuple):
    """Units that went through the method together."""

    units: list[Unit]
    reduction: Reduction


def reduce(
    full: Sequence,
    layout: Layout,
    tiles: list[Tiles],
    method: Method,
    model: Model,
    *,
    clip: ClipSides | None = None,
    prompts: Tensor | None = None,
    begin_alike: bool = False,
    limit: int | None = None,
    watch: Stopwatch | None = None,
) -> tuple[Sequence, Report]:
    """The sequences with their visual tokens reduced, padded on the right, and what became of every picture.

    Args:
        full: as the language model would have read them.
        layout: what every row is, and the budget of each unit.
        tiles: of each picture, with the parts of the tower that the method needs.
        method: what reduces.
        model: the tower that gave the parts, and the decoder whose first layer is probed.
        clip: patches and questions in CLIP's space, for methods that need QUESTION. Without them that is the space of
            the language model's embeddings, and the question what stands after each picture.
        prompts: [R] int64 fingerprint of each row's prompt, for methods that need FINGERPRINT.
        begin_alike: whether all prompts have the same words, and no padding, in front of their pictures.
        limit: rows that are left of a longer sequence, as the host truncates.
        watch: that has timed what came before.
    """
    watch = watch or Stopwatch(full.embeds.device)
    assert model.tower is not None
    # Autocast would compute saliencies in half precision, and training would keep other tokens than an answer does.
    with torch.autocast(full.embeds.device.type, enabled=False):
        probe = None
        with watch.time("probe"):
            if Need.PROBE in method.needs:
                probe = probe_text(full, layout, model.decoder, shared_fronts(layout, tiles) if begin_alike else None)
        by_words = clip is None and Need.QUESTION in method.needs
        words = words_after(full, layout) if by_words else None
        source = Source(full, layout, tiles, model.tower, method, prompts, probe, clip, words)
        groups = []
        for units in source.groups():
            with watch.time("gather"):
                tokens = source.tokens(units)
            groups.append(Group(units, _timed(method, tokens, units[0].budget)))
        with watch.time("splice"):
            out, outcomes = put_in(full, layout, groups, method, limit)
    silent = any(len(picture.text) == 0 for picture in layout.pictures)
    notes = (NO_TEXT,) * (silent and Need.PROBE in method.needs)
    notes += (BY_WORDS,) * by_words + (NO_WORDS,) * (silent and by_words)
    kept = full.positions.ndim > 2 and method.positions == "renumber"
    return out, Report(outcomes, notes + (KEPT,) * kept, watch)


def _timed(method: Method, tokens: VisualTokens, budget: Budget) -> Reduction:
    """The reduction with its time: by the method's own steps, or as one where it has none."""
    watch = Stopwatch(tokens.projected.device)
    with watch.time("method"):
        reduction = method.reduce(tokens, budget)
    return reduction if reduction.watch is not None else reduction._replace(watch=watch)


def put_in(
    full: Sequence, layout: Layout, groups: List[Group], method: Method, limit: int | None
) -> tuple[Sequence, list[PictureOutcome]]:
    """The sequences with the reduced tokens of these units in place of the others, and what became of each picture."""
    device, width = full.embeds.device, layout.real.shape[1]
    channels = full.everything()
    if method.positions == "mean":
        channels["positions"] = channels["positions"]._replace(rule=Rule.MEAN)
    stays, came = layout.real.clone(), [0] * len(layout.real)
    for picture in layout.pictures:
        stays[picture.row, list(picture.leaving)] = False
    into: list[int] = []  # sequence of every reduced token
    for units, reduction in groups:
        for unit in units:
            row, count = layout.pictures[unit.picture].row, reduction.tokens.shape[1]
            stays[row, unit.places] = False
            came[row] += count
            into += [row] * count
    lengths = [left + more for left, more in zip(stays.sum(1).tolist(), came, strict=True)]
    truncated = limit is not None and max(lengths) > limit
    if truncated and limit is not None:  # a channel that says which picture a token is of, to count what is left
        lengths = [min(length, limit) for length in lengths]
        channels["picture"] = Channel(layout.picture_rows().to(device), -1, Rule.SOURCE)
    values: dict[str, list[Tensor]] = {name: [] for name in channels}
    places = []
    for units, reduction in groups:
        rows = torch.tensor([[layout.pictures[unit.picture].row] for unit in units], device=device)
        columns = torch.stack([unit.places for unit in units]).to(device)
        source = columns.gather(1, reduction.source.clamp_min(0))  # of no patch: the unit's first
        places.append(_places(layout, units, reduction, source * ROW, method.order).flatten())
        for name, channel in channels.items():
            value = reduction.tokens if name == "embeds" else _values(channel, rows, columns, source, reduction)
            values[name].append(value.flatten(0, 1).to(channel.values.dtype))
    inserts = Inserts(into, torch.cat(places), {name: torch.cat(parts) for name, parts in values.items()})
    place = torch.where(stays, torch.arange(width) * ROW, NEVER).to(device)
    new, real, unpadded = edit(channels, place, lengths, inserts)
    outcomes = _outcomes(layout, groups)
    if truncated:
        outcomes = counted(outcomes, new["picture"])
    return full.with_values(real, new, unpadded), outcomes


def _values(channel: Channel, rows: Tensor, columns: Tensor, source: Tensor, reduction: Reduction) -> Tensor:
    """What the reduced tokens of a group get in a channel: [B, K + M, ...].

    Args:
        rows: [B, 1] of the batch.
        columns: [B, N] places of the units' tokens.
        source: [B, K + M] place of the token that each slot stands for.
    """
    if channel.rule is Rule.BLANK:
        return channel.values.new_full((*source.shape, *channel.values.shape[2:]), channel.blank)
    if channel.rule is Rule.SOURCE:
        return channel.values[rows, source]
    return _means(channel.values[rows, columns], reduction)


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


def _places(layout: Layout, units: List[Unit], reduction: Reduction, at_source: Tensor, order: str) -> Tensor:
    """Places [B, K + M] of reduced tokens in the order of the sequence, by the zones of the method or by its order."""
    slots, kept = torch.arange(reduction.tokens.shape[1], device=at_source.device), reduction.kept.shape[1]
    if reduction.zone is None and (order == "raster" or kept == len(slots)):
        return at_source
    zones = torch.tensor([_zones(layout, unit) for unit in units], device=at_source.device)[..., None] + slots
    if reduction.zone is None:
        return torch.where(slots < kept, at_source, zones[:, BEHIND])
    return torch.where(reduction.zone == PLACE, at_source, zones.gather(1, reduction.zone[:, None])[:, 0])


def _zones(layout: Layout, unit: Unit) -> list[int]:
    """Place of the first slot in each zone of a unit: ahead of it, (at the source's place), right after it, or after
    the last row of its picture. A unit whose rows are mixed with those of other tiles has no place of its own: what
    belongs ahead of it stands after the picture, and what belongs after it after that.
    """
    picture = layout.pictures[unit.picture]
    first, last = int(unit.places[0]), int(unit.places[-1])
    heads, tails = (picture.end * ROW + stretch + unit.part * PART for stretch in (HEADS, TAILS))
    stands_alone = last - first == len(unit.places) - 1 or len(unit.places) == picture.before
    return [(first - 1) * ROW + NEXT, 0, last * ROW + TAILS, tails] if stands_alone else [heads, 0, tails, tails]


def _outcomes(layout: Layout, groups: List[Group]) -> list[PictureOutcome]:
    """Tokens before and after of every picture, with the bookkeeping of its units in order."""
    whole = untouched(layout)
    after = [outcome.after for outcome in whole]
    parts: list[list[tuple[int, Reduction]]] = [[] for _ in whole]
    for units, reduction in groups:
        for index, unit in enumerate(units):
            one = reduction
            if len(reduction.tokens) > 1:
                own = (value[index : index + 1] if isinstance(value, Tensor) else value for value in reduction)
                one = Reduction._make(own)
            after[unit.picture] += reduction.tokens.shape[1] - len(unit.places)
            parts[unit.picture].append((unit.part, one))
    return [
        outcome._replace(after=after[i], reductions=tuple(sorted(parts[i], key=lambda part: part[0])))
        for i, outcome in enumerate(whole)
    ]


def untouched(layout: Layout, limit: int | None = None) -> list[PictureOutcome]:
    """What becomes of pictures that stay as they are, `limit` being the rows that are left of a longer sequence."""
    outcomes = [
        PictureOutcome(picture.row, picture.before, picture.before, picture.structural, (), (), layout.origin(picture))
        for picture in layout.pictures
    ]
    if limit is None:
        return outcomes
    return counted(outcomes, layout.picture_rows().where(layout.real.cumsum(1) <= limit, -1))


def counted(outcomes: list[PictureOutcome], picture: Tensor) -> list[PictureOutcome]:
    """The outcomes with the visual tokens that are left in sequences [R, S], given which picture each row belongs to.
    Waits for the device.
    """
    return [outcome._replace(after=int((picture == index).sum())) for index, outcome in enumerate(outcomes)]


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


def probe_text(full: Sequence, layout: Layout, decoder: Decoder, fronts: Fronts | None = None) -> TextProbe:
    """The decoder's layer 0 as the text rows after each picture see it, once where several pictures have the same
    text: their queries, and the keys of the whole sequence, by the layer's own modules. Nothing runs but the two
    projections (paper section 3.2). Rows that prompts have in common at their beginning are projected once: `front`.
    """
    device, asking = full.embeds.device, layout.probes[0]
    texts, row_mask = text_rows(asking)
    padded = not bool(row_mask.all())
    rows = [picture.row for picture in asking]
    every = rows == list(range(len(layout.real)))  # then nothing is copied
    row, texts, row_mask = torch.tensor(rows, device=device), texts.to(device), row_mask.to(device)
    if EXPERTS in full.channels:
        decoder, fronts = cast(ExpertDecoder, decoder).choosing(full.channels[EXPERTS].values), None
    start = 0 if fronts is None else fronts.size
    texts = (texts - start).clamp_min(0) if start else texts  # padding among the text rows has place 0
    front = None
    with torch.no_grad():
        embeds = full.embeds if decoder.embedding_scale == 1 else full.embeds * decoder.embedding_scale
        normed = decoder.normed(0, embeds[:, start:] if start else embeds)
        query, key = decoder.query(0, normed[row[:, None], texts]), decoder.key(0, normed)
        cos, sin = decoder.rotary(normed, full.positions[:, start:])
        real = full.real[:, start:]
        if fronts is not None:
            shared = decoder.normed(0, embeds[fronts.rows, :start])
            angles = decoder.rotary(shared, full.positions[fronts.rows, :start])
            front = FrontKeys(decoder.key(0, shared), *angles, torch.tensor(fronts.which, device=device)[row])
        key, cos, sin, real = (value if every else value[row] for value in (key, cos, sin, real))
    return TextProbe(query, key, cos, sin, decoder.scale(0), texts, row_mask, real, padded, front)


def text_rows(asking: List[Picture]) -> tuple[Tensor, Tensor]:
    """Places of the text rows after each of these pictures, padded with 0, and which of them are real: [I, L] each."""
    texts = [picture.text for picture in asking]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return padded, torch.arange(padded.shape[1]) < torch.tensor([[len(text)] for text in texts])


def words_after(full: Sequence, layout: Layout) -> tuple[Tensor, Tensor]:
    """Embeddings [I, L, D] of the text rows after each picture, once where several have the same text, and which of
    them are real [I, L].
    """
    asking, device = layout.probes[0], full.embeds.device
    texts, real = text_rows(asking)
    rows = torch.tensor([[picture.row] for picture in asking], device=device)
    return full.embeds[rows, texts.to(device)], real.to(device)


@dataclass(frozen=True)
class Source:
    """Where a method's inputs come from: what it reads of the units of assembled sequences."""

    full: Sequence
    layout: Layout
    tiles: list[Tiles]  # of each picture of the call
    tower: Tower
    method: Method
    prompts: Tensor | None = None  # [R] int64 fingerprint of each row's prompt, where the method asks for it
    probe: TextProbe | None = None
    clip: ClipSides | None = None  # patches of all tiles of the call; text of each row
    words: tuple[Tensor, Tensor] | None = None  # `words_after`, in place of CLIP

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

    def _picture(self, unit: Unit) -> Picture:
        return self.layout.pictures[unit.picture]

    def _tiles(self, unit: Unit) -> Tiles:
        return self.tiles[self._picture(unit).source]

    def _side(self, unit: Unit) -> int:
        side = self._tiles(unit).side
        return self.tower.side if side is None else side

    def tokens(self, units: list[Unit]) -> VisualTokens:
        """What the method reads of a group of units, on the device of the sequences."""
        device, own, needs = self.full.embeds.device, self._tiles(units[0]), needs_of(self.tower, self.method)
        used, tile = self._used(units)
        row = torch.tensor([[self._picture(unit).row] for unit in units], device=device)
        columns = torch.stack([unit.places for unit in units]).to(device)
        parts = {name: self._part(name, used) for name in (self.tiles[0].parts if self.tiles else ())}
        fingerprint = parts.pop("fingerprint", None)
        if fingerprint is not None and self.prompts is not None:  # of a unit's first tile and of its prompt
            fingerprint = fingerprint[tile[:, 0].to(device)] ^ self.prompts.to(device)[row[:, 0]]
        attention = self._attention(parts, "", blocks_read(self.tower, self.method)[1], own)
        earlier = self._attention(parts, EARLIER, earlier_block(self.tower, self.method), own)
        members = self.tower.members if own.members is None else own.members
        return VisualTokens(
            projected=self.full.embeds[row, columns],
            tile=tile.to(device),
            patch=torch.stack([unit.patch for unit in units]).to(device),
            tiles_per_unit=units[0].tiles,
            side=self._side(units[0]),
            members=None if members is None else members.to(device),
            picture=torch.tensor([unit.picture for unit in units], device=device),
            prompt=torch.tensor([self.layout.probes[1][unit.picture] for unit in units], device=device),
            columns=columns,
            attention=attention,
            earlier=earlier,
            project=self.tower.project if Need.PROJECTOR in needs else None,
            clip=self._clip(used),
            probe=self._probe(units[0]),
            fingerprint=fingerprint,
            whole=self._whole(used) if Need.WHOLE_PICTURES in needs else None,
            **{name: value for name, value in parts.items() if not name.startswith(EARLIER)},
        )

    def _attention(self, parts: dict[str, Tensor], front: str, block: int, own: Tiles) -> VisionAttention | None:
        """The attention of a block, whose queries and keys leave the parts; None where they are not among them."""
        query, key = (parts.pop(front + name, None) for name in ("query", "key"))
        if query is None or key is None:
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
        """Of each picture of the call, the first that has the same tiles."""
        return tuple(range(len(self.tiles))) if self.clip is not None else same_pictures(self.tiles)

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
        if self.probe is None or self.layout.has_text(unit):
            return self.probe
        none = self.probe.rows[:, :0]
        return self.probe._replace(query=self.probe.query[:, :, :0], rows=none, row_mask=self.probe.row_mask[:, :0])

    def _clip(self, used: list[tuple[int, int]]) -> ClipSides | None:
        """Patches of these tiles, and the question of the row each is asked about in."""
        pictures, sizes = self.layout.pictures, [len(tiles.projected) for tiles in self.tiles]
        if self.words is not None:
            text, real = self.words
            tokens = [self.tiles[pictures[picture].source].projected[tile] for picture, tile in used]
            prompt = torch.tensor([self.layout.probes[1][picture] for picture, _ in used], device=text.device)
            return ClipSides(torch.stack(tokens).to(text.device), text[prompt], real[prompt], words=True)
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
    """Of each picture of a call the first that is the same one, encoded once and asked about in several prompts."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(one), source) for source, one in enumerate(tiles))
