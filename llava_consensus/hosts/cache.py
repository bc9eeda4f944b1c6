"""A KV cache that holds fewer rows than its prompt had, and says the prompt's length.

`generate`, and models that count positions by the cache, then go on from the full length; the masks, which are as long
as what the cache holds, ask `get_query_offset` and the layers.
"""

import functools
from typing import Any, NamedTuple

from torch import Tensor


class Book(NamedTuple):
    """What a shortened cache holds of the rows that were read."""

    size: int  # rows of the prompts
    real: Tensor  # [R, n] which of the n rows held are no padding
    shift: Tensor  # [R, 1] real rows removed, by which renumbered positions are smaller
    index: Tensor  # [R, n] row of the prompts that each is, or stands for


def book_of(cache: Any) -> Book | None:
    return getattr(cache, "book", None)


def shorten(cache: Any, book: Book) -> None:
    """The cache was filled with rows by `book`."""
    if book_of(cache) is None:
        cache.__class__ = _shortened(type(cache))
    cache.book = book


@functools.cache
def _shortened(kind: type) -> type:
    class Shortened(kind):
        book: Book

        def get_seq_length(self, layer_idx: int = 0) -> Any:
            return super().get_seq_length(layer_idx) + self.book.size - self.book.real.shape[1]

        def get_query_offset(self, layer_idx: int = 0) -> Any:
            return super().get_seq_length(layer_idx)

        def reset(self) -> None:
            super().reset()
            del self.book
            self.__class__ = kind

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self.book = Book(self.book.size, *(one.repeat_interleave(repeats, 0) for one in self.book[1:]))

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self.book = Book(self.book.size, *(one[indices] for one in self.book[1:]))

    Shortened.__name__ = Shortened.__qualname__ = f"Shortened{kind.__name__}"
    return Shortened
