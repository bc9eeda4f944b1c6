"""Train CLIP's text side for the vision tower, as CLIP has one: texts against pictures, with the tower as it is.

    python -m playground.mini.text [--folder checkpoints/llava-mini/vision_tower] [--scenes 4000] [--steps 1500]

The folder's vision model becomes a whole CLIP model with the same vision weights, bit for bit: a text tower, the two
projections and a tokenizer of words are added. LLaVA loads the vision model out of it as before; methods that compare
patches with the question (CDPruner) find their text tower beside it. A text is a short caption or one of the training
questions; it belongs to every picture of the batch that shows all the objects it names.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPVisionModel

from playground.mini.export import put
from playground.mini.paths import CHECKPOINT
from playground.mini.questions import View, article
from playground.mini.scenes import Scene, padded, render, scene
from playground.mini.styles import training_questions
from playground.mini.tokenizer import corpus
from playground.mini.tower import normalise

WIDTH, BLOCKS, HEADS, JOINT, LENGTH = 64, 2, 4, 64, 77
SPECIAL = ["<pad>", "<unk>", "<none>", "<start>", "<end>"]  # 2 as end of text has another meaning in transformers
START, END = 3, 4
TEXTS = 8  # of each scene
SCENES, STEPS = 4000, 1500


def vocabulary() -> list[str]:
    """Every word of the training corpus, lower-cased, behind the special ones."""
    words = {word for line in corpus() for word in re.findall(r"\w+|[^\w\s]+", line.lower())}
    return [*SPECIAL, *sorted(words)]


def tokenizer(words: list[str]) -> Tokenizer:
    """Words and marks, with a start and an end around each text."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", START), ("<end>", END)]
    )
    return made


def text_config(words: int) -> CLIPTextConfig:
    """The shape of the text tower."""
    return CLIPTextConfig(
        vocab_size=words, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS, max_position_embeddings=LENGTH, projection_dim=JOINT, hidden_act="gelu",
        bos_token_id=START, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip


def texts(scene_: Scene, rng: random.Random) -> list[tuple[str, frozenset[str]]]:
    """Texts about a scene and the objects each of them names: captions and questions."""
    view, found = View(scene_), []
    for _ in range(TEXTS // 2):
        chosen = rng.sample(scene_.items, min(rng.randint(1, 3), len(scene_.items)))
        phrases = [article(f"{item.colour} {item.name}" if item.colour else item.name) for item in chosen]
        found.append((" and ".join(phrases), frozenset(item.name for item in chosen)))
    asked = [qa for qa in training_questions(scene_, rng, 12) if qa.named]
    for qa in asked[: TEXTS // 2]:
        found.append((qa.question, frozenset(view.items[index].name for index in qa.named)))
    return found


class TextSide(nn.Module):
    """The text tower and the projection of the pooled picture into its space."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.text = CLIPTextModelWithProjection(text_config(words))
        self.visual_projection = nn.Linear(width, JOINT, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, pooled: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Similarity of pictures [n, width] and texts [m, L]: [n, m]."""
        pictures = F.normalize(self.visual_projection(pooled), dim=-1)
        words = F.normalize(self.text(input_ids=ids, attention_mask=(ids != 0).long()).text_embeds, dim=-1)
        return self.logit_scale.exp() * pictures @ words.T


def loss(similarity: torch.Tensor, belongs: torch.Tensor) -> torch.Tensor:
    """CLIP's two cross entropies, with all pictures a text belongs to (and all texts of a picture) equally right."""
    sides = ((similarity, belongs), (similarity.T, belongs.T))
    each = [-(right / right.sum(1, keepdim=True) * logits.log_softmax(1)).sum(1).mean() for logits, right in sides]
    return torch.stack(each).mean()


@dataclasses.dataclass(frozen=True)
class Seen:
    """Scenes as the text side meets them: what the tower pools of each, its texts and its objects."""

    pooled: torch.Tensor
    texts: list[list[tuple[str, frozenset[str]]]]
    names: list[set[str]]


@torch.no_grad()
def look(clip: CLIPVisionModel, split: str, count: int) -> Seen:
    """The first scenes of a split."""
    scenes, rng = [scene(split, index) for index in range(count)], random.Random(7)
    parts = []
    for first in range(0, count, 32):
        pictures = [np.asarray(padded(render(one, scale=1))) for one in scenes[first : first + 32]]
        parts.append(clip(normalise(torch.from_numpy(np.stack(pictures)))).pooler_output)
    names = [{item.name for item in one.items} for one in scenes]
    return Seen(torch.cat(parts), [texts(one, rng) for one in scenes], names)


def batch(seen: Seen, rows: list[int], coder: Tokenizer, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """One text for each of some scenes: ids [m, L] and which picture [n, m] each belongs to."""
    chosen = [rng.choice(seen.texts[row]) for row in rows]
    coded = [coder.encode(text).ids[:LENGTH] for text, _ in chosen]
    ids = torch.zeros(len(rows), max(map(len, coded)), dtype=torch.long)
    for index, own in enumerate(coded):
        ids[index, : len(own)] = torch.tensor(own)
    return ids, torch.tensor([[float(named <= seen.names[row]) for _, named in chosen] for row in rows])


def train(clip: CLIPVisionModel, count: int, steps: int, size: int = 128) -> tuple[TextSide, list[str]]:
    """The text side after some steps, and its words."""
    torch.manual_seed(5)
    words = vocabulary()
    coder, rng = tokenizer(words), random.Random(5)
    seen, unseen = look(clip, "train", count), look(clip, "val", 64)
    print(f"text: {len(words)} words, {count} scenes seen", flush=True)
    side = TextSide(len(words), seen.pooled.shape[1])
    optimiser = torch.optim.AdamW(side.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    mean = 0.0
    for step in range(1, steps + 1):
        rows = rng.sample(range(count), min(size, count))
        ids, belongs = batch(seen, rows, coder, rng)
        value = loss(side(seen.pooled[rows], ids), belongs)
        optimiser.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(side.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        mean = value.item() if step == 1 else 0.98 * mean + 0.02 * value.item()
        if step % 100 == 0 or step == steps:
            print(f"text {step}/{steps} loss {mean:.3f}, {validate(side, unseen, coder)}", flush=True)
    return side, words


@torch.no_grad()
def validate(side: TextSide, seen: Seen, coder: Tokenizer) -> dict[str, float]:
    """How often the picture that a text ranks first is one it belongs to (`right`), and by chance."""
    count = len(seen.names)
    ids, belongs = batch(seen, list(range(count)), coder, random.Random(7))
    right = belongs[side(seen.pooled, ids).argmax(0), torch.arange(count)].mean().item()
    return {"right": round(right, 3), "chance": round(belongs.mean().item(), 3)}


def export(folder: Path, side: TextSide, words: list[str]) -> None:
    """Makes the vision model in a folder a whole CLIP model; the vision weights stay as they are."""
    vision = json.loads((folder / "config.json").read_text())
    vision = vision.get("vision_config", vision)
    text = {key: getattr(side.text.config, key) for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "projection_dim", "hidden_act", "layer_norm_eps", "bos_token_id", "eos_token_id",
        "pad_token_id")}  # fmt: skip
    config = {
        "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": JOINT, "torch_dtype": "float32",
        "logit_scale_init_value": 2.6592, "vision_config": {**vision, "projection_dim": JOINT},
        "text_config": {"model_type": "clip_text_model", "attention_dropout": 0.0, **text},
    }  # fmt: skip
    state = {key: value for key, value in load_file(folder / "model.safetensors").items() if "vision_model." in key}
    for name, value in side.text.state_dict().items():
        if not name.endswith("position_ids"):
            state[name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}"] = value
    state |= {"visual_projection.weight": side.visual_projection.weight, "logit_scale": side.logit_scale}
    ready = {key: value.detach().contiguous() for key, value in state.items()}
    put(folder / "model.safetensors", save(ready, metadata={"format": "pt"}))
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), (*SPECIAL[:2], *SPECIAL[3:]), strict=True))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LENGTH, **names}
    for name, value in (("config.json", config), ("tokenizer_config.json", about), ("special_tokens_map.json", names)):
        put(folder / name, (json.dumps(value, indent=2) + "\n").encode())
    put(folder / "tokenizer.json", tokenizer(words).to_str().encode())


def add_text(folder: Path, count: int, steps: int) -> None:
    """Trains the text side of the vision model in a folder and stores it there."""
    clip = CLIPVisionModel.from_pretrained(folder).eval()
    export(folder, *train(clip, count, steps))
    print(f"wrote {folder}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=CHECKPOINT / "vision_tower")
    parser.add_argument("--scenes", type=int, default=SCENES)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    add_text(options.folder, options.scenes, options.steps)
