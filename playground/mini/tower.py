"""Train the vision tower: a small CLIPVisionModel whose patches know what they show and whose CLS knows what is there.

    python -m playground.mini.tower [--device cpu] [--threads 1]

Stage 1 trains on 96 px windows of dense scenes with the matching 12 x 12 window of the position embeddings, stage 2 on
whole 192 px scenes. Patch features are read after the penultimate block, as LLaVA reads them. The CLS token learns
multi-label recognition from the same depth (and from the last block), so its attention there has to find objects.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from playground.mini import pool
from playground.mini.labels import CLASSES, FIRST_CHAR, TINTS, label
from playground.mini.paths import WORK
from playground.mini.scenes import GRID, PATCH, UNITS, padded, render, scene

MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(1, 3, 1, 1)
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(1, 3, 1, 1)
WIDTH, BLOCKS, HEADS = 128, 6, 4


def tower_config() -> CLIPVisionConfig:
    """The shape of the tower."""
    return CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=HEADS,
        image_size=UNITS, patch_size=PATCH, projection_dim=WIDTH, hidden_act="gelu",
    )  # fmt: skip


def place_code(freqs: int = 4) -> torch.Tensor:
    """Smooth code of the 576 patch places: sines and cosines of row and column, [576, 4 * freqs]."""
    y, x = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    return point_code((x.flatten() + 0.5) * PATCH, (y.flatten() + 0.5) * PATCH, freqs)


def point_code(x: torch.Tensor, y: torch.Tensor, freqs: int = 4) -> torch.Tensor:
    """Smooth code of points given in units of the padded square."""
    waves = torch.pi * 2.0 ** torch.arange(freqs, device=x.device) / UNITS
    angles = torch.cat([x[..., None] * waves, y[..., None] * waves], -1)
    return torch.cat([angles.sin(), angles.cos()], -1)


class Tower(nn.Module):
    """The CLIP tower with the heads it is trained by (the heads are thrown away, the projector replaces them)."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = CLIPVisionModel(tower_config())
        self.kind = nn.Linear(WIDTH, CLASSES)
        self.colour = nn.Linear(WIDTH, TINTS)
        self.other = nn.Linear(WIDTH, 4)  # large, anchor, dx, dy
        self.place = nn.Linear(WIDTH, 16)
        self.cls_mid = nn.Linear(WIDTH, CLASSES - 1)
        self.cls_end = nn.Linear(WIDTH, CLASSES - 1)
        self.code: torch.Tensor
        self.register_buffer("code", place_code(), persistent=False)

    def body(self, pixels: torch.Tensor, window: torch.Tensor, end: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States after the penultimate block, and CLS after the last if wanted, for pixels that cover `window`."""
        clip = getattr(self.clip, "vision_model", self.clip)
        table = clip.embeddings
        patches = table.patch_embedding(pixels).flatten(2).transpose(1, 2)
        cls = table.class_embedding.expand(len(pixels), 1, -1)
        where = table.position_embedding.weight
        states = torch.cat([cls + where[0], patches + where[1:][window]], 1)
        states = clip.pre_layrnorm(states)
        blocks = list(clip.encoder.layers)
        for block in blocks[:-1]:
            out = block(states, None)
            states = out[0] if isinstance(out, tuple) else out
        if not end:
            return states, None
        last = blocks[-1](states.detach(), None)
        last = last[0] if isinstance(last, tuple) else last
        return states, clip.post_layernorm(last[:, 0])

    def forward(
        self, pixels: torch.Tensor, labels: torch.Tensor, window: torch.Tensor, end: bool
    ) -> dict[str, torch.Tensor]:
        """The losses; labels are [B, 7, h, w] as `PatchLabels.packed` writes them."""
        states, final = self.body(pixels, window, end)
        x = states[:, 1:]
        kind, colour, large, dx, dy, anchor, _ = labels.long().flatten(2).unbind(1)
        shown = kind > 0
        weight = torch.ones(CLASSES, device=x.device)
        weight[0], weight[FIRST_CHAR:] = 0.15, 3.0
        losses = {"kind": F.cross_entropy(self.kind(x).flatten(0, 1), kind.flatten(), weight, ignore_index=-1)}
        seen, other = x[shown], self.other(x)
        losses["colour"] = F.cross_entropy(self.colour(seen), colour[shown])
        losses["large"] = F.binary_cross_entropy_with_logits(other[..., 0][shown], large[shown].float())
        losses["anchor"] = F.binary_cross_entropy_with_logits(other[..., 1][shown], anchor[shown].float())
        offsets = torch.stack([dx, dy], -1)[shown].float() / 16
        losses["offset"] = F.smooth_l1_loss(other[shown][:, 2:], offsets)
        losses["place"] = F.mse_loss(self.place(x), self.code[window].expand(len(x), -1, -1))
        present = torch.zeros(len(x), CLASSES, device=x.device).scatter_add_(
            1, kind.clamp(min=0), torch.ones_like(kind, dtype=x.dtype)
        )
        present = (present[:, 1:] >= 2).float()
        scale = torch.tensor(8.0, device=x.device)
        heads = {"mid": self.cls_mid(states[:, 0])} | ({} if final is None else {"end": self.cls_end(final)})
        for name, logits in heads.items():
            losses[name] = F.binary_cross_entropy_with_logits(logits, present, pos_weight=scale)
        return losses


WEIGHTS = {"kind": 1.0, "colour": 1.5, "large": 0.3, "anchor": 0.3, "offset": 0.7, "place": 1.0, "mid": 3.0, "end": 1.0}


class Feed:
    """Random batches from the shards that are ready, a few shards in memory at a time."""

    def __init__(self, kind: str, seed: int, keep: int = 6) -> None:
        self.kind, self.keep = kind, keep
        self.rng = np.random.default_rng(seed)
        self.memory: list[tuple[np.ndarray, np.ndarray]] = []
        self.drawn = 0

    def batch(self, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pixels (uint8), labels and the patch numbers of a common random window of `side` patches."""
        if self.drawn % (6000 // size) == 0 or not self.memory:
            ready = pool.shards(WORK, self.kind)
            self.memory.append(pool.load(ready[self.rng.integers(len(ready))]))
            self.memory = self.memory[-self.keep :]
        self.drawn += 1
        images, labels = self.memory[self.rng.integers(len(self.memory))]
        rows = self.rng.integers(len(images), size=size)
        top, left = self.rng.integers(GRID - side + 1, size=2)
        pixels = images[rows, top * PATCH : (top + side) * PATCH, left * PATCH : (left + side) * PATCH]
        window = np.arange(GRID * GRID).reshape(GRID, GRID)[top : top + side, left : left + side].reshape(-1)
        chosen = labels[rows, :, top : top + side, left : left + side]
        return torch.from_numpy(pixels), torch.from_numpy(chosen), torch.from_numpy(window)


def normalise(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 [B, H, W, 3] to what CLIPImageProcessor gives."""
    return (pixels.permute(0, 3, 1, 2).float() / 255 - MEAN.to(pixels.device)) / STD.to(pixels.device)


@torch.no_grad()
def validate(tower: Tower, count: int = 48) -> dict[str, float]:
    """Accuracy on validation scenes: patches of objects and of sign characters, colour, and CLS attention lift."""
    device = next(tower.parameters()).device
    scenes = [scene("val", i) for i in range(count)]
    pixels = normalise(torch.from_numpy(np.stack([np.asarray(padded(render(s))) for s in scenes]))).to(device)
    labels = torch.from_numpy(np.stack([label(s).packed() for s in scenes])).to(device)
    states, _ = tower.body(pixels, torch.arange(GRID * GRID, device=device), end=False)
    kind, colour = labels[:, 0].flatten(1).long(), labels[:, 1].flatten(1).long()
    said, tint = tower.kind(states[:, 1:]).argmax(-1), tower.colour(states[:, 1:]).argmax(-1)
    objects, chars = (kind > 0) & (kind < FIRST_CHAR), kind >= FIRST_CHAR
    mid, right = tower.cls_mid(states[:, 0]) > 1.0, (said == kind).float()
    truth = torch.zeros(count, CLASSES, device=device).scatter_(1, kind.clamp(min=0), 1.0)[:, 1:] > 0
    lift = cls_lift(tower.clip, pixels, kind > 0)
    return {"objects": right[objects].mean().item(), "chars": right[chars].mean().item(),
            "background": right[kind == 0].mean().item(), "colour": (tint == colour)[objects].float().mean().item(),
            "cls_f1": (2 * (mid & truth).sum() / (mid.sum() + truth.sum())).item(), "cls_lift": lift,
            "order": (tint == colour)[chars].float().mean().item()}  # fmt: skip


@torch.no_grad()
def cls_lift(clip: CLIPVisionModel, pixels: torch.Tensor, shown: torch.Tensor) -> float:
    """CLS attention of the penultimate block on object and sign patches, over their share of the area."""
    clip.set_attn_implementation("eager")
    weights = clip(pixels, output_attentions=True).attentions[-2].mean(1)[:, 0, 1:]
    clip.set_attn_implementation("sdpa")
    share = (weights * shown).sum(1) / weights.sum(1)
    return (share.mean() / shown.float().mean()).item()


def save(path: Path, **parts: object) -> None:
    """Write a resumable state atomically."""
    torch.save(parts, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def train_tower(stages: list[tuple[str, int, int, int, float]], device: str, log_every: int = 75) -> None:
    """Run the stages (pool, window, batch, steps, peak rate), going on from where a killed run stopped."""
    torch.manual_seed(1)
    tower = Tower().to(device)
    path, begin = WORK / "tower.pt", 0
    total = sum(stage[3] for stage in stages)
    optimiser = torch.optim.AdamW(tower.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.03)
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        tower.load_state_dict(state["tower"])
        optimiser.load_state_dict(state["optimiser"])
        begin = state["step"]
    step, started = 0, time.time()
    mean: dict[str, float] = {}
    for number, (kind, side, size, steps, peak) in enumerate(stages):
        feed = Feed(kind, seed=100 * number + begin)
        for local in range(steps):
            step += 1
            if step <= begin:
                continue
            rate = peak * min(1.0, (local + 1) / 200) * (1 - 0.92 * local / steps)
            for group in optimiser.param_groups:
                group["lr"] = rate
            pixels, labels, window = (part.to(device) for part in feed.batch(size, side))
            losses = tower(normalise(pixels), labels, window, end=step % 4 == 0)
            optimiser.zero_grad()
            sum(WEIGHTS[name] * value for name, value in losses.items()).backward()
            nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
            optimiser.step()
            mean |= {k: 0.98 * mean.get(k, v.item()) + 0.02 * v.item() for k, v in losses.items()}
            if step % log_every == 0 or step == total:
                print(
                    f"tower {step}/{total} {time.time() - started:.0f}s",
                    {k: round(v, 3) for k, v in mean.items()},
                    flush=True,
                )
            if step % (2 * log_every) == 0 or step == total:
                print("  val", {k: round(v, 3) for k, v in validate(tower).items()}, flush=True)
                save(path, tower=tower.state_dict(), optimiser=optimiser.state_dict(), step=step)


STAGES = [
    ("dense+signs", 12, 48, 1500, 1.2e-3),
    ("dense+signs", 24, 12, 300, 7e-4),
    ("signs", 12, 48, 450, 1.0e-3),
    ("signs+scene", 24, 12, 450, 6e-4),
    ("signs+scene", 24, 12, 420, 7e-4),
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train_tower(STAGES, arguments.device)
