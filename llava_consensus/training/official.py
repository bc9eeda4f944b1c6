"""Official LLaVA's own training, `llava.train.train.train()`, with a method attached to the model it builds.

It is called as its scripts call it, with its own arguments. Names of its module are replaced while it runs, because it
takes no arguments for them: the Trainer (to attach the method), the model's class (to find the vision tower in any
folder), the saving of the model at the end (`run.py` does it), and the reading of images (to refuse damaged ones in a
line).
"""

import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch  # names of a module are others for a while, and come back

import torch
import transformers
from PIL import Image
from torch import nn

from llava_consensus.errors import MissingDependency, OptionError
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.media import open_image, shrink_to_pad
from llava_consensus.evaluation.models.llava import CONVERSATION, FLAG, MEND, tower_of
from llava_consensus.hosts.clip import without_unused_report
from llava_consensus.hosts.environment import OFFICIAL, load_pretrained
from llava_consensus.hosts.official_model import check_images
from llava_consensus.training.plan import LORA, PROJECTOR, Conversations, TrainingPlan
from llava_consensus.training.trainer import ReducingTrainer, inner, settings

LENGTH = 2048  # rows of a conversation, of LLaVA's own scripts
TAKEN = (  # entries of a checkpoint's configuration that LLaVA's parser has under the same names
    "mm_projector_type",
    "mm_vision_select_layer",
    "mm_vision_select_feature",
    "mm_patch_merge_type",
    "mm_use_im_start_end",
    "mm_use_im_patch_token",
    "image_aspect_ratio",
)
OF_LOADERS = ("dispatch_batches", "split_batches", "even_batches", "use_seedable_sampler")


def check(plan: TrainingPlan, folder: Path) -> None:
    config = read_json(folder / "config.json", MEND, dict)
    check_images(config)
    tiled, own_tower = config.get("image_aspect_ratio") == "anyres", bool(config.get(FLAG))
    if tiled or own_tower or not str(config.get("model_type")).endswith("llama"):
        raise OptionError(
            f"model={plan.model!r}: LLaVA's training builds Llama models with the stock vision tower and without "
            "tiles. Convert the checkpoint (llava-consensus model convert) and train it on transformers"
        )


def _tower(folder: Path) -> Path:
    tower = tower_of(folder)
    return folder if tower is None else tower.folder


def run(plan: TrainingPlan, data: Conversations, folder: Path, states: Path) -> transformers.Trainer:
    """Trains, as LLaVA's scripts do. OptionError for an argument after the `--` that LLaVA's parser does not take."""
    training = _module()
    trainers: list[transformers.Trainer] = []
    if plan.deepspeed is not None and "RANK" in os.environ:
        import deepspeed  # whose stage 3 cuts weights while they load, and must know of the other processes by then

        deepspeed.init_distributed(dist_backend="gloo" if plan.device == "cpu" else None)
    accelerator = functools.partial(_accelerator, transformers.trainer.Accelerator)
    with (
        patch.multiple(training, **_replaced(training, plan, folder, trainers)),
        patch.object(transformers.trainer, "Accelerator", accelerator),
        patch.object(sys, "argv", ["llava.train.train", *_arguments(plan, folder, states)]),
        without_unused_report(),
    ):
        try:
            training.train(attn_implementation=None if plan.attention == "auto" else plan.attention)
        except ValueError as error:
            if "not used by the HfArgumentParser" not in str(error):
                raise
            raise OptionError(f"after `--`: {error}") from None
    return trainers[0]


def _replaced(training: Any, plan: TrainingPlan, folder: Path, trainers: list[transformers.Trainer]) -> dict[str, Any]:
    """Names of LLaVA's module as they are while a plan is trained; the Trainer is put into `trainers`."""

    def made(
        model: nn.Module, tokenizer: Any, args: transformers.TrainingArguments, **data: Any
    ) -> transformers.Trainer:
        if not hasattr(tokenizer, "legacy"):  # read by LLaVA's templates; a tokenizer of the fast kind may not say it
            tokenizer.legacy = True
        if not (args.bf16 or args.fp16):  # LLaVA's training has rounded the tower to float16, which evaluation does not
            tower = inner(model).get_vision_tower()
            tower.is_loaded = False
            tower.load_model()
            tower.to(device=args.device, dtype=model.dtype)
        name = "tokenizer" if transformers.__version__.startswith("4.") else "processing_class"
        made_of = type("ReducedTrainer", (_Reduced, trainer_class), {"plan": plan})
        trainers.append(made_of(model=model, args=args, **{name: tokenizer}, **data))
        return trainers[-1]

    def from_pretrained(name: str, **options: Any) -> nn.Module:
        """A model that has a vision tower without weights yet, in float32 unless another type is wanted."""
        told = {"torch_dtype": torch.float32} | {key: value for key, value in options.items() if value is not None}
        return load_pretrained(model_class, name, mm_vision_tower=str(_tower(folder)), **told)

    trainer_class, model_class = training.LLaVATrainer, training.LlavaLlamaForCausalLM
    return {
        "LLaVATrainer": made,
        "LlavaLlamaForCausalLM": SimpleNamespace(from_pretrained=from_pretrained),
        "Image": SimpleNamespace(open=lambda path: shrink_to_pad(open_image(path)), new=Image.new),
        "get_peft_state_maybe_zero_3": lambda *_: {},
        "get_peft_state_non_lora_maybe_zero_3": lambda *_: {},
        "safe_save_model_for_hf_trainer": lambda **_: None,
    }


class _Reduced(ReducingTrainer):
    """LLaVA's Trainer hooks in the signature of the installed transformers."""

    def create_optimizer(self, model: Any = None) -> Any:
        return super().create_optimizer()

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return super()._get_train_sampler()


def _module() -> Any:
    """`llava.train.train`, on any version of transformers. MissingDependency where official LLaVA is not installed."""
    try:
        from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS

        # LLaVA imports it from the Trainer's module, where transformers 5 has it no more
        with patch.object(transformers.trainer, "ALL_LAYERNORM_LAYERS", ALL_LAYERNORM_LAYERS, create=True):
            import llava.train.train as training
    except ImportError as error:
        raise MissingDependency(f"official LLaVA: {error}. {OFFICIAL}") from error
    return training


def _arguments(plan: TrainingPlan, folder: Path, states: Path) -> list[str]:
    config = read_json(folder / "config.json", MEND, dict)
    values: dict[str, Any] = {
        **settings(plan, states),
        "model_name_or_path": folder,
        "version": CONVERSATION,
        "data_path": plan.conversations,
        "image_folder": plan.images,
        "vision_tower": _tower(folder),
        "mm_use_im_patch_token": True,
        **{name: config[name] for name in TAKEN if config.get(name) is not None},
        "tune_mm_mlp_adapter": plan.tune == PROJECTOR,
        "lora_enable": plan.tune == LORA,
        "model_max_length": LENGTH,
        "lazy_preprocess": True,
    }
    return [part for name, value in values.items() for part in (f"--{name}", str(value))] + list(plan.arguments)


def _accelerator(official: Any, **options: Any) -> Any:
    """Options that accelerate takes in one object since 1.0, for 4.37 of transformers, which does not know it."""
    loader = {name: options.pop(name) for name in OF_LOADERS if name in options}
    if loader:
        from accelerate.utils import DataLoaderConfiguration

        # 4.37 does not ask for the same order of the data in one process and in several, as later versions do
        options["dataloader_config"] = DataLoaderConfiguration(**{"use_seedable_sampler": True, **loader})
    return official(**options)
