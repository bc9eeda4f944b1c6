"""What is trained: `Plan`. It is checked when it is made; nothing is loaded for it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError, OptionError, unknown_name
from llava_consensus.evaluation.files import Record, canonical
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method

PROJECTOR, LORA, FULL = "projector", "lora", "full"
RATES = {PROJECTOR: 1e-3, LORA: 2e-4, FULL: 2e-5}  # of LLaVA's own scripts
PRECISIONS = ("float32", "bfloat16", "float16")
NAMED = ("llava", ("lora", "mpt", "mistral"))  # what LLaVA's loader reads out of the name of a folder
OURS = {  # arguments of LLaVA's parser that a plan gives itself, each with the option that does
    "model_name_or_path": "--model",
    "data_path": "--data-path",
    "image_folder": "--images",
    "output_dir": "--out",
    "max_steps": "--steps",
    "num_train_epochs": "--steps",
    "per_device_train_batch_size": "--batch",
    "gradient_accumulation_steps": "--accumulate",
    "learning_rate": "--learning-rate",
    "seed": "--seed",
    "data_seed": "--seed",
    "save_steps": "--save-every",
    "bf16": "--dtype",
    "fp16": "--dtype",
    "tune_mm_mlp_adapter": "--tune",
    "lora_enable": "--tune",
    "version": "--conversation",
    "deepspeed": "--deepspeed",
    "gradient_checkpointing": "--checkpointing",
    "resume_from_checkpoint": "--out",
}


@dataclass(frozen=True)
class Plan:
    """A training.

    Args:
        model: folder of the checkpoint that is adapted, or a name of the hub.
        conversations: JSON file in LLaVA's data format.
        images: folder of its pictures.
        out: folder that becomes the adapted checkpoint. Its name must be one that LLaVA's loader understands.
        method: the reduction that is attached; None for the full model.
        budgets: visual tokens of a picture. One of them is drawn for each step, so that one model serves all.
        tune: `projector` | `lora` (of the language model, and the projector) | `full` (all but the vision tower).
        steps: optimiser steps.
        batch: conversations of one process in one forward.
        accumulate: forwards of a step.
        learning_rate: None is that of LLaVA's own scripts for this `tune`.
        seed: of the order of the data, of the budgets and of dropout.
        save_every: steps between two states to go on from.
        precision: of weights and sums, `float32` | `bfloat16` | `float16` (with a scaler, on a GPU).
        checkpointing: whether the layers are computed again in the backward pass, to save memory.
        attention: kernel of the language model, `auto` | `sdpa` | `flash_attention_2` | `eager`.
        device: `auto` | `cpu` | `cuda`.
        deepspeed: configuration file of DeepSpeed.
        conversation: template of the prompts; None is that of LLaVA 1.5. A model of transformers has its own.
        arguments: further arguments of LLaVA's own parser, such as `("--lora_r", "16")`.
    Raises:
        OptionError: for a value outside its bound, an `out` that LLaVA's loader would take for another model, or an
            argument that is given twice.
    """

    model: str
    conversations: Path
    images: Path
    out: Path
    method: Method | None
    budgets: tuple[Budget | Share, ...]
    tune: str = PROJECTOR
    steps: int = 100
    batch: int = 8
    accumulate: int = 1
    learning_rate: float | None = None
    seed: int = 0
    save_every: int = 50
    precision: str = "float32"
    checkpointing: bool = False
    attention: str = "auto"
    device: str = "auto"
    deepspeed: Path | None = None
    conversation: str | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tune not in RATES:
            raise unknown_name("part to tune", self.tune, RATES)
        if self.precision not in PRECISIONS:
            raise unknown_name("dtype of training", self.precision, PRECISIONS)
        for name, least in (("steps", 1), ("batch", 1), ("accumulate", 1), ("save_every", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise OptionError(f"learning_rate={self.learning_rate} must be above 0")
        if self.method is not None and not self.budgets:
            raise OptionError("budgets: give at least one number of visual tokens, such as --tokens 64")
        self._check_out()
        self._check_arguments()

    def _check_out(self) -> None:
        """The name by which LLaVA's loader will take the folder for a LLaVA of this kind."""
        wanted, other = NAMED
        name = self.out.name.lower()
        mistaken = [word for word in other if word in name and word not in Path(self.model).name.lower()]
        if wanted not in name or mistaken or name.startswith("checkpoint-"):
            raise OptionError(
                f"out={str(self.out)!r}: LLaVA's loader goes by the name of a folder, which must contain "
                f"{wanted!r} and none of {', '.join(other)}, and not begin with 'checkpoint-'. "
                "Take one such as checkpoints/llava-mine"
            )

    def _check_arguments(self) -> None:
        for argument in self.arguments:
            name = argument.partition("=")[0].lstrip("-").replace("-", "_")
            if argument.startswith("--") and name in OURS:
                raise OptionError(f"{argument}: is given by {OURS[name]}. Take that, in front of the `--`")

    @property
    def rate(self) -> float:
        """The learning rate."""
        return RATES[self.tune] if self.learning_rate is None else self.learning_rate

    @property
    def zero_stage(self) -> int:
        """Stage of DeepSpeed's ZeRO; 0 without DeepSpeed.

        Raises:
            DataError: for a configuration that cannot be read.
        """
        if self.deepspeed is None:
            return 0
        from llava_consensus.evaluation.files import read_json

        config = read_json(self.deepspeed, "Take one of eval_scripts/zero2.json and eval_scripts/zero3.json", dict)
        stage = config.get("zero_optimization", {}).get("stage", 0)
        if stage not in (0, 1, 2, 3):
            raise DataError(f"{self.deepspeed}: zero_optimization.stage={stage!r} must be 0, 1, 2 or 3")
        return int(stage)

    def description(self, name: str) -> Record:
        """What belongs on record of the plan, `name` being the method's."""
        options = (
            {}
            if self.method is None
            else {field.name: getattr(self.method, field.name) for field in fields(self.method)}
        )
        left_out = ("model", "conversations", "images", "out", "method", "budgets", "deepspeed", "arguments")
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        return {
            "method": name,
            "options": options,
            "budgets": [described(budget) for budget in self.budgets],
            **values,
            "learning_rate": self.rate,
            "zero_stage": self.zero_stage,
            "arguments": list(self.arguments),
        }


def described(budget: Budget | Share) -> Any:
    """A budget as a number, with the merged tokens where they are given."""
    if isinstance(budget, Share):
        return budget.share
    return budget.tokens if budget.merged is None else [budget.tokens, budget.merged]


def drawn(budgets: Sequence[Budget | Share], seed: int, step: int) -> Budget | Share:
    """The budget of a step: the same in every process and after a resume, each budget equally often on average."""
    import random

    return random.Random(canonical({"seed": seed, "step": step})).choice(list(budgets))
