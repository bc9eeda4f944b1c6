"""What can be known of a Hugging Face checkpoint without its weights; no torch is imported for it."""

from typing import Any

from llava_consensus.errors import OptionError

TEMPLATE = "chat template of the model"


def check(model: str, conversation: str | None, videos: bool) -> dict[str, Any]:
    """What belongs in the description of a run beside the model's name.

    Raises:
        OptionError: for a named template: prompts are put into the model's own.
    """
    if conversation not in (None, TEMPLATE):
        raise OptionError(
            f"conversation={conversation!r}: {model} is a model of transformers, whose prompts are put into its own "
            "chat template. Leave --conversation out"
        )
    return {"conversation": TEMPLATE}
