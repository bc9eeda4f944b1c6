"""What can be known of a checkpoint with code of its own before any of that code runs; no torch is imported for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava_consensus.errors import OptionError, unknown_name
from llava_consensus.evaluation.files import read_json

OWN = "prompts of the model's own code"
TEMPLATES = ("base", "chat", "chat_old", "vqa")  # of CogVLM's `build_conversation_input_ids`


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """What belongs in the description of a run beside the model's name.

    Raises:
        OptionError: for a template the model does not have.
    """
    if conversation in (None, OWN):
        return {"conversation": OWN}
    file = Path(model).expanduser() / "config.json"
    config = read_json(file, "Fetch the checkpoint again", dict) if file.is_file() else {}
    if "QWenLMHeadModel" in (config.get("architectures") or []):
        raise OptionError(f"conversation={conversation!r}: Qwen-VL has one prompt of its own. Leave --conversation out")
    if conversation not in TEMPLATES:
        raise unknown_name("conversation", str(conversation), TEMPLATES)
    return {"conversation": conversation}
