"""The core: `reduce` shortens assembled sequences before the prefill of the language model.

The inputs of a method are gathered from the parts that hooks collected (`MethodInputs`) and from a probe of the
language model's first layer with the text after the picture as queries (`probe_text`). The method reduces units of
equal size in one batch, and `put_in` replaces their tokens in a single edit of the sequences. `reduce` is a pure
function: it knows no attachment and changes none of its arguments.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from llava_consensus.errors import NonFiniteError
from llava_consensus.hosts.base import Model, PictureOutcome, Tiles, Tower
from llava_consensus.hosts.call import Report
from llava_consensus.hosts.sequence import (
    HEADS,
    NEVER,
    NEXT,
    PART,
    ROW,
    TAILS,
    Assembled,
    Channel,
    Inserts,
    Layout,
    RowKinds,
    Rule,
    Unit,
    edit,
    rows_of,
    wide,
)
from llava_consensus.hosts.source import MethodInputs, UnitBatch, probe_text, words_after
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import BEHIND, PLACE, ClipSides, Need, Reduction, Stopwatch, VisualTokens

KEPT = "positions of three axes are kept"
NO_TEXT = "no text after the image: reduced by vision saliency alone"
BY_WORDS = "no CLIP text tower: relevance by the language model's own embeddings of the words after the image"
NO_WORDS = "no text after the image: all tokens are equally relevant"


class ReducedUnits(NamedTuple):
    """Units that went through the method together."""

    batch: UnitBatch
    reduction: Reduction


def reduce(
    full: Assembled,
    layout: Layout,
    tiles: list[Tiles],
    method: Method,
    model: Model,
    *,
    clip: ClipSides | None = None,
    prompts: Tensor | None = None,
    limit: int | None = None,
    watch: Stopwatch | None = None,
) -> tuple[Assembled, Report]:
    """Reduces the visual tokens of the sequences: shorter sequences, padded on the right, and a report per picture.

    Args:
        full: as the language model would have read them.
        layout: what every row is, and the budget of each unit.
        tiles: of each picture, with the parts of the tower that the method needs.
        method: what reduces.
        model: the tower that gave the parts, and the decoder whose first layer is probed.
        clip: patches and questions in CLIP's space, for methods that need QUESTION. Without them that is the space of
            the language model's embeddings, and the question what stands after each picture.
        prompts: [R] int64 fingerprint of each row's prompt, for methods that need FINGERPRINT.
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
                probe = probe_text(full, layout, model.decoder, getattr(method, "scap_rope", True))
        by_words = clip is None and Need.QUESTION in method.needs
        words = words_after(full, layout) if by_words or Need.WORDS in method.needs else None
        # All inputs stay those of the full sequences: no unit sees the reduction of another.
        source = MethodInputs(full, layout, tiles, model.tower, method, prompts, probe, clip, words)
        groups = []
        for batch in source.batches():
            with watch.time("gather"):
                tokens = source.tokens(batch)
            try:
                reduction = _timed(method, tokens, batch.units[0].budget)
            except NonFiniteError as error:
                raise NonFiniteError(_named(error, tokens, batch, layout)) from error
            groups.append(ReducedUnits(batch, reduction))
        with watch.time("splice"):
            out, outcomes = put_in(full, layout, groups, method, limit)
    silent = any(len(picture.text) == 0 for picture in layout.pictures)
    notes = (NO_TEXT,) * (silent and Need.PROBE in method.needs)
    notes += (BY_WORDS,) * by_words + (NO_WORDS,) * (silent and by_words)
    kept = full.positions.ndim > 2 and method.positions == "renumber"
    return out, Report(outcomes, notes + (KEPT,) * kept, watch)


def compact(tiles: list[Tiles], kinds: RowKinds, tower: Tower | None) -> tuple[list[Tiles], RowKinds]:
    """Tiles of the tokens that a method before the projector has left, in place of a copy for each patch, and kinds
    whose `token` counts them. Waits for the device.
    """
    assert tower is not None
    made: dict[int, Tiles] = {}
    token = kinds.token.clone()
    for source, one in enumerate(tiles):
        slot = one.parts["slot"].cpu()  # [T, N]
        here = (kinds.picture == source) & (kinds.token >= 0)
        token[here] = slot[kinds.tile[here], kinds.token[here]]
        if id(one) in made:
            continue
        count = int(slot.max()) + 1
        index = one.parts["slot"][..., None].expand_as(one.projected)
        left = one.projected.new_zeros(len(slot), count, one.projected.shape[2]).scatter(1, index, one.projected)
        full = tower.side if one.side is None else one.side
        columns = int(slot[0, :full].max()) + 1 if full else 0
        grids = ((slot.shape[1] // full, full), (count // columns, columns)) if full else ()
        square = bool(grids) and torch.equal(slot[0], cells_of(*grids))
        members = one.members
        if members is None and tower.members is not None:
            each = tower.members.shape[1]
            members = torch.arange(count * each).view(count, each)
        parts = {name: value for name, value in one.parts.items() if name != "slot"}
        made[id(one)] = Tiles(left, parts, columns if square else 0, members, one.class_is_token)
    return [made[id(one)] for one in tiles], kinds._replace(token=token)


def cells_of(whole: tuple[int, int], small: tuple[int, int]) -> Tensor:
    """The cell of a smaller grid, of rows x columns, that each token of the whole one lies in: [N]."""
    row, column = (torch.arange(size) * less // size for size, less in zip(whole, small, strict=True))
    return (row[:, None] * small[1] + column).flatten()


def _named(error: Exception, tokens: VisualTokens, batch: UnitBatch, layout: Layout) -> str:
    """The message of an error with the pictures whose own tokens are not finite, where some are."""
    values = [tokens.projected.flatten(1)]
    values += [one[tokens.tile[:, 0]].flatten(1) for one in (tokens.features,) if one is not None]
    if tokens.attention is not None:
        values.append(tokens.attention.key[tokens.tile[:, 0]].flatten(1))
    bad = [place for place in range(len(batch.units)) if not all(bool(one[place].isfinite().all()) for one in values)]
    pictures = [layout.pictures[number] for number in sorted({batch.units[place].picture for place in bad})]
    names = ", ".join(f"picture {one.source} of prompt {one.row}" for one in pictures)
    return f"{names}: {error}" if names else str(error)


def _timed(method: Method, tokens: VisualTokens, budget: Budget) -> Reduction:
    """The reduction with its time: by the method's own steps, or as one where it has none."""
    watch = Stopwatch(tokens.projected.device)
    with watch.time("method"):
        reduction = method.reduce(tokens, budget)
    return reduction if reduction.watch is not None else reduction._replace(watch=watch)


def put_in(
    full: Assembled, layout: Layout, groups: Sequence[ReducedUnits], method: Method, limit: int | None
) -> tuple[Assembled, list[PictureOutcome]]:
    """Puts the reduced tokens of these units in place of the originals: the new sequences, and an outcome per
    picture.
    """
    device, width = full.embeds.device, layout.real.shape[1]
    channels = full.everything()
    if method.positions == "mean":
        channels["positions"] = channels["positions"]._replace(rule=Rule.MEAN)
    # Bookkeeping on the CPU: lengths follow from the layout and the shapes of the reductions, so that nothing waits for
    # the device. Only the device knows which tokens were kept: they enter as `source`.
    stays, came = layout.real.clone(), [0] * len(layout.real)
    for picture in layout.pictures:
        stays[picture.row, list(picture.leaving)] = False
    into: list[int] = []  # sequence of every reduced token
    for batch, reduction in groups:
        for unit in batch.units:
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
    # the zones of all units in one copy, however many groups there are
    zones = torch.tensor([_zones(layout, unit) for batch, _ in groups for unit in batch.units]).to(device)
    places = []
    for (batch, reduction), zone in zip(groups, zones.split([len(one.batch.units) for one in groups]), strict=True):
        source = batch.columns.gather(1, reduction.source.clamp_min(0))  # of no patch: the unit's first
        places.append(_places(reduction, zone, source * ROW, method.order).flatten())
        for name, channel in channels.items():
            value = reduction.tokens if name == "embeds" else _values(channel, batch, source, reduction)
            values[name].append(value.flatten(0, 1).to(channel.values.dtype))
    inserts = Inserts(into, torch.cat(places), {name: torch.cat(parts) for name, parts in values.items()})
    # Sort keys are spaced by ROW so that reduced tokens fit in between without renumbering.
    place = torch.where(stays, torch.arange(width) * ROW, NEVER).to(device)
    new, real, unpadded = edit(channels, place, lengths, inserts)
    outcomes = _outcomes(layout, groups)
    if truncated:
        outcomes = counted(outcomes, new["picture"])
    return full.with_values(real, new, unpadded), outcomes


def _values(channel: Channel, batch: UnitBatch, source: Tensor, reduction: Reduction) -> Tensor:
    """Values of the reduced tokens of a batch of units in a channel: [B, K + M, ...].

    Args:
        source: [B, K + M] place of the token that each slot stands for.
    """
    if channel.rule is Rule.BLANK:
        return channel.values.new_full((*source.shape, *channel.values.shape[2:]), channel.blank)
    if channel.rule is Rule.SOURCE:
        return channel.values[batch.row, source]
    return _means(channel.values[batch.row, batch.columns], reduction)


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


def _places(reduction: Reduction, zones: Tensor, at_source: Tensor, order: str) -> Tensor:
    """Places [B, K + M] of reduced tokens in the order of the sequence, by the zones of the method or by its order.

    Args:
        zones: [B, 4] place of the first slot in each zone of a unit.
        at_source: [B, K + M] place of the token that each slot stands for.
    """
    slots, kept = torch.arange(reduction.tokens.shape[1], device=at_source.device), reduction.kept.shape[1]
    if reduction.zone is None and (order == "raster" or kept == len(slots)):
        return at_source
    zones = zones[..., None] + slots
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


def _outcomes(layout: Layout, groups: Sequence[ReducedUnits]) -> list[PictureOutcome]:
    """Tokens before and after of every picture, with the bookkeeping of its units in order."""
    whole = untouched(layout)
    after = [outcome.after for outcome in whole]
    parts: list[list[tuple[int, Reduction]]] = [[] for _ in whole]
    for batch, reduction in groups:
        for index, unit in enumerate(batch.units):
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
    """Outcomes of pictures that are not reduced; `limit` is the number of rows left of a truncated sequence."""
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
