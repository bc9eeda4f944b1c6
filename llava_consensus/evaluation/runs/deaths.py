"""Questions at which a process died: after a death they are asked alone, and after two more they are errors.

A crash in native code, the system's memory killer or a device that no longer answers end the whole process, so what is
being asked stands in `asking.json` while it is asked. The next process finds it there. A process that stops in order
leaves none.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.runs.failures import DeviceFailed

NAME = "asking.json"
MOST = 2  # deaths at one question that was asked alone


class Deaths:
    """What former processes of a run died of, and the note of what this one asks.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._alone: dict[int, int] = {}  # deaths at a question that was asked alone, by its index
        asking = self._read()
        for index in asking:
            self._alone[index] = self._alone.get(index, 0) + (len(asking) == 1)

    def suspects(self, questions: Sequence[Question]) -> list[Question]:
        """Those that were being asked when a process died, to be asked alone."""
        return [question for question in questions if 0 <= self._alone.get(question.index, -1) < MOST]

    def fatal(self, questions: Sequence[Question]) -> list[Question]:
        """Those that are not to be asked again."""
        return [question for question in questions if self._alone.get(question.index, -1) >= MOST]

    @contextlib.contextmanager
    def asking(self, questions: Sequence[Question]) -> Iterator[None]:
        """Notes what is asked in the block, and that it was asked once the block ends in order."""
        self._write([question.index for question in questions])
        try:
            yield
        except DeviceFailed:  # as good as dead: the next process must know
            raise
        except BaseException:
            self._write([])
            raise
        for question in questions:
            self._alone.pop(question.index, None)

    def forget(self) -> None:
        """Removes the note: everything was asked."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _read(self) -> list[int]:
        try:
            note = read_json(self._path, kind=dict)
            self._alone = {int(index): int(count) for index, count in note["alone"].items()}
            return [int(index) for index in note["asking"]]
        except (DataError, KeyError, TypeError, ValueError, AttributeError):  # none, or cut: nobody died of anything
            return []

    def _write(self, asking: Sequence[int]) -> None:
        """In place and not synced: it is for a process that dies, not for a machine that does."""
        with contextlib.suppress(OSError):  # a run can do without
            self._path.write_text(json.dumps({"asking": asking, "alone": self._alone}))
