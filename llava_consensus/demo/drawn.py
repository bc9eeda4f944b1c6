"""Drawings of an answer: original, kept and merged patches side by side, under question, answer and counts."""

from collections.abc import Sequence

from PIL.Image import Image

from llava_consensus.demo.seen import Seen
from llava_consensus.evaluation.report import overlay
from llava_consensus.evaluation.report.overlay import MARGIN, PANEL, contact_sheet

STRIP = 3 * PANEL + 2 * MARGIN  # width of the frames of a video in pixels
SMALL = 120  # of a frame at least


def card(shown: Sequence[Seen], question: str, lines: Sequence[str]) -> Image:
    """One sheet about one answer.

    Args:
        shown: its pictures: one, or the frames of a video.
        question: what was asked.
        lines: below the question: answer, truth, counts.
    """
    drawn = [triple for one in shown for triple in _triples(one)]
    head = (question, *lines)
    if len(drawn) < 3:
        panels = [panel for triple in drawn for panel in triple]
        return contact_sheet(panels, 3, head=head)
    width = max(SMALL, (STRIP - MARGIN * (len(drawn) - 1)) // len(drawn))
    titles = ("original", "kept, as they are", "merged")
    rows = [[triple[part][1] for triple in drawn] for part in range(3)]
    panels = [
        (title if number == 0 else " ", image)
        for title, row in zip(titles, rows, strict=True)
        for number, image in enumerate(row)
    ]
    return contact_sheet(panels, len(drawn), head=head, width=width)


def counted(shown: Sequence[Seen]) -> str:
    """How many tokens became of how many patches, in words."""
    before, after = (sum(getattr(one, name) for one in shown) for name in ("before", "after"))
    kept, merged, dropped = (sum(one.counts[place] for one in shown) for place in range(3))
    parts = [f"{kept} kept"] + ([f"{merged} merged"] if merged else [])
    lost = f"; {dropped} patches dropped" if dropped else ""
    return f"visual tokens the language model saw: {after} of {before} ({' + '.join(parts)}{lost})"


def _triples(one: Seen) -> list[tuple[tuple[str, Image], tuple[str, Image], tuple[str, Image]]]:
    """Original, kept and merged patches of each view, with captions."""
    kept, merged, _ = one.counts
    several = len(one.views) > 1
    words = (
        "kept, as they are" if several else f"kept: {kept} tokens, as they are",
        "merged" if several and merged else f"merged: {merged or 'no'} tokens",
    )
    found = []
    for number, view in enumerate(one.views):
        place = f" ({one.titles[number]})" if one.titles and len(one.views) < 3 else ""
        found.append(
            (
                (f"original{place}", overlay.picture(view)),
                (words[0], overlay.selection(view, one.fates, ("kept",))),
                (words[1], overlay.selection(view, one.fates, ("merged",))),
            )
        )
    return found
