"""Plan of a training: `TrainingPlan`, the conversations, and every problem that would stop or spoil a training,
reported before any weight loads.
"""

import codecs
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from llava_consensus.errors import DataError, OptionError, missing_extra, unknown_name
from llava_consensus.evaluation.files import HALF, Record, canonical, misread, read_json
from llava_consensus.evaluation.media import check_file, check_size, open_header
from llava_consensus.evaluation.models.loading import ATTENTIONS, Loading
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need

PROJECTOR, LORA, FULL, SCORER = "projector", "lora", "full", "scorer"
RATES = {PROJECTOR: 1e-3, LORA: 2e-4, FULL: 2e-5, SCORER: 1e-3}  # of LLaVA's own scripts, but for a scorer's
PRECISIONS = ("float32", "bfloat16", "float16")
OTHER_MODELS = ("lora", "mpt", "mistral")  # by these words in a folder's name LLaVA's loader takes it for another model
GIVEN = (  # arguments of LLaVA's parser that the options of a plan give
    "model_name_or_path data_path image_folder output_dir max_steps num_train_epochs per_device_train_batch_size "
    "gradient_accumulation_steps learning_rate seed data_seed save_steps bf16 fp16 tune_mm_mlp_adapter lora_enable "
    "version deepspeed gradient_checkpointing resume_from_checkpoint"
)
IMAGE = "<image>"  # placeholder of an image in a conversation
HUMAN, MODEL = "human", "gpt"
MEND = "Mend the file or take it out of the list; nothing was trained"


@dataclass(frozen=True)
class TrainingPlan:
    """A training.

    Raises:
        OptionError: for a value outside its bound, an `out` that LLaVA's loader would take for another model, or an
            argument that is given twice.
    """

    model: str  # folder of the checkpoint that is adapted, or a name of the hub
    conversations: Path  # JSON file in LLaVA's data format
    images: Path  # folder of its images
    out: Path  # folder that becomes the adapted checkpoint. Its name must be one that LLaVA's loader understands
    method: Method | None  # the reduction that is attached; None for the full model
    # visual tokens of a picture. One of them is drawn for each step, so that one model serves all
    budgets: tuple[Budget | Share, ...]
    # `projector` | `lora` (of the language model, and the projector) | `full` (all but the vision tower) | `scorer`
    tune: str = PROJECTOR
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
    # template of the prompts; None is that of LLaVA 1.5. A model of transformers has its own
    conversation: str | None = None
    arguments: tuple[str, ...] = ()  # further arguments of LLaVA's own parser, such as `("--lora_r", "16")`

    def __post_init__(self) -> None:
        for what, given, known in (
            ("part to tune", self.tune, RATES),
            ("dtype of training", self.precision, PRECISIONS),
            ("attention", self.attention, ATTENTIONS),
        ):
            if given not in known:
                raise unknown_name(what, given, known)
        for name, least in (("steps", 1), ("batch", 1), ("accumulate", 1), ("save_every", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise OptionError(f"learning_rate={self.learning_rate} must be above 0")
        if self.method is not None and not self.budgets:
            raise OptionError("budgets: give at least one number of visual tokens, such as --tokens 64")
        self._check_out()
        for argument in self.arguments:
            name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
            if argument.startswith("--") and name in GIVEN.split():
                raise OptionError(f"{argument}: is set by an option before the `--` (train --help). Use that option")

    def _check_out(self) -> None:
        """Raises OptionError for an `out` that LLaVA's loader would take for another model, or that is no file of a
        scorer.
        """
        if self.tune == SCORER:
            if self.out.suffix != ".safetensors":
                raise OptionError(f"out={str(self.out)!r}: a scorer is one file. Take a name that ends in .safetensors")
            return
        name = self.out.name.lower()
        mistaken = any(word in name and word not in Path(self.model).name.lower() for word in OTHER_MODELS)
        if "llava" not in name or mistaken or name.startswith("checkpoint-"):
            raise OptionError(
                f"out={str(self.out)!r}: LLaVA's loader goes by the name of a folder, which must contain 'llava' and "
                f"none of {', '.join(OTHER_MODELS)}, and not begin with 'checkpoint-'. "
                "Take one such as checkpoints/llava-mine"
            )

    @property
    def rate(self) -> float:
        return RATES[self.tune] if self.learning_rate is None else self.learning_rate

    @property
    def zero_stage(self) -> int:
        """Stage of DeepSpeed's ZeRO; 0 without DeepSpeed.

        Raises:
            DataError: for a configuration that cannot be read.
        """
        if self.deepspeed is None:
            return 0
        config = read_json(self.deepspeed, "Take one of eval_scripts/zero2.json and eval_scripts/zero3.json", dict)
        with misread(f"{self.deepspeed}", "Take one of eval_scripts/zero2.json and eval_scripts/zero3.json"):
            stage = config.get("zero_optimization", {}).get("stage", 0)
        if stage not in (0, 1, 2, 3):
            raise DataError(f"{self.deepspeed}: zero_optimization.stage={stage!r} must be 0, 1, 2 or 3")
        return int(stage)

    def budget(self, step: int) -> Budget | Share:
        """The budget of a step: the same in every process and after a resume, each one equally often on average."""
        return Random(canonical({"seed": self.seed, "step": step})).choice(list(self.budgets))

    def description(self, name: str) -> Record:
        left_out = ("model", "conversations", "images", "out", "method", "budgets", "deepspeed", "arguments")
        method = self.method
        return {
            "method": name,
            "options": {} if method is None else {one.name: getattr(method, one.name) for one in fields(method)},
            "budgets": [_number(budget) for budget in self.budgets],
            **{one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out},
            "learning_rate": self.rate,
            "zero_stage": self.zero_stage,
            "arguments": list(self.arguments),
        }

    def check(self, name: str, data: "Conversations | None" = None) -> None:
        """Checks what this machine and this method need.

        Args:
            name: of the method.
            data: what is trained on, where it is known.
        Raises:
            MissingDependency: for a package that is not installed.
            OptionError: for a method that cannot be trained with, or not in this way.
        """
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
        _check_method(method, name)
        between_layers = method.place is Place.DECODER
        if between_layers and self.checkpointing:
            raise OptionError(
                f"method {name!r} with --checkpointing: it cuts between layers while they run, and layers that are "
                "computed again in the backward pass would not be cut. Leave it out, or take a method that acts after "
                "the tower"
            )
        Loading(attention=self.attention).check_method(method)
        runs_layers = between_layers or Need.PROBE in method.needs
        if runs_layers and data is not None and data.without_picture and self.zero_stage == 3:
            raise OptionError(
                f"method {name!r} under ZeRO stage 3: it runs a layer of the language model once more for every batch "
                f"with an image, and {data.without_picture} of {len(data.entries)} conversations have none. Processes "
                "whose batches differ in that would wait for each other for ever. Take stage 2, or conversations with "
                "pictures"
            )


def _check_method(method: Method, name: str) -> None:
    take = "Take a method that acts after the tower or between decoder layers (llava-consensus list)"
    if method.acts_inside:
        where = "inside the vision tower" if method.place is Place.TOWER else "on the image"
        raise OptionError(
            f"method {name!r} acts {where}, which training leaves as it is and runs without gradients. {take}"
        )
    if Need.QUESTION in method.needs:
        raise OptionError(
            f"method {name!r} reads the text of the question itself, and a batch in training holds token ids of whole "
            f"conversations. {take}"
        )


def _number(budget: Budget | Share) -> Any:
    """A budget as JSON: its share, its tokens, or these with the merged ones among them."""
    if isinstance(budget, Share):
        return budget.share
    return budget.tokens if budget.merged is None else [budget.tokens, budget.merged]


class Conversations(NamedTuple):
    """Content of a file in LLaVA's data format: a JSON list of conversations about images in a folder."""

    path: Path
    entries: list[Record]
    pictures: list[str]  # names in the folder, each once, sorted
    fingerprint: str  # of the file, and of names and sizes of its images

    @property
    def without_picture(self) -> int:
        return sum("image" not in entry for entry in self.entries)

    @property
    def description(self) -> Record:
        numbers = {"conversations": len(self.entries), "pictures": len(self.pictures)}
        return {"file": self.path.name, "fingerprint": self.fingerprint, **numbers}


def read(path: Path, images: Path) -> Conversations:
    """The conversations of a file, checked.

    Args:
        path: JSON list of entries with `conversations` and, about an image, `image`.
        images: folder that the names of images are relative to.
    Raises:
        DataError: for a file or an entry that cannot be trained on.
        ImageError: for an image that is missing, damaged or too large.
    """
    entries: list[Record] = read_json(path, MEND, list)
    content = path.read_bytes()
    if content.startswith(codecs.BOM_UTF8):
        raise DataError(f"{path}: begins with a byte order mark, at which LLaVA's reader stops. Save it without")
    if not entries:
        raise DataError(f"{path}: an empty list: there is nothing to train on. {MEND}")
    for number, entry in enumerate(entries):
        for problem in _problems(entry):
            raise DataError(f"{path}: entry {number}: {problem}. {MEND}")
    pictures = sorted({entry["image"] for entry in entries if "image" in entry})
    if not images.is_dir() and pictures:
        raise DataError(f"{images}: no such folder of images. Name it with --images")
    digest = hashlib.sha256(content)
    for name in pictures:
        check_file(images / name)
        with open_header(images / name) as opened:
            check_size(images / name, opened.size)
        digest.update(f"{name}\0{(images / name).stat().st_size}\n".encode())
    return Conversations(path, entries, pictures, digest.hexdigest())


def _problems(entry: Any) -> Iterator[str]:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)
        for turn in turns
    ):
        yield f'`conversations` must be a list of {{"from": "{HUMAN}" or "{MODEL}", "value": text}}'
        return
    speakers = [turn["from"] for turn in turns]
    if speakers != [HUMAN, MODEL] * (len(turns) // 2) or not turns:
        yield f"turns must be {HUMAN}, {MODEL}, {HUMAN}, {MODEL} ...: found {', '.join(speakers[:4]) or 'none'}"
    elif any(not turn["value"].strip() for turn in turns if turn["from"] == MODEL):
        yield "an answer is empty, so nothing would be learned from it"
    if any(HALF.search(turn["value"]) for turn in turns):
        yield "a text holds half of a character (a lone surrogate), which no tokenizer reads"
    name, placeholders = entry.get("image"), sum(turn["value"].count(IMAGE) for turn in turns)
    if "image" in entry and not isinstance(name, str):
        yield f"`image` must be the name of one image, found {type(name).__name__}"
        return
    if placeholders != ("image" in entry):
        yield f"{placeholders} placeholders {IMAGE} for {int('image' in entry)} image"
    if "image" in entry and (Path(name).is_absolute() or ".." in Path(name).parts):
        yield f"the image {name!r} leads out of the folder of images"
