"""Replaces an attribute of one instance, and puts back what stood there. The class is never touched."""

from typing import Any

_ABSENT = ...  # survives a deep copy as the same object


class Shadow:
    """`name` of `target` is `value` until `restore`."""

    def __init__(self, target: Any, name: str, value: Any) -> None:
        self.target, self.name = target, name
        self.before = vars(target).get(name, _ABSENT)
        object.__setattr__(target, name, value)

    def restore(self) -> None:
        """Puts back what stood there. A second time does nothing."""
        if self.name in vars(self.target):
            if self.before is _ABSENT:
                object.__delattr__(self.target, self.name)
            else:
                object.__setattr__(self.target, self.name, self.before)
