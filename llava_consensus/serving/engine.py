"""From pictures to the embeddings that are left of them, inside vLLM's worker: what vLLM's modules give is gathered as
hosts gather it, and `hosts.reduce` does the rest.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.attention import MMEncoderAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Heads, Tiles
from llava_consensus.hosts.derived.tap import KernelCall, attention_modules, install
from llava_consensus.hosts.hf.generate import once
from llava_consensus.hosts.hf.rows import PictureRows
from llava_consensus.hosts.reduce import reduce
from llava_consensus.hosts.sequence import Assembled, Channel, Rule, fingerprints
from llava_consensus.hosts.towers import attention_blocks, blocks_read, load_clip_text, needs_of, split_heads, states_of
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.tokens import Need
from llava_consensus.serving.counts import KEPT, SECONDS, counts
from llava_consensus.serving.plan import Plan, row_kinds

KEPT_BYTES = 256 << 20  # of what towers gave for pictures, for methods that read the prompt
BEGUN_BYTES = 64 << 20  # of reduced pictures of prompts that vLLM encodes in several steps
BATCH_ROWS = 1 << 15  # of prompts that are reduced together, padding included; a longer prompt is reduced alone
BASE = 128  # positions travel in two columns each, as digits that every number format holds exactly


class EncodedPicture(NamedTuple):
    """Output of the tower for one picture."""

    tiles: Tiles
    tokens: Tensor  # [n, D'] the rows of the prompt, with what vLLM has beside the features
    rows: PictureRows
    inputs: dict[str, Any]  # of the processor that positions follow from, of this picture alone

    @property
    def size(self) -> int:
        """Bytes of it."""
        tensors = (self.tokens, self.tiles.projected, *self.tiles.parts.values())
        return sum(one.numel() * one.element_size() for one in tensors)

    def copied(self) -> "EncodedPicture":
        """A copy in memory of its own: views would keep all pictures of their batch alive."""
        tiles = self.tiles
        parts = {name: one.clone() for name, one in tiles.parts.items()}
        tiles = tiles._replace(projected=tiles.projected.clone(), parts=parts)
        return self._replace(tiles=tiles, tokens=self.tokens.clone())


class FullPrompt(NamedTuple):
    """A prompt as it would be without reduction, or a picture alone."""

    ids: Tensor  # [S]
    picture: Tensor  # [S] which of its pictures a row is of, or -1
    pictures: Sequence[EncodedPicture]
    budgets: Sequence[Budget | Share]  # of its pictures
    question: str = ""  # of methods that read it by CLIP's text tower


class ReducedPrompt(NamedTuple):
    """What is left of the pictures of one prompt."""

    pictures: list[Tensor]  # [K, D'] each

    @property
    def size(self) -> int:
        """Bytes of it."""
        return sum(one.numel() * one.element_size() for one in self.pictures)

    def copied(self) -> "ReducedPrompt":
        """A copy in memory of its own."""
        return ReducedPrompt([one.clone() for one in self.pictures])


Made = TypeVar("Made", EncodedPicture, ReducedPrompt)


class Kept(Generic[Made]):
    """What was put in last, by its key, up to a number of bytes."""

    def __init__(self, most: int) -> None:
        self._known: OrderedDict[Any, Made] = OrderedDict()
        self._bytes, self._most = 0, most

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Any) -> Made | None:
        """What has the key, which is then the latest."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return found

    def put(self, key: Any, value: Made) -> None:
        """Keeps a copy, and lets the oldest go that there is no room for."""
        if key in self._known:
            return
        self._known[key] = value = value.copied()
        self._bytes += value.size
        while self._bytes > self._most and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1].size


class Layer0:
    """The first layer with attention of vLLM's language model as `hosts.reduce` reads a decoder; rotation is that of
    transformers.

    Args:
        language: vLLM's language model.
        view: of the host.
        config: of the language model.
    Raises:
        OptionError: for layers that are not like Llama's.
    """

    def __init__(self, language: Any, view: Any, config: Any) -> None:
        self.layer: Any = next((layer for layer in language.layers if hasattr(layer, "self_attn")), None)
        if self.layer is None:
            raise OptionError(
                f"language model {type(language).__name__}: its attention cannot be read in vLLM. Take a method that "
                "asks no question of it (llava-consensus list)"
            )
        self._host = view.decoder
        self.embedding_scale = self._host.embedding_scale
        self.layer.self_attn.qkv_proj._cpu_skip_gemm_dispatch = True  # on a CPU vLLM would keep a packed copy alone
        rotary = type(self._host.module.rotary_emb)(config=config)
        self._host.module = SimpleNamespace(rotary_emb=rotary.to(next(self.layer.parameters()).device))

    def read(
        self, layer: int, hidden: Tensor, positions: Tensor, row: Tensor, columns: Tensor, rope: bool = True
    ) -> Heads:
        """Queries of the rows `columns` [P, L] of the sequences `row` [P] and all keys, of states [R, S, D] that enter
        the layer.
        """
        normed = self.layer.input_layernorm(hidden.flatten(0, 1)).view_as(hidden)
        query, key = self._heads(normed[row[:, None], columns], 0), self._heads(normed, 1)
        cos, sin = self._host.rotary(hidden, positions)
        turned, size = cos.shape[-1], key.shape[-1]
        if turned < size:
            cos, sin = (pad(one, (0, size - turned), value=still) for one, still in ((cos, 1.0), (sin, 0.0)))
            query, key, cos, sin = (paired(one, turned) for one in (query, key, cos, sin))
        return Heads(query, key, cos, sin, self.layer.self_attn.scaling)

    def _heads(self, normed: Tensor, which: int) -> Tensor:
        attention = self.layer.self_attn
        gated = getattr(attention, "attn_output_gate", False)  # then each head's query has a gate behind it
        projection, sizes = attention.qkv_proj, [attention.q_size * (1 + gated), attention.kv_size, attention.kv_size]
        if isinstance(projection.quant_method, UnquantizedLinearMethod):  # vLLM has one for all three: their part of it
            bias = None if projection.bias is None else projection.bias.split(sizes)[which]
            projected = linear(normed, projection.weight.split(sizes)[which], bias)
        else:
            projected = projection(normed.flatten(0, 1))[0].split(sizes, -1)[which].unflatten(0, normed.shape[:2])
        size = attention.head_dim
        heads = projected.unflatten(-1, (-1, 2 * size if gated and which == 0 else size))[..., :size]
        norm = getattr(attention, ("q_norm", "k_norm")[which], None)
        heads = heads if norm is None else norm(heads.flatten(0, 1).contiguous()).view(heads.shape)
        return all_heads(heads.transpose(1, 2))


def paired(states: Tensor, turned: int) -> Tensor:
    """Channels [..., d] of which the first ones rotate, in an order in which pairs stand half a head apart."""
    parts = [part.chunk(2, -1) for part in states.split([turned, states.shape[-1] - turned], -1)]
    return torch.cat([part[half] for half in range(2) for part in parts], -1)


def all_heads(states: Tensor) -> Tensor:
    """Heads [T, H, n, d] of all ranks, of which each has its part."""
    if get_tensor_model_parallel_world_size() == 1:
        return states
    return tensor_model_parallel_all_gather(states.contiguous(), dim=1)


class Engine:
    """The reduction in one worker.

    Args:
        plan: what is to be done.
        model: vLLM's.
        blocks: of its vision tower.
        embed: ids [n] and which of them are pictures [n] -> embeddings [n, D].
        project: its projector, None where the tower offers none.
        readers: modules that read the output of each block, where the block itself cannot be watched.
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
        self.plan, self.method, self.view, self.embed = plan, plan.method, plan.view, embed
        self.width = self.view.module.config.text_config.hidden_size
        tower = self.tower = self.view.tower
        if project is not None:
            tower.project = project
        needs = needs_of(self.tower, self.method)
        decoder = Layer0(model, self.view, self.view.module.config.text_config) if Need.PROBE in needs else None
        self.model: Any = SimpleNamespace(tower=tower, decoder=decoder)
        device = next(model.parameters()).device
        self.clip = load_clip_text(plan.clip_name, device) if plan.clip_name else None
        if self.clip is not None:
            tower.last_norm = self.clip.last_norm  # vLLM builds none
        self.kept: Kept[EncodedPicture] = Kept(KEPT_BYTES)
        self.begun: Kept[ReducedPrompt] = Kept(BEGUN_BYTES)
        self.counts = counts() if get_tensor_model_parallel_rank() == 0 else None
        self._parts: dict[str, list[Tensor]] | None = None
        self._install(blocks, readers, needs)

    @property
    def keeps(self) -> bool:
        """True if tokens have other position ids than their places in the shortened prompt."""
        return bool(self.view.keeps_positions or self.method.positions != "renumber")

    def _install(self, blocks: Sequence[Any], readers: Sequence[Any] | None, needs: frozenset[Need]) -> None:
        """Hooks that take what the method reads of the tower."""
        features, _ = blocks_read(self.tower, self.method)
        if needs & {Need.FEATURES, Need.CLASS_FEATURE}:
            if readers is None:
                blocks[features].register_forward_hook(lambda _, args, output: self._take("states", states_of(output)))
            else:  # a copy, which the norms of the next block do not write over
                readers[features].register_forward_pre_hook(lambda _, args: self._take("states", args[0].clone()))
        for front, block in attention_blocks(self.tower, self.method).items():
            self._watch(blocks[block], front)

    def _watch(self, block: Any, front: str) -> None:
        """Takes queries and keys of the attention of a block, under names that begin so."""
        for kernel in block.modules():
            if isinstance(kernel, MMEncoderAttention):
                kernel.register_forward_pre_hook(partial(self._take_attention, front), with_kwargs=True)
        install(attention_modules(block), partial(self._take_call, front))  # of towers that are transformers' own

    def _take(self, name: str, values: Tensor) -> None:
        if self._parts is not None:
            self._parts.setdefault(name, []).append(values)

    def _take_attention(self, front: str, module: Any, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        for place, name in enumerate(("query", "key")):
            states = named[name].transpose(1, 2) if name in named else split_heads(args[place], module.num_heads)
            self._take(front + name, all_heads(states))

    def _take_call(self, front: str, call: KernelCall) -> None:
        self._take(front + "query", call.query)
        self._take(front + "key", call.key)

    @contextmanager
    def collecting(self) -> Iterator[dict[str, list[Tensor]]]:
        """The parts that hooks take while the body runs."""
        parts: dict[str, list[Tensor]] = {}
        self._parts = parts
        try:
            yield parts
        finally:
            self._parts = None

    def positions(self, inputs: dict[str, Any], ids: Tensor, real: Tensor) -> Tensor:
        """Positions of full prompts [R, S] with what the processor says of their pictures: [R, S], or [R, S, A]."""
        return self.view.positions(inputs, ids.cpu(), real.cpu()).to(ids.device)

    def reduced(self, prompts: Sequence[FullPrompt], modality: str) -> list[list[Tensor]]:
        """Reduced tokens of each picture of each prompt: [K, D'], and with kept positions [K, D' + 2 axes]."""
        start = perf_counter()
        found = [left for batch in batches(prompts) for left in self._reduce(batch, modality)]
        if self.counts is not None:
            self.counts[SECONDS] += perf_counter() - start
            self.counts[KEPT] = len(self.kept)
        return found

    def _reduce(self, prompts: Sequence[FullPrompt], modality: str) -> list[list[Tensor]]:
        """Reduces prompts together."""
        pictures = [picture for prompt in prompts for picture in prompt.pictures]
        firsts = [sum(len(prompt.pictures) for prompt in prompts[:i]) for i in range(len(prompts))]
        numbered = [
            prompt.picture.where(prompt.picture < 0, prompt.picture + first)
            for prompt, first in zip(prompts, firsts, strict=True)
        ]
        kinds = row_kinds(numbered, [picture.rows for picture in pictures], modality, self.view.around)
        layout = self.plan.layout(kinds, [budget for prompt in prompts for budget in prompt.budgets])
        if not layout.reduced() and not self.keeps:
            return [[picture.tokens for picture in prompt.pictures] for prompt in prompts]
        full = self._assembled(prompts, pictures, kinds)
        ids = full.channels["ids"].values
        marks = fingerprints(*once(ids, full.real, kinds.picture.to(ids.device)))
        out = full
        if layout.reduced():
            tiles = [picture.tiles for picture in pictures]
            questions = [self.method.query(prompt.question) for prompt in prompts]
            clip = None if self.clip is None else self.clip.sides(self.tower, tiles, questions)
            out, _ = reduce(full, layout, tiles, self.method, self.model, clip=clip, prompts=marks)
        owner = out.channels["picture"].values
        rows = torch.cat(
            [out.embeds, *(channel.values for name, channel in out.channels.items() if name == "beside")], -1
        )
        found = []
        for number in range(len(pictures)):
            place = kinds.picture.eq(number).any(1).nonzero()[0, 0]
            here = owner[place] == number
            own = rows[place][here]
            if self.keeps:
                first = kinds.picture[place].eq(number).nonzero()[0, 0]
                offset = out.positions[place][here] - full.positions[place][first]
                own = torch.cat((own, columns(offset, own.dtype)), -1)
            found.append(own)
        return [found[first : first + len(prompt.pictures)] for prompt, first in zip(prompts, firsts, strict=True)]

    def _assembled(self, prompts: Sequence[FullPrompt], pictures: Sequence[EncodedPicture], kinds: Any) -> Assembled:
        """The prompts as the language model would have read them."""
        device = pictures[0].tokens.device
        real, picture = kinds.real.to(device), kinds.picture.to(device)
        ids = torch.nn.utils.rnn.pad_sequence([prompt.ids for prompt in prompts], batch_first=True).to(device)
        at_picture = picture >= 0
        tokens = torch.cat([one.tokens for one in pictures])
        embeds = tokens.new_zeros(*ids.shape, tokens.shape[-1])
        if self.method.reads_prompt:
            text = self.embed(ids.flatten(), at_picture.flatten()).view(*ids.shape, -1)
            embeds[..., : self.width] = text
        embeds = embeds.masked_scatter(at_picture[..., None], tokens)
        channels = {"ids": Channel(ids, 0), "picture": Channel(picture, -1)}
        if embeds.shape[-1] > self.width:
            channels["beside"] = Channel(embeds[..., self.width :], 0, Rule.MEAN)
        inputs = {name: torch.cat([one.inputs[name] for one in pictures]) for name in pictures[0].inputs}
        return Assembled(embeds[..., : self.width], real, self.positions(inputs, ids, real), channels)


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
    """Offsets [K] or [K, A] as columns [K, 2 A]: high digits, then low ones."""
    offset = offset[:, None] if offset.ndim == 1 else offset
    return torch.cat((offset // BASE, offset % BASE), -1).to(dtype)


def offsets(values: Tensor) -> Tensor:
    """The offsets [K, A] of `columns`."""
    high, low = values.round().long().chunk(2, dim=-1)
    return high * BASE + low
