"""Additions to a `Trainer`, LLaVA's or that of transformers: every step runs with the method attached, checkpoints hold
only trained parameters, and training resumes from the last complete checkpoint.
"""

import contextlib
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llava_consensus.errors import DataError, OptionError
from llava_consensus.hosts import attached, view_of
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.training.plan import TrainingPlan

LABELS, UNLABELLED = "labels", -100  # torch's own number for rows without a target
WARM_UP = 0.03  # share of the steps, of LLaVA's own scripts
WEIGHTS, COMPLETE = "trained.safetensors", "complete"  # of a state: the tensors that are trained; its last file
_Trainer: Any = object  # the attributes of a Trainer come with the class that is made of both
log = logging.getLogger(__name__)


def settings(plan: TrainingPlan, states: Path) -> dict[str, Any]:
    """The `TrainingArguments` of a plan, for either Trainer; `states` is the folder of its states."""
    return {
        "output_dir": str(states),
        "max_steps": plan.steps,
        "per_device_train_batch_size": plan.batch,
        "gradient_accumulation_steps": plan.accumulate,
        "gradient_checkpointing": plan.checkpointing,
        "learning_rate": plan.rate,
        "weight_decay": 0.0,
        "warmup_steps": round(WARM_UP * plan.steps),
        "lr_scheduler_type": "cosine",
        "bf16": plan.precision == "bfloat16",
        "fp16": plan.precision == "float16",
        "save_strategy": "steps",
        "save_steps": plan.save_every,
        "logging_steps": 1,
        "seed": plan.seed,
        "data_seed": plan.seed,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": plan.device == "cpu",
        **({} if plan.deepspeed is None else {"deepspeed": str(plan.deepspeed)}),
    }


def inner(model: Any) -> Any:
    """The model that a host adapts, out of what wraps it: processes, DeepSpeed, adapters, a compiler."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name; shared ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def last_state(folder: Path) -> Path | None:
    """The latest state in a folder that was stored to its end; None where there is none."""
    complete = [file.parent for file in folder.glob(f"checkpoint-*[0-9]/{COMPLETE}")]
    return max(complete, key=lambda state: int(state.name.rpartition("-")[2]), default=None)


class ReducingTrainer(_Trainer):
    """Mixin before a Trainer's class, `class Mine(ReducingTrainer, transformers.Trainer)`; follows its `plan`."""

    plan: TrainingPlan

    def train(self, resume_from_checkpoint: Any = None, **more: Any) -> Any:
        """Trains from the last state that is complete, whatever the caller has found.

        Raises:
            OptionError: for a method the model has no parts for, or a budget above the tokens of a picture.
        """
        for budget in self.plan.budgets if self.plan.method is not None else ():
            with self._attached(budget):
                view = view_of(inner(self.model))
                most = view.most_tiles * view.tower.tokens
            if isinstance(budget, Budget) and budget.tokens > most:
                raise OptionError(
                    f"tokens={budget.tokens}: a picture of this model has {most} visual tokens. Give at most that"
                )
        self.remove_callback(transformers.PrinterCallback)  # `log` below says it shorter
        last = last_state(Path(self.args.output_dir))
        if last is not None:
            log.info(f"going on from {last}")
            state = transformers.TrainerState.load_from_json(str(last / "trainer_state.json"))
            if state.global_step >= self.plan.steps and not self.is_deepspeed_enabled:  # a Trainer would do one more
                self._load_from_checkpoint(str(last))
                self.state = state
                return None
        # Trainers store the state of numpy's generator; transformers 4.37 does not tell torch that it may be read.
        rebuilds: Any = numpy.zeros(0).__reduce__()[0]
        kinds: list[Any] = [rebuilds, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]
        with torch.serialization.safe_globals(kinds):
            return super().train(resume_from_checkpoint=None if last is None else str(last), **more)

    def _attached(self, budget: Budget | Share) -> Attachment:
        assert self.plan.method is not None  # else nothing is attached
        return attached(inner(self.model), self.plan.method, budget)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *more: Any) -> Tensor:
        """One forward and backward pass with the method attached, at the budget drawn for the step.

        Raises:
            DataError: for a batch in which no row has an answer, whose loss is not a number.
        """
        if not bool((inputs[LABELS] != UNLABELLED).any()):
            raise DataError(
                "no row of a batch has an answer left: its conversations are cut to model_max_length before their "
                "answers. Raise it after the `--`: -- --model_max_length 4096"
            )
        reducing = self.plan.method is not None
        with self._attached(self.plan.budget(self.state.global_step)) if reducing else contextlib.nullcontext():
            loss: Tensor = super().training_step(model, inputs, *more)
        return loss

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Stores what is trained; a Trainer's own would store the whole model."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        known = dict(self.model.named_parameters()) if state_dict is None else state_dict
        tensors = {name: known[name].detach().cpu().contiguous() for name in trained(self.model)}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Reads what was trained back, in place.

        Raises:
            DataError: where the state is damaged, or one of other parameters.
        """
        file = Path(resume_from_checkpoint) / WEIGHTS
        try:
            stored = load_file(file)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file}: cannot be read ({error}). Remove {file.parent} to resume without it") from error
        parameters = trained(self.model if model is None else model)
        if {name: one.shape for name, one in stored.items()} != {name: one.shape for name, one in parameters.items()}:
            raise DataError(f"{file}: holds other parameters than are trained now. Remove the folder to begin anew")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(stored[name])

    def _save_checkpoint(self, model: nn.Module, trial: Any, *more: Any, **options: Any) -> None:
        """Stores a state. It counts from the moment that every process has stored its part; the one before is then
        removed, unless LLaVA's parser was given the number to keep.
        """
        transformers.Trainer._save_checkpoint(self, model, trial, *more, **options)  # LLaVA's stores a projector alone
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            state = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            (state / COMPLETE).touch()
            for other in state.parent.glob("checkpoint-*") if self.args.save_total_limit is None else ():
                if other != state:
                    shutil.rmtree(other)
        self.accelerator.wait_for_everyone()

    def log(self, logs: dict[str, float], *more: Any) -> None:
        """Logs step, loss and budget."""
        super().log(logs, *more)
        if "loss" in logs:
            budget = self.plan.budget(self.state.global_step - 1) if self.plan.method is not None else "all"
            tokens = getattr(budget, "tokens", budget)
            log.info(f"step {self.state.global_step}: loss {float(logs['loss']):.4f}, {tokens} tokens")
