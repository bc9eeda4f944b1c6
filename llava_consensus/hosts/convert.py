"""A LLaVA checkpoint in the layout of Hugging Face, and back: of 1.5 as `LlavaForConditionalGeneration`, of 1.6 as
`LlavaNextForConditionalGeneration`.

    llava-consensus convert checkpoints/llava-mini OUT

Tensors are read one at a time and written shard by shard; each is hashed when it is read and again from the file that
was written. The Hugging Face layout has one word more, `<image>`, which stands for a visual token and is never
generated. The prompt's template is taken from the official package. The small files of the official checkpoint go along
in a folder `official`, by which it comes back; a tower that is a whole CLIP model goes along whole, for methods that
read the question by its text side, and so does one in whose place the checkpoint has a tower of its own.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import read_json, write_json
from llava_consensus.hosts.converted import MEND, SQUARE, TILED, configuration, generation, write_processor
from llava_consensus.hosts.llava.checks import tower_beside
from llava_consensus.hosts.llava.own_tower import FLAG

SHARD = 4 << 30  # bytes of one file of weights
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PARTS = (  # official name, Hugging Face name, longest first
    ("model.mm_projector.0.", "multi_modal_projector.linear_1."),
    ("model.mm_projector.2.", "multi_modal_projector.linear_2."),
    ("model.vision_tower.vision_tower.", "vision_tower."),
    ("model.image_newline", "image_newline"),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
SIGHT = "vision_model."  # the vision side of a CLIP model
OFFICIAL = "official"  # folder of what the official layout needs to come back
Rename = Callable[[str, Tensor], tuple[str, Tensor]]  # name and values as read -> as written; no name: left out


def convert(source: Path, out: Path) -> str:
    """Writes the checkpoint of one layout in the other; returns a line about what was written.

    Args:
        source: folder of an official LLaVA checkpoint, or of one that this function wrote.
        out: folder that is not there yet.
    Raises:
        DataError: for a folder that is neither, an `out` that exists, or a tensor that was not written as it was read.
    """
    file = source / "config.json"
    if not file.is_file():
        raise DataError(f"{source}: no config.json in it, so it is no checkpoint")
    if out.exists():
        raise DataError(f"{out}: is there already. Give a folder that is not")
    config = read_json(file, MEND, dict)
    backwards = bool({SQUARE, TILED} & set(config.get("architectures", [])))
    if not backwards and not any(name.startswith("LlavaLlama") for name in config.get("architectures", [])):
        raise DataError(f"{source}: made by {config.get('architectures')}; only LLaVA with a Llama model is converted")
    if not backwards and config.get("mm_projector_type") != "mlp2x_gelu":
        raise DataError(f"{source}: mm_projector_type={config.get('mm_projector_type')!r} must be 'mlp2x_gelu'")
    merge_type = config.get("mm_patch_merge_type")
    if not backwards and config.get("image_aspect_ratio") == "anyres" and merge_type != "spatial_unpad":
        raise DataError(f"{source}: mm_patch_merge_type={merge_type!r} must be 'spatial_unpad', as in LLaVA 1.6")
    out.mkdir(parents=True)
    count = _to_official(source, out) if backwards else _to_hugging_face(source, out, config)
    return f"{count} tensors, every one read back and equal: {out}"


def _to_hugging_face(source: Path, out: Path, config: dict[str, Any]) -> int:
    tower = Path(tower_beside(str(source)).get("mm_vision_tower", ""))
    if not (tower / "config.json").is_file():
        raise DataError(f"{source}: its vision tower {config.get('mm_vision_tower')!r} is not in the same folder")

    def rename(name: str, values: Tensor) -> tuple[str, Tensor]:
        if name in (EMBEDDING, HEAD):  # one word more, which is never read or generated
            values = torch.cat((values, values.new_zeros(1, values.shape[1])))
        return _renamed(name, PARTS), values

    def of_tower(name: str, values: Tensor) -> tuple[str, Tensor]:
        return (f"vision_tower.{name}" if name.startswith(SIGHT) else ""), values

    own_tower = bool(config.get(FLAG))
    weights: list[tuple[Path, Rename]] = [(path, rename) for path in _weight_files(source)]
    weights += [] if own_tower else [(path, of_tower) for path in _weight_files(tower)]
    written = _write(weights, out)
    tower_config = read_json(tower / "config.json", MEND, dict)
    image_id = write_processor(source, tower, out, config)
    write_json(out / "config.json", configuration(config, tower_config, image_id))
    write_json(out / "generation_config.json", generation(source) | {"suppress_tokens": [image_id]})
    _copy_small_files(source, out / OFFICIAL)
    _copy_small_files(tower, out / OFFICIAL / tower.name)
    if own_tower or "text_config" in tower_config:
        for path in _weight_files(tower):
            shutil.copyfile(path, out / OFFICIAL / tower.name / path.name)
    return written


def _to_official(source: Path, out: Path) -> int:
    official = source / OFFICIAL
    if not (official / "config.json").is_file():
        raise DataError(f"{source}: no folder {OFFICIAL} in it: only what this command wrote is converted back")
    config = read_json(official / "config.json", MEND, dict)
    tower, own_tower = out / Path(config["mm_vision_tower"]).name, bool(config.get(FLAG))
    back = tuple((hf_part, official_part) for official_part, hf_part in PARTS)

    def of_language(name: str, values: Tensor) -> tuple[str, Tensor]:
        name = "" if name.startswith("vision_tower.") and not own_tower else _renamed(name, back)
        return name, values[: config["vocab_size"]] if name in (EMBEDDING, HEAD) else values

    def of_tower(name: str, values: Tensor) -> tuple[str, Tensor]:
        return (name.removeprefix("vision_tower.") if name.startswith(f"vision_tower.{SIGHT}") else ""), values

    def beside_sight(name: str, values: Tensor) -> tuple[str, Tensor]:
        return ("" if name.startswith(SIGHT) and not own_tower else name), values

    files = _weight_files(source)
    sides: list[tuple[Path, Rename]] = [] if own_tower else [(path, of_tower) for path in files]
    sides += [(path, beside_sight) for path in sorted((official / tower.name).glob("*.safetensors"))]
    _copy_small_files(official, out)
    _copy_small_files(official / tower.name, tower)
    return _write([(path, of_language) for path in files], out) + _write(sides, tower)


def _copy_small_files(source: Path, out: Path) -> None:
    """Configurations and tokenizer, everything but weights."""
    out.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".model", ".txt") and "index" not in path.name:
            shutil.copyfile(path, out / path.name)


def _renamed(name: str, parts: Iterable[tuple[str, str]]) -> str:
    for before, after in parts:
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: no *.safetensors in it")
    return files


def _tensors(weights: list[tuple[Path, Rename]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all files under their new names, one at a time, without those that have none."""
    with ExitStack() as stack:
        for path, rename in weights:
            file = stack.enter_context(safe_open(path, "pt"))
            for name in file.keys():  # noqa: SIM118
                new_name, values = rename(name, file.get_tensor(name))
                if new_name:
                    yield new_name, values.contiguous()


def _write(weights: list[tuple[Path, Rename]], out: Path) -> int:
    """Writes shards and their index; reads every tensor back. Returns how many there are."""
    digests: dict[str, str] = {}
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = number = total = 0

    def flush() -> None:
        nonlocal shard, size, number
        if shard:
            number += 1
            name = f"model-{number:05}.safetensors"
            save_file(shard, out / name, metadata={"format": "pt"})
            places.update(dict.fromkeys(shard, name))
            shard, size = {}, 0

    for name, values in _tensors(weights):
        if size + values.nbytes > SHARD:
            flush()
        digests[name], shard[name] = _digest(values), values
        size, total = size + values.nbytes, total + values.nbytes
    flush()
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    for name, values in _tensors([(path, lambda *pair: pair) for path in _weight_files(out)]):
        if digests.pop(name, None) != _digest(values):
            raise DataError(f"{out}: {name} was not written as it was read. Is the disk full?")
    if digests:
        raise DataError(f"{out}: {', '.join(digests)} were not written")
    return len(places)


def _digest(values: Tensor) -> str:
    raw = values.reshape(-1).view(torch.uint8)
    return hashlib.sha256(f"{tuple(values.shape)} {values.dtype}".encode() + raw.numpy().tobytes()).hexdigest()
