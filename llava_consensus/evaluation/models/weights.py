"""Weight files of a checkpoint, of safetensors or pickled, read one tensor at a time and written shard by shard."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from llava_consensus.errors import ConsensusError, DataError
from llava_consensus.evaluation.files import FRESH, write_json

FORMATS = ("*.safetensors", "pytorch_model*.bin")
MEND = "Fetch the checkpoint again"
SHARD = 4 << 30  # bytes of one file of weights


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, of the first format there is. DataError for none."""
    for pattern in FORMATS:
        if files := sorted(folder.glob(pattern)):
            return files
    raise DataError(f"{folder}: no {' or '.join(FORMATS)} in it")


def tensors_of(file: Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file whose names begin so; of a pickled file nothing is executed."""
    if file.suffix == ".bin":
        try:
            weights: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # UnpicklingError, RuntimeError, EOFError
            raise DataError(f"{file}: cannot be read: {reason(error)}") from error
        yield from ((name, values) for name, values in weights.items() if name.startswith(prefix))
        return
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            if name.startswith(prefix):
                yield name, opened.get_tensor(name)


def write_shards(tensors: Iterable[tuple[str, Tensor]], out: Path) -> int:
    """Writes shards and their index; how many tensors there are."""
    out.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        file = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, values in tensors:
        if shard and sum(one.nbytes for one in shard.values()) + values.nbytes > SHARD:
            flush()
        shard[name] = values.contiguous()
        total += values.nbytes
    flush()
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    return len(places)


def rewrite(source: Path, out: Path, values: dict[str, Tensor]) -> int:
    """Writes the weights of a folder with these replaced or added, in its types; returns their number."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        left = dict(values)
        for file in weight_files(source):
            for name, value in tensors_of(file):
                yield name, left.pop(name, value).to(value.dtype)
        yield from left.items()

    return write_shards(tensors(), out)


@contextmanager
def new_folder(out: Path, source: Path) -> Iterator[Path]:
    """A folder that becomes `out` if the body ends without an error, and vanishes otherwise with a DataError."""
    if out.exists():
        raise DataError(f"{out}: is there already. Give a folder that is not")
    fresh = out.with_name(f".{out.name}{FRESH}")
    shutil.rmtree(fresh, ignore_errors=True)  # of a call that was killed
    try:
        yield fresh
        fresh.rename(out)
    except ConsensusError:
        raise
    except OSError as error:
        raise DataError(f"{error.filename or out}: {error.strerror or error}. Nothing was written to {out}") from error
    except Exception as error:  # a damaged checkpoint breaks foreign code in any way, and so does a full disk
        raise DataError(f"{source}: cannot be written as {out} ({reason(error)}). {MEND}, or make room") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def reason(error: Exception) -> str:
    if "weights_only" in str(error):  # torch's message explains how to run the pickled code
        return "weights hold pickled objects, which can run code and are not read. Convert them to safetensors"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def copy_small_files(source: Path, out: Path) -> None:
    """Configurations and tokenizer, everything but weights."""
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".model", ".txt", ".jinja") and "index" not in path.name:
            shutil.copyfile(path, out / path.name)
