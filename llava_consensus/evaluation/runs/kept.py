"""Encodings that the runs of a sweep share: the vision tower runs once for a picture and kind of need.

kept = Kept(source_of(cell.plan) for cell in grid)
with kept.run(plan) as shelf:
    ...  # encodings on the shelf serve later runs that need the same of the same pictures

What a tower gives depends on the parts a method reads and on the blocks they are read from, not on the budget; methods
that act before the projector have encodings of their own. Memory is bounded: when it is full, nothing more is kept.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from llava_consensus.evaluation.runs.configuration import Plan
from llava_consensus.hosts import Encoded
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need

MEMORY = 1 << 30  # bytes
LATER = frozenset({Need.PROBE, Need.PROJECTOR, Need.WHOLE_PICTURES})  # nothing is collected for these in the tower


def kind(method: Method) -> Hashable:
    """Equal for methods for which a tower gives the same; None where it works for one method and budget alone."""
    if method.place in (Place.PICTURE, Place.TOWER):
        return None
    return method.needs - LATER, method.vision_layer, method.blocks_ahead


def source_of(plan: Plan) -> Hashable:
    """Equal for runs whose encodings of a picture are the same; None for a run that shares none."""
    own_kind = kind(plan.method)
    if own_kind is None:
        return None
    shown = plan.folder, plan.benchmark.frames, plan.clips
    return own_kind, shown, plan.model, plan.loading, tuple(sorted(plan.host_options.items()))


class Kept:
    """Encodings of all runs of a sweep; those that no later run can use are not kept.

    Args:
        sources: of every run that is to come, as `source_of` has them.
        memory: bytes of tensors that are kept at most.
    """

    def __init__(self, sources: Iterable[Hashable], memory: int = MEMORY) -> None:
        self._ahead = Counter(sources)
        self._left = memory
        self._shelves: dict[Hashable, dict[Hashable, list[Encoded]]] = {}

    @contextmanager
    def run(self, plan: Plan) -> "Iterator[Shelf | None]":
        """The shelf of a run, which is cleared behind the last run that can use it; None for a run that shares none."""
        source = source_of(plan)
        self._ahead[source] -= 1
        if source is None:
            yield None
            return
        try:
            yield Shelf(self, source, self._ahead[source] > 0)
        finally:
            if self._ahead[source] <= 0:
                for found in self._shelves.pop(source, {}).values():
                    self._left += size(found)

    def get(self, source: Hashable, picture: Hashable) -> list[Encoded] | None:
        """What is kept of a picture."""
        return self._shelves.get(source, {}).get(picture)

    def put(self, source: Hashable, picture: Hashable, encoded: list[Encoded]) -> None:
        """Keeps the encodings of a picture, where there is room."""
        needed = size(encoded)
        if needed <= self._left:
            self._left -= needed
            self._shelves.setdefault(source, {})[picture] = encoded


class Shelf:
    """What one run finds and leaves."""

    def __init__(self, kept: Kept, source: Hashable, keeps: bool) -> None:
        self._kept, self._source, self._keeps = kept, source, keeps
        self._made_for: tuple[Method, Budget | Share] | None = None

    def given(self, method: Method, budget: Budget | Share) -> "Shelf":
        """The same shelf for a run with this method and this budget, which may follow from the model."""
        self._made_for = method, budget
        return self

    def get(self, path: Path) -> list[Encoded] | None:
        """The encodings of a file as if they had been made for the method and budget of this run; None where there are
        none.
        """
        found = self._kept.get(self._source, _stamp(path))
        return None if found is None else [_made_for(one, self._made_for) for one in found]

    def put(self, path: Path, encoded: list[Encoded]) -> None:
        """Leaves the encodings of a file, where a later run can use them and there is room."""
        picture = _stamp(path)
        if self._keeps and self._kept.get(self._source, picture) is None:
            self._kept.put(self._source, picture, encoded)


def _made_for(encoded: Encoded, given: tuple[Method, Budget | Share] | None) -> Encoded:
    if given is None or not isinstance(encoded, Encoded):
        return encoded
    return replace(encoded, method=given[0], budget=given[1])


def _stamp(path: Path) -> Hashable:
    """A file as it is now; the name alone of a picture inside a table."""
    try:
        found = path.stat()
    except OSError:
        return path
    return path, found.st_mtime_ns, found.st_size


def size(value: Any) -> int:
    """Bytes of the tensors in a value of lists, tuples, mappings and dataclasses."""
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(size(one) for one in value.values())
    if isinstance(value, list | tuple):
        return sum(size(one) for one in value)
    if is_dataclass(value) and not isinstance(value, Method | Budget | Share):
        return sum(size(getattr(value, one.name)) for one in fields(value))
    return 0
