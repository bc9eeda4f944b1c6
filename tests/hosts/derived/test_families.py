"""Families that no file describes, each against transformers' own language model in float64: images of different
sizes, left padding, positions kept and numbered anew, a later turn, and what is refused.
"""

from functools import cache
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.19")

from families import FAMILIES, IMAGE, build, prompts  # noqa: E402
from reference import answer, called, cross, kernel_calls, received  # noqa: E402

from llava_consensus import attach  # noqa: E402
from llava_consensus.errors import OptionError  # noqa: E402
from llava_consensus.hosts import HOSTS, ONE_AXIS, TOWER  # noqa: E402

NAMES = list(FAMILIES)
PEERS = ("divprune", "vispruner", "hiprune", "random", "fastv")
BOTH, SECOND = [0, 1], [1]


@cache
def model_of(name: str) -> Any:
    if FAMILIES[name].timm:
        pytest.importorskip("timm")
    return build(FAMILIES[name])


def scap(name: str) -> str:
    """The method whose choice is tested: that of the paper where the tower is read, else one by the words alone."""
    return "consensusdrop" if FAMILIES[name].tower else "divprune"


def alone(inputs: dict[str, Any], name: str, number: int, shown: list[int]) -> dict[str, Any]:
    """One prompt of a batch without its padding."""
    rows, shape = inputs["attention_mask"][number].bool(), inputs["input_ids"].shape
    own = {key: value[number : number + 1, rows] for key, value in inputs.items() if value.shape == shape}
    return {**prompts(model_of(name), FAMILIES[name], shown), **own}


def near(found: torch.Tensor, expected: torch.Tensor, room: float = 1e-5) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < room


@pytest.mark.parametrize("name", NAMES)
def test_all_rows_kept_is_the_plain_model_and_so_is_the_detached_one(name: str) -> None:
    model, method = model_of(name), scap(name)
    inputs = prompts(model, FAMILIES[name], BOTH, SECOND)
    with torch.no_grad():
        plain = model(**inputs).logits
        with attach(model, method, tokens=4000):
            assert torch.equal(model(**inputs).logits, plain)
        assert torch.equal(model(**inputs).logits, plain)


@pytest.mark.parametrize(
    ("name", "positions"),
    [(name, one) for name in NAMES for one in ("keep", "renumber")[: 2 if FAMILIES[name].axes == 1 else 1]],
)
def test_a_reduced_batch_is_read_as_the_language_model_reads_its_own_call_cut(name: str, positions: str) -> None:
    model, family = model_of(name), FAMILIES[name]
    inputs = prompts(model, family, BOTH, SECOND)
    options = {"order": "raster"} if family.tower else {}
    with attach(model, scap(name), tokens=0.5, positions=positions, **options) as attached, torch.no_grad():
        logits, outcomes = model(**inputs).logits[:, -1], attached.outcomes
        generated = model.generate(
            **inputs, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    near(generated.logits[0], logits, 1e-4)
    assert [one.before for one in outcomes] == [family.rows[one] for one in (0, 1, 1)]
    assert all(0 < one.after < one.before for one in outcomes)
    for number, shown in enumerate((BOTH, SECOND)):
        own = [one for one in outcomes if one.row == number]
        near(logits[number], answer(model, alone(inputs, name, number, shown), own, positions == "keep"))


def test_positions_on_several_axes_are_not_numbered_anew() -> None:
    for name in NAMES:
        if FAMILIES[name].axes > 1:
            model = model_of(name)
            with pytest.raises(OptionError, match="axes, which are kept"), attach(model, positions="renumber"):
                model(**prompts(model, FAMILIES[name], BOTH))


@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].tower])
def test_both_saliencies_are_those_of_the_kernels(name: str) -> None:
    model, family = model_of(name), FAMILIES[name]
    inputs = prompts(model, family, BOTH)
    with attach(model, "consensusdrop", tokens=3, merged=0, tile_budget="global") as attached, torch.no_grad():
        model(**inputs)
        outcomes = attached.outcomes
    for outcome, expected in zip(outcomes, cross(model, inputs, family.layer), strict=True):
        near(outcome.reductions[0][1].cross[0].double(), expected)
    if family.members is None:
        return
    with kernel_calls() as calls, torch.no_grad():
        model(**inputs)
    decoder = {id(module) for module in model.get_decoder().modules()}
    tower = [call for call in calls if id(call[0]) not in decoder]
    block = [call for call in tower if call[0] is tower[-1][0]]
    tiles = [(*pair, call[3]) for call in block for pair in zip(call[1], call[2], strict=True)]
    for number, (outcome, count) in enumerate(zip(outcomes, family.tiles, strict=True)):
        members = family.members(number)
        own, tiles = tiles[:count], tiles[count:]
        parts = [
            received(*(one[:, : members.numel() + family.beside] for one in tile[:2]), tile[2], members) for tile in own
        ]
        found = outcome.reductions[0][1].vision[0].double()
        expected = torch.cat([part / part.sum() for part in parts])  # tiles of an image count alike
        near(found / found.sum(), expected / expected.sum())


@pytest.mark.parametrize("name", NAMES)
def test_peers_are_read_so_too_or_refused_in_one_line(name: str) -> None:
    model, family = model_of(name), FAMILIES[name]
    inputs = prompts(model, family, BOTH)
    for method in PEERS:
        try:
            with attach(model, method, tokens=0.5) as attached, torch.no_grad():
                logits, outcomes = model(**inputs).logits[:, -1], attached.outcomes
        except OptionError as error:
            assert method in ("vispruner", "hiprune") and not family.tower, f"{method}: {error}"
            assert "\n" not in str(error)
            continue
        assert all(0 < one.after < one.before for one in outcomes), method
        if method != "fastv":
            near(logits[0], answer(model, inputs, outcomes, family.axes > 1))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.cuts])
@pytest.mark.parametrize("method", ["fastv", "pyramiddrop"])
def test_a_cut_between_layers_hides_what_it_drops(name: str, method: str) -> None:
    """The plain model gives the same logits where its later layers do not see those rows; a step of decoding too."""
    model = model_of(name)
    inputs = prompts(model, FAMILIES[name], BOTH)
    size, options = inputs["input_ids"].shape[1], {"layer": 2} if method == "fastv" else {"layers": "2"}
    with attach(model, method, tokens=3, positions="keep", **options) as attached, torch.no_grad():
        logits = model(**inputs).logits[0, -1]
        outcomes = attached.outcomes
        found = model.generate(
            **inputs, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    near(found.logits[0][0], logits)
    visual = (inputs["input_ids"][0] == IMAGE).nonzero()[:, 0]
    hidden = torch.zeros(size + 1, dtype=torch.bool)
    for outcome in outcomes:
        own, visual = visual[: outcome.before], visual[outcome.before + outcome.structural :]
        hidden[own] = True
        hidden[own[outcome.reductions[0][1].kept[0]]] = False

    def hide(layer: Any, args: Any, kwargs: Any) -> Any:
        mask, rows = kwargs.get("attention_mask"), (args[0] if args else kwargs["hidden_states"]).shape[1]
        mask = torch.ones(1, 1, rows, rows, dtype=torch.bool).tril() if mask is None else mask
        return args, {**kwargs, "attention_mask": mask.masked_fill(hidden[:rows], False)}

    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None) or decoder.model.layers
    handles = [one.register_forward_pre_hook(hide, with_kwargs=True) for one in layers[2:]]
    word = found.sequences[:, size : size + 1]
    more = {"input_ids": word, "attention_mask": torch.ones_like(word)}
    longer = {
        key: torch.cat((value, more.get(key, torch.zeros_like(word))), 1)
        if value.shape == inputs["input_ids"].shape else value
        for key, value in inputs.items()
    }  # fmt: skip
    with torch.no_grad():
        near(logits, model(**inputs).logits[0, -1])
        if FAMILIES[name].turns:
            near(found.logits[1][0], model(**longer).logits[0, -1])
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].turns])
def test_a_later_turn_goes_on_from_the_reduced_cache(name: str) -> None:
    model, family = model_of(name), FAMILIES[name]
    inputs, words = prompts(model, family, BOTH), torch.tensor([[41, 42, 43]])
    none = torch.zeros_like(words)
    more = {"input_ids": words, "attention_mask": none + 1}
    longer = {
        key: torch.cat((value, more.get(key, none)), 1) if value.shape == inputs["input_ids"].shape else value
        for key, value in inputs.items()
    }
    positions = called(model, longer).get("position_ids")
    with attach(model, "divprune", tokens=0.5), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        given = {"attention_mask": torch.ones_like(longer["input_ids"]), "past_key_values": cache}
        if family.axes > 1:
            given["position_ids"] = positions[..., -words.shape[1] :]
        later = model(input_ids=words, **given).logits[:, -1]
        near(later, model(**longer).logits[:, -1], 1e-4)  # recurrent kernels compute in float32


def test_the_list_says_what_derivation_finds() -> None:
    entries = {kind: entry for entry in HOSTS.values() for kind in entry.types}
    for name, family in FAMILIES.items():
        lacks = entries[family.kind].lacks
        assert (TOWER in lacks, ONE_AXIS in lacks) == (not family.tower, family.axes > 1), name
