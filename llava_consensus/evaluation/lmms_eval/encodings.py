"""Pictures after the vision tower, so that many questions about one picture send it there once."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

from PIL.Image import Image

from llava_consensus.evaluation.models import Encoding, Runner

CAPACITY = 64  # pictures that are kept encoded


class TimedEncoding(NamedTuple):
    """One picture after the vision tower, and its share of the time that took."""

    encoded: Encoding
    seconds: float


class Encodings:
    """The last encodings of a runner by what is in the picture: lmms-eval hands over pictures, not files."""

    def __init__(self, runner: Runner) -> None:
        self._host = runner
        self._held: OrderedDict[str, TimedEncoding] = OrderedDict()

    def fetch(self, pictures: Sequence[Sequence[Image]]) -> list[list[TimedEncoding]]:
        """Encodings of the pictures of each question; what is new goes through the tower in one batch."""
        keys = [[_key(picture) for picture in own] for own in pictures]
        by_key = dict(zip(chain(*keys), chain(*pictures), strict=True))
        fresh = {key: picture for key, picture in by_key.items() if key not in self._held}
        if fresh:
            start = time.perf_counter()
            encoded = self._host.encode(list(fresh.values()))
            seconds = (time.perf_counter() - start) / len(fresh)
            self._held.update({key: TimedEncoding(one, seconds) for key, one in zip(fresh, encoded, strict=True)})
        found = [[self._held[key] for key in own] for own in keys]
        for key in by_key:
            self._held.move_to_end(key)
        while len(self._held) > CAPACITY:
            self._held.popitem(last=False)
        return found


def _key(picture: Image) -> str:
    return sha256(f"{picture.size}".encode() + picture.tobytes()).hexdigest()
