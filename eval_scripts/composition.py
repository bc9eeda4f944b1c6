"""Which composition is best: saliency x choice x merging x calibration, on one bed, with positions kept.

    python -m eval_scripts.composition screen --model checkpoints/llava-mini --out results/composition
    python -m eval_scripts.composition best --model checkpoints/NAME --out results/composition

`screen` asks samples of the validation benchmarks (playground/mini-val) with every composition at 32 tokens, `best`
larger ones with those of `BEST` and with ConsensusDrop+ at 32, 64 and 128 tokens. The runs are ordinary ones, so that
what is complete is not asked again; a picture goes through the tower once for all of them. `composed` is no method of
the package: every part of it is a function of one that is, and `choice=top` is ConsensusDrop+ itself.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from eval_scripts.compared import SALIENCIES
from llava_consensus.errors import choose
from llava_consensus.evaluation import benchmarks, models
from llava_consensus.evaluation.models import Encoded, Host, Loading
from llava_consensus.evaluation.runs.configuration import RunConfig, prepare
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.loop import evaluate
from llava_consensus.evaluation.runs.sweep import LoadedOnce
from llava_consensus.methods import METHODS, make
from llava_consensus.methods.cdpruner import greedy_map
from llava_consensus.methods.consensusdrop import Saliencies
from llava_consensus.methods.consensusdrop_plus import ConsensusDropPlus
from llava_consensus.methods.otprune import OTPrune
from llava_consensus.methods.scope import cover
from llava_consensus.methods.vidcom2 import VidCom2
from llava_consensus.methods.vispruner import thin
from llava_consensus.reduction import selection
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.selection import left_over, pick
from llava_consensus.reduction.tokens import Need, Stopwatch, VisualTokens

GAMMA = 4.55  # of OTPrune for features of 192 numbers (docs/results.md)
LATER = frozenset(
    {Need.PROBE, Need.WHOLE_PICTURES, Need.PROJECTOR}
)  # needs that are not met while a picture is encoded
VAL = Path("playground/mini-val")
BUDGETS, SCREENED = (128, 64, 32), 32
SAMPLES = {"textvqa": 160, "pope": 120}  # questions of a screening, as `compared.SCREEN` knows
LARGER = {"textvqa": 200, "pope": 200}  # of the best
BEST = (("distance", "fused"), ("cover", "fused"), ("dpp", "fused"))  # unmerged


def _cosines(values: Tensor) -> Tensor:
    direction = directions(values.float())
    return direction @ direction.transpose(1, 2)


def _features(tokens: VisualTokens) -> Tensor:
    return tokens.of_tiles(tokens.needed(Need.FEATURES))


def _dpp(tokens: VisualTokens, weight: Tensor, count: int) -> Tensor:
    """CDPruner's, with the saliency in place of its relevance."""
    weight = weight / weight.amax(1, keepdim=True)
    return greedy_map(weight[:, :, None] * _cosines(tokens.projected) * weight[:, None], count)


def _halves(weight: Tensor, count: int, other: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Half of the budget by saliency, half by another choice among the rest, which is given in order of saliency."""
    best, rest = selection.rank(weight).tensor_split((count // 2,), dim=1)
    return torch.cat((best, rest.gather(1, other(rest, count - count // 2))), dim=1)


def _thin(tokens: VisualTokens, weight: Tensor, count: int) -> Tensor:
    features = _features(tokens)
    return _halves(weight, count, lambda rest, left: thin(_cosines(pick(features, rest)), left))


def _transport(tokens: VisualTokens, weight: Tensor, count: int) -> Tensor:
    def of_rest(rest: Tensor, left: int) -> Tensor:
        others = tokens.only(rest)._replace(projected=pick(tokens.projected, rest))
        return OTPrune(gamma=GAMMA).reduce(others, Budget(left)).kept

    return _halves(weight, count, of_rest)


def _unlike(tokens: VisualTokens, weight: Tensor, count: int) -> Tensor:
    """Saliency times how unlike its frame VidCom2 finds a token, from 0 to 1."""
    unlike = VidCom2().reduce(tokens, Budget(count)).fused
    assert unlike is not None
    low, high = unlike.amin(1, keepdim=True), unlike.amax(1, keepdim=True)
    return selection.top(weight * (unlike - low) / (high - low).clamp_min(1e-6), count)


CHOICES: dict[str, Callable[[VisualTokens, Tensor, int], Tensor]] = {  # [B, N] -> [B, K] in any order
    "top": lambda tokens, weight, count: selection.top(weight, count),
    "distance": lambda tokens, weight, count: selection.diverse(weight, _features(tokens), count, 1.0),
    "cover": lambda tokens, weight, count: cover(_cosines(_features(tokens)), weight, count),
    "dpp": _dpp,
    "thin": _thin,
    "transport": _transport,
    "unlike": _unlike,
}


@dataclass(frozen=True, kw_only=True)
class Composed(ConsensusDropPlus):
    """ConsensusDrop+ that chooses by a function of another method, weighted with its saliency.

    Args:
        choice: `top` (ConsensusDrop+) | `distance` | `cover` | `dpp` | `thin` | `transport` | `unlike`.
    """

    choice: str = "top"

    title: ClassVar[str] = "Composed"

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("choice", self.choice, tuple(CHOICES))

    def _choose(self, tokens: VisualTokens, saliencies: Saliencies, count: int) -> tuple[Tensor, Tensor]:
        vision, cross, fused = saliencies
        weight = vision if fused is None else fused
        added = 0 if fused is not None or cross is None else selection.recovered(count, self.rate)
        kept = CHOICES[self.choice](tokens, weight, count - added).sort(dim=1).values
        if added and cross is not None:  # what is chosen comes first, and the question adds what it would miss
            chosen = selection.membership(kept, weight.shape[1]).float()
            kept = selection.recover(chosen, cross, count, self.rate)
        return kept, left_over(kept, weight.shape[1])


@dataclass(frozen=True, kw_only=True)
class Calibrated(InDecoder):
    """What `Composed` keeps, none merged, chosen before the first decoder layer, whose attention is then calibrated by
    distance, as RESTORE does.

    Args:
        choice, alpha, fuser, rate: of `Composed`.
    """

    positions: str = "keep"
    choice: str = "top"
    alpha: float = 0.7
    fuser: str = "convex"
    rate: float = 0.1
    calibrate: bool = True

    title: ClassVar[str] = "Composed, attention calibrated"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES})
    asks: ClassVar[str] = "text"
    attention: ClassVar[str] = "own"

    @property
    def calibrates(self) -> bool:
        """As asked."""
        return self.calibrate

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """A cut before the first layer."""
        return [Cut(0, tokens)]

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        """The T tokens that `Composed` keeps."""
        method = Composed(choice=self.choice, alpha=self.alpha, fuser=self.fuser, rate=self.rate)
        assert view.tower is not None
        prompts = torch.arange(len(view.columns), device=view.columns.device)
        tokens = view.tower._replace(
            projected=view.visual_inputs, probe=view.probe, columns=view.columns, prompt=prompts
        )
        with torch.no_grad():
            kept, _ = method._choose(tokens, method.saliencies(tokens, watch), view.cut.kept)
        return Chosen(kept)


OWN: dict[str, Any] = {"composed": Composed, "composed_calibrated": Calibrated}  # known by name while this runs


def remembering(load: Callable[..., Host]) -> Callable[..., Host]:
    """A loader of hosts whose tower sees each picture or clip once for all methods that read nothing more of it."""

    def loader(model: str, loading: Loading, options: Mapping[str, str]) -> Host:
        host = load(model, loading, options)
        kept: dict[tuple[Any, ...], Encoded] = {}
        encode = host.encode

        def once(pictures: list[Any]) -> list[Encoded]:
            with host.attachment() as attached:
                method, budget = attached.method, attached.budget
                keys = [(method.blocks_ahead, method.early, *_content(one)) for one in pictures]
                fresh = {key: one for key, one in zip(keys, pictures, strict=True)
                         if key not in kept or (method.needs - LATER) - kept[key].method.needs}  # fmt: skip
                kept.update(zip(fresh, encode(list(fresh.values())) if fresh else [], strict=True))
                return [replace(kept[key], method=method, budget=budget) for key in keys]

        host.encode = once  # type: ignore[method-assign]
        return host

    return loader


def _content(picture: Any) -> tuple[int, ...]:
    frames = getattr(picture, "frames", (picture,))
    return tuple(zlib.crc32(frame.tobytes()) for frame in frames)


Cell = tuple[Method, Budget]
FULL: Cell = make("full"), Budget(1)  # which has no budget


def composed(choice: str, saliency: str, calibrated: bool = False) -> Method:
    """The method of a composition."""
    name = "composed_calibrated" if calibrated else "composed"
    return make(name, choice=choice, **SALIENCIES[saliency])


def screened() -> list[Cell]:
    """Compositions at one budget: every choice with every saliency, and with the fused one unmerged too; calibration
    with each saliency.
    """
    cells = [(composed(choice, saliency), Budget(SCREENED)) for choice in CHOICES for saliency in SALIENCIES]
    cells += [(composed(choice, "fused"), Budget(SCREENED, 0)) for choice in CHOICES]
    cells += [(composed("top", saliency, calibrated=True), Budget(SCREENED, 0)) for saliency in SALIENCIES]
    return [FULL, *cells]


def best(budgets: Iterable[int]) -> list[Cell]:
    """ConsensusDrop+ and the best, at every budget."""
    of_best = [(composed(*one), 0) for one in BEST]
    return [(method, Budget(tokens, merged)) for tokens in budgets
            for method, merged in ((composed("top", "fused"), None), *of_best)]  # fmt: skip


def run(
    cells: Iterable[Cell],
    names: Mapping[str, int | None],
    model: str,
    data: Path,
    out: Path,
    load: Callable[..., Host] = models.load,
    said: Mapping[str, str] | None = None,
    longest: int | None = None,
    batch: int = 16,
) -> None:
    """Asks benchmarks, with a sample of so many questions each, with every method and budget.

    Args:
        load: of the model.
        said: of the model, beside what its folder says.
        longest: answer in tokens, where it is not the benchmark's.
        batch: questions asked together.
    """
    loader = LoadedOnce(remembering(load))
    for name, sample in names.items():
        config = RunConfig(benchmarks.make(name), make("full"), model=model, data=data, sample=sample,
                           loading=Loading(device="cpu"), max_new_tokens=longest)  # fmt: skip
        first = prepare(config)
        first = replace(first, description=first.description | dict(said or {}))
        for cell in cells:
            plan = first.reduced_by(*cell, "kept")
            done = evaluate(plan, out, Execution(batch, progress=False), loader)
            print(name, plan.description["method"], plan.description["changed"], plan.description["tokens"],
                  plan.description["merged"], done.metrics["score"] or done.metrics["report"], flush=True)  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("screen", "best"))
    parser.add_argument("--bench", nargs="+", default=list(LARGER), help="of the best (%(default)s)")
    parser.add_argument("--tokens", nargs="+", type=int, default=BUDGETS, help="of the best (%(default)s)")
    parser.add_argument("--model", default="checkpoints/llava-mini")
    parser.add_argument("--data", type=Path, default=VAL)
    parser.add_argument("--out", type=Path, default=Path("results/composition"), help="folder (%(default)s)")
    given = parser.parse_args()
    METHODS.data |= OWN
    if given.action == "screen":
        run(screened(), SAMPLES, given.model, given.data, given.out)
    else:
        run(best(given.tokens), {name: LARGER[name] for name in given.bench}, given.model, given.data, given.out)


if __name__ == "__main__":
    main()
