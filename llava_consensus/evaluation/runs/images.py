"""Images of a run, encoded once and kept for the next questions about them (`EncodingCache`)."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from PIL import Image

from llava_consensus.errors import ConsensusError, ImageError
from llava_consensus.evaluation.media import Clip, read_clip, read_frames, reason
from llava_consensus.evaluation.models import Encoding, Runner
from llava_consensus.evaluation.runs.configuration import RunPlan
from llava_consensus.evaluation.runs.execution import raise_if_device_failed

CAPACITY = 256  # images that are kept encoded at once; each frame of a video counts


class ModelFailed(ImageError):
    """An image that can be read, at which the model fails."""


Opened = list[Image.Image | Clip]
Reader = Callable[[Path], Opened]


def reader(plan: RunPlan) -> Reader:
    """Opens a file of a run: its image, or sampled frames of a video as images or one clip. May raise ImageError."""
    frames = plan.benchmark.frames
    if plan.clips:
        return lambda path: [read_clip(path, frames)]
    if frames:
        return lambda path: list(read_frames(path, frames))
    return lambda path: [plan.open(path)]


class EncodingCache:
    """Encodings by file: the vision tower runs once per image, and an encoding is forgotten after its last question.

    Args:
        runner: encodes.
        asked: files of each question that will be asked, in order.
        read: opens a file, see `reader`.
        capacity: files that are kept at most.
    """

    def __init__(self, runner: Runner, asked: Iterable[Sequence[Path]], read: Reader, capacity: int = CAPACITY) -> None:
        self._host, self._read, self._capacity = runner, read, max(1, capacity)
        self._ahead = Counter(path for paths in asked for path in paths)  # questions still to come about each file
        self._held: OrderedDict[Path, list[Encoding] | ImageError] = OrderedDict()

    def fetch(self, asked: Sequence[Sequence[Path]]) -> list[list[Encoding] | ImageError]:
        """For each question the encodings of its files, or the error of the first that is unreadable."""
        fresh: dict[Path, Opened] = {}
        needed = list(dict.fromkeys(path for paths in asked for path in paths))
        for path in needed:
            if path not in self._held:
                try:
                    fresh[path] = self._read(path)
                except ImageError as error:
                    self._held[path] = error
        self._held.update(self._encode(fresh))
        found: list[list[Encoding] | ImageError] = []
        for paths in asked:
            encodings: list[Encoding] = []
            errors = []
            for held in (self._held[path] for path in paths):
                errors += [held] if isinstance(held, ImageError) else []
                encodings += [] if isinstance(held, ImageError) else held
            found.append(errors[0] if errors else encodings)
        self._ahead.subtract(path for paths in asked for path in paths)
        for path in needed:
            self._held.move_to_end(path)
            if self._ahead[path] <= 0:
                del self._held[path]
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)
        return found

    def _encode(self, fresh: dict[Path, Opened]) -> dict[Path, list[Encoding] | ImageError]:
        """Encodings by file, all in one batch; if that fails, file by file, so that one does not spoil the others."""
        if not fresh:
            return {}
        first = next(iter(fresh))
        try:
            encoded = iter(self._host.encode([image for images in fresh.values() for image in images]))
            return {path: [next(encoded) for _ in images] for path, images in fresh.items()}
        except ConsensusError:
            raise
        except Exception as error:  # anything a model can raise about an image
            raise_if_device_failed(error, str(first))
            if len(fresh) == 1:
                why = f"{type(error).__name__}: {reason(error)}"
                return {first: ModelFailed(f"{first}: the model fails at it ({why})")}
        return {path: found for one, images in fresh.items() for path, found in self._encode({one: images}).items()}
