"""Sizes of a model and a prompt, from which costs follow."""

from typing import NamedTuple

from llava_consensus.errors import OptionError


class Shape(NamedTuple):
    """Sizes of a model and of one prompt that decide what a prefill costs."""

    layers: int  # decoder layers
    width: int  # D
    heads: int
    kv_heads: int
    head_width: int
    inner: int  # of the gated MLP
    vocabulary: int
    blocks: int  # vision blocks that are run
    vision_width: int  # D_v
    vision_heads: int
    vision_inner: int
    patches: int  # of one tile
    patch_values: int  # numbers in the pixels of one patch
    text: int  # rows that are not visual tokens
    question: int | None = None  # of these, rows after the last picture; None where nobody knows
    tiles: int = 1  # of one picture: the most it can have
    pictures: int = 1  # of the prompt
    classes: int = 1  # class tokens of the vision tower
    projector: int = 0  # weights of the projector, multiply-adds for one patch
    number_bytes: int = 2  # of one number in the cache
    feature_blocks: int = 0  # vision blocks up to the one that feeds the projector; 0: all but the last, as in LLaVA
    joint: int = 768  # width of the space that CLIP's pictures and texts share; of ViT-L, as the next
    text_tower: float = 2.0 * 77 * 12 * 12 * 768**2  # FLOPs of CLIP's text tower for one segment of a question

    @property
    def available(self) -> int:
        """N, visual tokens of one picture."""
        return self.patches * self.tiles

    def known(self, name: str) -> int:
        """A size that may be missing. OptionError where it is."""
        value: int | None = getattr(self, name)
        if value is None:
            raise OptionError(f"shape: {name} is not known, and the cost depends on it. Give Shape(..., {name}=...)")
        return value
