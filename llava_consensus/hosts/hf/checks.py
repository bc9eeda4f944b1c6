"""What can be known of a Hugging Face checkpoint without its weights; no torch is imported for it."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from llava_consensus.errors import OptionError

TEMPLATE = "chat template of the model"
NEEDED = (5, 0)  # the version of transformers from which on encoders return what these hosts read


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """What belongs in the description of a run beside the model's name.

    Raises:
        OptionError: for a version of transformers that is not adapted, or a named template: prompts are put into the
            model's own.
    """
    check_version(version("transformers"))
    if conversation not in (None, TEMPLATE):
        raise OptionError(
            f"conversation={conversation!r}: {model} is a model of transformers, whose prompts are put into its own "
            "chat template. Leave --conversation out"
        )
    return {"conversation": TEMPLATE}


def check_version(installed: str, oldest: tuple[int, int] = NEEDED) -> None:
    """Raises OptionError for a version of transformers that these hosts do not work with."""
    numbers = tuple(int(part) for part in installed.split(".")[:2])
    if numbers < oldest:
        raise OptionError(
            f"transformers {installed}: methods on this model of transformers need >= {oldest[0]}.{oldest[1]}. "
            "Type: pip install -U transformers"
        )
