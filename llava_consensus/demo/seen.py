"""Fate of every patch of one image of an answer, with the grids to draw it on, and the drawing of an answer:
original, kept and merged patches side by side, under question, answer and counts.

Knows how a host lays its patches out: one grid over an image that was padded, cropped or stretched to it, a base view
and a grid of tiles (LLaVA-NeXT), or one grid for each frame of a clip.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from PIL.Image import Image, Resampling

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.media import Clip
from llava_consensus.evaluation.models import Answer, Encoding, Runner
from llava_consensus.evaluation.report import overlay
from llava_consensus.evaluation.report.overlay import MARGIN, PANEL, SIDE, Fates, View, contact_sheet, fates, view
from llava_consensus.evaluation.report.patches import Patches, patches
from llava_consensus.hosts.outcomes import ImageOutcome

SMALL = 120  # of a frame at least


@dataclass(frozen=True)
class Seen:
    views: tuple[View, ...]  # one for each grid of patches that lies over it
    patches: Patches  # kept, merged and dropped ones with their saliencies, numbered through all views
    before: int  # visual tokens the language model would have received, and below those it received
    after: int
    structural: int = 0  # newline tokens among neither

    @property
    def fates(self) -> Fates:
        return fates(self.patches.kept, self.patches.anchors, self.patches.owner)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens that are patches as they were, merged tokens, and patches that were dropped."""
        merged = len({slot for slot in self.patches.owner if slot >= 0}) - len(self.patches.kept)
        return len(self.patches.kept), merged, self.before - sum(slot >= 0 for slot in self.patches.owner)


def seen_by(runner: Runner, shown: Sequence[Image | Clip], encoded: Sequence[Encoding], answer: Answer) -> list[Seen]:
    """Each image of an answer.

    Raises:
        OptionError: for tokens that lie on no grid that is known.
    """
    return [_seen(runner, *one) for one in zip(shown, encoded, answer.outcomes, strict=True)]


def _seen(runner: Runner, shown: Image | Clip, encoded: Encoding, outcome: ImageOutcome) -> Seen:
    assert outcome.origin is not None
    side = round(runner.visual_tokens**0.5) if encoded.tiles.side is None else encoded.tiles.side
    if not side:
        raise OptionError("drawing: the visual tokens of this model form no grid over the image")
    counts = outcome.before, outcome.after, outcome.structural
    tiles, rows = 1 + int(outcome.origin[0].max()), -(-(1 + int(outcome.origin[1].max())) // side)
    if isinstance(shown, Clip):
        found = patches(outcome, side, 0, rows)
        frames = [shown.frames[place * len(shown.frames) // tiles] for place in range(tiles)]
        bounds = (max(64, 960 // tiles), SIDE[1])
        views = [_view(runner, one, (rows, side), number * rows * side, bounds) for number, one in enumerate(frames)]
        return Seen(tuple(views), found, *counts)
    columns = runner.grid_columns(shown.size) if tiles > 1 else 0
    if tiles > 1 and not columns:
        raise OptionError("drawing: of images in tiles, those of LLaVA-NeXT are drawn. Leave the drawing out")
    found = patches(outcome, side, columns, rows)
    if not columns:
        return Seen((_view(runner, shown, (rows, side), 0, SIDE),), found, *counts)
    lines = (len(found.owner) // side**2 - 1) // columns
    base = view(_stretched(shown, (1, 1)), (side, side))
    grid = view(shown, (lines * side, columns * side), side**2)
    return Seen((base, grid), found, *counts)


def _view(runner: Runner, image: Image, grid: tuple[int, int], first: int, side: tuple[int, int]) -> View:
    """The grid over an image as the model's processor fits the image to it."""
    fit = _fit(runner)
    if fit == "crop":
        edge = min(image.size)
        left, top = ((length - edge) // 2 for length in image.size)
        image = image.crop((left, top, left + edge, top + edge))
    return view(image if fit == "pad" else _stretched(image, grid), grid, first, side)


def _stretched(image: Image, grid: tuple[int, int]) -> Image:
    longer = max(image.size)
    size = (longer * grid[1] // max(grid), longer * grid[0] // max(grid))
    return image.resize((max(1, size[0]), max(1, size[1])), Resampling.LANCZOS)


def _fit(runner: Runner) -> str:
    """Mode by which the model's processor fits an image to its tower: `pad`, `crop` or `stretch`."""
    if getattr(getattr(runner.model, "config", None), "image_aspect_ratio", None) == "pad":
        return "pad"
    own = getattr(runner, "image_processor", None)
    processor = getattr(getattr(runner, "processor", None), "image_processor", own)
    if getattr(processor, "do_pad", False):
        return "pad"
    return "crop" if getattr(processor, "do_center_crop", False) else "stretch"


def card(shown: Sequence[Seen], question: str, lines: Sequence[str]) -> Image:
    """One sheet about one answer.

    Args:
        shown: images to draw: one, or the frames of a video.
        question: text of the question.
        lines: below the question: answer, truth, counts.
    """
    views = [(one.fates, grid) for one in shown for grid in one.views]
    kept, merged, _ = map(sum, zip(*(one.counts for one in shown), strict=True))
    panels = [("original" if grid is views[0][1] else " ", overlay.draw(grid)) for _, grid in views]
    for part, title in (("kept", f"kept: {kept} tokens, as they are"), ("merged", f"merged: {merged or 'no'} tokens")):
        drawn = [overlay.selection(grid, known, (part,)) for known, grid in views]
        panels += [(" " if number else title, image) for number, image in enumerate(drawn)]
    if len(views) == 1:
        return contact_sheet(panels, 3, head=(question, *lines))
    # a row for each part, a column for each view
    width = max(SMALL, (3 * PANEL + MARGIN * (3 - len(views))) // len(views))
    return contact_sheet(panels, len(views), head=(question, *lines), width=width)


def counted(shown: Sequence[Seen]) -> str:
    before, after = (sum(getattr(one, name) for one in shown) for name in ("before", "after"))
    kept, merged, dropped = (sum(one.counts[place] for one in shown) for place in range(3))
    parts = [f"{kept} kept"] + ([f"{merged} merged"] if merged else [])
    lost = f"; {dropped} patches dropped" if dropped else ""
    return f"visual tokens the language model saw: {after} of {before} ({' + '.join(parts)}{lost})"
