"""Models of transformers as hosts: one small file for each family, and what they share, which is how a model is viewed
(`model.py`) and how prompts enter it (`seam.py`).

from llava_consensus import attach
with attach(model, "consensusdrop", tokens=64):
    model.generate(**processor(...), max_new_tokens=64)
"""

from typing import Any

from llava_consensus.errors import OptionError

NEEDED = (5, 0)  # the version of transformers from which on encoders return what these hosts read


def __getattr__(name: str) -> Any:
    """`reduce`, imported when it is asked for."""
    if name != "reduce":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llava_consensus.hosts.hf.seam import reduce

    return reduce


def check_version(installed: str, oldest: tuple[int, int] = NEEDED) -> None:
    """Raises OptionError for a version of transformers that these hosts do not work with."""
    numbers = tuple(int(part) for part in installed.split(".")[:2])
    if numbers < oldest:
        raise OptionError(
            f"transformers {installed}: methods on this model of transformers need >= {oldest[0]}.{oldest[1]}. "
            "Type: pip install -U transformers"
        )
