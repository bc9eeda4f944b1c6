"""What is known of Qwen-VL and CogVLM without the code that their checkpoints carry."""

from collections.abc import Mapping
from typing import Any

from llava_consensus.hosts.remote.cogvlm import CogVLM, EvaTower
from llava_consensus.hosts.remote.qwen_vl import QwenVL, QwenVLTower
from llava_consensus.hosts.remote.unseen import unseen

TOWERS = {CogVLM: EvaTower, QwenVL: QwenVLTower}


def view(architecture: str, family: str, options: Mapping[str, str]) -> Any:
    """The view of a family, named as `file:class`, over a model that is not there."""
    (view_class,) = (found for found in TOWERS if found.__name__ == family.partition(":")[2])
    return unseen(view_class, TOWERS[view_class], view_class.check)
