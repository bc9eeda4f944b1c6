"""Plan of a training, and the conversations in LLaVA's data format, both checked before any weight loads."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import NamedTuple

from llava_consensus.errors import DataError, OptionError, missing_extra
from llava_consensus.evaluation.files import Record, canonical, misread, read_json
from llava_consensus.evaluation.media import check_file
from llava_consensus.evaluation.models.loading import ATTENTIONS, Loading
from llava_consensus.reduction.budget import Budget, Share, amount
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.options import at_least, choose
from llava_consensus.reduction.tokens import Need

PROJECTOR, LORA, FULL, SCORER = "projector", "lora", "full", "scorer"
RATES = {PROJECTOR: 1e-3, LORA: 2e-4, FULL: 2e-5, SCORER: 1e-3}  # of LLaVA's own scripts, but for a scorer's
PRECISIONS = ("float32", "bfloat16", "float16")
IMAGE = "<image>"  # placeholder of an image in a conversation
HUMAN, MODEL = "human", "gpt"
MEND = "Mend the file or take it out of the list; nothing was trained"


@dataclass(frozen=True)
class TrainingPlan:
    """A training. OptionError for a value outside its bound."""

    model: str  # folder of the checkpoint that is adapted, or a name of the hub
    conversations: Path  # JSON file in LLaVA's data format
    images: Path  # folder of its images
    out: Path  # folder that becomes the adapted checkpoint, or file of a scorer
    method: Method | None  # the reduction that is attached; None for the full model
    budgets: tuple[Budget | Share, ...]  # of an image; one of them is drawn for each step, so that one model serves all
    tune: str = PROJECTOR  # `projector` | `lora` (and the projector) | `full` (all but the vision tower) | `scorer`
    steps: int = 100  # optimiser steps
    batch: int = 8  # conversations of one process in one forward
    accumulate: int = 1  # forwards of a step
    learning_rate: float | None = None  # None is that of LLaVA's own scripts for this `tune`
    seed: int = 0  # of the order of the data, of the budgets and of dropout
    save_every: int = 50  # steps between two checkpoints to resume from
    precision: str = "float32"  # of weights and sums, `float32` | `bfloat16` | `float16` (with a scaler, on a GPU)
    checkpointing: bool = False  # whether the layers are computed again in the backward pass, to save memory
    attention: str = "auto"  # kernel of the language model, `auto` | `sdpa` | `flash_attention_2` | `eager`
    device: str = "auto"  # `auto` | `cpu` | `cuda`
    deepspeed: Path | None = None  # configuration file of DeepSpeed
    arguments: tuple[str, ...] = ()  # further arguments of LLaVA's own parser, such as `("--lora_r", "16")`

    def __post_init__(self) -> None:
        choose("tune", self.tune, tuple(RATES))
        choose("dtype", self.precision, PRECISIONS)
        choose("attention", self.attention, ATTENTIONS)
        for name, least in (("steps", 1), ("batch", 1), ("accumulate", 1), ("save_every", 1), ("seed", 0)):
            at_least(name, getattr(self, name), least)
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise OptionError(f"learning_rate={self.learning_rate} must be above 0")
        if self.method is not None and not self.budgets:
            raise OptionError("budgets: give at least one number of visual tokens, such as --tokens 64")
        if self.tune == SCORER and self.out.suffix != ".safetensors":
            raise OptionError(f"out={str(self.out)!r}: a scorer is one file. Take a name that ends in .safetensors")

    @property
    def rate(self) -> float:
        return RATES[self.tune] if self.learning_rate is None else self.learning_rate

    @property
    def zero_stage(self) -> int:
        """Stage of DeepSpeed's ZeRO; 0 without DeepSpeed. DataError for a configuration that cannot be read."""
        if self.deepspeed is None:
            return 0
        with misread(f"{self.deepspeed}", "Take one of eval_scripts/zero2.json and eval_scripts/zero3.json"):
            return int(read_json(self.deepspeed).get("zero_optimization", {}).get("stage", 0))

    def budget(self, step: int) -> Budget | Share:
        """The budget of a step: the same in every process and after a resume, each one equally often on average."""
        return Random(canonical({"seed": self.seed, "step": step})).choice(list(self.budgets))

    def description(self, name: str) -> Record:
        left_out = ("model", "conversations", "images", "out", "method", "budgets", "deepspeed", "arguments")
        method = self.method
        return {
            "method": name,
            "options": {} if method is None else {one.name: getattr(method, one.name) for one in fields(method)},
            "budgets": [amount(budget) for budget in self.budgets],
            **{one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out},
            "learning_rate": self.rate,
            "zero_stage": self.zero_stage,
            "arguments": list(self.arguments),
        }

    def check(self, name: str, data: "Conversations | None" = None) -> None:
        """Checks packages, and that a method of this name can be trained with, on these conversations."""
        for needed, package, extra in (
            (True, "accelerate", "train"),
            (self.tune == LORA, "peft", "train"),
            (self.deepspeed is not None, "deepspeed", "train"),
            (self.attention == "flash_attention_2", "flash_attn", "gpu"),
        ):
            if needed and find_spec(package) is None:
                raise missing_extra(package, extra)
        if self.deepspeed is not None and "RANK" not in os.environ:  # DeepSpeed would look for MPI
            raise OptionError(
                f"--deepspeed {self.deepspeed}: DeepSpeed runs under a launcher, for one GPU too. Start it by torchrun "
                "--nproc_per_node 1 -m llava_consensus.cli train ..."
            )
        method = self.method
        if method is None or not method.reduces:
            return
        reason = ""
        if method.acts_inside:
            reason = "acts inside the vision tower or on the image, which run without gradients"
        elif Need.QUESTION in method.needs:
            reason = "reads the text of the question, and a batch in training holds token ids of whole conversations"
        elif method.place is Place.DECODER and self.checkpointing:
            reason = "cuts between layers, and layers that --checkpointing computes again would not be cut"
        if reason:
            raise OptionError(f"method {name!r} {reason}. Take one that acts after the tower (llava-consensus list)")
        Loading(attention=self.attention).check_method(method)
        runs_layers = method.place is Place.DECODER or Need.PROBE in method.needs
        if runs_layers and data is not None and data.without_image and self.zero_stage == 3:
            raise OptionError(
                f"method {name!r} under ZeRO stage 3 runs a layer once more for every batch with an image, and "
                f"{data.without_image} of {len(data.entries)} conversations have none: processes whose batches differ "
                "would wait for each other for ever. Take stage 2, or conversations with images"
            )


class Conversations(NamedTuple):
    """Content of a file in LLaVA's data format: a JSON list of conversations about images in a folder."""

    path: Path
    entries: list[Record]

    @property
    def without_image(self) -> int:
        return sum("image" not in entry for entry in self.entries)


def read(path: Path, images: Path) -> Conversations:
    """The conversations of a file about images in a folder. DataError for a file that cannot be trained on."""
    entries: list[Record] = read_json(path, MEND, list)
    if not entries:
        raise DataError(f"{path}: an empty list: there is nothing to train on. {MEND}")
    for number, entry in enumerate(entries):
        with misread(f"{path}: entry {number}", MEND):
            for problem in _problems(entry):
                raise DataError(f"{path}: entry {number}: {problem}. {MEND}")
            if "image" in entry:
                check_file(images / entry["image"])
    return Conversations(path, entries)


def _problems(entry: Record) -> Iterator[str]:
    turns = entry["conversations"]
    speakers, texts = [turn["from"] for turn in turns], [turn["value"].strip() for turn in turns]
    if speakers != [HUMAN, MODEL] * (len(turns) // 2) or not turns:
        yield f"turns must be {HUMAN}, {MODEL}, {HUMAN}, {MODEL} ...: found {', '.join(speakers[:4]) or 'none'}"
    if not all(texts[1::2]):
        yield "an answer is empty, so nothing would be learned from it"
    placeholders = sum(text.count(IMAGE) for text in texts)
    if placeholders != ("image" in entry):
        yield f"{placeholders} placeholders {IMAGE} for {int('image' in entry)} image"
    if "image" in entry and (Path(entry["image"]).is_absolute() or ".." in Path(entry["image"]).parts):
        yield f"the image {entry['image']!r} leads out of the folder of images"
