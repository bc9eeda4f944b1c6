"""One account of tokens: the cost of a prompt with a method and a budget, from sizes only.

    account(make("consensusdrop"), Budget(64), SHAPES["llava-1.5-7b"]).flops.total

Counted as FLOPs, two for each multiply-add (docs/accounting.md):

    language model  every layer l with its true input of S_l rows: projections 2 S_l (2 D H d + 2 D H_kv d), gated MLP
                    6 S_l D I, attention scores and values 4 S_l^2 H d over the whole square (a causal kernel may skip
                    half of it); `lm_head` once, for the row that gives the first token
    vision tower    patch embedding of its input, and every block that is run: 8 n D_v^2 + 4 n^2 D_v for the n =
                    patches + class token that enter it, 4 n' D_v I_v for the n' that enter the next one; projector on
                    the output of the last
    method          its own matrix products (`Method.flops`)

Not counted: norms, activations, softmax, rotary embedding, sorting, gathering. KV bytes: 2 H_kv d S_l numbers in each
layer. `tests/evaluation/test_account.py` holds all of it against torch's FlopCounterMode and the caches of prefills.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method, Shape
from llava_consensus.reduction.options import choose

MATCHES = ("kept", "entering", "average", "flops")

# Llama-2 / Vicuna and CLIP ViT-L/14-336: config.json of liuhaotian/llava-v1.5-7b, llava-v1.5-13b, llava-v1.6-vicuna-7b
# and openai/clip-vit-large-patch14-336. 66 rows of text: the meaning of the paper's KV column (docs/accounting.md), 35
# of them before the image with `vicuna_v1`. LLaVA-NeXT: the paper's fixed layout of 2 x 2 tiles and the base view,
# without newlines.
_CLIP: dict[str, Any] = dict(
    blocks=24,
    feature_blocks=23,
    vision_width=1024,
    vision_heads=16,
    vision_inner=4096,
    patches=576,
    patch_values=588,
    text=66,
    question=31,
)
_LLAVA_7B = Shape(32, 4096, 32, 32, 128, 11008, 32000, **_CLIP, projector=4096 * (1024 + 4096))
_LLAVA_13B = Shape(40, 5120, 40, 40, 128, 13824, 32000, **_CLIP, projector=5120 * (1024 + 5120))
SHAPES = {
    "llava-1.5-7b": _LLAVA_7B,
    "llava-1.5-13b": _LLAVA_13B,
    "llava-next-7b": _LLAVA_7B._replace(tiles=5),
    "llava-next-13b": _LLAVA_13B._replace(tiles=5),
}


class Flops(NamedTuple):
    """FLOPs of one prefill by who spends them."""

    llm: float
    vision: float  # tower and projector
    method: float | None  # None if the method does not know it for this shape

    @property
    def total(self) -> float | None:
        return None if self.method is None else self.llm + self.vision + self.method


class Account(NamedTuple):
    """Cost of one prompt. Visual tokens are counted over all its images."""

    layers: tuple[int, ...]  # visual tokens that enter each decoder layer
    flops: Flops
    kv_layers: tuple[int, ...]  # bytes of keys and values of each layer after the prefill
    note: str = ""  # why a cost is not known

    @property
    def entering(self) -> int:
        return self.layers[0]

    @property
    def kept(self) -> int:
        return self.layers[-1]

    @property
    def average(self) -> float:
        return sum(self.layers) / len(self.layers)

    @property
    def kv_bytes(self) -> int:
        return sum(self.kv_layers)

    def record(self) -> dict[str, Any]:
        flops = {**self.flops._asdict(), "total": self.flops.total}
        counts = {"entering": self.entering, "kept": self.kept, "average": self.average}
        return {**counts, "flops": flops, "kv_bytes": self.kv_bytes, **({"note": self.note} if self.note else {})}


def llm_flops(shape: Shape, entering: Sequence[int]) -> float:
    """FLOPs of the language model's prefill when `entering[l]` visual tokens enter layer l."""
    heads, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    weights = shape.width * (2 * heads + 2 * keys + 3 * shape.inner)
    rows = [count + shape.text for count in entering]
    head = shape.width * shape.vocabulary
    return 2.0 * (sum(rows) * weights + 2 * sum(count * count for count in rows) * heads + head)


def vision_flops(shape: Shape, per_block: Sequence[int]) -> float:
    """FLOPs of tower and projector for all images when the patches of `per_block[b]` tokens of each tile enter block
    b. Every block attends to its whole tile and has an MLP of two layers: windows cost less, gated MLPs more.

    A method that merges patches inside a block does so between its attention and its MLP, as ToMe does.
    """
    width = shape.vision_width
    total = per_block[0] * shape.merged * shape.patch_values * width + per_block[-1] * shape.projector
    for patches, following in zip(per_block, [*per_block[1:], per_block[-1]], strict=True):
        count, left = patches * shape.merged + shape.classes, following * shape.merged + shape.classes
        total += 4 * count * width * width + 2 * count * count * width + 2 * left * width * shape.vision_inner
    return 2.0 * total * shape.tiles * shape.images


def kv_layers(shape: Shape, entering: Sequence[int]) -> tuple[int, ...]:
    bytes_per_token = 2 * shape.kv_heads * shape.head_width * shape.number_bytes
    return tuple(bytes_per_token * (count + shape.text) for count in entering)


def kv_bytes(shape: Shape, entering: Sequence[int]) -> int:
    return sum(kv_layers(shape, entering))


def account(method: Method, budget: Budget, shape: Shape) -> Account:
    """Cost of a prompt of this shape with a method. A budget of all tokens is the unpatched model.

    Args:
        method: costs that it does not know are in `note`.
        budget: of one image.
        shape: of the model and the prompt; an image has `shape.available` tokens.
    """
    reduced = method.reduces and budget.tokens < shape.available and shape.images > 0
    per_image = method.entering(budget, shape.available, shape.layers) if reduced else [shape.available] * shape.layers
    layers = tuple(shape.images * count for count in per_image)
    blocks = method.vision_tokens(budget, shape) if reduced else [shape.patches] * shape.blocks
    method_flops: float | None = 0.0
    note = ""
    if reduced:
        try:
            method_flops = method.flops(shape, budget)
            note = "" if method_flops is not None else f"{type(method).__name__} does not say what its own work costs"
        except OptionError as error:
            method_flops, note = None, str(error)
        method_flops = None if method_flops is None else shape.images * method_flops
    flops = Flops(llm_flops(shape, layers), vision_flops(shape, blocks), method_flops)
    return Account(layers, flops, kv_layers(shape, layers), note)


def match(method: Method, budget: Budget, shape: Shape, by: str = "kept") -> Budget:
    """The budget at which a method costs the same as a plain reduction to T tokens before the language model:
    the nearest whole number of tokens, found by trying them all.

    Args:
        method: the method that gets the budget.
        budget: T.
        shape: of the model and a typical prompt.
        by: `kept` (T as it is: by its own rule a method keeps T) | `entering` | `average` | `flops` (tower, language
            model and the method's own work together).
    Raises:
        OptionError: if no budget comes within half a token of it, or for another `by`.
    """
    choose("match", by, MATCHES)
    if by == "kept" or not method.reduces or budget.tokens >= shape.available:
        return budget
    plain = [shape.images * budget.tokens] * shape.layers
    tower = vision_flops(shape, [shape.patches] * shape.blocks)
    target = llm_flops(shape, plain) + tower if by == "flops" else float(plain[0])
    costs = _costs(method, budget, shape, by)
    best = min(costs, key=lambda tokens: (abs(costs[tokens] - target), -tokens))
    steps = [abs(costs[neighbour] - costs[best]) for neighbour in (best - 1, best + 1) if neighbour in costs]
    if abs(costs[best] - target) > max(steps, default=0.0) / 2:
        raise OptionError(
            f"match={by}: no budget of this method costs as much as {budget.tokens} tokens ({target:g}); nearest: "
            f"tokens={best} ({costs[best]:g}). Take match=kept, or another budget"
        )
    return Budget(best, budget.merged)


def _costs(method: Method, budget: Budget, shape: Shape, by: str) -> dict[int, float]:
    costs: dict[int, float] = {}
    why = "this method has no budget below all tokens"
    for tokens in range(1, shape.available):
        try:
            cost = account(method, Budget(tokens, budget.merged), shape)
        except OptionError as error:  # a budget this method cannot have
            why = str(error)
            continue
        if by == "flops" and cost.flops.total is None:
            raise OptionError(f"match=flops: {cost.note}. Take another match")
        costs[tokens] = cost.flops.total or 0.0 if by == "flops" else float(getattr(cost, by))
    if not costs:
        raise OptionError(f"match={by}: {why}. Take match=kept")
    return costs


def paper_flops(shape: Shape, entering: Sequence[int], decoded: int = 20) -> float:
    """The FLOPs column of the paper's efficiency tables: half the square of attention, no `lm_head`, no vision tower,
    20 decoded tokens, 50 rows of text (reconstructed from its numbers: docs/accounting.md).
    """
    weights = 4 * shape.width**2 + 3 * shape.width * shape.inner
    rows = [count + shape.text for count in entering]
    return float(sum(2 * (count + decoded) * weights + 2 * count * count * shape.width for count in rows))
