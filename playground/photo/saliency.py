"""Where the saliencies look: at the thing that is asked for, at things at all, or at the same places in every picture.

    python -m playground.photo.saliency [--scenes 200] [--tokens 64]

Every patch's content is known from the scene, so no answer is needed. One question ("Where is the zebra?") a picture.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from playground.photo.catalogue import NAMES
from playground.photo.paths import CHECKPOINT
from playground.photo.questions import PhotoView
from playground.photo.scenes import GRID, patch_labels, render, scene

SCORES = ("vision", "cross", "fused")
COLUMNS = ("asked for", "things", "same places", "top 1 %", "asked kept", "ground kept")


def ranks(values: Tensor) -> Tensor:
    """Ranks [n] of the values, 0 the smallest, as float."""
    return values.argsort().argsort().float()


def auc(score: Tensor, wanted: Tensor) -> float:
    """The chance that a patch of `wanted` has a higher score than one that is not."""
    inside = int(wanted.sum())
    total = float(ranks(score)[wanted].sum()) - inside * (inside - 1) / 2
    return total / (inside * (len(score) - inside))


def kept_shares(kept: Tensor, wanted: Tensor, ground: Tensor) -> tuple[float, float]:
    """The share of the wanted patches that are kept, and of the kept ones that show the photograph behind."""
    return float(torch.isin(wanted.nonzero().flatten(), kept).float().mean()), float(ground[kept].float().mean())


@torch.inference_mode()
def measure(model: Any, processor: Any, scenes: int, tokens: int) -> tuple[dict[str, list[list[float]]], int]:
    """For each score a row a picture: AUC of the asked thing and of all things, rank correlation with the picture
    before, share of the mass on the highest hundredth, and what a selection of `tokens` by it keeps.
    """
    from llava_consensus import attach

    rows: dict[str, list[list[float]]] = defaultdict(list)
    before: dict[str, Tensor] = {}
    with attach(model, "consensusdrop", tokens=tokens) as attached:
        for index in range(scenes):
            shown = scene("test", index)
            view = PhotoView(shown)
            asked = [k for k in view.unique if shown.items[k].name in NAMES]
            image, labels = render(shown)
            patches = torch.from_numpy(patch_labels(labels, GRID))
            if not asked or not (patches == asked[0] + 1).any():
                continue
            text = f"Where is the {shown.items[asked[0]].name}?"
            turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
            prompt = processor.apply_chat_template(turn, add_generation_prompt=True)
            inputs = processor(images=image, text=prompt, return_tensors="pt")
            model(**inputs.to(model.dtype), logits_to_keep=1)
            reduction = attached.outcomes[0].reductions[0][1]
            wanted, ground = patches == asked[0] + 1, patches == 0
            for name in SCORES:
                score = getattr(reduction, name)[0].float()
                kept = score.topk(tokens).indices
                same = float(torch.corrcoef(torch.stack([ranks(score), ranks(before.get(name, score))]))[0, 1])
                mass = float(score.topk(len(score) // 100).values.sum() / score.sum())
                rows[name].append(
                    [auc(score, wanted), auc(score, ~ground), same, mass, *kept_shares(kept, wanted, ground)]
                )
                before[name] = score
    return rows, len(rows["vision"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="assembled checkpoint (%(default)s)")
    parser.add_argument("--scenes", type=int, default=200, help="pictures (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="visual tokens that are kept (%(default)s)")
    given = parser.parse_args()
    if not (given.model / "config.json").exists():
        raise SystemExit(f"error: {given.model}: no checkpoint. Run make checkpoint-photo")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(given.model).eval()
    rows, pictures = measure(model, AutoProcessor.from_pretrained(given.model), given.scenes, given.tokens)
    print(f"{pictures} pictures\n| saliency | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}")
    for name in SCORES:
        values = torch.tensor(rows[name][1:])
        error = 1.96 * values.std(0) / len(values) ** 0.5
        print(
            f"| {name} | "
            + " | ".join(f"{100 * m:.1f} ± {100 * e:.1f}" for m, e in zip(values.mean(0), error, strict=True))
            + " |"
        )


if __name__ == "__main__":
    main()
