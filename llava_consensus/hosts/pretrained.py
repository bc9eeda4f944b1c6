"""The only caller of `from_pretrained`: configurations, models, tokenizers and processors of checkpoints."""

from pathlib import Path
from typing import Any


def load_pretrained(kind: Any, name: str | Path | None, trust_remote_code: bool = False, **options: Any) -> Any:
    """Calls `kind.from_pretrained(name, **options)`.

    Where `trust_remote_code` is left open, transformers asks standard input whether a checkpoint's code may run, and
    `yes |` answers it. Here it is always given: without it such a checkpoint is refused with a ValueError.
    """
    return kind.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
