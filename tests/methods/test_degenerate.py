"""Every method on inputs that leave nothing to choose by, and on numbers that are none: each token enters once, owner
and source agree, and NaN, infinity and overflow are errors that name a stage.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from units import WATCH, unit

from llava_consensus.errors import NonFiniteError
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import DecoderView
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.tokens import VisualTokens

AFTER_TOWER = [name for name in METHODS if make(name).place is Place.TOKENS and make(name).reduces]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("consensusdrop", {"fuser": "recovery"}),
    ("consensusdrop", {"select": "diverse", "fps_start": "salient"}),
    ("consensusdrop", {"tau_vision": 1e-30, "tau_cross": 1e30, "fps_start": "mean"}),
    ("consensusdrop", {"vision_score": "tokens", "order": "raster", "aggregate": "max"}),
    ("prumerge", {"budget": "adaptive"}),
    ("prumerge", {"weights": "mean", "order": "raster"}),
    ("prumerge_plus", {"budget": "adaptive"}),
    ("prumerge_plus", {"spread": "even"}),
    ("prumerge_plus", {"spread": "ratio"}),
    ("visionzip", {"class_token": False, "contextual": "mean"}),
    ("cdpruner", {"theta": 0.5}),
    ("scope", {"alpha": 0.0}),
    ("holov", {"crops": 24, "order": "raster"}),
    ("holov", {"crops": 5}),
    ("restore", {"selector": "divprune", "order": "top_then_merged"}),
    ("restore", {"selector": "holov"}),
    ("hiprune", {"alpha": 1.0}),
    ("vscan", {"windows": 2, "local": 1.0, "order": "top_then_merged"}),
]
VARIANTS = {name: [{}, *(options for one, options in MORE if one == name)] for name in AFTER_TOWER}
CUTTING: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name, one in METHODS.items() if one.place is Place.DECODER and one.attention != "none"),
    ("sparsevlm", {"version": "2.0"}),
    ("sparsevlm", {"version": "1.0", "scale": 1.0}),
]
BUDGETS = (Budget(8), Budget(1), Budget(2), Budget(13), Budget(23), Budget(8, 0), Budget(8, 8))
PARTS = ("projected", "features", "class_feature")


def attended(tokens: VisualTokens, *rows: int) -> VisualTokens:
    """The class token looks at these block rows alone: 0 is itself, the patches follow."""
    assert tokens.attention is not None
    key, query = torch.zeros_like(tokens.attention.key), torch.zeros_like(tokens.attention.query)
    key[:, :, list(rows)], query[:] = 300.0, 300.0
    return tokens._replace(attention=tokens.attention._replace(query=query, key=key))


def blank(tokens: VisualTokens, value: float) -> VisualTokens:
    return tokens._replace(**{name: torch.full_like(getattr(tokens, name), value) for name in PARTS})


DEGENERATE: list[Callable[[VisualTokens], VisualTokens]] = [
    lambda tokens: tokens,
    lambda tokens: attended(tokens, 6),
    lambda tokens: attended(tokens, 6, 10),
    lambda tokens: attended(tokens, 0),
    attended,
    lambda tokens: blank(tokens, 1.0),
    lambda tokens: blank(tokens, 0.0),
    lambda tokens: attended(blank(tokens, 0.0)),
]


@pytest.mark.parametrize("name", AFTER_TOWER)
def test_every_token_enters_once_and_owner_agrees_with_source(name: str) -> None:
    for options in VARIANTS[name]:
        method = make(name, **options)
        for change in DEGENERATE:
            tokens = change(unit(batch=1 if method.adaptive else 2))
            for budget in BUDGETS:
                reduction = method.reduce(tokens, budget)
                slots = reduction.tokens.shape[1]
                assert method.adaptive or slots == budget.tokens
                assert torch.isfinite(reduction.tokens).all()
                for source, owner, kept in zip(reduction.source, reduction.owner, reduction.kept, strict=True):
                    named = source >= 0  # others stand for no patch
                    assert len(source[named].unique()) == int(named.sum())
                    assert torch.equal(owner[source[named]], torch.arange(slots)[named])
                    assert int(owner.max()) < slots and bool((kept.diff() > 0).all())


def spoiled(values: Tensor, number: float, everywhere: bool) -> Tensor:
    values = values.clone()
    values.view(-1)[slice(None) if everywhere else values.numel() // 2 + 3] = number
    return values


@pytest.mark.parametrize("name", AFTER_TOWER)
def test_no_number_that_is_none_comes_out(name: str) -> None:
    """An error, or a reduction which that number has nothing to do with."""
    for options, number in product(VARIANTS[name], (float("nan"), float("inf"), float("-inf"))):
        method = make(name, **options)
        fine = unit(batch=1 if method.adaptive else 2)
        assert fine.attention is not None and fine.probe is not None
        for everywhere in (False, True):
            cases = [fine._replace(**{part: spoiled(getattr(fine, part), number, everywhere)}) for part in PARTS]
            for side in ("query", "key"):
                attention = spoiled(getattr(fine.attention, side), number, everywhere)
                cases.append(fine._replace(attention=fine.attention._replace(**{side: attention})))
                probe = spoiled(getattr(fine.probe, side), number, everywhere)
                cases.append(fine._replace(probe=fine.probe._replace(**{side: probe})))
            for budget in (Budget(8), Budget(23)):
                expected = method.reduce(fine, budget)
                for tokens in cases:
                    try:
                        found = method.reduce(tokens, budget)
                    except NonFiniteError:
                        continue
                    assert torch.isfinite(found.tokens).all() and torch.equal(found.source, expected.source)


@pytest.mark.parametrize("name", AFTER_TOWER)
def test_overflow_of_half_precision_is_an_error(name: str) -> None:
    for options in VARIANTS[name]:
        method = make(name, **options)
        fine = unit(batch=1 if method.adaptive else 2, dtype=torch.float16)
        parts = {part: 60000 * getattr(fine, part).sign() for part in PARTS}  # whose sums are too large
        with_projector = fine._replace(**parts, project=lambda values: values[..., :6] * 2)
        for budget in (Budget(8), Budget(23)):
            try:
                assert torch.isfinite(method.reduce(with_projector, budget).tokens).all()
            except NonFiniteError as error:
                assert "float16" in str(error)


def view(method: Any, batch: int, cut: Any, dtype: torch.dtype = torch.float32) -> DecoderView:
    entered, now = (unit(24, batch, seed, 1 if method.asks == "last" else 5, dtype, width=12) for seed in (0, 1))
    states = now.projected, now.words.text, now.columns
    return DecoderView(8, cut, *states, now.probe, entered.projected, entered.words.text, lambda values: values)


READ = {"sparsevlm": ("hidden", "visual_inputs", "text_inputs"), "dart": ("hidden", "asked")}


@pytest.mark.parametrize(("name", "options"), CUTTING)
def test_cuts_are_as_careful(name: str, options: dict[str, Any]) -> None:
    method: Any = make(name, **options)
    batch = 1 if method.adaptive else 2
    for tokens in (8, 2, 20):
        cut = method.cuts(Budget(tokens), 24, 32)[0]
        fine = view(method, batch, cut)
        flat = {part: torch.zeros_like(getattr(fine, part)) for part in ("hidden", "asked", "visual_inputs")}
        still = fine.probe._replace(query=0 * fine.probe.query, key=0 * fine.probe.key)
        for one in (fine, fine._replace(**flat, probe=still)):
            chosen = method.select(one, WATCH)
            assert method.adaptive or chosen.kept.shape[1] == cut.kept
            assert bool((chosen.kept.diff(dim=1) > 0).all())
            if chosen.centres is not None:
                both = torch.cat((chosen.kept, chosen.centres), dim=1).sort(dim=1).values
                assert bool((both.diff(dim=1) > 0).all()) and torch.isfinite(chosen.merged).all()
        for number in (float("nan"), float("inf")):
            for part in READ.get(name, ()):
                if part == "hidden" and name == "sparsevlm" and not cut.merged:
                    continue  # nothing is made of them
                with pytest.raises(NonFiniteError):
                    method.select(fine._replace(**{part: spoiled(getattr(fine, part), number, True)}), WATCH)
            with pytest.raises(NonFiniteError):
                method.select(fine._replace(probe=fine.probe._replace(key=0 * fine.probe.key + number)), WATCH)


def test_clusters_are_averaged_without_overflow() -> None:
    method: Any = make("sparsevlm")
    cut = method.cuts(Budget(8), 24, 32)[0]
    large = view(method, 2, cut, torch.float16)._replace(hidden=torch.full((2, 24, 12), 60000.0).half())
    assert torch.equal(method.select(large, WATCH).merged, torch.full((2, cut.merged, 12), 60000.0).half())
