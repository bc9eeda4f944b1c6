"""A model of transformers, trained by the `Trainer` of that package with the method attached to it.

Conversations come in LLaVA's data format and are put into the model's own chat template by its own processor.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.models.hf import HfRunner
from llava_consensus.training.plan import IMAGE, LORA, MODEL, PROJECTOR, Conversations, TrainingPlan
from llava_consensus.training.trainer import LABELS, UNLABELLED, ReducingTrainer, settings

PROJECTORS = {"multi_modal_projector", "connector", "merger", "mlp1"}  # names of projectors
TOWERS = {"vision_tower", "vision_model", "visual", "image_tower", "video_tower"}
ROWS = ("input_ids", "attention_mask", LABELS)


def check(plan: TrainingPlan, folder: Path) -> None:
    if plan.arguments:
        raise OptionError(
            f"after `--`: {plan.arguments[0]} is for LLaVA's own parser, and {plan.model} is a model of transformers"
        )
    if plan.conversation is not None:
        raise OptionError(
            f"conversation={plan.conversation!r}: {plan.model} has a chat template of its own. Leave it out"
        )


def run(plan: TrainingPlan, data: Conversations, folder: Path, states: Path) -> transformers.Trainer:
    device = "cpu" if plan.device == "cpu" else "auto"
    dtype = "float32" if plan.precision == "float16" else plan.precision
    runner = models.load(plan.model, Loading(device, dtype, attention=plan.attention))
    assert isinstance(runner, HfRunner)  # `run.py` has refused others
    padding = runner.tokenizer.pad_token_id or 0
    reduced = type("ReducedTrainer", (ReducingTrainer, transformers.Trainer), {"plan": plan})
    trainer: transformers.Trainer = reduced(
        model=tuned(runner.model, plan),
        args=transformers.TrainingArguments(**settings(plan, states), remove_unused_columns=False),
        train_dataset=Examples(data, plan.images, runner),
        data_collator=lambda rows: collated(rows, padding),
    )
    trainer.train()
    return trainer


def tuned(model: transformers.PreTrainedModel, plan: TrainingPlan) -> nn.Module:
    """The model with the parameters of a plan to be trained, and adapters where it asks for them.

    Raises:
        OptionError: for a model whose projector has none of the known names.
    """
    model.requires_grad_(False).train()
    model.config.use_cache = False
    parameters = dict(model.named_parameters())
    projector = {name for name in parameters if PROJECTORS & set(name.split("."))}
    tower = {name for name in parameters if TOWERS & set(name.split("."))} - projector
    if not projector:
        known = ", ".join(sorted(PROJECTORS))
        raise OptionError(f"tune={plan.tune}: {type(model).__name__} has no projector named {known}")
    if plan.tune == LORA:
        import peft

        left_out = PROJECTORS | TOWERS | {"lm_head"}
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        names = [name for name in linear if not left_out & set(name.split("."))]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=64, lora_alpha=16, lora_dropout=0.05, target_modules=names)
        )
    for name, parameter in parameters.items():
        if name in projector or (plan.tune not in (LORA, PROJECTOR) and name not in tower):
            parameter.requires_grad_(True)
    if plan.checkpointing:
        model.enable_input_require_grads()
    return model


class Examples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Conversations as the model reads them: ids, labels, and what its processor makes of the picture.

    Args:
        data: the conversations.
        images: folder of their pictures.
        runner: whose processor reads them.
    """

    def __init__(self, data: Conversations, images: Path, runner: HfRunner) -> None:
        self.data, self.images, self.runner = data, images, runner

    def __len__(self) -> int:
        return len(self.data.entries)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        entry = self.data.entries[number]
        pictures: list[tuple[str, str]] = []
        inputs: dict[str, Any] = {}
        if "image" in entry:
            processed = self.runner.processed(open_image(self.images / entry["image"]))
            pictures, inputs = [(processed.modality, processed.text)], processed.inputs
        ids, labels = self._rows(entry, pictures)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and name not in ROWS}
        return {"input_ids": ids, LABELS: labels, **tensors}

    def _rows(self, entry: dict[str, Any], pictures: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        """Ids [L] of a conversation, and labels [L]: what the template adds for each answer.

        Raises:
            DataError: where the ids of a conversation do not begin with those of its beginning.
        """
        messages = [message(turn) for turn in entry["conversations"]]
        ids = self._ids(messages, False, pictures)
        labels = torch.full_like(ids, UNLABELLED)
        for place, turn in enumerate(messages):
            if turn["role"] == "assistant":
                asked = self._ids(messages[:place], True, pictures)
                said = self._ids(messages[: place + 1], False, pictures)
                if not torch.equal(said[: len(asked)], asked) or not torch.equal(ids[: len(said)], said):
                    raise DataError(
                        f"{self.data.path}: entry {entry.get('id')!r}: the chat template of the model writes a "
                        "conversation otherwise than its turns one by one, so that its answers cannot be told. Put one "
                        "question into each"
                    )
                labels[len(asked) : len(said)] = ids[len(asked) : len(said)]
        return ids, labels

    def _ids(self, messages: list[dict[str, Any]], asks: bool, pictures: list[tuple[str, str]]) -> Tensor:
        text = self.runner.processor.apply_chat_template(messages, add_generation_prompt=asks)
        ids: Tensor = self.runner.ids_of(text, pictures)
        return ids


def message(turn: dict[str, str]) -> dict[str, Any]:
    """A turn of LLaVA's format as chat templates take it; the picture comes first, as LLaVA's own code has it."""
    text = turn["value"].replace(IMAGE, "").strip()
    content = [{"type": "image"}] if IMAGE in turn["value"] else []
    return {
        "role": "assistant" if turn["from"] == MODEL else "user",
        "content": [*content, {"type": "text", "text": text}],
    }


def collated(rows: list[dict[str, Tensor]], padding: int) -> dict[str, Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    batch = {
        "input_ids": pad(ids, batch_first=True, padding_value=padding),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
        LABELS: pad([row[LABELS] for row in rows], batch_first=True, padding_value=UNLABELLED),
    }
    names = {name for row in rows for name in row if name not in ROWS}
    return {**batch, **{name: torch.cat([row[name] for row in rows if name in row]) for name in sorted(names)}}
