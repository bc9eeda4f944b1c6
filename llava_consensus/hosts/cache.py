"""A KV cache that holds fewer rows than its prompt had, and says the prompt's length.

`generate`, and models that count positions by the cache, then continue from the full length. Masks are as long as
the cache: they ask `get_query_offset` and the layers.
"""

import functools
import weakref
from typing import Any, NamedTuple

from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.rows import Rows

CACHE_NAMES = ("cache", "past_key_values", "past_key_value")  # since transformers 5.24, before, and in layers of 4.37


def cache_in(values: Any) -> Any:
    """The KV cache among the arguments or the outputs of a model; None if there is none."""
    return next((values[name] for name in CACHE_NAMES if name in values and values[name] is not None), None)


def without_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: None if name in CACHE_NAMES else value for name, value in arguments.items()}


def makes_cache(arguments: dict[str, Any], config: Any) -> bool:
    """Whether a decoder that gets these arguments makes a cache if none is passed."""
    given = arguments.get("use_cache")
    return bool(getattr(config, "use_cache", True) if given is None else given)


class Book(NamedTuple):
    """Contents of a shortened cache: the rows kept of each prompt."""

    size: int  # rows of the prompts
    missing: int  # of these, rows that the first layer does not hold
    real: Tensor  # [R, n] False for padding, of the n rows that the first layer may hold
    index: Tensor  # type: ignore[assignment]  # [R, n] row of the prompts that each is, or represents
    shift: Tensor  # [R, 1] how many rows left, by which renumbered positions are smaller
    padded: bool  # whether any row held is padding
    shifted: bool  # whether positions are renumbered and any prompt lost rows
    holes: bool  # whether a later turn may have left padding behind the prompts
    layers: dict[int, Rows]  # rows of each layer in which more of them left
    weights: dict[int, Tensor]  # [R, n] of such layers: how many tokens each row represents, if that is calibrated
    owner: int = 0  # number of the entrance whose hooks continue from this cache

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
        tensors = {name: change(getattr(self, name)) for name in ("real", "index", "shift")}
        return self._replace(**tensors, layers=layers, weights=weights)


class Hold:
    """Keeps the hooks of an entrance on its model, as long as a cache or any copy of it needs them."""

    def __init__(self, entrance: Any) -> None:
        entrance.caches += 1
        weakref.finalize(self, entrance.release)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hold":
        return self  # the last of a cache and its copies releases it


def book_of(cache: Any) -> Book | None:
    return getattr(cache, "reduction_book", None)


def shorten(cache: Any, book: Book) -> None:
    """Note that the cache was filled with the rows in `book`."""
    if book_of(cache) is None:
        kind: Any = type(cache)
        cache.__class__ = _shortened(kind)
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
