"""What a user may name as a model, and where its files are: `find("owner/name")`; and what of transformers' own reports
on loading nobody needs to read.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llava_consensus.errors import DataError, OptionError
from llava_consensus.hosts import hub

SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"}
FETCH = "llava-consensus fetch-mini puts the embedded model there"
OWN = "checkpoints"  # the folder in which a checkpoint is never taken for a name of the hub


class Checkpoint(NamedTuple):
    """Where a model's files are."""

    name: str  # as the user named it
    folder: Path
    commit: str | None = None  # of a model of the hub

    def files(self) -> list[Path]:
        """What can change answers, downloaded where it is not here; a vision tower in a folder below included.

        Raises:
            DataError: for a model of the hub whose weights cannot be had.
        """
        if self.commit:
            hub.fetch(self.name, self.folder)
            return hub.weights(self.folder)
        found = (*self.folder.glob("[!.]*"), *self.folder.glob("[!.]*/[!.]*"))
        return sorted(path for path in found if path.suffix in SUFFIXES)


def find(model: str, revision: str | None = None) -> Checkpoint:
    """A model's folder with its configuration; of a model of the hub no weights are downloaded yet.

    Raises:
        DataError: for a model that is not there.
        OptionError: for a revision of a folder.
    """
    check_checkpoint(model)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = hub.snapshot(model, revision)
        return Checkpoint(model, folder, folder.name)
    if revision is not None:
        raise OptionError(f"revision={revision!r}: {model} is a folder, and only models of the hub have revisions")
    return Checkpoint(model, folder)


def check_checkpoint(model: str) -> None:
    """Raises DataError for a local folder that is no checkpoint; a name of the form owner/name is left to the hub."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DataError(f"model {model!r}: the folder has no config.json, so it is no checkpoint.{_checkpoints()}")
        return
    local = model.startswith((".", "/", "~", f"{OWN}/")) or Path(folder.parts[0] if folder.parts else ".").is_dir()
    if folder.exists() or local or not hub.NAME.fullmatch(model):
        raise DataError(f"model {model!r}: no such folder.{_checkpoints()} A model of the hub is named owner/name")


def _checkpoints() -> str:
    """What there is instead."""
    folders = sorted(str(path.parent) for path in Path(OWN).glob("*/config.json"))
    return f" Here are: {', '.join(folders)}." if folders else f" There are none in {OWN}/ either: {FETCH}."


@contextlib.contextmanager
def without_unused_report() -> Iterator[None]:
    """Keeps transformers from listing weights a model has no place for, as of a whole CLIP model where only one side is
    wanted. A report of missing or misshapen weights is shown.
    """
    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(_needs_reading)
    try:
        yield
    finally:
        log.removeFilter(_needs_reading)


def _needs_reading(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if "were not used when initializing" in text:  # transformers 4, which has a message of its own for missing weights
        return False
    return "UNEXPECTED" not in text or any(word in text for word in ("MISSING", "MISMATCH", "CONVERSION"))
