"""The embedded model and the generator of its benchmarks, copied to the working folder: the defaults of every command
name them relative to that folder. An installed package carries both (setup.py), a checkout has them beside the package.
"""

import os
import runpy
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

from llava_consensus.errors import DataError

HERE = Path(__file__).parent
PARTS = ("checkpoints/llava-mini", "playground/mini")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "eval", ".eval-*", ".work")


def source() -> Path:
    """The folder that has both parts.

    Raises:
        DataError: if they were left out, as a build from elsewhere may do.
    """
    for folder in (HERE / "embedded", HERE.parents[2]):
        if all((folder / part).is_dir() for part in PARTS):
            return folder
    raise DataError("the embedded model is not in this installation. Install a release, or work in a checkout")


def remove_leftovers(start: Path) -> None:
    """Removes folders `<start><process id>` of processes that were killed."""
    for folder in start.parent.glob(f"{start.name}[0-9]*"):
        number = folder.name.removeprefix(start.name)
        if number.isdecimal() and not Path("/proc", number).exists() and Path("/proc").is_dir():
            shutil.rmtree(folder, ignore_errors=True)


def copy(to: Path) -> tuple[Path, Path]:
    """Copies missing files; returns the folders of the model and the generator below `to`. The model is in the
    layout of transformers, which needs no other package; on transformers 4 in that of LLaVA: only that runs there.
    """
    found = source()
    checkpoint, generator = (to / part for part in PARTS)
    if not checkpoint.exists() and not version("transformers").startswith("4."):
        from llava_consensus.evaluation.models.convert import convert

        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        convert(found / PARTS[0], checkpoint)
    for part, target in zip(PARTS, (checkpoint, generator), strict=True):
        if not target.exists():
            remove_leftovers(target.with_name(f"{target.name}.new-"))
            fresh = target.with_name(f"{target.name}.new-{os.getpid()}")
            try:
                shutil.copytree(found / part, fresh, ignore=LEFT_OUT)
                os.replace(fresh, target)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    return checkpoint, generator


def generate(to: Path) -> None:
    """Writes the mini benchmarks below `to`, unless they are complete: the same files every time."""
    arguments, path = ["build", "--out", str(to / PARTS[1])], [str(to.resolve()), *sys.path]
    with patch.object(sys, "argv", arguments), patch.object(sys, "path", path):
        runpy.run_module("playground.mini.build", run_name="__main__")
