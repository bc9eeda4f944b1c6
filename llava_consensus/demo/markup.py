"""An answered request as HTML: one column for each side, its picture with what `page.js` shows of a patch under the
pointer. Pictures are inside the text as data addresses, so that nothing else is fetched. Pure functions.
"""

import base64
import io
import json
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from PIL.Image import Image

from llava_consensus.demo.desk import VIEWS, SideAnswer
from llava_consensus.demo.seen import SALIENCIES, Seen
from llava_consensus.evaluation.report import overlay
from llava_consensus.evaluation.report.overlay import View

WIDTH = 560  # of a picture in pixels
HINT = "Point at a patch, or touch it, to see its rank, its saliencies and where it went."
KEPT, MERGED, DROPPED = "kept", "merged", "dropped"


def results(answers: Sequence[SideAnswer], view: str) -> str:
    """Both sides of an answered request, side by side."""
    return f'<div class="cd-results">{"".join(_column(one, view) for one in answers)}</div>'


def message(text: str) -> str:
    """Something the visitor must know."""
    return f'<p class="cd-message" role="alert">{escape(text)}</p>' if text else ""


def thumbnail(image: Image) -> str:
    """The picture that is asked about."""
    return f'<img class="cd-thumbnail" alt="the picture you ask about" src="{address(image)}">'


def address(image: Image, width: int = WIDTH) -> str:
    """A picture as a data address, at most `width` pixels wide."""
    shown = image.convert("RGB")
    if shown.width > width:
        shown = shown.resize((width, max(1, round(shown.height * width / shown.width))))
    content = io.BytesIO()
    shown.save(content, "JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()


def _column(one: SideAnswer, view: str) -> str:
    head = (
        f'<h3>{escape(one.side.title)}</h3><p class="cd-question">{escape(one.side.question)}</p>'
        if one.side.question
        else ""
    )
    if one.error:
        return f'<section class="cd-column">{head}{message(one.error)}</section>'
    body = "" if one.seen is None else "".join(_drawn(one.seen, number, view) for number in range(len(one.seen.views)))
    foot = f'<p class="cd-readout" aria-live="polite">{HINT}</p>' if body else message("no drawing for this model")
    return f'<section class="cd-column">{head}{_answer(one)}{_facts(one)}{body}{foot}</section>'


def _answer(one: SideAnswer) -> str:
    truth = ""
    if one.side.truth:
        right = one.answer.strip().lower().rstrip(".") == one.side.truth.strip().lower()
        mark = ("&#10003; right", "cd-right") if right else ("&#10007; wrong", "cd-wrong")
        truth = f' <span class="{mark[1]}">{mark[0]}</span> <small>truth: {escape(one.side.truth)}</small>'
    full = f'<small class="cd-full">from all tokens: {escape(one.full) or "nothing"}</small>'
    return f'<p class="cd-answer"><b>{escape(one.answer) or "(no answer)"}</b>{truth}{full}</p>'


def _facts(one: SideAnswer) -> str:
    seen, facts = one.seen, []
    if seen is not None:
        counts = zip(seen.counts, ("kept", "merged", "dropped"), strict=True)
        parts = [f"{count} {word}" for count, word in counts if count]
        facts.append(f"<b>{seen.after}</b> of {seen.before} tokens <small>{', '.join(parts)}</small>")
    rounds = f"median of {one.rounds} rounds" if one.rounds > 1 else "measured once"
    if one.milliseconds is not None and one.full_milliseconds is not None:
        facts.append(
            f"<b>{one.milliseconds:.0f} ms</b> to the first token "
            f"<small>all tokens: {one.full_milliseconds:.0f} ms; {rounds}</small>"
        )
    return f'<ul class="cd-facts">{"".join(f"<li>{fact}</li>" for fact in facts)}</ul>'


def _drawn(seen: Seen, number: int, view: str) -> str:
    """One view of a picture with its patches as data; a title above it where there are several."""
    grid = seen.views[number]
    title = f"<h4>{escape(seen.titles[number])}</h4>" if seen.titles else ""
    kind = VIEWS[view]
    if kind in SALIENCIES and getattr(seen.patches, kind) is None:
        lack = message(f"this method has no {kind} saliency; here is what it kept")
        kind = "selection"
    else:
        lack = ""
    left, top, right, bottom = (edge / grid.cell for edge in grid.box)
    data = escape(json.dumps(table(seen, grid), separators=(",", ":")), quote=True)
    alt = escape(f"{view}, {grid.rows} by {grid.columns} patches")
    return (
        f'{title}{lack}<div class="cd-picture" tabindex="0" role="application" aria-label="{alt}" data-view="{kind}" '
        f'data-patches="{data}"><img alt="{alt}" src="{address(_painted(seen, grid, kind))}">'
        f'<svg viewBox="{left:.4f} {top:.4f} {right - left:.4f} {bottom - top:.4f}" preserveAspectRatio="none">'
        '<path class="cd-group"></path><path class="cd-edge"></path><path class="cd-here"></path></svg></div>'
    )


def _painted(seen: Seen, grid: View, kind: str) -> Image:
    if kind in SALIENCIES:
        values = getattr(seen.patches, kind)
        return overlay.heat(grid, values[grid.first : grid.first + grid.rows * grid.columns])
    if kind == "picture":
        return overlay.picture(grid)
    return overlay.selection(grid, seen.fates, ("kept",) if kind == "kept" else ("kept", "merged"))


def table(seen: Seen, grid: View) -> dict[str, Any]:
    """Data of the patches of one view for `page.js`.

    Returns:
        rows and columns of the grid, and for each of its patches `slot`, the output token it is in from 1 on (0 where
        it was dropped); `kept`; `head`, whether it is the anchor of a merged token; `rank` from 1 on, by what the
        method ranked by, and the saliencies as multiples of their mean, where the method has them.
    """
    here = slice(grid.first, grid.first + grid.rows * grid.columns)
    found: dict[str, Any] = {"rows": grid.rows, "columns": grid.columns, "count": seen.before}
    slots: dict[int, int] = {}
    for slot in seen.patches.owner:
        if slot >= 0:
            slots.setdefault(slot, len(slots) + 1)
    sizes = {slots[slot]: seen.patches.owner.count(slot) for slot in slots}
    own = [slots.get(slot, 0) for slot in seen.patches.owner[here]]
    found["slot"] = own
    found["size"] = [sizes.get(slot, 0) for slot in own]
    found["kept"] = seen.fates.is_kept[here].astype(int).tolist()
    anchors = set(seen.patches.anchors)
    found["head"] = [int(place in anchors) for place in range(here.start, here.stop)]
    by = next((name for name in ("fused", "vision", "cross") if getattr(seen.patches, name) is not None), None)
    if by is not None:
        found["by"], found["rank"] = by, ranks(getattr(seen.patches, by))[here].tolist()
    for name in SALIENCIES:
        values = getattr(seen.patches, name)
        if values is not None:
            multiples = np.nan_to_num(np.asarray(values) / (np.nanmean(values) or 1))
            found[name] = multiples[here].round(2).tolist()
    return found


def ranks(values: Sequence[float]) -> np.ndarray:
    """[N] ranks from 1 on, the largest value first; patches without a value come last."""
    order = np.argsort(-np.nan_to_num(np.asarray(values), nan=-np.inf), kind="stable")
    found = np.empty(len(order), dtype=int)
    found[order] = np.arange(1, len(order) + 1)
    return found
