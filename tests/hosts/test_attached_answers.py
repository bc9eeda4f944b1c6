"""An attached model answers as it did at commit 2f74477, and as its layers do when they are run by hand: each is called
on the rows that are left, without cache, hooks or padding.

tests/golden/attached_answers.npz has three greedy tokens, some of their logits, and the tokens that were kept, for all
tiny models and methods. `git show 11abe7a:tests/hosts/test_attached_answers.py` wrote it with the package of 2f74477.
"""

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import families
import hf_models
import numpy as np
import pytest
import torch
from hf_models import decoder_given, double
from torch import Tensor
from transformers import DynamicCache

from llava_consensus import attach, make
from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.hosts.layers import Layers
from llava_consensus.methods.fastv import FastV
from llava_consensus.reduction.budget import budget
from llava_consensus.reduction.decoder import Chosen

GOLDEN = Path(__file__).parents[1] / "golden" / "attached_answers.npz"
STEPS, COLUMNS = 3, 6
FORMS: dict[str, list[list[int]]] = {"one": [[0]], "batch": [[0], [1, 0]]}
NAMES = [*hf_models.CASES, *families.FAMILIES]
CACHES = {"past_key_values", "cache"}  # names of the argument
PLACEHOLDERS = [families.IMAGE, families.VIDEO]  # the plain model cannot read an answer with one again
METHODS = (
    *("divprune", "consensusdrop", "consensusdrop+", "visionzip", "vispruner", "prumerge_plus", "cdpruner"),
    *("uniform_grid", "random", "fastv", "dart", "pyramiddrop", "sparsevlm", "ivcprune"),
)


class Tiny(NamedTuple):
    model: Any
    tokens: int
    prompts: dict[str, dict[str, Any]]  # `one` with one image; `batch` of two, padded, the second with two images


@cache
def tiny(name: str) -> Tiny:
    if name in families.FAMILIES:
        family = families.FAMILIES[name]
        if family.timm:
            pytest.importorskip("timm")
        model = families.build(family)
        prompts = {form: families.prompts(model, family, *shown) for form, shown in FORMS.items()}
        return Tiny(model, 3, prompts)
    case = hf_models.CASES[name]
    model = case.build()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"  # grouped_mm has no float64
    model = families.filled(model.double())
    first, second, third = (case.picture(number) for number in range(3))
    one, two = [5, 6, first, 7, 8, 9], [5, 6, 7, 11, second, 12, third, 7, 9]
    prompts = {"one": hf_models.prompts(one), "batch": hf_models.prompts(one, two)}
    return Tiny(model, case.tokens, {form: double(inputs) for form, inputs in prompts.items()})


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    given = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **given)


def accepted(method: str, **options: str) -> dict[str, str]:
    fields = type(make(method)).__dataclass_fields__
    return {name: value for name, value in options.items() if name in fields}


def positions_of(name: str) -> tuple[str, ...]:
    axes = families.FAMILIES[name].axes if name in families.FAMILIES else 1
    return ("keep",) if axes > 1 or name.startswith(("qwen", "glm4v")) else ("keep", "renumber")


def cells(name: str) -> Iterator[tuple[str, str, str]]:
    """Method, prompt and positions. Each method reads the batch, and every third also the single prompt."""
    positions = positions_of(name)
    for number, method in enumerate(METHODS, NAMES.index(name)):
        yield method, "batch", positions[number % len(positions)]
        if number % 3 == 0:
            yield method, "one", positions[(number + 1) % len(positions)]


class Answer(NamedTuple):
    logits: Tensor  # [B, STEPS, V] in float64
    tokens: Tensor  # [B, STEPS]
    counts: list[tuple[int, int, int]]  # row, tokens before, after; of every image
    kept: list[int]  # by the methods, of every unit they reduced


def answer(tiny: Tiny, method: str, form: str, positions: str) -> Answer:
    options = accepted(method, positions=positions, **({"tile_budget": "global"} if form == "batch" else {}))
    with attach(tiny.model, method, tokens=tiny.tokens, **options) as attached:
        found = generate(tiny.model, tiny.prompts[form])
    return Answer(
        torch.stack(found.logits, 1),
        found.sequences[:, -STEPS:],
        [(one.row, one.before, one.after) for one in attached.outcomes],
        [place for one in attached.outcomes for _, part in one.reductions for place in part.kept.flatten().tolist()],
    )


def sample(logits: Tensor) -> np.ndarray:
    """COLUMNS of the logits, spread over the vocabulary: enough to tell two answers apart."""
    return logits[..., :: logits.shape[-1] // COLUMNS][..., :COLUMNS].float().numpy()


@pytest.mark.parametrize("name", NAMES)
def test_all_tokens_kept_is_the_plain_model_and_so_is_the_detached_one(name: str) -> None:
    one = tiny(name)
    inputs = one.prompts["batch"]
    plain = one.model(**inputs).logits
    read = not (name in families.FAMILIES and not families.FAMILIES[name].tower)
    for method in ("consensusdrop" if read else "divprune", "fastv"):
        try:
            with attach(one.model, method, tokens=4000):
                assert torch.equal(one.model(**inputs).logits, plain)
        except ConsensusError:
            assert method == "fastv" and not families.FAMILIES[name].cuts
        assert torch.equal(one.model(**inputs).logits, plain)


class Recorded(NamedTuple):
    versions: dict[str, str]
    cells: dict[str, dict[str, Any]]  # counts, shapes and offsets by key
    arrays: dict[str, np.ndarray]

    def of(self, key: str, part: str) -> np.ndarray:
        start, shape = self.cells[key][part]
        return self.arrays[part][start : start + int(np.prod(shape))].reshape(shape)


@cache
def recorded() -> Recorded:
    with np.load(GOLDEN) as file:
        arrays = dict(file)
    index = json.loads(bytes(arrays.pop("index")))
    return Recorded(index["versions"], index["cells"], arrays)


@pytest.mark.parametrize("name", NAMES[:-1])  # the last is not recorded
def test_as_recorded(name: str) -> None:
    one, golden, wrong = tiny(name), recorded(), []
    plain = sample(one.model(**one.prompts["batch"]).logits[:, -1:])
    rounding = np.abs(plain - golden.of(name, "logits")).max() / np.abs(plain).max()
    if rounding > 1e-5:  # up to 3e-6 on other processors, whose float32 pixels and norms round otherwise
        installed = {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
        assert installed != golden.versions, "the plain model answers differently than it did when this was recorded"
        pytest.skip(f"weights or code of the plain model differ from those of {golden.versions}")
    for cell in cells(name):
        if (where := " | ".join((name, *cell))) not in golden.cells:
            continue
        found, close = answer(one, *cell), golden.of(where, "logits")
        if [list(count) for count in found.counts] != golden.of(where, "counts").tolist():
            wrong.append(f"{cell}: counts {found.counts}, not {golden.of(where, 'counts').tolist()}")
        if cell[0] == "random":  # drawn from the bits of the pixels: torch.randn has others on other processors
            continue
        logits = sample(found.logits)
        if not np.allclose(logits, close, rtol=0, atol=max(1e-5, 50 * rounding) * np.abs(close).max()):
            wrong.append(f"{cell}: logits differ by {np.abs(logits - close).max() / np.abs(close).max():.0e}")
        if not np.array_equal(found.tokens.numpy(), golden.of(where, "tokens")):
            wrong.append(f"{cell}: other tokens")
        if found.kept != golden.of(where, "kept").tolist():
            wrong.append(f"{cell}: other tokens of the image were kept")
    assert not wrong, "\n".join(wrong)


# ---- layers by hand


def rows_of(value: Any, index: Tensor, total: int) -> Any:
    if isinstance(value, tuple):
        return tuple(rows_of(part, index, total) for part in value)
    axes = [axis for axis in range(1, value.ndim) if value.shape[axis] == total] if isinstance(value, Tensor) else []
    return value.index_select(axes[0], index) if axes else value


class LayerCall(NamedTuple):
    module: Any
    arguments: dict[str, Any]
    output: Tensor


def decoder_of(model: Any) -> Any:
    decoder = model.get_decoder()
    return decoder.model if hasattr(decoder, "lm_head") else decoder  # Llama 4 has a whole language model inside


def layer_calls(model: Any, inputs: dict[str, Any]) -> list[LayerCall]:
    """What each layer of the plain model was given and returned, without a cache."""
    calls: list[LayerCall] = []

    def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        arguments = {**dict(zip(inspect.signature(layer.forward).parameters, args, strict=False)), **kwargs}
        calls.append(LayerCall(layer, arguments, output[0] if isinstance(output, tuple) else output))

    with ExitStack() as hooks:
        for layer in decoder_of(model).layers:
            hooks.enter_context(layer.register_forward_hook(note, with_kwargs=True))
        model(**inputs, use_cache=False)
    return calls


def kind_of(layer: Any) -> str:
    """Of the attention of a layer: `recurrent`, `sliding_attention` or another."""
    if not attention_of(layer):
        return "recurrent"
    index = next((m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")), 0)
    config = next(m.config for m in layer.modules() if hasattr(m, "config"))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * (index + 1)
    return str(kinds[index])


def attention_of(layer: Any) -> list[Any]:
    return [
        module
        for module in layer.modules()
        if "position_embeddings" in inspect.signature(module.forward).parameters
        and CACHES & inspect.signature(module.forward).parameters.keys()
        and module is not layer
    ]


def dense_mask(given: Any, index: Tensor, total: int, kind: str, window: int | None) -> Tensor | None:
    """[1, 1, n, n] of the rows left: causal; rows of an image see each other if they did; windows count rows."""
    if kind == "recurrent":
        return None
    if len(index) == total and given is not None:
        return given
    row = torch.arange(len(index))
    seen = row[None] <= row[:, None]
    if isinstance(given, Tensor) and given.ndim == 4:
        allowed = given[0, 0] if given.dtype == torch.bool else given[0, 0] > -1e30
        ahead = allowed.triu(1)
        seen |= (ahead | ahead.T)[index][:, index]
    if kind == "sliding_attention" and window:
        seen &= row[None] > row[:, None] - window
    return seen[None, None]


def by_hand(model: Any, inputs: dict[str, Any], rows: list[Tensor], size: int, renumber: bool) -> Tensor:
    """The last logits [B, V]; each layer is called on its `rows` of the prompt, and on all rows behind `size`."""
    calls = layer_calls(model, inputs)
    window, shared = getattr(decoder_of(model).config, "sliding_window", None), None
    hidden = calls[0].arguments["hidden_states"]  # [..., S, D]; layers that drop rows leave them as they were
    axis, total = hidden.ndim - 2, hidden.shape[-2]
    for number, (layer, given, _) in enumerate(calls):
        if number:  # what the decoder adds between its layers (DeepStack)
            hidden = hidden + (given["hidden_states"] - calls[number - 1].output)
        index = torch.cat([rows[number], torch.arange(size, total)])
        arguments = {}
        for name, value in given.items():
            if name in {"hidden_states", *CACHES}:
                continue
            if name == "shared_kv_states":
                shared = type(value)() if shared is None else shared
                arguments[name] = shared
            elif name == "attention_mask":
                arguments[name] = dense_mask(value, index, total, kind_of(layer), window)
            else:
                at = torch.arange(len(index)) if renumber and name == "position_embeddings" else index
                arguments[name] = rows_of(value, at, total)
        output = layer.forward(hidden.index_select(axis, index), **arguments)
        hidden = hidden.index_copy(axis, index, output[0] if isinstance(output, tuple) else output)
    last = decoder_of(model).layers[-1]
    with last.register_forward_hook(lambda _, __, out: (hidden, *out[1:]) if isinstance(out, tuple) else hidden):
        return model(**inputs, use_cache=False).logits[:, -1]


def angles_of(tiny: Tiny, run: Callable[[], Any]) -> dict[Any, Tensor]:
    """The rotary angles [..., n, d] that the attention of each layer is given in a prefill."""
    angles: dict[Any, Tensor] = {}

    def note(layer: Any) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
            found = bound.arguments["position_embeddings"]
            found = found[0] if isinstance(found, tuple) else torch.view_as_real(found).flatten(-2)
            if found.shape[-2] > 1:
                angles[layer] = found

        return hook

    with ExitStack() as hooks:
        for layer in decoder_of(tiny.model).layers:
            for module in attention_of(layer):
                hooks.enter_context(module.register_forward_pre_hook(note(layer), with_kwargs=True))
        run()
    return angles


def rows_seen(tiny: Tiny, method: str) -> list[Tensor]:
    """The rows of the prompt that each layer is given under a method that keeps positions."""
    inputs, layers = tiny.prompts["one"], decoder_of(tiny.model).layers
    lengths: dict[int, int] = {}  # of layers without attention, by their first norm
    whole = angles_of(tiny, lambda: tiny.model(**inputs))

    def note(number: int, args: tuple[Tensor, ...]) -> None:
        lengths[number] = max(args[0].shape[-2], lengths.get(number, 0))

    with ExitStack() as hooks, attach(tiny.model, method, tiny.tokens, **accepted(method, positions="keep")):
        for number, layer in enumerate(layers):
            norm = next(module for name, module in layer.named_children() if "norm" in name)
            hooks.enter_context(norm.register_forward_pre_hook(lambda _, args, number=number: note(number, args)))
        short = angles_of(tiny, lambda: generate(tiny.model, inputs, output_hidden_states=True))  # of all rows
    rows: dict[int, Tensor] = {}
    for number, layer in enumerate(layers):
        if layer in short:
            equal = (whole[layer].unsqueeze(-3) == short[layer].unsqueeze(-2)).all(-1)  # [..., rows left, S]
            rows[number] = equal.flatten(0, -3).all(0).long().argmax(-1)
    by_length = {len(index): index for index in [torch.arange(inputs["input_ids"].shape[1]), *rows.values()]}
    return [rows[number] if number in rows else by_length[lengths[number]] for number in range(len(layers))]


@pytest.mark.parametrize("name", NAMES)
def test_as_layers_by_hand(name: str) -> None:
    one, wrong = tiny(name), []
    inputs = one.prompts["one"]
    size = inputs["input_ids"].shape[1]
    plain = one.model(**inputs).logits[:, -1]
    recurrent = not all(map(attention_of, decoder_of(one.model).layers))
    tolerance = 3e-4 if recurrent else 1e-6  # recurrent kernels compute in float32, in chunks without a cache
    for method in ("divprune", "fastv", "pyramiddrop"):
        try:
            answer(one, method, "one", "keep")
        except ConsensusError:
            continue
        rows = rows_seen(one, method)
        assert min(map(len, rows)) < size, f"{method} left all rows"
        for positions in positions_of(name)[: 1 if method == "pyramiddrop" else 2]:
            with attach(one.model, method, tokens=one.tokens, **accepted(method, positions=positions)):
                found = generate(one.model, inputs, suppress_tokens=PLACEHOLDERS)
            # cuts leave positions of layers that share keys as they are
            renumber = positions == "renumber" and (method == "divprune" or "shared" not in name)
            for step, logits in enumerate(found.logits):
                true = by_hand(one.model, longer(one, found.sequences[:, : size + step], inputs), rows, size, renumber)
                off = float((logits - true).abs().max() / true.abs().max())
                if off > tolerance:
                    wrong.append(f"{method} {positions}: step {step} is off by {off:.0e}")
            if method == "fastv" and positions == "keep":
                assert float((found.logits[0] - plain).abs().max()) > 1e-6 * float(plain.abs().max())
    assert not wrong, "\n".join(wrong)


def narrowed(name: str, window: int) -> Tiny:
    """A model whose sliding layers have another window."""
    one = tiny(name)
    config = copy.deepcopy(one.model.config)
    config.text_config.sliding_window = window
    return one._replace(model=families.filled(type(one.model)(config).double().eval()))


def longer(tiny: Tiny, ids: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
    """These prompts with more words behind them."""
    more = ids.shape[1] - inputs["input_ids"].shape[1]
    ones = {"attention_mask"} | ({"token_type_ids"} if tiny.model.config.model_type == "paligemma" else set())
    padded = {
        name: torch.nn.functional.pad(value, (0, more), value=int(name in ones))
        for name, value in inputs.items()
        if name == "attention_mask" or name.endswith("token_type_ids")
    }
    return {**inputs, **padded, "input_ids": ids}


# ---- ways of calling

WAYS: dict[str, dict[str, Any]] = {
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "several sequences": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
}


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl", "gemma3", "gemma4 shared", "qwen3_vl"])
def test_every_way_of_calling_answers_the_same(name: str) -> None:
    one, wrong = tiny(name), []
    for method in ("consensusdrop+", "fastv"):
        with attach(one.model, method, tokens=one.tokens, **accepted(method, tile_budget="global")):
            plain = generate(one.model, one.prompts["one"]).sequences[:, -STEPS:]
            length = {"max_new_tokens": None, "max_length": one.prompts["one"]["input_ids"].shape[1] + STEPS}
            for way, options in {**WAYS, "a length of all": length}.items():
                found = generate(one.model, one.prompts["one"], **options).sequences[:, -STEPS:]
                if not all(torch.equal(row, plain[0]) for row in found):
                    wrong.append(f"{method}: {way} answers {found.tolist()}, not {plain[0].tolist()}")
            if len(positions_of(name)) == 1:
                continue  # the plain model needs positions
            looped = own_loop(one.model, one.prompts["one"])
            if not torch.equal(looped, plain):
                wrong.append(f"{method}: a loop over the cache answers {looped.tolist()}, not {plain.tolist()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["llava", "paddleocr_vl"])  # the latter's layout of tiles is not in the package
def test_beams_are_shown_the_same_tokens(name: str) -> None:
    """`random` draws by the pixels of each image."""
    one, kept = tiny(name), []
    with attach(one.model, "random", tokens=one.tokens) as attached:
        for beams in (1, 3):
            generate(one.model, one.prompts["batch"], num_beams=beams)
            kept.append([part.kept.tolist() for outcome in attached.outcomes for _, part in outcome.reductions])
    assert kept[0] == kept[1]


def shown(name: str, number: int) -> hf_models.Picture:
    return hf_models.CASES[name].picture(number)


def with_video(name: str) -> list[list[Any]]:
    """Prompts with a video in front of an image, an image, no image, and a video."""
    image, video = shown(name, 0), f"{name} video"
    return [[1, 5, shown(video, 1), 6, image, 7, 8], [1, image, 9, 10], [1, 21, 22], [1, shown(video, 0), 31]]


GRIDS = ("qwen2_5_vl", "qwen2_5_vl video")
PAIRS = {name: [[1, 7, shown(name, 0), 8], [1, shown(name, 2), 5, 6]] for name in GRIDS}
POOLED = ("llava_onevision", "llava_next_video")  # behind the tower, so that it cannot be given smaller videos
BATCHES: dict[str, tuple[str, float, list[list[Any]]]] = {
    **{f"a share, {name}": (name, 0.3, rows) for name, rows in PAIRS.items()},
    "more tokens than one image has": (GRIDS[0], 10, PAIRS[GRIDS[0]]),
    **{f"videos, {name}": (name, 6, with_video(name)) for name in ("qwen2_5_vl", "qwen3_vl", "video_llava", *POOLED)},
}
ASKED = [(batch, method) for batch in BATCHES for method in ("consensusdrop", "fastv")]
ASKED += [(batch, "resize") for batch in BATCHES if not batch.endswith(POOLED)]


@pytest.mark.parametrize(("batch", "method"), ASKED)
def test_a_batch_answers_as_its_prompts_alone(batch: str, method: str) -> None:
    name, tokens, rows = BATCHES[batch]
    model = tiny(name).model
    count = tokens if method != "resize" else max(tokens, 10)  # a token for each tile
    with attach(model, method, count, **accepted(method, tile_budget="global")) as attached:
        together = generate(model, double(hf_models.prompts(*rows)))
        outcomes = attached.outcomes
        alone = [generate(model, double(hf_models.prompts(row))) for row in rows]
    assert torch.equal(together.sequences[:, -STEPS:], torch.cat([one.sequences[:, -STEPS:] for one in alone]))
    for step, logits in enumerate(together.logits):
        torch.testing.assert_close(logits, torch.cat([one.logits[step] for one in alone]), rtol=1e-4, atol=1e-4)
    assert len({outcome.before for outcome in outcomes}) > 1, "images of one size show nothing"
    if method == "consensusdrop":  # the others have schedules of their own
        wanted = [min(one.before, budget(tokens).of(one.before).tokens) for one in outcomes]
        assert [one.after for one in outcomes] == wanted


@pytest.mark.parametrize("name", ["gemma4", "gemma4 shared"])
@pytest.mark.parametrize("method", ["divprune", "fastv", "dart"])
def test_prompts_of_one_length_lose_different_numbers_of_rows(name: str, method: str) -> None:
    """The plain model makes no masks of them."""
    one, family = tiny(name), families.FAMILIES[name]
    inputs = families.prompts(one.model, family, [1], [0])
    inputs["input_ids"][inputs["attention_mask"] == 0] = 40
    inputs["attention_mask"].fill_(1)
    alone = [{key: value[row : row + 1] for key, value in inputs.items()} for row in range(2)]
    with attach(one.model, method, one.tokens):
        together = generate(one.model, inputs).logits
        singles = [generate(one.model, given).logits for given in alone]
        inputs["attention_mask"][1, :3] = 0  # of which cuts leave as many rows as of the other
        last = one.model(**inputs, output_hidden_states=True).logits[:, -2:]  # with all rows in all layers
        assert method == "fastv" or torch.allclose(one.model(**inputs, logits_to_keep=2).logits, last, atol=1e-9)
        if method != "divprune" and name.endswith("shared"):
            with pytest.raises(OptionError, match="logits_to_keep=9: it reaches into an image"):
                one.model(**inputs, logits_to_keep=9)
    for step, logits in enumerate(together):
        assert torch.allclose(logits, torch.cat([single[step] for single in singles]), atol=1e-4)


def off(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def first_ones(_: Any, view: Any, __: Any) -> Chosen:
    return Chosen(torch.arange(view.cut.kept).expand(len(view.columns), -1))


TURNS = ("llava", "llava_next", "gemma3", "internvl", "gemma4", "gemma4 shared", "llama4", "lfm2_vl")


@pytest.mark.parametrize("positions", ["keep", "renumber"])
@pytest.mark.parametrize(("name", "method"), [(name, one) for name in TURNS for one in ("divprune", "fastv")][:-1])
def test_a_later_turn_on_the_cache_is_the_whole_conversation(
    name: str, method: str, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one prompt, which is given no positions, and of two, with padding in the later turn of one; the plain model
    does not mask that between recurrent layers. Which tokens are kept must not depend on the words.
    """
    monkeypatch.setattr(FastV, "select", first_ones)
    one = tiny(name)
    for form in ("one", "twice", "batch") if name != "lfm2_vl" else ("one",):
        inputs = one.prompts[form.replace("twice", "one")]
        if form == "twice":
            inputs = {key: torch.cat((value, value)) for key, value in inputs.items()}
        words = torch.tensor([[41, 42, 43, 46], [0, 44, 45, 47]])[: len(inputs["input_ids"])]  # and a step
        mask = torch.cat((inputs["attention_mask"], words.sign()), 1)
        every = (mask.cumsum(1) - 1).clamp(min=0)
        first, *later, both = (
            {"position_ids": places} if len(words) > 1 else {}
            for places in (every[:, :-4], every[:, -4:-1], every[:, -1:], every)
        )
        whole = longer(one, torch.cat((inputs["input_ids"], words), 1), inputs) | {"attention_mask": mask}
        with attach(one.model, method, tokens=one.tokens, positions=positions):
            cache = one.model(**inputs, **first, use_cache=True).past_key_values
            for turn, seen, places in zip((words[:, :3], words[:, 3:]), (mask[:, :-1], mask), later, strict=True):
                given = {"input_ids": turn, "attention_mask": seen, "past_key_values": cache, **places}
                apart = one.model(**given).logits
            together = one.model(**whole, **both).logits[:, -1]
        assert off(apart[:, -1], together) < 1e-4  # recurrent kernels compute in float32


@pytest.mark.parametrize("method", ["divprune", "divprune:tokens=10+fastv"])
def test_turns_of_two_prompts_with_padding_in_each(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the first has no image, but in front of a cut between layers."""
    monkeypatch.setattr(FastV, "select", first_ones)
    one, (a, b, c) = tiny("llava"), (shown("llava", number) for number in range(3))
    rows = [[[5, 6, 7], [8]], [[9, a, 10], [11, b, 12, c, 13]], [[14, 15, 16], [17]]]["+" in method :]
    turns, end, output = [double(hf_models.prompts(*turn)) for turn in rows], 0, {}
    whole = double(hf_models.prompts([a], [b, c]))
    whole |= {name: torch.cat([turn[name] for turn in turns], 1) for name in ("input_ids", "attention_mask")}
    places = (whole["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with attach(one.model, method, one.tokens):
        together = one.model(**whole, position_ids=places).logits[:, -1]
        for turn in turns:
            start, end = end, end + turn["input_ids"].shape[1]
            turn |= {"attention_mask": whole["attention_mask"][:, :end], "position_ids": places[:, start:end]}
            output = one.model(**turn, use_cache=True, past_key_values=output.get("past_key_values"))
    assert off(output["logits"][:, -1], together) < 1e-9


def test_batches_of_one_shape_whose_images_have_other_padding() -> None:
    one, (a, b, c, d) = tiny("smolvlm"), (shown("smolvlm", number) for number in range(4))
    with attach(one.model, "consensusdrop", one.tokens) as attached:

        def kept(*rows: Any) -> list[Any]:
            one.model(**double(hf_models.prompts(*rows)))
            return [part.kept.tolist() for outcome in attached.outcomes for _, part in outcome.reductions]

        together = [kept([1, one, a, 7], [1, one, c, 8]) for one in (b, d, b)]
        assert together == [kept([1, one, a, 7]) + kept([1, one, c, 8]) for one in (b, d, b)]


@pytest.mark.parametrize("types", ["of all turns", "of the later turn"])
@pytest.mark.parametrize("window", [8, 12, 100])
def test_an_image_in_a_later_turn_is_read_behind_a_cache_of_windows(window: int, types: str) -> None:
    """By types of tokens Gemma 3 lets the rows of an image see each other; those of the later turn alone count from the
    first row, and say nothing of its rows.
    """
    case = hf_models.CASES["gemma3"]
    rows = [5, 6, case.picture(0), 7, 8, 9], [11, case.picture(1), 12, 13], [14, 15]
    *turns, both = map(double, map(hf_models.prompts, (*rows, [*rows[0], *rows[1], *rows[2]])))
    whole, ends = both["token_type_ids"], np.cumsum([turn["input_ids"].shape[1] for turn in turns]).tolist()
    if types == "of the later turn":
        whole[:, ends[0] :] = 0
    for turn, end in zip(turns[1:], ends[1:], strict=True):
        turn["attention_mask"] = both["attention_mask"][:, :end]
        if types == "of all turns":
            turn["token_type_ids"] = whole[:, :end]
    one = narrowed("gemma3", window)
    for method in ({}, {"positions": "keep"}, {"positions": "renumber"}):
        with attach(one.model, "divprune", tokens=one.tokens, **method) if method else nullcontext():
            cache = None
            for turn in turns:
                output = one.model(**turn, use_cache=True, past_key_values=cache)
                cache = output.past_key_values
            assert off(output.logits[:, -1], one.model(**both).logits[:, -1]) < 1e-9


def own_loop(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Greedy tokens by a loop that passes nothing but the last token, the mask and the cache."""
    output, words, mask = model(**inputs, use_cache=True), [], inputs["attention_mask"]
    name = next(name for name in ("cache", "past_key_values") if output.get(name) is not None)
    for step in range(STEPS):
        words.append(output.logits[:, -1:].argmax(-1))
        mask = torch.cat((mask, torch.ones_like(words[-1])), 1)
        if step < STEPS - 1:
            output = model(input_ids=words[-1], attention_mask=mask, **{name: output[name]})
    return torch.cat(words, 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_windows_are_as_wide_in_rows_that_are_left(name: str, form: str) -> None:
    """A window that holds all rows that are left changes nothing, though the prompt is longer."""
    inputs, logits = tiny(name).prompts[form], []
    window = inputs["input_ids"].shape[1] - 1
    for size in (window, 512):
        one = narrowed(name, size)
        with attach(one.model, "consensusdrop", tokens=3):
            logits.append(generate(one.model, inputs).logits)
            logits.append(generate(one.model, inputs, cache_implementation="static").logits)
            one.model.set_attn_implementation("eager")
            logits.append(generate(one.model, inputs).logits)
    for steps in zip(*logits, strict=True):
        for one, tolerance in zip(steps, (1e-9, 1e-9, 1e-4) * 2, strict=True):  # the eager softmax is in float32
            assert torch.allclose(one, steps[0], rtol=0, atol=tolerance)


def test_masks_are_those_of_transformers_and_calibration_needs_no_forgotten_rows() -> None:
    one, real, ahead = narrowed("gemma3", 8), torch.ones(1, 20).bool(), torch.zeros(1, 20, 20).bool()
    layers, real[:, 0], ahead[:, 3:9, 3:9] = Layers(decoder_of(one.model), make("fastv")), False, True
    for index, rows in [(0, None), (1, None), (0, ahead), (1, ahead)]:
        expected = layers.mask(index, torch.zeros(1, 20, 64), real, None, rows)
        assert torch.equal(layers.dense(index, real, 20, rows)[:, :, 1:], expected[:, :, 1:])
        assert rows is not None or torch.equal(layers.dense(index, real, 3), expected[:, :, -3:])
    for name in ("gemma3", "gemma4 shared"):
        one = narrowed(name, 8)
        with attach(one.model, "restore_calibrated", tokens=3):
            caches = None, DynamicCache()  # which forgets none
            found = [generate(one.model, one.prompts["one"], past_key_values=cache).logits for cache in caches]
        assert all(map(torch.equal, *found))


def test_merged_tokens_stand_at_the_mean_of_their_members_on_every_axis() -> None:
    one = tiny("qwen2_5_vl")
    given = decoder_given(one.model, one.prompts["one"])["position_ids"][..., 3:27].double()
    with attach(one.model, "consensusdrop", one.tokens, positions="mean") as attached:
        found = decoder_given(one.model, one.prompts["one"])["position_ids"]
    owner = attached.outcomes[0].reductions[0][1].owner[0]
    means = torch.stack([given[..., owner == slot].mean(-1).round() for slot in range(one.tokens)], -1)
    assert torch.equal(found[..., 3 : 3 + one.tokens].double(), means)
