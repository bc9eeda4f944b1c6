"""Which placeholders of a prompt are one image, and which of its tiles: all that a model family must say of itself.

`TABLE` says for each `model_type` how its processor groups placeholders. For any other type each run is one image. All
of this is numpy on the CPU, so that a prefill launches nothing for it.
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.environment import FIXED

Integers = NDArray[np.int64]

MODALITIES = ("image", "video")
STRUCTURAL = -1  # token of rows that are never candidates (newlines, class tokens)


class Image(NamedTuple):
    """The rows of one image (or video) in a batch of prompts."""

    row: int  # batch index
    places: Integers  # [n] columns of the prompt
    tile: Integers  # [n] tile, or frame, of each row
    token: Integers  # [n] token of that tile; STRUCTURAL for rows that are no candidates
    tiles: int
    video: bool
    first: int  # number of its first tile among those of its modality
    part: tuple[int, int] = (0, 1)  # index of this part of the user's image, and their number


def one_image(row: int, places: Integers, token: Integers | None = None) -> Image:
    """An image of one tile, whose tokens are in order if none are given."""
    token = np.arange(len(places)) if token is None else token
    return Image(row, places, np.zeros_like(places), token, 1, False, 0)


class Call(NamedTuple):
    """Input of a family's entry."""

    base: Any  # the module with `get_image_features`
    inputs: dict[str, Any]  # arguments of the encoder
    ids: Integers  # [R, S]
    here: NDArray[np.bool_]  # [R, S] placeholders of the modality
    modality: str
    pixels: Tensor


def runs(call: Call) -> list[tuple[int, int, int]]:
    """Row, start and length of every unbroken run of placeholders."""
    edges = np.diff(np.pad(call.here.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, stops = np.argwhere(edges == 1).tolist(), np.argwhere(edges == -1).tolist()
    return [(row, start, stop - start) for (row, start), (_, stop) in zip(starts, stops, strict=True)]


def numbers(value: Any) -> Integers:
    return value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


# Entries: the sizes of the tiles of each image, in the order of the prompts.


def one_run(call: Call) -> list[Any]:
    return [[length] for _, _, length in runs(call)]


def equal(call: Call) -> list[Any]:
    """LLaVA, Gemma 3: every image has the same number of tokens."""
    count = len(call.pixels)
    return [[int(call.here.sum()) // count]] * count


def by_grid(call: Call) -> list[Any]:
    """Qwen-VL, GLM-4V: time x height x width patches; each time step is a tile."""
    grid = numbers(call.inputs[f"{call.modality}_grid_thw"])
    merged = int(grid.prod(1).sum()) // int(call.here.sum())
    return [[height * width // merged] * time for time, height, width in grid.tolist()]


def video(call: Call) -> list[Any]:
    """By grid if the processor gives one, else each run is one video."""
    return by_grid(call) if f"{call.modality}_grid_thw" in call.inputs else one_run(call)


def by_size(call: Call) -> list[Any]:
    """Pixtral, Mistral 3: the number of tokens depends on the pixels."""
    area = numbers(call.inputs["image_sizes"]).prod(1)
    each = int(area.sum()) // int(call.here.sum())
    return [[int(one) // each] for one in area]


def _tile(call: Call) -> int:
    tiles = call.pixels.flatten(0, -4)
    return int(call.here.sum()) // int((tiles != 0).flatten(1).any(1).sum())


def run_of_tiles(call: Call) -> list[Any]:
    """InternVL: the tiles of an image follow each other."""
    size = _tile(call)
    return [[size] * (length // size) for _, _, length in runs(call)]


def tagged(call: Call) -> list[Any]:
    """SmolVLM, Idefics 3, Aya: a tag in front of each tile; the whole view ends an image."""
    images, waiting, found = list[Any](), 0, runs(call)
    last = {row: int(call.ids[row, start - 1]) for row, start, _ in found}
    for row, start, length in found:
        waiting += 1
        if int(call.ids[row, start - 1]) == last[row]:
            images, waiting = [*images, [length] * waiting], 0
    return images


def gaps(call: Call) -> list[tuple[int, ...] | None]:
    """The words between each run and the one before it; None for the first run of a prompt."""
    found: list[tuple[int, ...] | None] = []
    previous, end = -1, 0
    for row, start, length in runs(call):
        found.append(tuple(call.ids[row, end:start].tolist()) if row == previous else None)
        previous, end = row, start + length
    return found


def spaced(call: Call) -> list[Any]:
    """Command A Vision, Ovis 2, LFM2-VL: one word between the tiles of an image."""
    images = list[Any]()
    for (_, _, length), words in zip(runs(call), gaps(call), strict=True):
        if words is not None and len(words) == 1:
            images[-1].append(length)
        else:
            images.append([length])
    return images


def separated(call: Call) -> list[Any]:
    """Llama 4: up to two separators between the tiles of an image, none of which starts or ends an image."""
    images, size = list[Any](), _tile(call)
    ends = {call.base.config.boi_token_index, call.base.config.eoi_token_index}
    for (_, _, length), words in zip(runs(call), gaps(call), strict=True):
        tiles = [size] * (length // size)
        if words is not None and len(words) <= 2 and not ends & set(words):
            images[-1] += tiles
        else:
            images.append(tiles)
    return images


def sliced(call: Call) -> list[Any]:
    """MiniCPM-V: slices behind the whole view, with `</image><slice>` in front of the first, and `</slice><slice>` or
    `</slice>\\n<slice>` between them. The word that opens the whole view opens no slice.
    """
    images, opens = list[Any](), -1
    for (row, start, length), words in zip(runs(call), gaps(call), strict=True):
        near = words is not None and (len(words) == 2 or (len(words) == 3 and len(images[-1]) > 1))
        if near and call.ids[row, start - 1] != opens:
            images[-1].append(length)
        else:
            images.append([length])
            opens = int(call.ids[row, start - 1])
    return images


def by_rows(call: Call) -> list[Any]:
    """Molmo 2: an overview, and a grid of crops, each row of tokens followed by its own separator."""
    grids = numbers(call.inputs["image_grids"]).tolist()
    return [[size for size in (height * width, tall * wide) if size] for height, width, tall, wide in grids]


def crops(call: Call) -> list[Any]:
    """Gemma 3: a whole view; with pan and scan a sentence behind it, and crops with equal words between them. A prompt
    of several images may look the same, so the pixels decide.
    """
    size, between, images = int(call.here.sum()) // len(call.pixels), gaps(call), list[Any]()
    first = 0
    while first < len(between):
        sentence, words = [*between[first + 1 : first + 3], None, None][:2]
        count = 1
        if sentence and words and len(sentence) > len(words):
            last = first + 3
            while last < len(between) and between[last] == words:
                last += 1
            view, rest = call.pixels[first], call.pixels[first + 1 : last]
            count += next((number for number in range(len(rest), 1, -1) if _shown(view, rest[:number])), 0)
        images.append([size] * count)
        first += count
    return images


def _shown(view: Tensor, parts: Tensor) -> bool:
    """Whether parts beside or below each other are this view."""
    cells = 12  # of an edge: 2, 3, 4 or 6 parts have whole ones

    def small(image: Tensor) -> Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(image.float(), cells)

    whole = small(view)
    spread = float(whole.std()) + 1e-6
    return any(float((small(torch.cat(list(parts), axis)) - whole).abs().mean()) < 0.2 * spread for axis in (-1, -2))


def frames(call: Call) -> list[Any]:
    """LLaVA-NeXT-Video, OneVision: equal frames; the remaining row is a newline."""
    count, number = call.pixels.shape[:2]
    size = int(call.here.sum()) // count
    return [[size // number] * number + [STRUCTURAL] * (size % number)] * count


def with_class(call: Call) -> list[Any]:
    """Video-LLaVA: the class token of each frame is in front of its patches."""
    return [[(STRUCTURAL, size - 1) for size in own] for own in frames(call)]


def anyres(call: Call) -> list[Any]:
    """LLaVA-NeXT, OneVision: the model's own packing, given coordinates in place of features."""
    base, vision, family = call.base, call.base.config.vision_config, import_module(type(call.base).__module__)
    side, found = vision.image_size // vision.patch_size, []
    patch = torch.arange(side**2)
    more = {"vision_feature_select_strategy": base.config.vision_feature_select_strategy}
    if hasattr(base.config, "vision_aspect_ratio"):
        more = {"vision_aspect_ratio": call.inputs.get("vision_aspect_ratio") or base.config.vision_aspect_ratio}
    several = call.inputs.get("batch_num_images")
    counts = np.zeros(0, np.int64) if several is None else numbers(several)
    whole = np.repeat(counts, counts) > 1  # OneVision does not cut several images of a prompt into tiles
    for number, size in enumerate(torch.from_numpy(numbers(call.inputs["image_sizes"]))):
        if number < len(whole) and whole[number]:  # a newline is behind the only tile
            found.append((np.zeros(side**2 + 1, np.int64), np.append(np.arange(side**2), STRUCTURAL), 1))
            continue
        pins = base.config.image_grid_pinpoints
        count = family.image_size_to_num_patches(size, pins, vision.image_size)
        across = int(family.get_anyres_image_grid_shape(size, pins, vision.image_size)[1])
        tile = torch.arange(count)[:, None]
        row = (tile - 1).clamp_min(0) // across * side + patch // side
        column = (tile - 1).clamp_min(0) % across * side + patch % side
        where = torch.stack((row, column, (tile > 0).expand_as(row)), -1).float()
        packed = base.pack_image_features([where], size[None], image_newline=torch.full((3,), -9.0), **more)
        row, column, grid = packed[0][0].round().long().unbind(-1)
        tile = torch.where(grid > 0, 1 + row // side * across + column // side, 0)
        token = torch.where(grid < 0, STRUCTURAL, row % side * side + column % side)
        found.append((tile.numpy(), token.numpy(), count))
    return found


class Family(NamedTuple):
    """How a family's processor writes images."""

    image: Callable[[Call], list[Any]] = one_run
    video: Callable[[Call], list[Any]] = video
    around: tuple[int, int] = (0, 0)  # markers that the processor puts in front of and behind each image
    projects: bool = False  # whether `multi_modal_projector` takes patch by patch (VisionZip, PruMerge project again)
    mapped: bool = False  # whether tiles must be found by the map of patches (`tower.py`)
    known: bool = True  # whether images are those the user passed; else each run of placeholders counts as one


GRID = Family(by_grid, around=(1, 1))
MAPPED_GRID = Family(by_grid, mapped=True)
TABLE = {
    "llava": Family(equal, projects=True),
    **dict.fromkeys(("llava_llama", "llava_mistral"), Family(projects=True)),  # official LLaVA
    "pixtral": Family(by_size, around=(0, 1)),  # a LLaVA over Pixtral
    "mistral3": Family(by_size, around=(0, 1)),
    "llava_next": Family(anyres, projects=True),
    "llava_next_video": Family(anyres, frames, projects=True),
    "llava_onevision": Family(anyres, frames, projects=True),
    "video_llava": Family(equal, with_class, projects=True),
    "internvl": Family(run_of_tiles, around=(1, 1)),
    "smolvlm": Family(tagged, around=(2, 1)),
    "idefics3": Family(tagged, around=(2, 1)),
    "aya_vision": Family(tagged, around=(2, 1)),
    "cohere2_vision": Family(spaced, around=(1, 2)),
    "ovis2": Family(spaced, around=(1, 1)),
    "gemma3": Family(crops, around=(1, 1)),
    "llama4": Family(separated, mapped=True),
    "minicpmv4_6": Family(sliced, mapped=True),
    "lfm2_vl": Family(spaced, mapped=True),
    "molmo2": Family(by_rows, mapped=True),
    **dict.fromkeys(("gemma4", "gemma3n", "perception_lm", "granite4_vision"), Family(mapped=True)),
    "paligemma": Family(equal),
    **dict.fromkeys(("qwen", "cogvlm"), Family()),  # of 2023, with custom code
    **dict.fromkeys(("blip", "vision-encoder-decoder", "idefics", "pp_formulanet"), Family()),  # `cross_attention.py`
    **dict.fromkeys(("pix2struct", "mllama", "florence2", "t5gemma2"), Family()),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe"), GRID),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "kimi_k25", "glm_ocr", "paddleocr_vl", "video_llama_3"), MAPPED_GRID),
}
UNKNOWN = Family(mapped=True, known=False)  # a run of placeholders is an image


def kind_of(config: Any) -> str:
    """A model's type; `pixtral` for a LLaVA over that tower."""
    kind: str = config.model_type
    return "pixtral" if kind == "llava" and config.vision_config.model_type == "pixtral" else kind


def family_of(config: Any) -> Family:
    return TABLE.get(kind_of(config), UNKNOWN)


STRAIGHT = ("llava", "llava_next", "llava_next_video", "llava_onevision", "video_llava")  # a token for each patch
PIXELS = {"image": ("pixel_values", "pixel_values_images"), "video": ("pixel_values_videos",)}


def placeholder_of(config: Any, modality: str) -> int | None:
    names = (f"{modality}_token_id", f"{modality}_token_index")
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def images_of(
    base: Any, config: Any, encoded: dict[str, list[Any]], ids: Integers
) -> list[tuple[str, Any, list[Image], int]]:
    """Modality, record, images and number of beams for each record of encoded images, in the order of prompts [R, S].
    Batch indices count prompts, not beams.
    """
    family, found = family_of(config), []
    for modality, records in encoded.items():
        here = ids == placeholder_of(config, modality)
        if not here.any():
            here = ids == placeholder_of(config, "image")  # GLM-4V has one placeholder for both
        total, rows = int(here.sum()), sum(record.count or 0 for record in records)
        beams = max(total // (rows or total or 1), 1)  # prompts are next to their copies
        where, start = np.argwhere(here[::beams]), 0
        if len(where) != (rows or len(where)):
            raise OptionError(
                f"the prompts hold {len(where)} placeholders and the {modality}s make {rows} tokens: pass input_ids "
                "and pixels of one call of the model's own processor, and truncate nothing"
            )
        for record in records:
            own = where[start : start + (record.count or len(where))]
            mask = np.zeros_like(here[::beams])
            mask[own[:, 0], own[:, 1]] = True
            pixels = next(record.inputs[name] for name in PIXELS[modality] if record.inputs.get(name) is not None)
            call = Call(base, record.inputs, ids[::beams], mask, modality, pixels)
            found.append((modality, record, _images(call, getattr(family, modality)(call), own), beams))
            start += len(own)
    return found


def _images(call: Call, groups: list[Any], where: Integers) -> list[Image]:
    """Images whose tiles have these sizes, at the rows and columns `where` [n, 2]."""
    images: list[Image] = []
    start, first = 0, 0
    for tiles in groups:
        tile, token, number = tiles if isinstance(tiles, tuple) else _of_tiles(tiles)
        own = where[start : start + len(tile)]
        if not len(own):
            break
        images.append(Image(int(own[0, 0]), own[:, 1], tile, token, number, call.modality == "video", first))
        start, first = start + len(tile), first + number
    if start != len(where):
        raise OptionError(f"{len(where)} placeholders, and the {call.modality}s make {start} rows: truncate nothing")
    return images


def _of_tiles(sizes: list[Any]) -> tuple[Integers, Integers, int]:
    """Tile and token of each row of an image whose tiles follow each other."""
    tile: list[Any] = []
    token: list[Any] = []
    count = 0
    for size in sizes:
        if size == STRUCTURAL:
            tile, token = [*tile, [max(count - 1, 0)]], [*token, [STRUCTURAL]]
            continue
        front, size = (1, size[1]) if isinstance(size, tuple) else (0, size)
        tile.append(np.full(front + size, count))
        token += [np.full(front, STRUCTURAL), np.arange(size)]
        count += 1
    return np.concatenate(tile), np.concatenate(token).astype(np.int64), count


def parts_of(image: Image) -> list[Image]:
    """The tiles of an image as separate images if they differ in size, as recorded tensors need equal sizes."""
    real = image.token != STRUCTURAL
    tiles, counts = np.unique(image.tile[real], return_counts=True)
    if len(set(counts.tolist())) < 2 or image.video or len(tiles) != image.tiles or not real.all():
        return [image]
    return [
        image._replace(
            places=image.places[own], tile=image.tile[own] - tile, token=image.token[own], tiles=1,
            first=image.first + int(tile), part=(number, len(tiles)),
        )
        for number, tile in enumerate(tiles)
        for own in [image.tile == tile]
    ]  # fmt: skip


# The parts of a model


def base_of(model: Any) -> Any:
    return next((part for part in (getattr(model, "model", None), model) if hasattr(part, "get_image_features")), None)


def decoder_of(model: Any) -> Any:
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder.model if hasattr(decoder, "lm_head") else decoder  # Llama 4 has a whole language model inside


# The fixed grid of LLaVA-NeXT (`hosts.FIXED`)

ACROSS = 2  # tiles in a row of the fixed grid


def fixed_grid(image_size: int) -> list[list[int]]:
    """The only entry of `image_grid_pinpoints` for the fixed grid of tiles of `image_size` pixels."""
    return [[ACROSS * image_size, ACROSS * image_size]]


def check_tiles(counts: Iterable[int]) -> None:
    """Raises OptionError unless every image has the number of tiles of the fixed grid, with the base view."""
    wanted = 1 + ACROSS**2
    for count in counts:
        if count != wanted:
            raise OptionError(
                f"layout={FIXED}: every image must be {wanted} tiles, and one is {count}: cut it with "
                f"image_grid_pinpoints of one entry, {ACROSS} by {ACROSS} tiles in pixels"
            )


def packed_whole(pack: Any, base: Any, *args: Any, image_newline: Any = None, **more: Any) -> Any:
    return pack(base, *args, image_newline=None, **more)


def on_grid(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of LLaVA-NeXT's encoder as if each image filled the fixed grid, so that nothing of it is cut away."""
    check_tiles(len(tiles) for tiles in inputs["pixel_values"])
    size = fixed_grid(config.vision_config.image_size)
    return {**inputs, "image_sizes": torch.tensor(size).expand(len(inputs["pixel_values"]), 2)}


def most_tiles(model: Any) -> int:
    """The most tiles an image of this model can have, for `tile_budget=most_tiles`."""
    pins, vision = getattr(model.config, "image_grid_pinpoints", None), getattr(model.config, "vision_config", None)
    return grid_tiles(pins, vision.image_size) if pins and vision is not None else 1


def grid_tiles(pins: list[list[int]], size: int) -> int:
    """Tiles of `size` pixels in the largest of these grids, and the base view."""
    return 1 + max((height // size) * (width // size) for height, width in pins)


def clip_of(config: Any) -> str:
    """The CLIP model that the vision configuration names as its own; empty if it names none."""
    vision = getattr(config, "vision_config", None)
    is_clip = getattr(vision, "model_type", "") == "clip_vision_model"
    return str(getattr(vision, "_name_or_path", "")) if is_clip else ""
