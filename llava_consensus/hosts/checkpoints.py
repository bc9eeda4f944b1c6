"""What a user may name as a model, checked before weights load: `check_checkpoint("owner/name")`; and what of
transformers' own reports on loading nobody needs to read.
"""

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from llava_consensus.errors import DataError

DTYPES = ("auto", "float32", "float16", "bfloat16")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_checkpoint(model: str) -> None:
    """Raises DataError for a local folder that is no checkpoint; a name of the form owner/name is left to the hub."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DataError(f"model {model!r}: the folder has no config.json, so it is no checkpoint.{_checkpoints()}")
        return
    local = model.startswith((".", "/", "~")) or Path(folder.parts[0] if folder.parts else ".").is_dir()
    if folder.exists() or local or not HUB_NAME.fullmatch(model):
        raise DataError(f"model {model!r}: no such folder.{_checkpoints()} A model of the hub is named owner/name")


def _checkpoints() -> str:
    folders = sorted(str(path.parent) for path in Path("checkpoints").glob("*/config.json"))
    return f" Here are: {', '.join(folders)}." if folders else " There are none in checkpoints/ either."


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
