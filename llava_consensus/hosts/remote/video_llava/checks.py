"""What can be known of an official Video-LLaVA checkpoint without its weights."""

from collections.abc import Mapping
from typing import Any

from llava_consensus.hosts.llava.checks import VIDEO_CONVERSATION, chosen_conversation


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """What belongs in the description of a run beside the model's name.

    Raises:
        OptionError: for a conversation template that the `llava` package does not have.
    """
    return {"conversation": chosen_conversation(conversation, VIDEO_CONVERSATION)}
