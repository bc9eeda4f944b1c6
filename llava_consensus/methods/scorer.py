"""Scorer: tokens are ranked by one trained linear form, that of VisionSelector (arXiv 2510.16598; official code
800a70f) and of IDPruner (arXiv 2602.13315; its port in Tencent AngelSlim 67394ce).

A token's score is the product of its query with the mean of all keys, queries and keys being linear maps of the
projected tokens as they are. The maps are read from a file: one of safetensors or of torch, or the folder of a whole
checkpoint that holds them as parts of its vision tower's scorer; the authors publish both. `llava-consensus train
scorer` trains them for a model and writes such a file, which any model of the same width takes.

`balance=1` keeps the best scores (VisionSelector); `balance=0.5` weighs them against the likeness to tokens that are
kept (IDPruner, as in `idpruner`, whose saliency is attention). Differences: the authors rank the tokens of all
images of a prompt together, here each image is ranked separately, over all its tiles; they take a file whose names do
not match in silence and rank by random weights, here it is refused. Ties go to the lower index.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.methods.idpruner import marginal, spread
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import Selected, Selector, Shape, Tiled
from llava_consensus.reduction.options import Ratio
from llava_consensus.reduction.selection import rank
from llava_consensus.reduction.tokens import VisualTokens, ensure_finite

PARTS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")
INSIDE = "_scorer."  # end of the prefix of the names in a whole checkpoint
FRONTS = ("module.", "_orig_mod.")  # that training in parallel and compiling put in front of names
UNREAD = {"norm.weight"}  # of IDPruner's LLaVA-1.5
MOST = 8  # tensors that are looked at in a file without a scorer, to name them
ENDS = (".safetensors", ".bin", ".pt", ".pth")


class LinearForm:
    """The maps of a scorer, in float32: weights [h, D] and biases [h] of queries and keys."""

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        own = [parts[name].float() for name in PARTS]
        self.hidden, self.width = own[0].shape
        self.checksum = _checksum(own)
        self._on = {own[0].device: own}

    def on(self, device: torch.device) -> list[Tensor]:
        """The parts in the order of PARTS, copied to a device once."""
        if device not in self._on:
            self._on[device] = [one.to(device) for one in self._on[torch.device("cpu")]]
        return self._on[device]


@dataclass(frozen=True, kw_only=True)
class Scorer(Selector, Tiled):
    """Keep the T tokens that a trained linear form scores best.

    Args:
        weights: file or folder that the form is read from; null is the form without training, each token's product
            with the mean token.
        balance: weight of the score, in [0, 1]; the rest is the weight of the likeness to kept tokens.
        tile_budget: `global` (one ranking over all tiles, as published) | `per_tile`.
    """

    weights: str | None = None
    balance: Ratio = 1.0
    tile_budget: Literal["per_tile", "global"] = "global"

    title: ClassVar[str] = "Scorer"

    def __post_init__(self) -> None:
        super().__post_init__()
        # read now: a file that is none is refused before a model loads, and one that changes later changes no answer
        form = None if self.weights is None else read_form(Path(self.weights).expanduser())
        object.__setattr__(self, "_form", form)

    @property
    def form(self) -> LinearForm | None:
        """The maps; None if no file is named."""
        return vars(self)["_form"]

    @property
    def width(self) -> int | None:
        return self.form.width if self.form else None

    @property
    def recorded(self) -> dict[str, str]:
        """The record of `weights` in a run: the name with a checksum of the numbers."""
        return {"weights": f"{self.weights} ({self.form.checksum})"} if self.form else {}

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Both maps for one token, the mean, and a product for each token; with likeness, all pairs."""
        hidden, total = self.form.hidden if self.form else 0, 0.0
        for _, size in self.losing(shape, budget):
            pairs = size * size if self.balance < 1 else 0
            total += 2.0 * shape.width * (2 * hidden + size + pairs) + 2.0 * hidden
        return total

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        points = ensure_finite("projected tokens", tokens.projected).float()  # [B, N, D]
        scores = ensure_finite("scores", self.scores(points))
        if self.balance == 1:
            return Selected(rank(scores)[:, :count], fused=scores)
        return Selected(marginal(spread(scores), directions(points), count, self.balance), fused=scores)

    def scores(self, points: Tensor) -> Tensor:
        mean, form = points.mean(1, keepdim=True), self.form  # the mean of keys is the key of the mean
        if form is None:
            return (points @ mean.transpose(1, 2))[..., 0] / points.shape[2] ** 0.5
        query, query_bias, key, key_bias = form.on(points.device)
        if points.shape[2] != form.width:
            raise OptionError(f"weights={self.weights}: of width {form.width}, and the tokens are of {points.shape[2]}")
        against = mean @ key.T + key_bias  # [B, 1, h]
        scores = points @ (against @ query).transpose(1, 2) + against @ query_bias[:, None]  # [B, N, 1]
        return scores[..., 0] / form.hidden**0.5


def _checksum(parts: list[Tensor]) -> str:
    """Short sha256 of all numbers, which are on the CPU."""
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in parts)).hexdigest()[:12]


def read_form(path: Path) -> LinearForm:
    """The form in a file or folder.

    Raises:
        OptionError: there is none, or its names or shapes are others.
    """
    inside = sorted(path.glob("*.safetensors")) or sorted(one for one in path.glob("*") if one.suffix in ENDS)
    files = [path] if path.is_file() else inside
    if not files:
        raise OptionError(f"weights={path}: no such file, and no folder with one of {', '.join(ENDS)} in it")
    found = {name: value for file in files for name, value in _tensors(file).items()}
    found = {name.partition(INSIDE)[2]: value for name, value in found.items() if INSIDE in name} or found
    for front in FRONTS * 2:
        found = {name.removeprefix(front): value for name, value in found.items()}
    missing, unknown = [name for name in PARTS if name not in found], sorted(found.keys() - {*PARTS} - UNREAD)
    if missing or unknown:
        what = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(unknown[:3])}"] * bool(unknown)
        raise OptionError(
            f"weights={path}: {' and '.join(what)}. A scorer has {', '.join(PARTS)} and nothing else, alone or, in "
            f"a whole checkpoint, behind a name that ends in {INSIDE!r}"
        )
    shape = found["q_proj.weight"].shape
    if len(shape) != 2 or any(found[name].shape != shape[: 2 if name.endswith("weight") else 1] for name in PARTS):
        shapes = ", ".join(f"{name} {list(found[name].shape)}" for name in PARTS)
        raise OptionError(f"weights={path}: {shapes}. Weights are [h, D] and biases [h], of one h and one D")
    return LinearForm(found)


def _tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file; of a whole checkpoint only those of its scorer. OptionError for a damaged one."""
    try:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, "pt") as tensors:
                names = [name for name in tensors.keys() if INSIDE in name] or list(tensors.keys())[:MOST]  # noqa: SIM118
                return {name: tensors.get_tensor(name) for name in names}
        loaded: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        return {name: value for name, value in loaded.items() if INSIDE in name} or loaded
    except Exception as error:  # each format has its own errors
        raise OptionError(f"weights={file}: cannot be read ({' '.join(str(error).split())[:200]})") from error
