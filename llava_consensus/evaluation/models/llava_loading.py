"""A checkpoint of official LLaVA: what can be known of it before any weight loads (`check`; no torch is imported for
it), and loading it by LLaVA's own loader (`load`).

Some checkpoints, such as LLaVA 1.6, have a vision tower that was trained along (`unfreeze_mm_vision_tower`). The
official loader would load it while the language model is being made, which current transformers refuse. Here the
language model is loaded without it, then the tower from its name, then the checkpoint's own tower weights over it: all
of them and no others, never silently the stock tower.
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import ConsensusError, DataError, MissingDependency, OptionError, unknown_name
from llava_consensus.evaluation.files import Record, read_json
from llava_consensus.evaluation.models.checkpoint import HUB_NAME, Checkpoint, find, hub_name
from llava_consensus.hosts import STOCK, check_layout, check_llava_version

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

    from llava_consensus.evaluation.models.llava import LlavaHost
    from llava_consensus.evaluation.models.loading import Loading

CONVERSATION = "vicuna_v1"  # the template of LLaVA-1.5, where nobody names another
VIDEO_CONVERSATION = "llava_v1"  # of the official scripts for questions about videos (Video-LLaVA)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
WEIGHTS = ("*.safetensors", "*.bin")
MEND = "Fetch the checkpoint again"
FLAG = "unfreeze_mm_vision_tower"
PREFIX = "model.vision_tower.vision_tower."  # of the tower's tensors in a checkpoint
NAMED = 4  # names in a message


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """What belongs in the description of a run beside the model's name, defaults filled in.

    Args:
        model: folder of the checkpoint.
        conversation: template of the prompts; None is the scripts' own.
        videos: whether the questions are about videos.
        options: of the host.
    Raises:
        OptionError: for a conversation template that official LLaVA does not have, or a layout of tiles where there are
            none.
        DataError: for a vision tower of the hub that cannot be had.
    """
    check_llava_version()
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


def load(path: str, loading: "Loading", view: str, options: Mapping[str, str]) -> "LlavaHost":
    """The host of a checkpoint, see `load_official`, with all options of the host."""
    from llava_consensus.evaluation.models.llava import LlavaHost

    return LlavaHost(*load_official(path, loading), options=options)


def load_official(path: str, loading: "Loading") -> tuple[Any, Any, Any]:
    """Model, tokenizer and image processor of a checkpoint, by LLaVA's own loader (`llava.model.builder`).

    A vision tower named in the checkpoint's config is looked for beside the checkpoint too, so that it is found from
    any folder.

    Args:
        path: folder of the checkpoint.
        loading: how, with nothing left open.
    Raises:
        DataError: for a folder that is not there or cannot be loaded, whose weights are not those of its config.json,
            or hold NaN or infinity.
        OptionError: for a name LLaVA's loader would take for another model.
    """
    check_llava_version()
    path = str(Path(path).expanduser())
    if loading.device_map not in (None, "auto"):
        raise OptionError(
            f"device_map={loading.device_map!r}: official LLaVA places its vision tower by auto alone. Take auto"
        )
    try:
        import llava.model.builder
        from llava.mm_utils import get_model_name_from_path
    except ImportError as error:
        raise MissingDependency(
            f"official LLaVA: {error}. Type: pip install --no-deps llava-torch==1.2.2.post1"
        ) from error
    from llava_consensus.evaluation.models.checkpoint import incomplete_refused, refuse_not_finite

    named = hub_name(Path(path)) or path
    name = get_model_name_from_path(named)
    if "llava" not in name.lower() or "lora" in name.lower():
        raise OptionError(
            f"model={named!r}: LLaVA's loader goes by the model's name, "
            "which must contain 'llava' and not 'lora' (merge first)"
        )
    check_sizes(path)
    own_tower = trains_tower(path)
    changes: dict[str, Any] = {**_tower(path), **({FLAG: False} if own_tower else {})}
    # what the loader hands on to transformers; where the model stands is its own to say
    changes |= {key: value for key, value in loading.told().items() if key != "device_map" or value == "auto"}
    device = "cuda" if loading.device_map else loading.device
    with incomplete_refused():
        model, tokenizer, processor = quietly_loaded(
            llava.model.builder.load_pretrained_model, path, name, device=device, **changes
        )
    if own_tower:
        load_own_tower(path, model)
    loading.cast(model)
    refuse_not_finite(path, model)
    _try_picture(path, model, processor)
    return model.eval(), tokenizer, processor


def _try_picture(path: str, model: "PreTrainedModel", processor: "BaseImageProcessor") -> None:
    """Raises DataError where a picture cannot be made ready for the tower: else every question would fail at it."""
    from llava.mm_utils import process_images
    from PIL import Image

    side = model.get_vision_tower().config.image_size
    try:
        pixels = process_images([Image.new("RGB", (64, 48))], processor, model.config)
        if pixels.shape[-3:] != (3, side, side) or not pixels.isfinite().all():
            raise ValueError(f"it becomes {tuple(pixels.shape[-3:])} numbers, and {(3, side, side)} finite ones enter")
    except Exception as error:  # a damaged configuration breaks foreign code in any way
        raise DataError(
            f"model={path!r}: its image processor cannot read a picture ({type(error).__name__}: {error}). Fetch "
            "config.json and preprocessor_config.json of the checkpoint and of its vision tower again"
        ) from error


def quietly_loaded(
    loader: Callable[..., Any], path: str, name: str, **arguments: Any
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, BaseImageProcessor]":
    """Model, tokenizer and image processor by the loader of a `llava` package, whose own printing is nobody's business.

    Raises:
        DataError: for a checkpoint that cannot be loaded.
    """
    from llava_consensus.hosts.towers import without_unused_report

    try:
        with contextlib.redirect_stdout(io.StringIO()), without_unused_report():
            tokenizer, model, processor, _ = loader(path, None, name, **arguments)
    except ConsensusError:
        raise
    except Exception as error:  # a damaged checkpoint breaks foreign code in any way
        raise DataError(f"model={path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return model, tokenizer, processor


def trains_tower(path: str) -> bool:
    """Whether the vision tower is part of the checkpoint in a folder."""
    file = Path(path) / "config.json"
    return bool(file.is_file() and json.loads(file.read_text()).get(FLAG, False))


def load_own_tower(path: str, model: "PreTrainedModel") -> None:
    """Puts the checkpoint's tower weights into a model that was loaded with another tower.

    Raises:
        DataError: where the checkpoint has none, or they are not those of this tower.
    """
    tower = model.get_vision_tower().vision_tower
    tower_state = tower.state_dict()
    bare = not any(name.startswith("vision_model.") for name in tower_state)  # transformers 5 has one level less
    tensors = {name.removeprefix("vision_model.") if bare else name: values for name, values in _tensors(Path(path))}
    tensors = {
        name: values for name, values in tensors.items() if name in tower_state or not name.endswith("position_ids")
    }
    missing, surplus = sorted(tower_state.keys() - tensors.keys()), sorted(tensors.keys() - tower_state.keys())
    missing = [name for name in missing if not name.endswith("position_ids")]
    shapes = [name for name in tensors.keys() & tower_state.keys() if tensors[name].shape != tower_state[name].shape]
    if missing or surplus or shapes:
        raise DataError(
            f"model={path!r}: config.json says that its vision tower was trained ({FLAG}), but the tower's weights do "
            f"not fit: {len(missing)} missing, {len(surplus)} left over, {len(shapes)} of another shape "
            f"({', '.join([*missing, *surplus, *shapes][:NAMED])}). Fetch the whole checkpoint again"
        )
    tower.load_state_dict(tensors, strict=False)
    setattr(model.config, FLAG, True)


def _tensors(folder: Path) -> "Iterator[tuple[str, Tensor]]":
    """The tower's tensors in the weight files of a checkpoint, by their names in the tower."""
    import torch
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(PREFIX):
                    yield name.removeprefix(PREFIX), file.get_tensor(name)
    for path in sorted(folder.glob("pytorch_model*.bin")):
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for name, values in weights.items():
            if name.startswith(PREFIX):
                yield name.removeprefix(PREFIX), values


def _tower(path: str) -> dict[str, str]:
    """Config changes that point the loader at the folder of the vision tower, downloaded where it is one of the hub."""
    tower = tower_of_hub(path)
    if tower is None:
        return tower_beside(path)
    tower.files()
    return {"mm_vision_tower": str(tower.folder)}


def _config(folder: Path) -> Record:
    config: Record = read_json(folder / "config.json", MEND, dict)
    return config


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
