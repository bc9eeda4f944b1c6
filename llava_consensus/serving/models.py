"""vLLM's models with fewer visual tokens: each class is vLLM's own with another way from images to embeddings."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_window_index
from vllm import ModelRegistry
from vllm.model_executor.layers.attention import MMEncoderAttention
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.llava import LlavaDummyInputsBuilder, LlavaMultiModalProcessor, LlavaProcessingInfo
from vllm.multimodal import MULTIMODAL_REGISTRY

from llava_consensus.hosts.images import Image
from llava_consensus.hosts.tower import Tiles
from llava_consensus.reduction.tokens import Need
from llava_consensus.serving.engine import PLACED, EncodedImage, Engine, FullPrompt, ReducedPrompt, offsets
from llava_consensus.serving.plan import PIXELS, Plan
from llava_consensus.serving.processors import (
    ALL,
    COUNT,
    COUNTS,
    INDEX,
    KEY,
    KEYS,
    NUMBERS,
    OWN,
    PROMPT,
    QUESTION,
    SHARE,
    SHARES,
    Reducing,
    budget_of,
)
from llava_consensus.serving.supported import ROWS


class Reduced:
    """Mixed into vLLM's model of a family, in front of it."""

    engine: Engine

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        plan = Plan(vllm_config.model_config.hf_config, vllm_config.model_config.model)
        plan.blocks()  # checked before weights load
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.reduces, self.moves = plan.method.reduces, None
        if self.reduces:
            self.engine = self.make_engine(plan)
            if self.engine.keeps:
                most = vllm_config.scheduler_config.max_num_batched_tokens
                device = next(self.parameters()).device
                self.axes = self.engine.axes
                self.moves = torch.zeros(most, self.axes, dtype=torch.long, device=device)

    def embed_multimodal(self: Any, **kwargs: Any) -> Any:
        own = {name: kwargs.pop(name) for name in list(kwargs) if OWN in name}
        if not self.reduces or not kwargs:
            return super().embed_multimodal(**kwargs)
        modality = next(iter(own)).partition("_")[0]
        own = {name.partition("_")[2]: value for name, value in own.items()}
        with torch.no_grad():
            return (self._asked if self.engine.method.reads_prompt else self._alone)(modality, kwargs, own)

    def _alone(self: Any, modality: str, kwargs: dict[str, Any], own: dict[str, Any]) -> list[Tensor]:
        """Images that nothing is asked about; one that comes under several budgets is encoded once."""
        keys = [tuple(key.tolist()) for key in own[KEY]]
        places = [keys.index(key) for key in dict.fromkeys(keys)]
        encoded = self.encode(modality, kwargs if len(places) == len(keys) else self.some(kwargs, places))
        known = {keys[place]: one for place, one in zip(places, encoded, strict=True)}
        placeholder = self.engine.facts.placeholder(modality)
        prompts = [
            FullPrompt(
                torch.full((len(known[key].tokens),), placeholder),
                torch.zeros(len(known[key].tokens), dtype=torch.long),
                [known[key]],
                [budget_of(*budget)],
            )
            for key, *budget in zip(keys, own[COUNT], own[SHARE], strict=True)
        ]
        return [left for (left,) in self.engine.reduced(prompts)]

    def words(self: Any, ids: Tensor, visual: Tensor) -> Tensor:
        return super().embed_input_ids(ids, None, is_multimodal=visual)

    def _asked(self: Any, modality: str, kwargs: dict[str, Any], own: dict[str, Any]) -> list[Tensor]:
        """Images of prompts with their question, reduced once for a prompt, also if vLLM asks in several steps."""
        keys = [tuple(tuple(key.tolist()) for key in group) for group in own[KEYS]]
        questions = [question.numpy().tobytes().decode() for question in own[QUESTION]]
        budgets = [tuple(map(budget_of, *pair)) for pair in zip(own[COUNTS], own[SHARES], strict=True)]
        ids = [one.numpy().tobytes() for one in own[PROMPT]]
        names = list(zip(keys, budgets, ids, questions, strict=True))
        begun = self.engine.begun
        reduced = {name: found.images for name in names if (found := begun.get(name)) is not None}
        new = {name: place for place, name in enumerate(names) if name not in reduced}
        if new:
            known: dict[tuple[int, ...], EncodedImage] = {}
            self._encode_missing(modality, kwargs, [tuple(key.tolist()) for key in own[KEY]], known)
            others = {name.removeprefix(ALL): value for name, value in own.items() if name.startswith(ALL)}
            if others:  # vLLM batches only items whose other fields are the same
                self._encode_missing(modality, others, keys[0], known)
            prompts = [
                FullPrompt(own[PROMPT][place], own[NUMBERS][place], [known[key] for key in group], share, question)
                for (group, share, _, question), place in new.items()
            ]
            for name, images in zip(new, self.engine.reduced(prompts), strict=True):
                reduced[name] = images
                if names.count(name) < len(images):
                    begun.put(name, ReducedPrompt(images))
        return [reduced[name][int(index)] for name, index in zip(names, own[INDEX], strict=True)]

    def _encode_missing(
        self: Any,
        modality: str,
        kwargs: dict[str, Any],
        keys: Sequence[tuple[int, ...]],
        known: dict[Any, EncodedImage],
    ) -> None:
        """Puts these images into `known`: those that were encoded before, and the others through the tower."""
        kept = self.engine.kept
        known |= {key: found for key in keys if (found := kept.get(key)) is not None}
        missing = [place for place, key in enumerate(keys) if key not in known and key not in keys[:place]]
        if missing:
            for place, image in zip(missing, self.encode(modality, self.some(kwargs, missing)), strict=True):
                known[keys[place]] = image
                kept.put(keys[place], image)

    def lengths(self: Any, kwargs: dict[str, Any]) -> list[int]:
        """Rows of pixels of each image, if those of all follow each other; none if each has its own entry."""
        return []

    def some(self: Any, kwargs: dict[str, Any], places: list[int]) -> dict[str, Any]:
        lengths = self.lengths(kwargs)
        found: dict[str, Any] = {}
        for name, values in kwargs.items():
            if isinstance(values, Tensor) and not values.ndim:  # of all images
                found[name] = values
            elif lengths and name in PIXELS.values():
                parts = values.split(lengths)
                found[name] = torch.cat([parts[place] for place in places])
            else:
                found[name] = values[places] if isinstance(values, Tensor) else [values[i] for i in places]
        return found

    def encode(self: Any, modality: str, inputs: dict[str, Any]) -> list[EncodedImage]:
        """Images through vLLM's tower and projector, with the inputs of the method."""
        engine = self.engine
        with engine.collecting() as parts:
            tokens = list(super().embed_multimodal(**inputs))
        taken, found, start = {name: torch.cat(values) for name, values in parts.items()}, [], 0
        for number, own in enumerate(tokens):
            alone = self.some(inputs, [number])
            alone = {name: value[0][None] if isinstance(value, list) else value for name, value in alone.items()}
            image = engine.plan.image(modality, alone, len(own))
            tiles, start = self.tiles(image, alone, taken, start)
            kept = [PLACED] if PLACED in alone else []
            kept += [name for name in alone if Need.FINGERPRINT in engine.needs and name in PIXELS.values()]
            found.append(EncodedImage(tiles, own, image, {name: alone[name] for name in kept}))
        return found

    def tiles(
        self: Any, image: Image, inputs: dict[str, Any], taken: dict[str, Tensor], start: int
    ) -> tuple[Tiles, int]:
        """Recorded tensors of one image of a batch, which begins in row `start`, and the start of the next."""
        raise NotImplementedError

    # kept positions: a token carries its distance from the first of its image

    def embed_input_ids(
        self: Any, input_ids: Tensor, multimodal_embeddings: Any = None, *, is_multimodal: Tensor | None = None
    ) -> Tensor:
        """Embeddings of the tokens read in this step; the places of its images are stored for `forward`."""
        if self.moves is not None:
            self.moves.zero_()
            if multimodal_embeddings is not None and len(multimodal_embeddings):
                assert is_multimodal is not None  # it comes with the embeddings
                extra = 2 * self.axes
                moves = offsets(torch.cat([one[:, -extra:] for one in multimodal_embeddings]))
                self.moves[: len(input_ids)][is_multimodal.to(self.moves.device)] = moves
                multimodal_embeddings = [one[:, :-extra] for one in multimodal_embeddings]
        return super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)

    def forward(
        self: Any,
        input_ids: Any,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **more: Any,
    ) -> Any:
        """vLLM's own, with every token of an image at its place."""
        if self.moves is not None:
            positions = positions[: self.axes] + self.moves[: positions.shape[-1]].T
            positions = positions[0] if self.axes == 1 else positions
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **more)

    def get_mrope_input_positions(self: Any, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Positions of a prompt as in the full one; those of an image are all its first."""
        if self.moves is None:
            return super().get_mrope_input_positions(input_tokens, mm_features)
        features = sorted(mm_features, key=lambda one: one.mm_position.offset)
        embeds = []  # places of each image in the shortened prompt
        for one in features:
            place = torch.arange(one.mm_position.length) + one.mm_position.offset
            embeds.append(place if one.mm_position.is_embed is None else place[one.mm_position.is_embed])
        counts = torch.ones(len(input_tokens), dtype=torch.long)
        for one, place in zip(features, embeds, strict=True):
            # of an image that the prefix cache has, vLLM passes on no pixels
            rows = int(one.data[f"{one.modality}_{ROWS}"].data)
            counts[place[-1]] += rows - len(place)  # the last placeholder represents those that left
        grids = [torch.as_tensor(one.data[PLACED].data)[None] for one in features if PLACED in one.data]
        ids = torch.tensor(input_tokens).repeat_interleave(counts)[None]
        placed = {PLACED: torch.cat(grids)} if grids else {}
        full = self.engine.positions(placed, ids, torch.ones_like(ids, dtype=torch.bool))
        full = full[:, 0].T if full.ndim == 3 else full[0, :, None].expand(-1, 3)  # [S, 3]
        positions = full[counts.cumsum(0) - 1]
        for place in embeds:
            positions[place] = full[counts[: place[0]].sum()]
        return positions.T.contiguous(), int(full.max()) + 1 - len(input_tokens)


def theirs(architecture: str) -> Any:
    return ModelRegistry.models[f"{architecture}ForConditionalGeneration"].load_model_cls()


def with_own_processor(model: Any, videos: bool = False) -> Any:
    """Gives a model the processor of vLLM's class, with `Reducing` in front of it."""
    parts = model._processor_factory
    processor = type(f"{model.__name__}Processor", (Reducing, parts.processor), {})
    info = parts.info if videos else type(f"{model.__name__}Info", (Images, parts.info), {})
    return MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=parts.dummy_inputs)(model)


class Images:
    """Mixed into vLLM's processing info of a family of which no videos are served."""

    def get_supported_mm_limits(self: Any) -> Mapping[str, int | None]:
        limits: Mapping[str, int | None] = super().get_supported_mm_limits()
        return {"image": None, "video": 0} if "video" in limits else limits


Gemma4Model: Any = theirs("Gemma4")
InternVLModel: Any = theirs("InternVL")
LlavaModel: Any = theirs("Llava")
LlavaNextModel: Any = theirs("LlavaNext")
LlavaOnevisionModel: Any = theirs("LlavaOnevision")
Qwen25VLModel: Any = theirs("Qwen2_5_VL")
Qwen35Model: Any = theirs("Qwen3_5")
Qwen3VLModel: Any = theirs("Qwen3VL")


def ahead(kind: Any, config: Any, name: str) -> Any:
    """A block behind the last one that vLLM builds, for methods that read its attention; it passes its input on."""

    def forward(block: Any, hidden_states: Tensor) -> Tensor:
        block.self_attn(hidden_states=block.layer_norm1(hidden_states))
        return hidden_states

    return type(kind.__name__, (kind,), {"forward": forward})(config, prefix=name, attn_cls=MMEncoderAttention)


def tower_named(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights by the names of vLLM 0.32: transformers 5.19 saves the tower's without `vision_model`."""
    for name, weight in weights:
        yield re.sub(r"^(model\.)?vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", name), weight


def part_of(taken: dict[str, Tensor], start: int, count: int) -> dict[str, Tensor]:
    return {name: values[start : start + count] for name, values in taken.items()}


def pooled(side: int) -> Tensor:
    """The four patches that bilinear resizing of a frame to half looks at for each token: [N, 4]."""
    width = (side + 1) // 2
    first = ((torch.arange(width) + 0.5) * side / width - 0.5).clamp_min(0).long()
    pair = torch.stack((first, (first + 1).clamp_max(side - 1)), -1)  # [width, 2]
    return (pair[:, None, :, None] * side + pair[None, :, None, :]).reshape(width**2, 4)


def squares(height: int, width: int, stride: int) -> Tensor:
    """The patches of each square of a grid of patches: [N, stride * stride]."""
    place = torch.arange(height * width).view(height // stride, stride, width // stride, stride)
    return place.transpose(1, 2).reshape(-1, stride**2)


class SquareTower(Reduced):
    """CLIP or SigLIP under a LLaVA-type model, and a projector of one patch at a time."""

    def make_engine(self: Any, plan: Plan) -> Engine:
        blocks = self.vision_tower.vision_model.encoder.layers
        attention = plan.blocks()[1].get("", 0)
        if attention == len(blocks):
            name = f"vision_tower.vision_model.encoder.layers.{attention}"
            blocks.append(ahead(type(blocks[0]), self.config.vision_config, name))
        return Engine(plan, self.language_model.model, blocks, self.words, self.multi_modal_projector)

    def tiles(
        self: Any, image: Image, inputs: dict[str, Any], taken: dict[str, Tensor], start: int
    ) -> tuple[Tiles, int]:
        """The tiles of an image, without those that fill a batch up; of a video, its frames, which are pooled."""
        tower, members = self.engine.facts.tower, pooled(self.engine.facts.tower.side) if image.video else None
        size = tower.tokens if members is None else len(members)
        pixels = inputs[PIXELS["video" if image.video else "image"]]
        parts = part_of(taken, start, image.tiles)
        tiles = self.engine.tiles(image.tiles, size, math.isqrt(size), parts, members)
        return tiles, start + (len(pixels[0]) if pixels.ndim == 5 else 1)

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads weights as vLLM does, of checkpoints of transformers 5.19 too."""
        named = hasattr(self.vision_tower, "vision_model")
        return super().load_weights(tower_named(weights) if named else weights)


class LlavaProcessor(Reducing, LlavaMultiModalProcessor): ...


@MULTIMODAL_REGISTRY.register_processor(LlavaProcessor, info=LlavaProcessingInfo, dummy_inputs=LlavaDummyInputsBuilder)
class ConsensusDropLlava(SquareTower, LlavaModel, SupportsMRoPE): ...


@with_own_processor
class ConsensusDropLlavaNext(SquareTower, LlavaNextModel, SupportsMRoPE): ...


@partial(with_own_processor, videos=True)
class ConsensusDropLlavaOnevision(SquareTower, LlavaOnevisionModel, SupportsMRoPE):
    def _process_video_pixels(self: Any, inputs: Any) -> list[Tensor]:
        """Flattens the pixels of vLLM, which gives videos of unequal length one axis more than it then takes."""
        return [video.flatten(0, -2) for video in super()._process_video_pixels(inputs)]


@with_own_processor
class ConsensusDropInternVL(SquareTower, InternVLModel, SupportsMRoPE):
    """InternVL, whose projector makes one token of four patches."""

    def make_engine(self: Any, plan: Plan) -> Engine:
        return Engine(plan, self.language_model.model, self.vision_tower.encoder.layer, self.words)

    def lengths(self: Any, kwargs: dict[str, Any]) -> list[int]:
        return kwargs["image_num_patches"].tolist()

    def tiles(
        self: Any, image: Image, inputs: dict[str, Any], taken: dict[str, Tensor], start: int
    ) -> tuple[Tiles, int]:
        stride, side = round(1 / self.config.downsample_ratio), self.engine.facts.tower.side
        parts, members = part_of(taken, start, image.tiles), squares(side * stride, side * stride, stride)
        return self.engine.tiles(image.tiles, side**2, side, parts, members), start + image.tiles


class Qwen(Reduced):
    """Images of any size, windows, and a merger of four patches."""

    def make_engine(self: Any, plan: Plan) -> Engine:
        blocks, merger = self.visual.blocks, self.visual.merger
        readers = [*(block.norm1 for block in blocks[1:]), getattr(merger, "ln_q", None) or merger.norm]
        return Engine(plan, self.language_model.model, blocks, self.words, readers=readers)

    def tiles(
        self: Any, image: Image, inputs: dict[str, Any], taken: dict[str, Tensor], start: int
    ) -> tuple[Tiles, int]:
        """An image as one tile; its patches stay in the order of the tower, which may be that of windows."""
        visual, grid = self.engine.facts.inner.visual, torch.as_tensor(inputs[PLACED]).cpu()
        _, height, width = grid[0].tolist()
        side, count = visual.spatial_merge_size, height * width
        place = torch.arange(count // side**2)
        if hasattr(visual, "window_size"):
            sizes = {"window_size": visual.window_size, "patch_size": visual.patch_size}
            place = get_vision_window_index(grid, spatial_merge_size=side, **sizes)[0].cpu().argsort()
        members = place[:, None] * side**2 + torch.arange(side**2)
        # queries and keys [1, H, all patches, d], states [all patches, 1, D_v]
        parts = {name: values[:, :, start : start + count] for name, values in taken.items() if name != "states"}
        if "states" in taken:
            parts["states"] = taken["states"].flatten(0, -2)[None, start : start + count]
        return self.engine.tiles(1, len(members), width // side, parts, members), start + count

    def lengths(self: Any, kwargs: dict[str, Any]) -> list[int]:
        return kwargs[PLACED].prod(-1).tolist()


@with_own_processor
class ConsensusDropQwen25(Qwen, Qwen25VLModel): ...


@with_own_processor
class ConsensusDropQwen3(Qwen, Qwen3VLModel): ...


@with_own_processor
class ConsensusDropQwen35(Qwen, Qwen35Model): ...


@with_own_processor
class ConsensusDropGemma4(Reduced, Gemma4Model, SupportsMRoPE):
    """Gemma 4, whose tower is that of transformers: images of any shape, padded, a square of patches pooled."""

    def make_engine(self: Any, plan: Plan) -> Engine:
        return Engine(plan, self.language_model.model, self.vision_tower.encoder.layers, self.words)

    def words(self: Any, ids: Tensor, visual: Tensor) -> Tensor:
        """Embeddings of the words of prompts, past the buffer of a step's per-layer embeddings."""
        return self.language_model.embed_input_ids(ids)

    def tiles(
        self: Any, image: Image, inputs: dict[str, Any], taken: dict[str, Tensor], start: int
    ) -> tuple[Tiles, int]:
        """An image as one tile, without the patches that fill it up."""
        stride = self.config.vision_config.pooling_kernel_size
        width, height = (inputs["pixel_position_ids"][0].amax(0) + 1).tolist()
        parts = {name: values[..., : width * height, :] for name, values in part_of(taken, start, 1).items()}
        members = squares(height, width, stride)
        return self.engine.tiles(1, len(members), width // stride, parts, members), start + 1
