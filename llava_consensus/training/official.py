"""Official LLaVA's own training, `llava.train.train.train()`, with a method attached to the model it builds.

It is called as its scripts call it, with its own arguments. Names of its module are replaced while it runs: the Trainer
by one that does the same and attaches the method (`steps.py`), the model's class by one that loads from any folder and
on any version of transformers, and what it saves at the end by what `export.py` writes.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llava_consensus.errors import MissingDependency, OptionError
from llava_consensus.evaluation.files import read_json
from llava_consensus.hosts.clip_text import without_unused_report
from llava_consensus.hosts.llava.checks import CONVERSATION, MEND, check_conversation, tower_beside, tower_of_hub
from llava_consensus.hosts.llava.own_tower import FLAG, trains_tower
from llava_consensus.training.names import accelerator, command_line, named
from llava_consensus.training.plan import LORA, PROJECTOR, Plan
from llava_consensus.training.steps import Session, Steps, inner

LENGTH = 2048  # rows of a conversation, of LLaVA's own scripts
WARM_UP = 0.03  # share of the steps, likewise
TAKEN = {  # entry of a checkpoint's configuration -> argument of LLaVA's parser
    "mm_projector_type": "mm_projector_type",
    "mm_vision_select_layer": "mm_vision_select_layer",
    "mm_vision_select_feature": "mm_vision_select_feature",
    "mm_patch_merge_type": "mm_patch_merge_type",
    "mm_use_im_start_end": "mm_use_im_start_end",
    "mm_use_im_patch_token": "mm_use_im_patch_token",
    "image_aspect_ratio": "image_aspect_ratio",
}


def check(plan: Plan, folder: Path) -> None:
    """Raises OptionError for what LLaVA's training cannot do with this checkpoint."""
    config = read_json(folder / "config.json", MEND, dict)
    check_conversation(plan.conversation or CONVERSATION)
    if config.get("image_aspect_ratio") == "anyres":
        raise OptionError(
            f"model={plan.model!r} cuts pictures into tiles, which the training code of llava-torch does not. "
            "Convert the checkpoint (llava-consensus convert) and train it on transformers"
        )
    if trains_tower(str(folder)):
        raise OptionError(
            f"model={plan.model!r} has a vision tower that was trained along ({FLAG}), in whose place LLaVA's training "
            "puts the stock one. Convert the checkpoint (llava-consensus convert) and train it on transformers"
        )
    if not str(config.get("model_type", "")).endswith("llama"):
        raise OptionError(
            f"model={plan.model!r}: LLaVA's training builds Llama models, this is a {config.get('model_type')}. "
            "Convert the checkpoint (llava-consensus convert) and train it on transformers"
        )


def visual_tokens(folder: Path) -> int | None:
    """Visual tokens of a picture, from the configuration of the tower; None where that is not here."""
    tower = _tower(folder) / "config.json"
    if not tower.is_file():
        return None
    config = read_json(tower, MEND, dict)
    vision = config.get("vision_config", config)
    return int(vision["image_size"] // vision["patch_size"]) ** 2


def _tower(folder: Path) -> Path:
    hub_tower = tower_of_hub(str(folder))
    if hub_tower is not None:
        return hub_tower.folder
    beside = tower_beside(str(folder))
    return Path(beside.get("mm_vision_tower") or read_json(folder / "config.json", MEND, dict)["mm_vision_tower"])


def llava_arguments(plan: Plan, folder: Path, state: Path) -> list[str]:
    """The arguments of LLaVA's own parser for a plan."""
    config = read_json(folder / "config.json", MEND, dict)
    tower = _tower(folder)
    values: dict[str, Any] = {
        "model_name_or_path": folder,
        "version": plan.conversation or CONVERSATION,
        "data_path": plan.conversations,
        "image_folder": plan.images,
        "vision_tower": tower,
        "mm_use_im_patch_token": True,
        **{argument: config[entry] for entry, argument in TAKEN.items() if config.get(entry) is not None},
        "tune_mm_mlp_adapter": plan.tune == PROJECTOR,
        "lora_enable": plan.tune == LORA,
        "bf16": plan.precision == "bfloat16",
        "fp16": plan.precision == "float16",
        "output_dir": state,
        "max_steps": plan.steps,
        "per_device_train_batch_size": plan.batch,
        "gradient_accumulation_steps": plan.accumulate,
        "gradient_checkpointing": plan.checkpointing,
        "learning_rate": plan.rate,
        "weight_decay": 0.0,
        "warmup_steps": round(WARM_UP * plan.steps),
        "lr_scheduler_type": "cosine",
        "save_strategy": "steps",
        "save_steps": plan.save_every,
        "save_total_limit": 1,
        "logging_steps": 1,
        "seed": plan.seed,
        "data_seed": plan.seed,
        "model_max_length": LENGTH,
        "lazy_preprocess": True,
        "report_to": "none",
        "disable_tqdm": True,
        **({"deepspeed": plan.deepspeed} if plan.deepspeed else {}),
        **({"use_cpu": True} if plan.device == "cpu" else {}),
    }
    given = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return [*given, *plan.arguments]


def module() -> Any:
    """`llava.train.train`, on any version of transformers.

    Raises:
        MissingDependency: where official LLaVA is not installed.
    """
    try:
        import transformers.trainer as trainer
        from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS

        with named(trainer, {"ALL_LAYERNORM_LAYERS": ALL_LAYERNORM_LAYERS}):  # transformers 5 has it elsewhere alone
            import llava.train.train as training
    except ImportError as error:
        raise MissingDependency(
            f"official LLaVA: {error}. Type: pip install --no-deps llava-torch==1.2.2.post1"
        ) from error
    return training


def run(plan: Plan, folder: Path, session: Session) -> None:
    """Trains, as LLaVA's scripts do.

    Args:
        plan: what is trained.
        folder: of the checkpoint it starts from.
        session: gets the Trainer.
    Raises:
        OptionError: for an argument behind the `--` that LLaVA's parser does not take.
    """
    import transformers.trainer

    training = module()
    replaced = {
        "LLaVATrainer": functools.partial(_trainer, training.LLaVATrainer, transformers.trainer.Trainer, session),
        "LlavaLlamaForCausalLM": _Loads(training.LlavaLlamaForCausalLM, _tower(folder)),
        "maybe_zero_3": functools.partial(_gathered, training.maybe_zero_3),
        "safe_save_model_for_hf_trainer": functools.partial(_saved, training.safe_save_model_for_hf_trainer, plan.tune),
    }
    if plan.deepspeed is not None and "RANK" in os.environ:
        import deepspeed  # whose stage 3 cuts weights while they load, and must know of the other processes by then

        deepspeed.init_distributed(dist_backend="gloo" if plan.device == "cpu" else None)
    arguments = llava_arguments(plan, folder, session.state.folder)
    tolerant = {"Accelerator": functools.partial(accelerator, transformers.trainer.Accelerator)}
    kernel = None if plan.attention == "auto" else plan.attention
    with contextlib.ExitStack() as stack:
        for context in (named(training, replaced), named(transformers.trainer, tolerant), command_line(arguments)):
            stack.enter_context(context)
        stack.enter_context(without_unused_report())
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            training.train(attn_implementation=kernel)
        except ValueError as error:
            if "not used by the HfArgumentParser" not in str(error):
                raise
            raise OptionError(f"behind `--`: {error}") from None


class _Loads:
    """The model's class as LLaVA's training asks for it: the tower is found from any folder, and weights are float32
    unless another type is wanted.
    """

    def __init__(self, model_class: Any, tower: Path) -> None:
        self.model_class, self.tower = model_class, tower

    def from_pretrained(self, name: str, **options: Any) -> Any:
        """A model that has a vision tower without weights yet, as LLaVA's training expects it."""
        import torch

        options["torch_dtype"] = options.get("torch_dtype") or torch.float32
        if options.get("attn_implementation", "") is None:
            del options["attn_implementation"]
        if options.get("cache_dir", "") is None:
            del options["cache_dir"]
        return self.model_class.from_pretrained(name, mm_vision_tower=str(self.tower), **options)


def _trainer(official: Any, plain: Any, session: Session, model: Any, tokenizer: Any, args: Any, **data: Any) -> Any:
    """LLaVA's Trainer with the method attached before every step."""
    import transformers

    if not hasattr(tokenizer, "legacy"):  # read by LLaVA's templates; a tokenizer of the fast kind may not say it
        tokenizer.legacy = True
    if not (args.bf16 or args.fp16):  # LLaVA's training has rounded the tower to float16, which evaluation does not
        tower = inner(model).get_vision_tower()
        tower.is_loaded = False
        tower.load_model()
        tower.to(device=args.device, dtype=model.dtype)
    newer = int(transformers.__version__.split(".")[0]) >= 5
    made = type("ReducedTrainer", (_Reduced, official), {"session": session, "plain": plain})
    session.check(model)
    session.trainer = made(model=model, args=args, **{"processing_class" if newer else "tokenizer": tokenizer}, **data)
    session.trainer.remove_callback(transformers.PrinterCallback)
    return session.trainer


class _Reduced(Steps):
    """What LLaVA's Trainer asks of the versions it was written for, in the form of the present one."""

    def create_optimizer(self, model: Any = None) -> Any:
        """LLaVA's groups of parameters."""
        return super().create_optimizer()

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return super()._get_train_sampler()


def _gathered(official: Callable[..., Any], parameter: Any, *more: Any, **options: Any) -> Any:
    """A parameter in one piece; DeepSpeed is asked only where it has cut it."""
    if hasattr(parameter, "ds_id"):
        return official(parameter, *more, **options)
    return parameter.detach().cpu().clone()


def _saved(official: Callable[..., Any], tune: str, *, trainer: Any, output_dir: str) -> None:
    """LLaVA's `mm_projector.bin`; a whole model is written by `export.py`."""
    if tune == PROJECTOR:
        official(trainer=trainer, output_dir=output_dir)
