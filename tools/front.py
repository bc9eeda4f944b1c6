"""Draws README's picture: one question about one photograph, answered from all tokens and from 64.

    python -m tools.front squirrel_cls.jpg "What mammal is in the picture?"

docs/images/SOURCES.md says where the photograph is from. Patches that are kept are in colour, others grey. Letters are
large enough for a phone.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from llava_consensus.demo.seen import seen_by
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks.base import SHORT
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

MODEL, OUT = "checkpoints/llava-photo", Path("docs/images/front.jpg")
SIDE, GAP, LINE = 440, 16, 44  # pixels of a panel, between panels, and of a line of text
GREY = 0.72  # how far a patch that is not kept goes to white


def panel(runner: models.Runner, image: Image.Image, question: str, method: str) -> tuple[Image.Image, str]:
    """The picture as a method leaves it, and a line about its answer."""
    with runner.attach(make(method), Budget(64)):
        encoded, answer = runner.ask([image], models.Prompt(question + SHORT))
    (seen,) = seen_by(runner, [image], encoded, answer)
    (view,) = seen.views
    kept = seen.fates.is_kept.reshape(view.rows, view.columns)
    pixels = view.pixels
    mask = np.kron(kept, np.ones((view.cell, view.cell)))[..., None] > 0
    grey = pixels.mean(axis=-1, keepdims=True) * (1 - GREY) + 255 * GREY
    shown = Image.fromarray(np.where(mask, pixels, grey).astype(np.uint8)).crop(view.box)
    shown = shown.resize((SIDE, round(SIDE * shown.height / shown.width)), Image.Resampling.LANCZOS)
    return shown, f"{answer.after} tokens: {answer.text}"


def main(path: str, question: str) -> None:
    """Ask, draw and write."""
    runner = models.load(MODEL, models.Loading(device="cpu"))
    image = Image.open(path).convert("RGB")
    panels = [panel(runner, image, question, method) for method in ("full", "consensusdrop")]
    width, height = 2 * SIDE + 3 * GAP, panels[0][0].height + 2 * LINE + 4 * GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    bold = font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans", weight="bold"))
    draw.text((GAP, GAP), question, "black", ImageFont.truetype(bold, 32))
    for number, (shown, line) in enumerate(panels):
        left = GAP + number * (SIDE + GAP)
        sheet.paste(shown, (left, LINE + 2 * GAP))
        draw.text((left, LINE + shown.height + 3 * GAP), line, "#1a4f8b", ImageFont.truetype(bold, 36))
    sheet.save(OUT, quality=86)
    print(*(line for _, line in panels), OUT.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
