"""What official LLaVA can be told, checked before any weight loads; no torch is imported for it."""

import json
from pathlib import Path
from typing import Any

from llava_consensus.errors import unknown_name

CONVERSATION = "vicuna_v1"  # the template of LLaVA-1.5, where nobody names another


def check(model: str, conversation: str | None) -> dict[str, Any]:
    """What belongs in the description of a run beside the model's name, defaults filled in.

    Raises:
        OptionError: for a conversation template that official LLaVA does not have.
    """
    if conversation is not None:
        check_conversation(conversation)
    return {"conversation": conversation or CONVERSATION}


def check_conversation(name: str) -> None:
    """Raises OptionError for a conversation template that official LLaVA does not have."""
    from llava.conversation import conv_templates  # only now: it takes seconds

    if name not in conv_templates:
        raise unknown_name("conversation", name, conv_templates)


def tower_beside(path: str) -> dict[str, str]:
    """Config changes that point the loader at a vision tower kept inside the checkpoint's own folder; none for other
    checkpoints.
    """
    folder = Path(path)
    if not folder.is_dir():
        return {}
    name = json.loads((folder / "config.json").read_text()).get("mm_vision_tower", "")
    beside = folder / Path(name).name
    return {"mm_vision_tower": str(beside)} if name and (beside / "config.json").is_file() else {}
