"""Two vision towers in one model, as Video-LLaVA has them: one for clips and one for pictures, of one shape."""

from typing import Any

from torch import Tensor

from llava_consensus.hosts.base import Tap
from llava_consensus.reduction.tokens import Need


class TwoTowers:
    """Both towers as one; methods inside a tower are not adapted to two.

    Args:
        clips, pictures: the towers.
        class_is_token: whether the class token of a frame is a token.
    """

    members: Tensor | None = None

    def __init__(self, clips: Any, pictures: Any, class_is_token: bool) -> None:
        clips.class_is_token = class_is_token
        self._towers = clips, pictures
        self.tokens, self.side, self.classes, self.offers = clips.tokens, clips.side, clips.classes, clips.offers
        self.blocks, self.feature_block = clips.blocks, clips.feature_block
        self.scale, self.project, self.encode = clips.scale, clips.project, clips.encode

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Of both towers, one of which runs at a time."""
        return [tap for tower in self._towers for tap in tower.taps(needs, features, attention)]
