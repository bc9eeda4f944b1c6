"""Prompts for the doubles of models that carry their own code, as their authors' own preprocessing makes them, and
folders of checkpoints with the doubles for their code.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import remote_doubles
import torch
import transformers
from hf_models import padded
from PIL import Image
from remote_doubles.base import pixels_of

from llava_consensus import attach

MINI = Path(__file__).parents[1] / "checkpoints/llava-mini"
TOKENS = 64  # of an image
PICTURE = "picture"  # where it stands in a row of words
ROWS = [[5, 6, PICTURE, 7, 8, 9], [15, PICTURE, 16, 17, 18, 19, 20], [25, 26, 27, PICTURE, 28]]
EQUAL = [[5, 6, PICTURE, 7, 8, 9], [15, 16, PICTURE, 17, 18, 19]]


def picture(number: int) -> Image.Image:
    values = numpy.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
    return Image.fromarray(values).resize((60 + 8 * number, 64))


def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MINI)


@dataclass
class Double:
    """A double and what it is asked."""

    name: str
    model: Any
    folder: Path

    def inputs(self, rows: list[list[Any]], first: int = 0) -> dict[str, Any]:
        """Left-padded prompts, each about an image of its own, counted from `first`."""
        return getattr(self, f"_{self.name}")(rows, first)

    @property
    def rows(self) -> list[list[Any]]:
        """Prompts that the model can answer together."""
        return EQUAL if self.name == "internvl_chat" else ROWS

    def _qwen_vl(self, rows: list[list[Any]], first: int) -> dict[str, Any]:
        start, found = self.model.config.visual["image_start_id"], []
        for number, row in enumerate(rows):
            path = self.folder / f"{first + number}.png"
            picture(first + number).save(path)
            name = list(str(path).encode())
            span = [start, *name, *[start + 2] * (TOKENS - len(name)), start + 1]
            found.append([word for part in row for word in (span if part == PICTURE else [part])])
        return padded(found, 1263)

    def _cogvlm(self, rows: list[list[Any]], first: int) -> dict[str, Any]:
        words = [[1, *([0] * (TOKENS + 2) if PICTURE in row else []), *without(row)] for row in rows]
        types = [[0, *([1] * (TOKENS + 2) if PICTURE in row else []), *[0] * len(without(row))] for row in rows]
        size = self.model.config.vision_config["image_size"]
        pictures = [[pixels_of(picture(first + n), size)] if PICTURE in row else [] for n, row in enumerate(rows)]
        inputs = {**padded(words, 0), "token_type_ids": padded(types, 0)["input_ids"]}
        return {**inputs, "images": pictures} if any(pictures) else inputs

    def _internvl_chat(self, rows: list[list[Any]], first: int) -> dict[str, Any]:
        size = self.model.get_vision_tower().image_processor.crop_size["height"]
        words = [[1, *(-200 if part == PICTURE else part for part in row)] for row in rows]
        pictures = [pixels_of(picture(first + n), size) for n in range(len(rows))]
        return {**padded(words, 0), "images": torch.stack(pictures)}


def double(name: str, folder: Path) -> Double:
    """A double whose images are kept in a folder with a short path."""
    return Double(name, getattr(remote_doubles, name)(), folder)


def host_of(case: Double) -> Any:
    from llava_consensus.evaluation.models import remote
    from llava_consensus.hosts import view_of

    if case.name != "internvl_chat":
        return remote.runner_of(view_of(case.model), tokenizer())
    return remote.InternVLChatRunner(case.model, tokenizer(), case.model.get_vision_tower().image_processor)


def without(row: list[Any]) -> list[int]:
    return [part for part in row if part != PICTURE]


def generate(model: Any, inputs: dict[str, Any], new: int = 4, **options: Any) -> Any:
    given = {name: value for name, value in inputs.items() if name != "input_ids"}
    bounds = {"max_new_tokens": new, "min_new_tokens": new}
    return model.generate(inputs["input_ids"], do_sample=False, **bounds, **given, **options)


@torch.no_grad()
def recorded(case: Double) -> dict[str, Any]:
    """Logits [R, V] of the last row and generated ids [R, new], plain and reduced to 16 tokens, and the kept tokens."""
    inputs = case.inputs(case.rows)
    found = {"plain": case.model(**inputs).logits[:, -1], "plain_ids": generate(case.model, inputs)[:, -4:]}
    for method in ("consensusdrop", "vispruner"):
        with attach(case.model, method, 16) as attached:
            found[method] = case.model(**inputs).logits[:, -1]
            kept = [one.kept[0] for outcome in attached.outcomes for _, one in outcome.reductions]
            found[f"{method}_ids"] = generate(case.model, inputs)[:, -4:]
        found[f"{method}_kept"] = torch.stack(kept)
    return {name: value.numpy() for name, value in found.items()}


def checkpoint(name: str, folder: Path) -> Path:
    """A checkpoint folder of a double, which carries the double's code and LLaVA-mini's tokenizer."""
    model = getattr(remote_doubles, name)()
    model.save_pretrained(folder)
    for file in ("base.py", f"{name}.py"):
        shutil.copy(Path(remote_doubles.__file__).parent / file, folder)
    for file in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(MINI / file, folder)
    config = json.loads((folder / "config.json").read_text())
    kind = type(model).__name__
    classes = {"AutoConfig": type(model.config).__name__, "AutoModelForCausalLM": kind}
    config["auto_map"] = {auto: f"{name}.{own}" for auto, own in classes.items()}
    config["architectures"] = [kind]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
