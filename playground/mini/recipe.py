"""What may differ between two trainings of the language model: its seed, rotation, first weights and depth."""

from __future__ import annotations

import argparse
import dataclasses


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One training. The defaults are those of the committed model."""

    seed: int = 0  # further seeds draw other first weights, scenes and questions
    theta: float = 1e6  # of the rotation; this one is slow enough that most dimensions compare words at any distance
    matchers: bool = True  # half of the heads start as matchers of words and patches
    layers: int = 4
    hidden: int = 192

    def seeds(self, *parts: int) -> list[int]:
        """The seed of a generator; that of seed 0 is the one which the committed model was trained with."""
        return [*parts, self.seed] if self.seed else list(parts)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """The same options for every stage."""
        parser.add_argument("--seed", type=int, default=Recipe.seed)
        parser.add_argument("--theta", type=float, default=Recipe.theta, help="base of the rotary positions")
        parser.add_argument("--matchers", action=argparse.BooleanOptionalAction, default=Recipe.matchers)
        parser.add_argument("--layers", type=int, default=Recipe.layers, help="of the language model")
        parser.add_argument("--hidden", type=int, default=Recipe.hidden, help="width of the language model")

    @staticmethod
    def of(options: argparse.Namespace) -> Recipe:
        """What was typed."""
        return Recipe(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Recipe)})

    def arguments(self) -> list[str]:
        """What to type."""
        matchers = "--matchers" if self.matchers else "--no-matchers"
        numbers = [("--seed", self.seed), ("--theta", self.theta), ("--layers", self.layers), ("--hidden", self.hidden)]
        return [matchers, *(str(part) for pair in numbers for part in pair)]
