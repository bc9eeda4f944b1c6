"""Models as the evaluation asks them: found and loaded (`loading.py`), asked (`base.py` and a file for each kind of
model), held against what they compute themselves (`check_host.py`), and written in another layout (`convert.py`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llava_consensus.evaluation.models.loading import CLIPS, Checkpoint, Loading, check, find, load, name_of, pinned

if TYPE_CHECKING:
    from llava_consensus.evaluation.models.base import Answer, Clip, Encoded, Host, Prompt

__all__ = [
    "CLIPS",
    "Answer",
    "Checkpoint",
    "Clip",
    "Encoded",
    "Host",
    "Loading",
    "Prompt",
    "check",
    "find",
    "load",
    "name_of",
    "pinned",
]


def __getattr__(name: str) -> Any:
    """Classes that need torch, imported when they are asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.base"), name)
