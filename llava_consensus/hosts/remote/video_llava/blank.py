"""What is known of the official Video-LLaVA without the package of its authors."""

from collections.abc import Mapping
from typing import Any

from llava_consensus.hosts.remote.unseen import unseen
from llava_consensus.hosts.remote.video_llava.adapter import BindTower, VideoLlava


def view(architecture: str, family: str, options: Mapping[str, str]) -> Any:
    """A view over a model that is not there."""
    return unseen(VideoLlava, BindTower, VideoLlava.check_method)
