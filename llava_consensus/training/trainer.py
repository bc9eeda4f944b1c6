"""Additions to a `Trainer`, LLaVA's or that of transformers: every step runs with the method attached, and states hold
only trained parameters. Below: how a model of transformers is trained, with conversations in LLaVA's data format and
the model's own chat template.
"""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.models.hf import HfRunner
from llava_consensus.hosts import attached
from llava_consensus.training.plan import IMAGE, LORA, MODEL, PROJECTOR, Conversations, TrainingPlan

LABELS, UNLABELLED = "labels", -100  # torch's own number for rows without a target
WARM_UP = 0.03  # share of the steps, of LLaVA's own scripts
WEIGHTS = "trained.safetensors"  # of a state: the tensors that are trained
PROJECTORS = {"multi_modal_projector", "connector", "merger", "mlp1"}  # names of projectors
TOWERS = {"vision_tower", "vision_model", "visual", "image_tower", "video_tower"}
ROWS = ("input_ids", "attention_mask", LABELS)
_Trainer: Any = object  # the attributes of a Trainer come with the class that is made of both


def settings(plan: TrainingPlan, states: Path) -> dict[str, Any]:
    """The `TrainingArguments` of a plan, for either Trainer; `states` is the folder of its states."""
    return {
        "output_dir": str(states),
        "max_steps": plan.steps,
        "per_device_train_batch_size": plan.batch,
        "gradient_accumulation_steps": plan.accumulate,
        "gradient_checkpointing": plan.checkpointing,
        "learning_rate": plan.rate,
        "warmup_steps": round(WARM_UP * plan.steps),
        "lr_scheduler_type": "cosine",
        "bf16": plan.precision == "bfloat16",
        "fp16": plan.precision == "float16",
        "save_steps": plan.save_every,
        "save_total_limit": 1,
        "logging_steps": 1,
        "seed": plan.seed,
        "data_seed": plan.seed,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": plan.device == "cpu",
        **({} if plan.deepspeed is None else {"deepspeed": str(plan.deepspeed)}),
    }


def inner(model: Any) -> Any:
    """The model that a host adapts, without its wrappers: processes, DeepSpeed, a compiler, adapters."""
    from accelerate.utils import extract_model_from_parallel

    model = extract_model_from_parallel(model, keep_torch_compile=False)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name; shared ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def last_state(folder: Path) -> Path | None:
    """The latest state in a folder that was stored to its end, as far as its last file says; None if there is none."""
    complete = [file.parent for file in folder.glob("checkpoint-*[0-9]/trainer_state.json")]
    return max(complete, key=lambda state: int(state.name.rpartition("-")[2]), default=None)


class ReducingTrainer(_Trainer):
    """Mixin before a Trainer's class, `class Mine(ReducingTrainer, transformers.Trainer)`; follows its `plan`."""

    plan: TrainingPlan

    def train(self, resume_from_checkpoint: Any = None, **more: Any) -> Any:
        """Trains from the last state that is complete, whatever the caller has found."""
        last = last_state(Path(self.args.output_dir))
        # Trainers store the state of numpy's generator; transformers 4.37 does not register it as safe to load.
        rebuilds: Any = numpy.zeros(0).__reduce__()[0]
        kinds: list[Any] = [rebuilds, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]
        with torch.serialization.safe_globals(kinds):
            return super().train(resume_from_checkpoint=None if last is None else str(last), **more)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *more: Any) -> Tensor:
        """A step with the method attached, at its budget. DataError if no row has an answer: its loss is no number."""
        if not bool((inputs[LABELS] != UNLABELLED).any()):
            raise DataError(
                "no row of a batch has an answer left: its conversations are cut to model_max_length before their "
                "answers. Raise it after the `--`: -- --model_max_length 4096"
            )
        attachment: Any = contextlib.nullcontext()
        if self.plan.method is not None:
            attachment = attached(inner(self.model), self.plan.method, self.plan.budget(self.state.global_step))
        with attachment:
            loss: Tensor = super().training_step(model, inputs, *more)
        return loss

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        known = dict(self.model.named_parameters()) if state_dict is None else state_dict
        tensors = {name: known[name].detach().cpu().contiguous() for name in trained(self.model)}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Reads the trained parameters back, in place. DataError for a damaged state."""
        file = Path(resume_from_checkpoint) / WEIGHTS
        try:
            stored = load_file(file)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file}: cannot be read ({error}). Remove {file.parent} to resume without it") from error
        with torch.no_grad():
            for name, parameter in trained(self.model if model is None else model).items():
                parameter.copy_(stored[name])

    def _save_checkpoint(self, *given: Any, **options: Any) -> None:
        transformers.Trainer._save_checkpoint(self, *given, **options)  # LLaVA's own stores only a projector


# ---- models of transformers


def check(plan: TrainingPlan, folder: Path) -> None:
    if plan.arguments:
        raise OptionError(f"after `--`: {plan.arguments[0]} is for LLaVA's own parser, not for models of transformers")


def run(plan: TrainingPlan, data: Conversations, folder: Path, states: Path) -> transformers.Trainer:
    device = "cpu" if plan.device == "cpu" else "auto"
    dtype = "float32" if plan.precision == "float16" else plan.precision
    runner = models.load(plan.model, Loading(device, dtype, attention=plan.attention))
    assert isinstance(runner, HfRunner)  # `run.py` has refused others
    reduced = type("ReducedTrainer", (ReducingTrainer, transformers.Trainer), {"plan": plan})
    trainer: transformers.Trainer = reduced(
        model=tuned(runner.model, plan),
        args=transformers.TrainingArguments(**settings(plan, states), remove_unused_columns=False),
        train_dataset=Examples(data, plan.images, runner),
        data_collator=partial(collated, padding=runner.tokenizer.pad_token_id or 0),
    )
    trainer.train()
    return trainer


def tuned(model: transformers.PreTrainedModel, plan: TrainingPlan) -> nn.Module:
    """The model with the parameters of a plan to be trained, and adapters if it asks for them."""
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
    """Conversations as the model reads them: ids, labels, and its processor's tensors of the image."""

    def __init__(self, data: Conversations, images: Path, runner: HfRunner) -> None:
        self.data, self.images, self.runner = data, images, runner

    def __len__(self) -> int:
        return len(self.data.entries)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        entry = self.data.entries[number]
        visuals: list[tuple[str, str]] = []
        inputs: dict[str, Any] = {}
        if "image" in entry:
            processed = self.runner.processed(open_image(self.images / entry["image"]))
            visuals, inputs = [(processed.modality, processed.text)], processed.inputs
        ids, labels = self._rows(entry, visuals)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and name not in ROWS}
        return {"input_ids": ids, LABELS: labels, **tensors}

    def _rows(self, entry: dict[str, Any], visuals: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        """Ids [L] of a conversation, and labels [L]: what the template adds for each answer."""
        messages = [message(turn) for turn in entry["conversations"]]
        ids = self._ids(messages, False, visuals)
        labels = torch.full_like(ids, UNLABELLED)
        for place, turn in enumerate(messages):
            if turn["role"] == "assistant":
                asked = self._ids(messages[:place], True, visuals)
                said = self._ids(messages[: place + 1], False, visuals)
                if not torch.equal(said[: len(asked)], asked) or not torch.equal(ids[: len(said)], said):
                    raise DataError(
                        f"{self.data.path}: entry {entry.get('id')!r}: the chat template of the model writes a "
                        "conversation otherwise than its turns one by one, so that its answers cannot be told. Put one "
                        "question into each"
                    )
                labels[len(asked) : len(said)] = ids[len(asked) : len(said)]
        return ids, labels

    def _ids(self, messages: list[dict[str, Any]], asks: bool, visuals: list[tuple[str, str]]) -> Tensor:
        text = self.runner.processor.apply_chat_template(messages, add_generation_prompt=asks)
        ids: Tensor = self.runner.ids_of(text, visuals)
        return ids


def message(turn: dict[str, str]) -> dict[str, Any]:
    """A turn of LLaVA's format as chat templates take it; the image comes first, as LLaVA's own code has it."""
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
