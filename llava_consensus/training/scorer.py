"""Train a scorer (`methods/scorer.py`) for a model of transformers, in VisionSelector's way (arXiv 2510.16598): only
the scorer learns. The tokens of an image are multiplied by a soft mask, sigmoid(score + t), t such that it sums to the
budget; the loss is that of the answers, and, with a weight that grows from 0.1 to 2, the distance of the soft mask from
the hard one.

Difference: weights start with a standard deviation of 0.01, theirs of 0.0001, which minutes of training do not leave;
and an image's scores are weighed only against the mean of its tokens.
"""

import contextlib
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, linear

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.files import replace
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.models.hf import HfRunner
from llava_consensus.methods.scorer import PARTS
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.training.plan import TrainingPlan, read
from llava_consensus.training.trainer import Examples, collated, settings

START, HALVINGS = 0.01, 64
NEARNESS = (0.1, 2.0)  # weight of the distance from the hard mask, at the first and at the last step


class SoftTop(torch.autograd.Function):
    """Soft mask of the largest scores: sigmoid(score + t), t by bisection such that the mask sums to `count`."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, count: float) -> Tensor:
        """[N] -> [N]."""
        low, high = -scores.max() - 10, -scores.min() + 10
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            few = torch.sigmoid(scores + middle).sum() < count
            low, high = torch.where(few, middle, low), torch.where(few, high, middle)
        mask = torch.sigmoid(scores + (low + high) / 2)
        ctx.save_for_backward(mask * (1 - mask))
        return mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The sum stays, so the others lose the gain of one score."""
        (slope,) = ctx.saved_tensors
        pushed = grads[0] * slope
        return pushed - slope * pushed.sum() / slope.sum(), None


class ScorerWeights(nn.Module):
    def __init__(self, width: int, hidden: int, seed: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, hidden), nn.Linear(width, hidden)
        generator = torch.Generator().manual_seed(seed)
        for one in (self.q_proj, self.k_proj):
            one.weight.data.copy_(torch.randn(hidden, width, generator=generator) * START)
            one.bias.data.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the tokens of one image: [N, D] -> [N]."""
        against = linear(tokens.mean(0), self.k_proj.weight, self.k_proj.bias)
        return self.q_proj(tokens) @ against / against.numel() ** 0.5


def train_scorer(plan: TrainingPlan) -> list[float]:
    """Trains a scorer and stores it in `plan.out`; returns the loss of each step."""
    data = read(plan.conversations, plan.images)
    data = data._replace(entries=[entry for entry in data.entries if "image" in entry])
    if not data.entries:
        raise DataError(f"{plan.conversations}: no conversation about an image, and a scorer learns from those only")
    runner = models.load(plan.model, Loading(plan.device, plan.precision, attention=plan.attention))
    if not isinstance(runner, HfRunner):
        raise OptionError(
            f"model={plan.model!r}: a scorer is trained on a model of transformers. `llava-consensus model convert` "
            "makes one of official LLaVA, and its scorer then serves both"
        )
    width = runner.model.requires_grad_(False).eval().config.get_text_config().hidden_size
    weights = ScorerWeights(width, max(1, width // 2), plan.seed)
    with tempfile.TemporaryDirectory() as folder:
        own = {"save_strategy": "no", "max_grad_norm": 0.0, "bf16": False, "fp16": False}
        trainer = ScorerTrainer(
            model=weights,
            args=transformers.TrainingArguments(**settings(plan, Path(folder)) | own, remove_unused_columns=False),
            train_dataset=Examples(data, plan.images, runner),
            data_collator=partial(collated, padding=runner.tokenizer.pad_token_id or 0),
        )
        trainer.plan, trainer.runner = plan, runner
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train()
    store(weights, plan.out)
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


class ScorerTrainer(transformers.Trainer):
    plan: TrainingPlan
    runner: HfRunner

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        step = self.state.global_step
        nearness = NEARNESS[0] + (NEARNESS[1] - NEARNESS[0]) * step / max(1, self.plan.steps - 1)
        answered, distance = _losses(self.runner, model, inputs, self.plan.budget(step))
        return answered + nearness * distance


def store(weights: nn.Module, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    replace(out, save({name: weights.state_dict()[name].float().cpu().contiguous() for name in PARTS}))


def _losses(
    runner: HfRunner, weights: ScorerWeights, batch: dict[str, Tensor], budget: Budget | Share
) -> tuple[Tensor, Tensor]:
    """Loss of the answers from softly masked tokens, and the mean distance of the masks from the hard ones."""
    view: Any = runner.view
    model, device = view.module, view.module.device
    batch = {
        name: value.to(device, model.dtype if value.is_floating_point() else None) for name, value in batch.items()
    }
    pixels = view.encoder_inputs(batch)["image"]
    images = view.images("image", pixels, batch["input_ids"].cpu().numpy())
    with torch.no_grad():
        output = view.inner.get_image_features(**pixels, return_dict=True)
    features = output.pooler_output
    tokens = torch.cat([one.reshape(-1, one.shape[-1]) for one in features])
    masked, distances = [], []
    for own, image in zip(tokens.split([len(one.token) for one in images]), images, strict=True):
        candidates = torch.from_numpy(image.token >= 0).to(device)
        scores = weights(own[candidates].float())
        count = min(budget.of(len(scores)).tokens, len(scores) - 1)
        mask = SoftTop.apply(scores, float(count))
        hard = torch.zeros_like(mask).scatter(0, scores.topk(count).indices, 1.0)
        distances.append(binary_cross_entropy(mask, hard))
        factor = torch.ones_like(own[:, 0], dtype=torch.float32).masked_scatter(candidates, mask)
        masked.append(own * factor[:, None].to(own.dtype))
    output.pooler_output = torch.cat(masked).view_as(features) if isinstance(features, Tensor) else masked
    words = {name: value for name, value in batch.items() if not name.startswith("pixel_values")}
    answered = model(**words, mm_encoder_outputs={"image": output}).loss
    return answered, torch.stack(distances).mean()
