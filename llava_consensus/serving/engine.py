"""From images to the embeddings that are left of them, inside vLLM's worker. Outputs of vLLM's modules are read as
`hosts.tower` reads it, and `hosts.inputs` and `hosts.rows` do the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.attention import MMEncoderAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from llava_consensus.errors import OptionError
from llava_consensus.hosts.arguments import positions_of
from llava_consensus.hosts.clip import load_clip_text
from llava_consensus.hosts.images import Image, decoder_of
from llava_consensus.hosts.inputs import Inputs
from llava_consensus.hosts.kernels import spying
from llava_consensus.hosts.prompts import Prompt, prompt_of
from llava_consensus.hosts.rows import Rows, reduced_rows, upload
from llava_consensus.hosts.tower import EARLIER, Tiles
from llava_consensus.hosts.units import Reduced, units_of, visual_rows
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.tokens import Need
from llava_consensus.serving.counts import KEPT, SECONDS, counts
from llava_consensus.serving.plan import Plan

KEPT_BYTES = 256 << 20  # of tower outputs for images, for methods that read the prompt
BEGUN_BYTES = 64 << 20  # of reduced images of prompts that vLLM encodes in several steps
BATCH_ROWS = 1 << 15  # of prompts that are reduced together, padding included; a longer prompt is reduced separately
BASE = 128  # positions travel in two columns each, as digits that every number format holds exactly
PLACED = "image_grid_thw"  # from which positions of several axes follow


class EncodedImage(NamedTuple):
    tiles: Tiles
    tokens: Tensor  # [n, D'] the rows of the prompt, with the values that vLLM keeps beside the features
    rows: Image
    inputs: dict[str, Any]  # of the processor, from which positions and random draws follow

    @property
    def size(self) -> int:
        tensors = (self.tokens, *self.tiles.parts.values(), *self.inputs.values())
        return sum(one.numel() * one.element_size() for one in tensors)

    def copied(self) -> "EncodedImage":
        """A separate copy in memory: views would keep all images of their batch alive."""
        parts = {name: one.clone() for name, one in self.tiles.parts.items()}
        inputs = {name: one.clone() for name, one in self.inputs.items()}
        return self._replace(tiles=self.tiles._replace(parts=parts), tokens=self.tokens.clone(), inputs=inputs)


class FullPrompt(NamedTuple):
    """A prompt as it would be without reduction, or a single image."""

    ids: Tensor  # [S]
    image: Tensor  # [S] which of its images a row is of, or -1
    images: Sequence[EncodedImage]
    budgets: Sequence[Budget | Share]  # of its images
    question: str = ""  # of methods that read it by CLIP's text tower


class ReducedPrompt(NamedTuple):
    """The remaining rows of the images of one prompt."""

    images: list[Tensor]  # [K, D'] each

    @property
    def size(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.images)

    def copied(self) -> "ReducedPrompt":
        return ReducedPrompt([one.clone() for one in self.images])


Made = TypeVar("Made", EncodedImage, ReducedPrompt)


class Kept(LRUCache[Any, Made]):
    """The latest entries by key, up to a number of bytes."""

    def __init__(self, most: int) -> None:
        super().__init__(most, lambda one: one.size)

    def put(self, key: Any, value: Made) -> None:
        """Keeps a copy, unless it is larger than all may be."""
        if key not in self and value.size <= self.maxsize:
            self[key] = value.copied()


class Part(nn.Module):
    """Queries (0), keys (1) or values (2, never read) of vLLM's packed projection, as transformers calls it."""

    def __init__(self, attention: Any, which: int) -> None:
        super().__init__()
        gated = getattr(attention, "attn_output_gate", False)  # then each head's query has a gate behind it
        self.sizes = [attention.q_size * (1 + gated), attention.kv_size, attention.kv_size]
        self.packed, self.which = [attention.qkv_proj], which  # in a list, as it is no part of this module
        attention.qkv_proj._cpu_skip_gemm_dispatch = True  # on a CPU vLLM would only keep a packed copy

    def forward(self, normed: Tensor) -> Tensor:
        """[R, S, D] -> [R, S, heads of this rank times d]."""
        (packed,), which = self.packed, self.which
        if which == 2:
            return normed.new_zeros(1).expand(*normed.shape[:2], self.sizes[which])
        if isinstance(packed.quant_method, UnquantizedLinearMethod):
            bias = None if packed.bias is None else packed.bias.split(self.sizes)[which]
            return linear(normed, packed.weight.split(self.sizes)[which], bias)
        projected: Tensor = packed(normed.flatten(0, 1))[0].split(self.sizes, -1)[which]
        return projected.unflatten(0, normed.shape[:2])


def first_layer(decoder: Any, language: Any) -> Any:
    """The decoder of transformers, without weights, whose only layer becomes vLLM's first with attention: it computes
    the inputs of SCAP. OptionError for layers that are not like Llama's.
    """
    theirs: Any = next((layer for layer in language.layers if hasattr(layer, "self_attn")), None)
    layer = decoder.layers[0]
    if theirs is None or not hasattr(theirs.self_attn, "qkv_proj") or not hasattr(layer.self_attn, "q_proj"):
        raise OptionError(
            f"language model {type(language).__name__}: its attention cannot be read in vLLM. Take a method that "
            "asks no question of it (llava-consensus list)"
        )
    for which, name in enumerate(("q_proj", "k_proj", "v_proj")):
        setattr(layer.self_attn, name, Part(theirs.self_attn, which))
    for name in ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
        own, _, last = name.rpartition(".")
        if hasattr(layer.get_submodule(own), last):
            layer.get_submodule(name).weight = theirs.get_submodule(name).weight
    rotary = type(decoder.rotary_emb)(config=decoder.config)
    decoder.rotary_emb = rotary.to(next(language.parameters()).device)
    return decoder


def all_heads(states: Tensor) -> Tensor:
    """Heads [T, H, n, d] of all ranks, of which each has its part."""
    if get_tensor_model_parallel_world_size() == 1:
        return states
    return tensor_model_parallel_all_gather(states.contiguous(), dim=1)


class Engine:
    """The reduction in one worker.

    Args:
        embed: ids [n] and which of them are images [n] -> embeddings [n, D].
        project: its projector, None if it takes several patches at a time.
        readers: modules that read the output of each block, if the block itself cannot be watched.
    """

    def __init__(
        self,
        plan: Plan,
        model: Any,
        blocks: Sequence[Any],
        embed: Any,
        project: Callable[[Tensor], Tensor] | None = None,
        readers: Sequence[Any] | None = None,
    ) -> None:
        self.plan, self.method, self.facts, self.embed, self.project = plan, plan.method, plan.facts, embed, project
        self.needs = plan.needs
        self.width = self.facts.config.text_config.hidden_size
        self.axes = 3 if self.facts.keeps_positions else 1
        self.decoder = first_layer(decoder_of(self.facts.module), model) if Need.PROBE in self.needs else None
        device = next(model.parameters()).device
        self.clip = load_clip_text(plan.clip_name, device) if plan.clip_name else None
        self.kept: Kept[EncodedImage] = Kept(KEPT_BYTES)
        self.begun: Kept[ReducedPrompt] = Kept(BEGUN_BYTES)
        self.counts = counts() if get_tensor_model_parallel_rank() == 0 else None
        self.scales: dict[str, float] = {}
        self._parts: dict[str, list[Tensor]] | None = None
        self._spied: dict[Any, str] = {}  # attention modules of towers that are transformers' own
        self._install(blocks, readers)

    @property
    def keeps(self) -> bool:
        """True if tokens have other position ids than their places in the shortened prompt."""
        return self.facts.keeps_positions or self.method.positions != "renumber"

    def _install(self, blocks: Sequence[Any], readers: Sequence[Any] | None) -> None:
        features, attention = self.plan.blocks()
        if self.needs & {Need.FEATURES, Need.CLASS_FEATURE}:
            if readers is None:
                blocks[features].register_forward_hook(lambda _, args, output: self._take("states", states_of(output)))
            else:  # a copy, which the norms of the next block do not write over
                readers[features].register_forward_pre_hook(lambda _, args: self._take("states", args[0].clone()))
        for front, block in attention.items():
            kernels = [part for part in blocks[block].modules() if isinstance(part, MMEncoderAttention)]
            for kernel in kernels:
                kernel.register_forward_pre_hook(partial(self._take_attention, front), with_kwargs=True)
            if not kernels:
                self._spied |= dict.fromkeys(blocks[block].modules(), front)

    def _take(self, name: str, values: Tensor) -> None:
        if self._parts is not None:
            self._parts.setdefault(name, []).append(values)

    def _take_attention(self, front: str, module: Any, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        self.scales[front] = module.scale
        for place, name in enumerate(("query", "key")):
            if name in named:
                states = named[name].transpose(1, 2)
            else:
                states = args[place].unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            self._take(front + name, all_heads(states))

    def _spy(self, kernel: Any, module: Any, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        """Takes queries and keys that a module of transformers hands to its attention kernel."""
        front = self._spied.get(module)
        if front is not None:
            self.scales[front] = options.get("scaling") or query.shape[-1] ** -0.5
            self._take(front + "query", query)
            self._take(front + "key", key.repeat_interleave(query.shape[1] // key.shape[1], 1))
        return kernel(module, query, key, *args, **options)

    @contextmanager
    def collecting(self) -> Iterator[dict[str, list[Tensor]]]:
        parts: dict[str, list[Tensor]] = {}
        self._parts = parts
        try:
            with spying(self._spy) if self._spied else nullcontext():
                yield parts
        finally:
            self._parts = None

    def tiles(self, count: int, size: int, side: int, parts: dict[str, Tensor], members: Tensor | None = None) -> Tiles:
        """Recorded tensors of an image: parts [T, ...]; `states` [T, C + n, D_v] have class tokens in front."""
        classes = self.facts.tower.classes
        if "states" in parts:
            states = parts.pop("states")
            parts |= {"features": states[:, classes:]} | ({"class_feature": states[:, 0]} if classes else {})
        scale, early = (self.scales.get(front, 1.0) for front in ("", EARLIER))
        return Tiles(count, size, side, parts, members, classes, scale, early)

    def positions(self, inputs: dict[str, Any], ids: Tensor, real: Tensor) -> Tensor:
        """Positions [R, S], or [3, R, S] of three axes, of full prompts on the CPU, given the grids of their images."""
        if not self.facts.keeps_positions:
            return (real.cumsum(1) - 1).clamp_min(0)
        types = self.facts.row_inputs(ids)["mm_token_type_ids"]
        positions: Tensor = self.facts.inner.get_rope_index(
            ids, mm_token_type_ids=types, attention_mask=real.long(), **inputs
        )[0]
        return positions

    def reduced(self, prompts: Sequence[FullPrompt]) -> list[list[Tensor]]:
        """Reduced tokens of each image of each prompt: [K, D'], and with kept positions [K, D' + 2 axes]."""
        start = perf_counter()
        found = [left for batch in batches(prompts) for left in self._reduce(batch)]
        if self.counts is not None:
            self.counts[SECONDS] += perf_counter() - start
            self.counts[KEPT] = len(self.kept)
        return found

    def _reduce(self, prompts: Sequence[FullPrompt]) -> list[list[Tensor]]:
        encoded = [image for prompt in prompts for image in prompt.images]
        prompt, method = self._prompt(prompts), self.method
        budgets = [budget for one in prompts for budget in one.budgets]
        units = units_of(prompt.images, budgets, method, self.facts.most_tiles)
        if not units and not self.keeps:
            return [[image.tokens for image in one.images] for one in prompts]
        embeds, beside = self._embeds(prompt, encoded)
        device, positions = embeds.device, self._positions(prompt, encoded)
        clip = None
        if self.clip is not None:
            questions = [method.query(one.question) for one in prompts]
            clip = self.clip.sides(prompt, questions, self.clip.last_norm)  # vLLM builds none in the tower
        inputs = Inputs(prompt, embeds, method, self.needs, self.project, clip)
        if self.decoder is not None and units:
            no_mask = embeds.new_zeros(1, 1, 1, 1)  # only queries and keys are read
            given = {"inputs_embeds": embeds, "position_ids": positions.to(device), "attention_mask": no_mask}
            inputs.read_probe(self.decoder, given)
            probe = inputs.probe
            if probe is not None:
                inputs.probe = probe._replace(query=all_heads(probe.query), key=all_heads(probe.key))
        groups = inputs.reduce(units)
        drops = [self.plan.drops(image) for image in prompt.images]
        rows, pool = reduced_rows(embeds, prompt.real, prompt.images, groups, method, drops)
        values = [pool.take(embeds, [group.reduction.tokens for group in groups])]
        values += [pool.mean(beside)] if beside.shape[-1] else []
        tokens = torch.cat(values, -1)  # [R, W, D']
        moved, _ = positions_of(positions.to(device), rows, pool, prompt.real, 0, None, method)
        assert moved is not None
        found = []
        for image, own in zip(prompt.images, places_left(prompt, groups, drops, rows), strict=True):
            left = tokens[image.row, own]
            if self.keeps:
                first = positions[..., image.row, image.places[0], None].to(device)
                offset = torch.atleast_2d(moved[..., image.row, own] - first).T  # [K, A]
                left = torch.cat((left, columns(offset, left.dtype)), -1)
            found.append(left)
        return [[found.pop(0) for _ in one.images] for one in prompts]

    def _prompt(self, prompts: Sequence[FullPrompt]) -> Prompt:
        """The prompts as hosts have them, padded on the right."""
        ids = pad_sequence([prompt.ids for prompt in prompts], batch_first=True).cpu().numpy()
        real = np.zeros(ids.shape, dtype=bool)
        images, tiles, inputs = [], [], []
        for row, prompt in enumerate(prompts):
            real[row, : len(prompt.ids)] = True
            for number, image in enumerate(prompt.images):
                places = np.flatnonzero(prompt.image.numpy() == number)
                images.append(image.rows._replace(row=row, places=places))
                tiles.append(image.tiles)
                inputs.append(dict(image.inputs))
        return prompt_of(ids, real, real.copy(), images, tiles, inputs, self.facts.config)

    def _embeds(self, prompt: Prompt, encoded: Sequence[EncodedImage]) -> tuple[Tensor, Tensor]:
        """The prompts as the language model would read them [R, S, D], and values of vLLM beside the features."""
        tokens = torch.cat([image.tokens for image in encoded])
        ids, visual = upload([prompt.ids, visual_rows(prompt.images, prompt.ids.shape)], tokens.device)
        embeds = tokens.new_zeros(*ids.shape, tokens.shape[-1])
        if self.method.reads_prompt:
            text = self.embed(ids.flatten(), visual.flatten().bool())
            embeds[..., : self.width] = text.view(*ids.shape, -1)
        embeds = embeds.masked_scatter(visual[..., None].bool(), tokens)
        return embeds[..., : self.width], embeds[..., self.width :]

    def _positions(self, prompt: Prompt, encoded: Sequence[EncodedImage]) -> Tensor:
        grids = [image.inputs[PLACED] for image in encoded if PLACED in image.inputs]
        placed = {PLACED: torch.cat(grids)} if grids else {}
        return self.positions(placed, torch.from_numpy(prompt.ids), torch.from_numpy(prompt.real))


def states_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def places_left(prompt: Prompt, groups: Sequence[Reduced], drops: Sequence[bool], rows: Rows) -> list[slice]:
    """The columns of each image among the rows that are left, which are padded on the left."""
    left = [len(image.places) for image in prompt.images]
    for units, reduction in groups:
        for unit in units.units:
            left[unit.image] += reduction.tokens.shape[1] - len(unit.places)
    whole = {unit.image for units, _ in groups for unit in units.units}
    for number in whole:
        left[number] -= drops[number] and int((prompt.images[number].token < 0).sum())
    found, row, column, behind = [], -1, 0, 0
    for image, count in zip(prompt.images, left, strict=True):
        if image.row != row:
            row, column, behind = image.row, int(rows.real[image.row].argmax()), 0
        column += int(image.places[0]) - behind  # text in front of it
        found.append(slice(column, column + count))
        column, behind = column + count, int(image.places[-1]) + 1
    return found


def batches(prompts: Sequence[FullPrompt]) -> Iterator[list[FullPrompt]]:
    """The prompts in their order, in batches of at most BATCH_ROWS rows."""
    batch: list[FullPrompt] = []
    for prompt in prompts:
        if batch and (len(batch) + 1) * max(len(one.ids) for one in (*batch, prompt)) > BATCH_ROWS:
            yield batch
            batch = []
        batch.append(prompt)
    yield batch


def columns(offset: Tensor, dtype: torch.dtype) -> Tensor:
    """Offsets [K, A] as columns [K, 2 A]: high digits, then low ones."""
    return torch.cat((offset // BASE, offset % BASE), -1).to(dtype)


def offsets(values: Tensor) -> Tensor:
    """The offsets [K, A] of `columns`."""
    high, low = values.round().long().chunk(2, dim=-1)
    return high * BASE + low
