"""Versions of transformers that hosts run on, the allocator of the process, and the folder of caches."""

import os
from importlib.metadata import version
from pathlib import Path

from llava_consensus.errors import OptionError

REMEDY = "Type: pip install 'transformers>=5.19,<{}'"  # for a version of transformers that is not adapted
OFFICIAL = f"{REMEDY.format('5.24')} && pip install --no-deps llava-torch==1.2.2.post1"  # its own pins are stale


def check_version(transformers: str) -> None:
    """Raises OptionError for a version of transformers on whose own models methods were not seen to work."""
    if not (5, 19) <= _numbers(transformers) < (5, 25):
        raise OptionError(
            f"transformers {transformers}: methods on models of transformers run on 5.19 to 5.24. {REMEDY.format(5.25)}"
        )


def check_llava_version() -> None:
    """Raises OptionError for a version of transformers on which official LLaVA does not run: the metadata of this
    project can only state the requirements of transformers models. From 5.24 on generate() hands models a `cache`, and
    LLaVA's own code takes `past_key_values`.
    """
    installed = version("transformers")
    if _numbers(installed) != (4, 37) and not (5, 19) <= _numbers(installed) < (5, 24):
        raise OptionError(
            f"transformers {installed}: official LLaVA runs here on 4.37.2, its own pin, and on 5.19 to 5.23. "
            f"{OFFICIAL}, or convert the checkpoint to transformers' own LLaVA: llava-consensus model convert"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def keep_freed_memory() -> None:
    """Lets glibc see one large block come and go. From then on it takes smaller blocks from its heap, and gives the
    heap back to the system only from twice that size on (mallopt(3), M_MMAP_THRESHOLD). Otherwise the attention maps of
    a vision tower are mapped again and filled with zeros page by page in every layer: on LLaVA's own pins that was a
    third to a half of the time to the first token (docs/efficiency.md). Other C libraries ignore it.
    """
    import torch

    torch.empty(31 << 20, dtype=torch.uint8)  # bytes, freed at once; blocks above 32 MiB never raise the threshold


def cache_folder(name: str) -> Path:
    """Folder of one kind of cached files, below XDG_CACHE_HOME or ~/.cache. It is not made."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "llava-consensus" / name
