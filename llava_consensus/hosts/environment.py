"""What hosts run on: versions of transformers, the allocator of the process, how checkpoints are loaded and tiles laid
out. No heavy imports.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from llava_consensus.errors import OptionError

# How LLaVA-NeXT lays out the tiles of an image, a base view and then a grid of tiles. `stock` follows the checkpoint:
# the grid that fits the image best, rows and columns of padding cut away, a newline after each row. `2880` is
# the layout behind the numbers of the paper, VisPruner and CDPruner: always 2 x 2 tiles, nothing cut away, no
# newlines, so that every image has 5 x 576 tokens and 640 of them are 128 of each tile.
STOCK, FIXED = LAYOUTS = ("stock", "2880")
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


def load_pretrained(kind: Any, name: str | Path | None, trust_remote_code: bool = False, **options: Any) -> Any:
    """Calls `kind.from_pretrained(name, **options)`, and is its only caller: of configurations, models, tokenizers and
    processors.

    Where `trust_remote_code` is left open, transformers asks standard input whether a checkpoint's code may run, and
    `yes |` answers it. Here it is always given: without it such a checkpoint is refused with a ValueError.
    """
    return kind.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
