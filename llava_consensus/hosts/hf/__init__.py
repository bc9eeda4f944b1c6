"""Models of transformers as hosts: one small file for each family, and what they share, which is how a model is viewed
(`model.py`) and how prompts enter it (`generate.py`).

from llava_consensus import attach
with attach(model, "consensusdrop", tokens=64):
    model.generate(**processor(...), max_new_tokens=64)
"""

from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Any:
    """`reduce`, imported when it is asked for."""
    if name != "reduce":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llava_consensus.hosts.hf.generate import reduce

    return reduce


def text_side(checkpoint: str) -> str:
    """Folder of the CLIP model that `model convert` has put beside the weights of a checkpoint; empty where none is."""
    config = next(Path(checkpoint).glob("official/*/config.json"), None)
    return "" if config is None else str(config.parent)
