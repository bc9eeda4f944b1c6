"""Align the projector with the language model's words, without running the language model.

    python -m playground.photo.align

The composed scenes say what covers each patch. The projector learns to put a patch where the words of its name stand
among the input embeddings, and a little toward the words of its half of the picture (top or bottom, left or right);
patches of the photograph behind go to "background", those of a sign to "sign". Minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from playground.photo.catalogue import NAMES
from playground.photo.features import WIDTH, load_labels, opened
from playground.photo.parts import converted
from playground.photo.paths import WORK
from playground.photo.scenes import scene

WORDS = [*NAMES, "background", "sign"]  # what a patch may be
GROUND, SIGN = len(NAMES), len(NAMES) + 1
SIDES = ("top", "bottom", "left", "right")
PLACE = 0.5  # length of each side's part beside the name's
TEMPERATURE = 0.05


class Projector(nn.Module):
    """LLaVA's projector over standardised features; `folded` is LLaVA's own over the features as they are."""

    mean: Tensor
    std: Tensor

    def __init__(self, hidden: int = 576) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("std", torch.ones(WIDTH))
        self.linear_1, self.linear_2 = nn.Linear(WIDTH, hidden), nn.Linear(hidden, hidden)

    def forward(self, features: Tensor) -> Tensor:
        """[..., 384] -> [..., 576]."""
        standard = (features - self.mean) / self.std
        return self.linear_2(functional.gelu(self.linear_1(standard)))

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        """Weights of `LlavaMultiModalProjector`, summed in float64: the same ones on every machine."""
        weight = self.linear_1.weight.double() / self.std.double()
        bias = self.linear_1.bias.double() - weight @ self.mean.double()
        return {"linear_1.weight": weight.float(), "linear_1.bias": bias.float(),
                "linear_2.weight": self.linear_2.weight, "linear_2.bias": self.linear_2.bias}  # fmt: skip


def patches(split: str, side: int, scenes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [N, n, 384] (half), index into WORDS [N, n], and halves [n, 2] (bottom, right) of the patches."""
    shards = opened(split, side, scenes)
    features, labels = np.concatenate(shards), load_labels(split, side, len(shards))
    words = np.full((len(labels), 256), SIGN, np.int64)
    for index in range(len(labels)):
        shown = scene(split, index)
        words[index, 0] = GROUND
        for number, item in enumerate(shown.items, start=1):
            words[index, number] = NAMES.index(item.name)
    kind = np.take_along_axis(words, labels.astype(np.int64), 1)
    grid = side // 14
    row, column = np.divmod(np.arange(grid * grid), grid)
    halves = np.stack([row >= grid / 2, column >= grid / 2], 1).astype(np.int64)
    return torch.from_numpy(features), torch.from_numpy(kind), torch.from_numpy(halves)


def word_vectors(embedding: Tensor, tokenizer: object, words: tuple[str, ...] | list[str]) -> Tensor:
    """Mean input embedding of each word with a blank before it, [words, 576]."""
    ids = [tokenizer(" " + word, add_special_tokens=False).input_ids for word in words]  # type: ignore[operator]
    return torch.stack([embedding[i].mean(0) for i in ids])


def score(projector: Projector, names: Tensor, sides: Tensor, data: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Shares of held-out patches that are nearest to their own word, and to their own halves."""
    features, kind, halves = data
    with torch.no_grad():
        unit = functional.normalize(projector(features.float()), dim=-1)
        right = (unit @ names.T).argmax(-1) == kind
        place = (unit @ sides.T).unflatten(-1, (2, 2)).argmax(-1) == halves
    parts = {"things": kind < GROUND, "ground": kind == GROUND, "signs": kind == SIGN}
    shares = {name: right[part].float().mean().item() for name, part in parts.items()}
    return shares | {"halves": place.float().mean().item()}


def align(steps: int, scenes: int, rate: float = 2e-3, size: int = 1024) -> Projector:
    """Train a projector; writes `PHOTO_WORK/projector.pt`."""
    from safetensors import safe_open
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(converted() / "language")
    with safe_open(converted() / "language" / "model.safetensors", "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight").float()
    raw = word_vectors(embedding, tokenizer, WORDS)
    names = functional.normalize(raw, dim=-1)
    sides = functional.normalize(word_vectors(embedding, tokenizer, SIDES), dim=-1)
    length = raw.norm(dim=-1).mean()
    known = [patches("train", side, scenes) for side in (168, 336)]
    held = {side: patches("val", side, 200) for side in (168, 336)}
    projector = Projector()
    sample = known[0][0][::7].float().flatten(0, 1)
    projector.mean.copy_(sample.mean(0))
    projector.std.copy_(sample.std(0))
    pools = []
    for features, kind, halves in known:
        parts = [part.flatten().nonzero()[:, 0] for part in (kind < GROUND, kind == GROUND, kind == SIGN)]
        pools.append((features.flatten(0, 1), kind.flatten(), halves, parts))
    optimiser = torch.optim.AdamW(projector.parameters(), lr=rate, weight_decay=0.02)
    started = time.time()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        features, kind, halves, parts = pools[step % 2]
        shares = (5 * size // 8, size // 4, size // 8)
        rows = torch.cat([part[torch.randint(len(part), (n,))] for part, n in zip(parts, shares, strict=True)])
        wanted, place = kind[rows], halves[rows % len(halves)]
        out = projector(features[rows].float())
        unit = functional.normalize(out, dim=-1)
        target = names[wanted] + PLACE * (sides[place[:, 0]] + sides[2 + place[:, 1]])
        loss = functional.cross_entropy(unit @ names.T / TEMPERATURE, wanted, label_smoothing=0.05)
        toward = (unit @ sides.T / TEMPERATURE).unflatten(-1, (2, 2))
        loss = loss + 0.3 * functional.cross_entropy(toward.flatten(0, 1), place.flatten())
        loss = loss + 2 * (1 - functional.cosine_similarity(out, target)).mean()
        loss = loss + 0.1 * (out.norm(dim=-1) / length - 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (step + 1) % 500 == 0:
            scores = {side: {k: round(v, 3) for k, v in score(projector, names, sides, data).items()}
                      for side, data in held.items()}  # fmt: skip
            print(f"step {step + 1}/{steps} loss {loss.item():.3f} {scores} {time.time() - started:.0f} s", flush=True)
            torch.save(projector.state_dict(), WORK / "projector.pt")
    return projector


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="of 1,024 patches (%(default)s)")
    parser.add_argument("--scenes", type=int, default=6000, help="whose features are used (%(default)s)")
    given = parser.parse_args()
    align(given.steps, given.scenes)


if __name__ == "__main__":
    main()
