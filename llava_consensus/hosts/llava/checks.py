"""What official LLaVA can be told, checked before any weight loads; no torch is imported for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError, OptionError, unknown_name
from llava_consensus.evaluation.files import Record, read_json
from llava_consensus.evaluation.models.checkpoint import HUB_NAME, Checkpoint, find
from llava_consensus.hosts.layouts import STOCK

CONVERSATION = "vicuna_v1"  # the template of LLaVA-1.5, where nobody names another
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
WEIGHTS = ("*.safetensors", "*.bin")
MEND = "Fetch the checkpoint again"
VIDEO_CONVERSATION = "llava_v1"  # of the official scripts for questions about videos (Video-LLaVA)


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """What belongs in the description of a run beside the model's name, defaults filled in.

    Args:
        model: folder of the checkpoint.
        conversation: template of the prompts; None is the scripts' own.
        videos: whether the questions are about videos.
    Raises:
        OptionError: for a conversation template that official LLaVA does not have, or a layout of tiles where there are
            none.
        DataError: for a vision tower of the hub that cannot be had.
    """
    tower = tower_of_hub(model)
    check_layout(options.get("layout", STOCK), _config(Path(model)).get("image_aspect_ratio"))
    chosen = chosen_conversation(conversation, VIDEO_CONVERSATION if videos else CONVERSATION)
    return {"conversation": chosen, **({"tower": tower.commit} if tower else {})}


def chosen_conversation(name: str | None, default: str) -> str:
    """The template of a name, or the default. OptionError for one that official LLaVA does not have."""
    if name is not None:
        check_conversation(name)
    return name or default


def check_conversation(name: str) -> None:
    """Raises OptionError for a conversation template that official LLaVA does not have."""
    from llava.conversation import conv_templates  # only now: it takes seconds

    if name not in conv_templates:
        raise unknown_name("conversation", name, conv_templates)


def check_layout(layout: str, image_aspect_ratio: str | None) -> None:
    """Raises OptionError for a layout of tiles where pictures are one square each."""
    if layout != STOCK and image_aspect_ratio != "anyres":
        raise OptionError(
            f"layout={layout} lays out the tiles of a picture, and this model cuts none (image_aspect_ratio="
            f"{image_aspect_ratio!r}): take a checkpoint of LLaVA 1.6, or layout={STOCK}"
        )


def tower_beside(path: str) -> dict[str, str]:
    """Config changes that point the loader at a vision tower kept inside the checkpoint's own folder; none for other
    checkpoints.
    """
    folder = Path(path)
    if not folder.is_dir():
        return {}
    name = _config(folder).get("mm_vision_tower", "")
    tower = folder / Path(name).name
    return {"mm_vision_tower": str(tower)} if name and (tower / "config.json").is_file() else {}


def tower_of_hub(path: str) -> Checkpoint | None:
    """The vision tower of a checkpoint that names one of the hub; None for one in a folder."""
    name = _config(Path(path)).get("mm_vision_tower")
    if not isinstance(name, str) or Path(name).exists() or tower_beside(path) or not HUB_NAME.fullmatch(name):
        return None
    return find(name)


def check_sizes(path: str) -> None:
    """Raises DataError for a folder whose config.json does not say how large the model is, or says it is larger than
    its weights can be: what is not said would be guessed, and what is not there would be random.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    config = _config(folder)
    wrong_sizes = [f"{name}={config.get(name)!r}" for name in SIZES if not _is_size(config.get(name))]
    if wrong_sizes:
        raise DataError(
            f"{folder / 'config.json'}: {', '.join(wrong_sizes)} must be whole numbers of at least 1. {MEND}"
        )
    tower = config.get("mm_vision_tower")
    if not isinstance(tower, str) or not tower:
        raise DataError(
            f"{folder / 'config.json'}: mm_vision_tower={tower!r} must name a vision tower: this is no LLaVA. {MEND}"
        )
    vocabulary, width, inner, layers, _ = (config[name] for name in SIZES)
    least_bytes = (vocabulary * width + layers * (2 * width**2 + 3 * width * inner)) // 2  # bytes, of 4-bit numbers
    stored_bytes = sum(file.stat().st_size for kind in WEIGHTS for file in folder.glob(kind) if file.is_file())
    if stored_bytes < least_bytes:
        raise DataError(
            f"model={path!r} cannot be loaded: config.json describes a model of at least {least_bytes:,} bytes, the "
            f"weight files ({', '.join(WEIGHTS)}) have {stored_bytes:,}. {MEND}"
        )


def _config(folder: Path) -> Record:
    config: Record = read_json(folder / "config.json", MEND, dict)
    return config


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
