"""Which rows of a batch of prompts are left (`Rows`), the one function by which rows leave (`drop_rows`), and the
rows of the KV cache after that (`Book`).

Row counts are known on the CPU, from the prompts and the shapes of reductions. Only the device knows which tokens a
method keeps, so places are tensors, and nothing here synchronises with it. Letters: R rows of the batch, S length of
the prompts, W rows that are left, T tokens that are left of a unit of N, D width.
"""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding, one_hot

from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import STRUCTURAL, Image
from llava_consensus.hosts.units import Reduced
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import BEHIND, PLACE, Reduction

# Sort keys of neighbouring rows are ROW apart. In between there is room for merged tokens: three stretches behind each
# row, the last one for tokens that belong ahead of the next row; in each of them a block for every part of an image.
ROW, STRETCH, PART = 1 << 40, 1 << 36, 1 << 20
PADDING = -(1 << 62)  # sorts before every row


class Rows(NamedTuple):
    """The rows that are left, padded on the left."""

    size: int  # S
    index: Tensor  # type: ignore[assignment]  # [R, W] row of the prompt that each is, or represents
    at: Tensor | None  # [R, W] the row of the prompt after which each is placed, ascending; None if it is `index`
    real: NDArray[np.bool_]  # [R, W] False for padding
    shown: Tensor  # the same on the device
    removed: Tensor  # [R, 1] how many rows each prompt lost
    shrinks: bool  # whether any lost some

    @property
    def padded(self) -> bool:
        return not bool(self.real.all())


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Whole numbers as int64 tensors on the device, in one copy that nothing waits for."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64, casting="unsafe"))
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def padded_columns(columns: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Columns of several rows as one array [n, L], padded behind, and which of it are real."""
    width = max(map(len, columns))
    padded = np.stack([np.pad(own, (0, width - len(own))) for own in columns])
    return padded, np.stack([np.arange(width) < len(own) for own in columns])


def row_axis(value: Tensor, size: int, count: int) -> int | None:
    """The axis of S rows that comes right after one of R (or 1) prompts."""
    for axis in range(1, value.ndim):
        if value.shape[axis] == size and value.shape[axis - 1] in (1, count):
            return axis
    return None


def gather(value: Tensor, index: Tensor, axis: int) -> Tensor:
    """Entries `index` [R, W] along an axis of S that comes right after the axis of prompts (R or 1)."""
    lead, view, target = [-1] * value.ndim, [1] * value.ndim, [*value.shape]
    lead[axis - 1] = len(index)
    view[axis - 1], view[axis] = index.shape
    target[axis - 1], target[axis] = index.shape
    return value.expand(lead).gather(axis, index.view(view).expand(target))


def drop_rows(value: Any, rows: Rows) -> Any:
    """Any argument of a module without the rows that left: tensors [..., R, S, ...], and containers of them."""
    if isinstance(value, Mapping):
        return {name: drop_rows(item, rows) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(drop_rows(item, rows) for item in value)
    axis = row_axis(value, rows.size, len(rows.index)) if isinstance(value, Tensor) else None
    if axis is None:
        return value
    new = gather(value, rows.index, axis)
    # a mask of visual rows must not count padding
    return new & rows.shown if new.dtype == torch.bool and new.ndim == 2 and rows.padded else new


def joined_rows(first: Rows, then: Rows) -> Rows:
    """The rows that are left of a prompt after those of `then` reduced those of `first`."""
    at, later = (rows.index if rows.at is None else rows.at for rows in (first, then))
    return then._replace(
        size=first.size,
        index=first.index.gather(1, then.index),
        at=at.gather(1, later.clamp_min(0)),  # padding has a place before every row
        removed=first.removed + then.removed,
        shrinks=first.shrinks or then.shrinks,
    )


def restore_rows(full: Tensor, short: Tensor, rows: Rows) -> Tensor:
    """States [..., S, D] of the prompt with those of the rows that are left in their places."""
    axis = row_axis(full, rows.size, len(rows.index))
    assert axis is not None
    view = [1] * full.ndim
    view[axis - 1], view[axis] = rows.index.shape
    return full.scatter(axis, rows.index.view(view).expand(short.shape), short)


def spread_rows(short: Tensor, rows: Rows, axis: int = 1) -> Tensor:
    """States of the rows that are left at the length of the prompt: a removed row repeats the last one before it, so
    that a label right behind an image is predicted by the row before it. Given the last n only, as Gemma 4 returns if
    layers share keys, those of the last n rows of the prompt.
    """
    at, given = rows.index if rows.at is None else rows.at, short.shape[axis]
    missing = rows.index.shape[1] - given
    (every,) = upload([np.tile(np.arange(rows.size - given if missing else 0, rows.size), (len(at), 1))], short.device)
    last = torch.searchsorted(at.contiguous(), every, right=True) - (1 + missing)
    return gather(short, last.clamp_min_(0), axis)


class Pool(NamedTuple):
    """Values of the prompts and of new tokens, from which the rows that are left are taken."""

    picked: Tensor  # [R, W] index into: all R S rows, then all new tokens, batch after batch
    groups: list[Reduced]
    images: list[Image]  # of the prompts

    def take(self, values: Tensor, new: list[Tensor]) -> Tensor:
        """Rows [R, W, ...] of values [R, S, ...] and of the new tokens' own [B, T, ...]."""
        flat = [values.flatten(0, 1), *(item.flatten(0, 1).to(values.dtype) for item in new)]
        return embedding(self.picked, torch.cat(flat)) if values.ndim == 3 else torch.cat(flat)[self.picked]

    def mean(self, values: Tensor) -> Tensor:
        """Rows [R, W, ...] of values [R, S, ...], those of merged tokens being means over their members."""
        flat = values.flatten(0, 1)
        return self.take(values, [member_means(flat[group.units.flat], group.reduction) for group in self.groups])

    def spread(self, positions: Tensor, rows: Rows) -> Tensor:
        """Positions [R, W] of positions [R, S]: the rows of an image are evenly over the span that the image had."""
        new = drop_rows(positions, rows).clone()
        for image in self.images:
            index, ends = rows.index[image.row], (image.places[0], image.places[-1])
            first, last = (positions[image.row, end] for end in ends)
            here = (index >= ends[0]) & (index <= ends[1])
            even = first + (here.cumsum(0) - 1) * (last - first) / (here.sum() - 1).clamp_min(1)
            new[image.row] = torch.where(here, even.round().to(new.dtype), new[image.row])
        return new


def member_means(values: Tensor, reduction: Reduction) -> Tensor:
    """Mean of values [B, N, ...] over the tokens that each slot was made of, rounded if they are whole numbers:
    [B, T, ...]. Kept tokens have their own value, bit for bit; a slot that represents no token is zero.
    """
    slots = reduction.source.shape[1]
    whole = not values.is_floating_point()
    dtype = torch.float32 if whole else values.dtype
    member = one_hot(reduction.owner + 1, slots + 1)[..., 1:].transpose(1, 2).to(dtype)  # [B, T, N]
    flat = (values.flatten(2) if values.ndim > 2 else values[..., None]).to(dtype)
    count = member.sum(-1, keepdim=True)
    mean = (member @ flat / count.clamp_min(1)).reshape(len(values), slots, *values.shape[2:])
    mean = mean.round().to(values.dtype) if whole else mean
    source = reduction.source.clamp_min(0)
    own = values.gather(1, source.view(*source.shape, *(1,) * (values.ndim - 2)).expand(mean.shape))
    single = (count[..., 0] == 1).view(*source.shape, *(1,) * (values.ndim - 2))
    return torch.where(single, own, mean)


def reduced_rows(
    embeds: Tensor, real: NDArray[np.bool_], images: list[Image], groups: list[Reduced], method: Method,
    drops: Sequence[bool],
) -> tuple[Rows, Pool]:  # fmt: skip
    """The rows of prompts in which units are replaced by their reduced tokens, in the order of the sequence.

    Args:
        drops: of each image, whether its structural rows leave if it is reduced.
    """
    (count, size), device = real.shape, embeds.device
    stays = real.copy()
    for group in groups:
        for unit in group.units.units:
            image = images[unit.image]
            stays[image.row, unit.places] = False
            if drops[unit.image]:
                stays[image.row, image.places[image.token == STRUCTURAL]] = False
    row, column = stays.nonzero()
    owned: list[list[NDArray[np.int64]]] = [[np.flatnonzero(row == number)] for number in range(count)]
    slots = len(row)  # numbered behind the rows that stay
    for group in groups:
        tokens = group.reduction.tokens.shape[1]
        for unit in group.units.units:
            owned[images[unit.image].row].append(np.arange(slots, slots + tokens))
            slots += tokens
    own = [np.concatenate(parts) for parts in owned]
    width = max(map(len, own))
    candidates = np.stack([np.pad(part, (width - len(part), 0), constant_values=slots) for part in own])
    kept_real = np.stack([np.arange(width) >= width - len(part) for part in own])
    removed = (real.sum(1) - kept_real.sum(1))[:, None]
    picked = np.concatenate((row * size + column, count * size + np.arange(slots - len(row)), [0]))
    zones = [_tails(group, images, method) for group in groups]
    keys, source, chosen, taken, shown, gone, *tails = upload(
        [np.append(column * ROW, PADDING), np.append(column, 0), candidates, picked, kept_real, removed, *zones], device
    )
    unit_keys, unit_source = [], []
    for group, tail in zip(groups, tails, strict=True):
        at = group.units.columns.gather(1, group.reduction.source.clamp_min(0))  # [B, T]
        unit_keys.append(_keys(group.reduction, at, tail, method.order).flatten())
        unit_source.append(at.flatten())
    keys = torch.cat([keys[:-1], *unit_keys, keys[-1:]])
    source = torch.cat([source[:-1], *unit_source, source[-1:]])
    keys, order = keys[chosen].sort(dim=1)
    chosen = chosen.gather(1, order)
    shown = shown.bool() if not kept_real.all() else torch.ones((), dtype=torch.bool, device=device).expand(shown.shape)
    rows = Rows(size, source[chosen], keys >> 40, kept_real, shown, gone, bool(removed.any()))
    return rows, Pool(taken[chosen], groups, images)


def _keys(reduction: Reduction, at: Tensor, tail: Tensor, order: str) -> Tensor:
    """Sort keys [B, T] of reduced tokens: at the place of the token each represents, ahead of the unit, right after
    it, or behind its whole image.

    Args:
        at: [B, T] column of the token that each represents.
        tail: [B, 4, T] keys in each zone.
    """
    kept = reduction.kept.shape[1]
    if reduction.zone is not None:
        zoned = tail.gather(1, reduction.zone[:, None])[:, 0]
        return torch.where(reduction.zone == PLACE, at * ROW, zoned)
    if order == "raster" or kept == at.shape[1]:
        return at * ROW
    return torch.cat((at[:, :kept] * ROW, tail[:, BEHIND, kept:]), 1)


def _tails(group: Reduced, images: list[Image], method: Method) -> NDArray[np.int64]:
    """Sort keys [B, 4, T] of the slots of each unit in every zone. A unit whose rows are mixed with those of other
    tiles has no place: tokens that belong ahead of it come behind the image, and those after it after them.
    """
    kept, slots = group.reduction.kept.shape[1], group.reduction.tokens.shape[1]
    if group.reduction.zone is None and (method.order == "raster" or kept == slots):
        return np.zeros((len(group.units.units), 4, 0), dtype=np.int64)
    starts = []
    for unit in group.units.units:
        image = images[unit.image]
        first, last, end = int(unit.places[0]), int(unit.places[-1]), int(image.places[-1])
        heads, tails = (end * ROW + stretch + unit.part * PART for stretch in (STRETCH, 2 * STRETCH))
        apart = last - first == len(unit.places) - 1 or len(unit.places) == int((image.token >= 0).sum())
        starts.append(
            [(first - 1) * ROW + 3 * STRETCH, 0, last * ROW + 2 * STRETCH, tails] if apart else [heads, 0, tails, tails]
        )
    return np.array(starts)[:, :, None] + np.arange(slots)


# The KV cache says the prompt's length, so that `generate`, and models that count positions by the cache, continue from
# it. Masks are as long as its keys: they ask `get_query_offset` and the layers.

CACHE_NAMES = ("cache", "past_key_values", "past_key_value")  # since transformers 5.24, before, and in layers of 4.37


def cache_in(values: Any) -> Any:
    """The KV cache among the arguments or the outputs of a model; None if there is none."""
    for name in CACHE_NAMES:
        if values.get(name) is not None:
            return values[name]
    return None


def without_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: None if name in CACHE_NAMES else value for name, value in arguments.items()}


def makes_cache(arguments: dict[str, Any], config: Any) -> bool:
    """Whether a decoder that gets these arguments makes a cache if none is passed."""
    given = arguments.get("use_cache")
    return bool(getattr(config, "use_cache", True) if given is None else given)


def by_name(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs


def given_rows(kwargs: dict[str, Any]) -> Tensor:
    """The ids [R, S], or the embeddings [R, S, D], that a call is given."""
    rows: Tensor = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    return rows


class Book(NamedTuple):
    """Contents of a shortened cache: the rows kept of each prompt."""

    size: int  # rows of the prompts
    real: Tensor  # [R, n] False for padding, of the n rows that the first layer may hold
    index: Tensor  # type: ignore[assignment]  # [R, n] row of the prompts that each is, or represents
    shift: Tensor | None  # [R, 1] by how much renumbered positions are smaller; None if none is
    padded: bool  # whether any row that the first layer holds is padding
    plain: bool  # whether the end of the prompts' mask is that of the rows held
    layers: dict[int, Rows]  # rows of each layer in which more of them left
    weights: dict[int, Tensor]  # [R, n] of such layers: how many tokens each row represents, if that is calibrated
    holes: bool = False  # whether a later turn may have left padding behind the prompts
    uneven: bool = False  # whether later layers hold padding
    owner: int = 0  # number of the entrance whose hooks continue from this cache

    @property
    def missing(self) -> int:
        """Rows of the prompts that the first layer does not hold."""
        return self.size - (self.layers[0].index if 0 in self.layers else self.real).shape[1]

    def without(self, last: int) -> "Book":
        """The same without that number of rows at the end, which are text.

        Raises:
            OptionError: if they are not.
        """
        if last <= 0:
            return self
        held = [self.index, *(rows.index for rows in self.layers.values())]
        if any(last >= index.shape[1] or bool((index[:, -last:] < self.size - last).any()) for index in held):
            raise OptionError(
                f"crop: the last {last} rows of a reduced prompt are not text: read it again in their place"
            )
        layers = {
            number: rows._replace(index=rows.index[:, :-last], real=rows.real[:, :-last], shown=rows.shown[:, :-last])
            for number, rows in self.layers.items()
        }
        weights = {number: weight[:, :-last] for number, weight in self.weights.items()}
        real, index = self.real[:, :-last], self.index[:, :-last]
        return self._replace(size=self.size - last, real=real, index=index, layers=layers, weights=weights)

    def change(self, change: Any) -> "Book":
        """The same with other batch rows, `change` being done to each tensor."""
        every = {
            id(rows): rows._replace(
                index=change(rows.index), at=None, shown=change(rows.shown), removed=change(rows.removed),
                real=change(rows.shown).cpu().numpy(),
            )
            for rows in self.layers.values()
        }  # fmt: skip
        layers = {number: every[id(rows)] for number, rows in self.layers.items()}
        weights = {number: change(weight) for number, weight in self.weights.items()}
        shift = None if self.shift is None else change(self.shift)
        return self._replace(
            real=change(self.real), index=change(self.index), shift=shift, layers=layers, weights=weights
        )


class Hold:
    """Hooks on a model, which are removed with the last attachment, forward pass, cache or copy of one that needs it.

    Args:
        handles: of the hooks.
    """

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles
        weakref.finalize(self, remove_all, handles)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hold":
        return self


def remove_all(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def book_of(cache: Any) -> Book | None:
    return getattr(cache, "reduction_book", None)


def held_in(values: Any) -> tuple[Any, Book | None]:
    """The KV cache among the arguments or the outputs of a model, and its book."""
    cache = cache_in(values)
    return cache, book_of(cache)


def shorten(cache: Any, book: Book, hold: Hold | None) -> None:
    """Note that the cache was filled with the rows in `book`, and needs these hooks."""
    if book_of(cache) is None:
        kind: Any = type(cache)
        cache.__class__, cache.reduction_hold = _shortened(kind), hold
    cache.reduction_book = book


@functools.cache
def _shortened(kind: Any) -> Any:
    class Shortened(kind):
        reduction_book: Book
        reduction_open = False  # whether the hooks that it needs run

        def update(self, *args: Any, **kwargs: Any) -> Any:
            if not self.reduction_open:
                raise OptionError(
                    "past_key_values: this KV cache is of a reduced prompt and can be continued only by the model that "
                    "filled it. Read the prompt again"
                )
            return super().update(*args, **kwargs)

        def get_seq_length(self, layer_idx: int = 0) -> Any:
            return super().get_seq_length(layer_idx) + self.reduction_book.missing

        def get_query_offset(self, layer_idx: int = 0) -> Any:
            return super().get_seq_length(layer_idx)

        def reset(self) -> None:
            super().reset()
            del self.reduction_book, self.reduction_hold
            self.__class__ = kind

        def crop(self, tokens_to_remove: int) -> None:
            book, length = self.reduction_book, self.get_seq_length()
            count = length - tokens_to_remove if tokens_to_remove > 0 else -tokens_to_remove
            self.reduction_book = book.without(book.size - length + count)
            super().crop(-count)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self.reduction_book = self.reduction_book.change(lambda value: value.index_select(0, beam_idx))

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self.reduction_book = self.reduction_book.change(lambda value: value.repeat_interleave(repeats, 0))

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self.reduction_book = self.reduction_book.change(lambda value: value[indices])

    Shortened.__name__ = Shortened.__qualname__ = f"Shortened{kind.__name__}"
    return Shortened


def cached_rows(cache: Any, axis: int = -2) -> int:
    """Rows that a cache holds; `axis` is that of rows in the keys of a cache of tuples."""
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    return 0 if not cache or cache[0] is None or cache[0][0] is None else int(cache[0][0].shape[axis])


def is_static(cache: Any) -> bool:
    return bool(getattr(cache, "is_compileable", False))
