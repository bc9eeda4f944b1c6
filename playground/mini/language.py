"""Train the language model before it has eyes: on prefixes made of words in place of patches.

    python -m playground.mini.language [--device cpu] [--threads 1]

A "patch" is the embedding of the word it shows (and of its colour), plus smooth codes of where the patch is and where
the centre of its object is, plus noise. The projector later learns to say the same from pixels. The first part of the
steps has neither LLaVA's system prompt nor its suffixes and asks every object word as a probe beside the questions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from llava.model.language_model.llava_llama import LlavaConfig, LlavaLlamaForCausalLM
from torch import nn

from playground.mini.catalogue import NAMES, SIGN_ALPHABET
from playground.mini.labels import COLOUR_NAMES
from playground.mini.paths import WORK
from playground.mini.probes import PROBES, Heads
from playground.mini.scenes import GRID, PATCH
from playground.mini.sequences import PIECES, Batch, Plan, block_mask, collate, questions
from playground.mini.tower import place_code, point_code, save

HEADS, HIDDEN, LAYERS = 4, 192, 4
THETA = 1e6  # slow enough that most dimensions compare words at any distance
PROBE_DEPTHS = (2, -1)
KINDS = (
    "existence",
    "category",
    "attribute",
    "count",
    "relation",
    "reading",
    "place",
    "letter",
    "chinese",
    "judge",
    "list",
    "choice",
    "words",
    "pair",
    "open",
)


def language_config() -> LlavaConfig:
    """The shape of the language model, without its eyes."""
    return LlavaConfig(
        vocab_size=PIECES.vocab_size(), hidden_size=HIDDEN, intermediate_size=HIDDEN * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_theta=THETA, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.04,
    )  # fmt: skip


class Words(nn.Module):
    """What a patch says, in the language model's own words: the symbolic prefix."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.tint, self.flags = nn.Linear(hidden, hidden, bias=False), nn.Embedding(4, hidden)
        self.here, self.centre = nn.Linear(16, hidden, bias=False), nn.Linear(16, hidden, bias=False)
        for layer in (self.here, self.centre):
            nn.init.normal_(layer.weight, std=0.016)
        names = [PIECES.piece_to_id("▁" + n) for n in NAMES] + [PIECES.piece_to_id(c) for c in SIGN_ALPHABET]
        tints = [0] + [PIECES.piece_to_id("▁" + c) for c in COLOUR_NAMES[1:]] + [PIECES.piece_to_id(c) for c in "<=>"]
        self.names: torch.Tensor
        self.tints: torch.Tensor
        self.code: torch.Tensor
        self.register_buffer("names", torch.tensor([0, *names]), persistent=False)
        self.register_buffer("tints", torch.tensor(tints), persistent=False)
        self.register_buffer("code", place_code(), persistent=False)

    def forward(self, labels: torch.Tensor, where: torch.Tensor, embed: nn.Embedding) -> torch.Tensor:
        """Embeddings of the patches `where` [B, P] with labels [B, 6, P] (edges already decided)."""
        kind, colour, large, dx, dy, anchor = labels.unbind(1)
        shown = (kind > 0).unsqueeze(-1).float()
        tinted = (colour > 0).unsqueeze(-1).float() * self.tint(embed(self.tints[colour]))
        x, y = (where % GRID + 0.5) * PATCH + dx, (where // GRID + 0.5) * PATCH + dy
        thing = 1.5 * embed(self.names[kind]) + tinted + self.centre(point_code(x.float(), y.float()))
        thing = thing + self.flags.weight[2] * large.unsqueeze(-1) + self.flags.weight[3] * anchor.unsqueeze(-1)
        ground = self.flags.weight[0]
        return shown * (thing + self.flags.weight[1]) + (1 - shown) * ground + self.here(self.code[where])


def answer_logits(
    model: LlavaLlamaForCausalLM, visual: torch.Tensor, batch: Batch, heads: nn.ModuleList | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, targets and weights at every answer token, and the loss of the word probes (0 without heads)."""
    text = model.get_input_embeddings()(batch.ids)
    embeds = torch.cat([text[:, : batch.start], visual, text[:, batch.start :]], 1)
    out = model.model(
        inputs_embeds=embeds, attention_mask=block_mask(batch), position_ids=batch.position, use_cache=False,
        output_hidden_states=heads is not None,
    )  # fmt: skip
    first, aside = batch.start + visual.shape[1], visual.new_zeros(())
    if heads is not None:
        for depth, head in zip(PROBE_DEPTHS, heads, strict=True):
            aside = aside + head(out.hidden_states[depth][:, first : first + PROBES], batch.known)
    ids, weight = batch.ids[:, batch.start :], batch.weight[:, batch.start :]
    states = torch.cat([out.last_hidden_state[:, :1] * 0, out.last_hidden_state[:, first:-1]], 1)
    asked = weight > 0
    return model.lm_head(states[asked]), ids[asked], weight[asked], aside


def answer_loss(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted cross entropy."""
    return (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()


@torch.no_grad()
def probe(
    model: LlavaLlamaForCausalLM, see: Callable[[Batch], torch.Tensor], plan: Plan, count: int = 24
) -> dict[str, float]:
    """Teacher-forced accuracy (the whole answer right) per kind of question on validation scenes."""
    hits: dict[str, list[float]] = {}
    for first in range(0, count, 4):
        indices = list(range(first, first + 4))
        batch = collate(indices, plan, np.random.default_rng(first)).to(str(model.device))
        logits, target, _, _ = answer_logits(model, see(batch), batch)
        good = (logits.argmax(-1) == target).tolist()
        asked = (batch.weight[:, batch.start :] > 0).nonzero().tolist()
        right: dict[tuple[int, int], bool] = {}
        for (row, column), ok in zip(asked, good, strict=True):
            key = (row, int(batch.segment[row, batch.start + column]))
            right[key] = right.get(key, True) and ok
        for row, index in enumerate(indices):
            for number, qa in enumerate(questions(index, plan), start=1):
                if (row, number) in right:
                    hits.setdefault(qa.kind, []).append(right[row, number])
    return {k: round(float(np.mean(hits[k])), 3) for k in KINDS if k in hits}


def prepare(model: LlavaLlamaForCausalLM, words: Words, gain: float = 1.7, lift: float = 0.28) -> None:
    """Start half of the heads as matchers, so that matching words to patches need not be discovered from noise.

    Such a head looks for patches that carry its own word: query and key share a projection that lives in the slow
    rotary dimensions (so distance does not scramble it), all words share a direction that looks for the mark of
    patches, and what is found is copied. Everything stays trainable.
    """
    hidden = model.config.hidden_size
    size = hidden // HEADS
    slow = 10 * size // 48
    half = size // 2
    content = torch.tensor([*range(slow, half - 2), *range(half + slow, size - 2)])
    marked = torch.tensor([half - 2, half - 1, size - 2, size - 1])
    with torch.no_grad():
        word, mark = F.normalize(torch.randn(2, hidden), dim=-1)
        table = model.get_input_embeddings().weight
        table.normal_(std=0.08).add_(0.08 * hidden**0.5 * word)
        words.flags.weight.normal_(std=0.05)
        words.flags.weight[1] += 0.12 * hidden**0.5 * mark
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
            for head in range(HEADS // 2):
                rows = slice(head * size, (head + 1) * size)
                look, copy = torch.randn(2, size, hidden) / hidden**0.5
                look = gain * (look - (look @ word)[:, None] * word)
                query, key = torch.zeros(2, size, hidden)
                query[content], key[content] = look[content], look[content]
                query[marked], key[marked] = lift * word, lift * mark
                attention.q_proj.weight[rows], attention.k_proj.weight[rows] = query, key
                attention.v_proj.weight[rows], attention.o_proj.weight[:, rows] = copy, 0.3 * copy.T


class Learner:
    """The state of the stage: model, words, probe heads and optimiser, saved and resumed together."""

    def __init__(self, device: str, peak: float) -> None:
        self.model = LlavaLlamaForCausalLM(language_config()).to(device)
        self.words = Words(HIDDEN).to(device)
        prepare(self.model, self.words)
        self.heads = nn.ModuleList(Heads(HIDDEN) for _ in PROBE_DEPTHS).to(device)
        self.parts = {"model": self.model, "words": self.words, "heads": self.heads}
        self.weights = [w for part in self.parts.values() for w in part.parameters()]
        self.optimiser = torch.optim.AdamW(self.weights, lr=peak, betas=(0.9, 0.98), weight_decay=0.03)
        self.device, self.path = device, WORK / "language.pt"

    def resume(self) -> int:
        """Go on from a saved state, if there is one; the number of steps done."""
        if not self.path.exists():
            return 0
        state = torch.load(self.path, map_location=self.device, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.optimiser.load_state_dict(state["optimiser"])
        return int(state["step"])

    def keep(self, step: int) -> None:
        """Save the state."""
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        save(self.path, **parts, optimiser=self.optimiser.state_dict(), step=step)

    def see(self, batch: Batch) -> torch.Tensor:
        """The symbolic prefix."""
        return self.words(batch.labels, batch.where, self.model.get_input_embeddings())

    def step(self, batch: Batch, noise: float, probes: bool) -> tuple[float, float]:
        """One update; the losses of the answers and of the probes."""
        visual = self.see(batch)
        visual = visual + torch.randn_like(visual) * visual.detach().std() * noise
        logits, target, weight, aside = answer_logits(self.model, visual, batch, self.heads if probes else None)
        loss = answer_loss(logits, target, weight)
        self.optimiser.zero_grad()
        (loss + 0.7 * aside).backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimiser.step()
        return loss.item(), aside.item()


def train_language(
    steps: int, device: str, size: int = 8, peak: float = 2e-3, bare: float = 0.7, easy: float = 0.08
) -> None:
    """Stage A: symbolic prefixes; `bare` and `easy` are the shares of the steps with bare prompts and easy scenes."""
    torch.manual_seed(2)
    learner = Learner(device, peak)
    begin, started, mean = learner.resume(), time.time(), np.zeros(2)
    for step in range(begin + 1, steps + 1):
        plain, simple = step <= bare * steps, step <= easy * steps
        rng = np.random.default_rng([2, step])
        for group in learner.optimiser.param_groups:
            group["lr"] = peak * min(1.0, step / 200) * (1 - 0.9 * step / steps)
        plan = Plan("easy" if simple else "train", 200 if plain else 300, bare=plain, probes=plain)
        first = step * size
        batch = collate([first + i for i in range(size)], plan, rng).to(device)
        losses = np.array(learner.step(batch, float(rng.uniform(0, 0.1 if simple else 0.4)), plain))
        mean = losses if step == begin + 1 else 0.97 * mean + 0.03 * losses
        if step % 50 == 0:
            spent = time.time() - started
            print(f"language {step}/{steps} {spent:.0f}s loss {mean[0]:.3f} probes {mean[1]:.3f}", flush=True)
        if step % 250 == 0 or step == steps:
            print("  val", probe(learner.model, learner.see, Plan("val", 400, bare=plain)), flush=True)
            learner.keep(step)


STEPS = 1700

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train_language(STEPS, arguments.device)
