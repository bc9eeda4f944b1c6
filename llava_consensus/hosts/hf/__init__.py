"""Models of transformers as hosts: one small file for each family, and what they share, which is how a model is viewed
(`model.py`) and how prompts enter it (`seam.py`).

from llava_consensus import attach
with attach(model, "consensusdrop", tokens=64):
    model.generate(**processor(...), max_new_tokens=64)
"""

from typing import Any

from llava_consensus.errors import OptionError

TEXT_SIDE = "official/*/config.json"  # of the CLIP model that `model convert` puts beside a checkpoint
TESTED = ((5, 19), (5, 24))  # versions of transformers: the oldest, and the first that is too new


def __getattr__(name: str) -> Any:
    """`reduce`, imported when it is asked for."""
    if name != "reduce":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llava_consensus.hosts.hf.seam import reduce

    return reduce


def check_version(installed: str) -> None:
    """Raises OptionError for a version of transformers that these hosts do not work with. From 5.24 on the cache that
    models are given is `cache`: watched by its former name, every step would be taken for a new prompt.
    """
    numbers = tuple(int(part) for part in installed.split(".")[:2])
    if not TESTED[0] <= numbers < TESTED[1]:
        raise OptionError(
            f"transformers {installed}: methods on models of transformers run on 5.19 to 5.23. "
            "Type: pip install 'transformers>=5.19,<5.24'"
        )
