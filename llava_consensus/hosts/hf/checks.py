"""What the harness may ask of a Hugging Face checkpoint: nothing yet."""

from typing import Any

from llava_consensus.hosts.hf.host import load


def check(model: str, conversation: str | None, videos: bool) -> dict[str, Any]:
    """Raises OptionError: see `host.load`."""
    found: dict[str, Any] = load(model, "auto", "auto")
    return found
