"""The state of a training, in the folder `.training` of the checkpoint that it becomes: what is trained, and states to
go on from, each of which counts only when its last file is there.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import Record, read_json, remove_leftovers, write_json
from llava_consensus.evaluation.locks import take_lock

FOLDER, DESCRIPTION, COMPLETE, RESULT = ".training", "training.json", "complete", "training.json"
log = logging.getLogger(__name__)
PREFIX = "checkpoint-"  # of states, as the Trainer names them
WEIGHTS = "trained.safetensors"  # of a state: the tensors that are trained


class State:
    """The folder of one training.

    Args:
        out: the checkpoint it becomes.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / FOLDER

    @contextlib.contextmanager
    def opened(self, description: Record, first: bool = True) -> Iterator[None]:
        """The folder with its description, locked while the body runs by the `first` of several processes.

        Raises:
            DataError: where the folder holds another training, or a checkpoint that is none of ours.
            BusyError: where another process works in it.
        """
        if not first:
            yield
            return
        if self.out.exists() and any(self.out.iterdir()) and not self.folder.is_dir():
            raise DataError(f"{self.out}: is there already, and no training made it. Give another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(self.folder / "lock", "this training")
        try:
            remove_leftovers(self.folder)
            self._describe(description)
            yield
        finally:
            os.close(lock)

    def _describe(self, description: Record) -> None:
        file = self.folder / DESCRIPTION
        if not file.exists():
            write_json(file, description)
            return
        before = read_json(file, f"Remove {self.out} to begin anew", dict)
        if before.get("versions") != description.get("versions"):
            log.warning(f"{self.out}: was begun with other versions of packages, which training.json names")
        names = {*before, *description} - {"versions"}
        changed = sorted(name for name in names if before.get(name) != description.get(name))
        if changed:
            was = ", ".join(
                f"{name}: {before.get(name)!r} there, {description.get(name)!r} now" for name in changed[:3]
            )
            raise DataError(
                f"{self.out}: holds a training of another plan ({was}). Give another --out, or the arguments it had"
            )

    @property
    def result(self) -> Record | None:
        """What a finished training has said of itself; None for one that is not finished."""
        file = self.out / RESULT
        return read_json(file, f"Remove {self.out} to begin anew", dict) if file.is_file() else None

    def last(self) -> Path | None:
        """The latest state that is complete; None where there is none."""
        steps = {int(path.name.removeprefix(PREFIX)): path for path in self.folder.glob(f"{PREFIX}*[0-9]")}
        complete = [step for step, path in steps.items() if (path / COMPLETE).is_file()]
        return steps[max(complete)] if complete else None


def mark_complete(folder: Path) -> None:
    """Says that everything of a state is on the disk."""
    write_json(folder / COMPLETE, {})
