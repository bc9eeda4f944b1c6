"""What is known of InternVL-Chat without the package of its authors."""

from collections.abc import Mapping
from typing import Any

from llava_consensus.hosts.remote.internvl_chat.adapter import InternTower, InternVLChat
from llava_consensus.hosts.remote.unseen import unseen


def view(architecture: str, family: str, options: Mapping[str, str]) -> Any:
    """A view over a model that is not there."""
    return unseen(InternVLChat, InternTower, InternVLChat.check_method)
