"""How the budget of a picture is shared over its tiles."""

from llava_consensus.hosts.base import Model
from llava_consensus.hosts.tower.inside import acts_inside
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method


class Shares:
    """What an attachment knows of budgets: those of a picture, and of each of its tiles."""

    model: Model
    method: Method
    budget: Budget | Share

    def budgets(self, tiles: int, available: int, video: bool = False) -> list[Budget]:
        """Budgets of a picture of so many tiles and visual tokens: one for all, or equal shares of the most tiles a
        picture of this model can have; the frames of a video share all of it. A share of a picture's own tokens is
        divided over its own tiles. A budget of all its tokens leaves a picture as it is.
        """
        tower, method = self.model.tower, self.method
        if acts_inside(method) and tower is not None:
            available = tiles * tower.tokens  # known before the sequence is
        budget = self.budget.of(available)
        if not method.reduces or budget.tokens >= available:
            return [Budget(max(available, 1))]
        if tiles == 1 or method.tile_budget == "global":
            return [budget]
        own_tiles = video or isinstance(self.budget, Share)
        return budget.share(tiles if own_tiles else max(tiles, self.model.most_tiles))[:tiles]

    def tile_tokens(self, tiles: int) -> list[int]:
        """Budget of each tile of a picture, for methods inside the tower."""
        tower = self.model.tower
        size = tower.tokens if tower is not None else 1
        shares = self.budgets(tiles, tiles * size)
        return [min(share.tokens, size) for share in shares] if len(shares) == tiles else [size] * tiles

    @property
    def reads_prompts(self) -> bool:
        """Whether what is left of a picture depends on the question asked about it."""
        tower = self.model.tower
        most_tokens = self.model.most_tiles * (tower.tokens if tower is not None else 0)
        return self.method.reduces and self.budget.of(most_tokens).tokens < most_tokens and self.method.reads_prompt
