"""RESTORE's calibration of attention, alone and with its merging, against its formula on plain numbers in float64."""

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import torch
from hf_models import CASES
from models import tiny_llava

from llava_consensus import attach
from llava_consensus.hosts import attach_view, prefill, view_of
from llava_consensus.methods import make
from llava_consensus.paper.study.methods import vision_saliency
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder
from llava_consensus.reduction.selection import top
from llava_consensus.reduction.tokens import Need, Stopwatch

TOKENS = 6


@dataclass(frozen=True, kw_only=True)
class Calibrated(InDecoder):
    """The T patches that the class token looks at most, before the first layer, calibrated."""

    positions: Literal["renumber", "keep"] = "keep"

    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION})
    attention: ClassVar[str] = "none"

    @property
    def calibrates(self) -> bool:
        return True

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        return [Cut(0, tokens)]

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        return Chosen(top(vision_saliency(view.tower), view.cut.kept))


WAYS = {"kept tokens": Calibrated(), "merged tokens": make("restore_calibrated", selector="divprune")}


def decay(distance: int, theta: list[float]) -> float:
    return sum(math.cos(distance * frequency) for frequency in theta) / len(theta)


def groups_of(visual: torch.Tensor, kept: list[int], count: int) -> list[list[int]]:
    """The members of every token that is left, by the authors' rule, in the order of their lower medians."""
    rest = [index for index in range(len(visual)) if index not in kept]
    units = visual[rest] / visual[rest].norm(dim=-1, keepdim=True)
    cosine = (units @ units.T).tolist()
    sums = [sum(row) for row in cosine]
    sparser = [[cosine[i][j] for j in range(len(rest)) if sums[j] < sums[i]] for i in range(len(rest))]
    scores = [total * (1 - max(others, default=0.0)) for total, others in zip(sums, sparser, strict=True)]
    anchors = sorted(sorted(range(len(rest)), key=lambda index: -scores[index])[:count])
    groups: dict[int, list[int]] = {anchor: [] for anchor in anchors}
    for index, row in enumerate(cosine):
        groups[index if index in groups else max(anchors, key=lambda anchor: row[anchor])].append(rest[index])
    return sorted([[one] for one in kept] + list(groups.values()), key=middle)


def middle(members: list[int]) -> int:
    return sorted(members)[(len(members) - 1) // 2]


@pytest.mark.parametrize("way", WAYS)
def test_every_layer_and_step_adds_what_the_formula_says(tower_folder: Path, prompt: SimpleNamespace, way: str) -> None:
    """A mask that is made here number by number gives the language model's own logits on the same rows."""
    model, prompt.images = tiny_llava(tower_folder).double(), prompt.images.double()
    layers = model.model.layers
    read: list[torch.Tensor] = []
    full = model.prepare_inputs_labels_for_multimodal(prompt.ids, None, None, None, None, prompt.images)[4][0]
    tap = layers[0].input_layernorm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with attach_view(view_of(model), WAYS[way], Budget(TOKENS)) as attached, tap:
        asked = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        given = model.generate(prompt.ids, images=prompt.images, attention_mask=torch.ones_like(prompt.ids), **asked)
        (outcome,) = attached.outcomes
    reduction, before, start = outcome.reductions[0][1], outcome.before, prompt.ids[0].tolist().index(-200)
    visual, kept = full[start : start + before], reduction.kept[0].tolist()
    groups = groups_of(visual, kept, TOKENS - len(kept)) if way == "merged tokens" else [[one] for one in kept]
    assert len(groups) == TOKENS and (way == "kept tokens" or max(map(len, groups)) > 2)
    means = torch.stack([visual[members].mean(0) for members in groups])
    rows = torch.cat((full[:start], means, full[start + before :]))[None]
    assert torch.allclose(read[0], rows, atol=1e-7), "merged rows stand at their medians"
    owner = [next((slot for slot, members in enumerate(groups) if one in members), -1) for one in range(before)]
    assert reduction.owner[0].tolist() == owner
    assert reduction.source[0].tolist() == [middle(members) for members in groups]

    width, places = rows.shape[1], [*range(start), *(start + middle(members) for members in groups)]
    places += range(start + before, start + before + width - len(places))
    theta = model.model.rotary_emb.inv_freq.tolist()

    def added(layer: int, query: int, key: int) -> float:
        if key > query:
            return torch.finfo(rows.dtype).min
        slot = key - start
        visual = 0 <= slot < TOKENS
        size = 1.0 if not visual else before / TOKENS if layer == 0 else float(len(groups[slot]))
        return math.log(size) + (math.log(2 - decay(places[query] - places[key], theta)) if query < width else 0.0)

    def reader(layer: int) -> Any:
        def change(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            count = len(places)
            table = [[added(layer, row, column) for column in range(count)] for row in range(count)]
            return args, {**kwargs, "attention_mask": torch.tensor(table, dtype=rows.dtype)[None, None]}

        return change

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(reader(number), with_kwargs=True)
    for step, token in enumerate(given.sequences[0].tolist()):
        found = model.lm_head(model.model(inputs_embeds=rows, position_ids=torch.tensor([places]), use_cache=False)[0])
        assert torch.allclose(found[0, -1], given.logits[step][0].double(), atol=1e-5)
        rows = torch.cat((rows, model.model.embed_tokens(torch.tensor([[token]]))), dim=1)
        places.append(places[-1] + 1)


@pytest.mark.parametrize("name", ["cohere2_vision", "glm4v"])
def test_layers_and_channels_that_do_not_turn_are_never_far(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of Command A Vision that see all rows, and half of GLM-4V's channels."""
    model, far = CASES[name].build(), []
    calibrate = prefill.seen_logits
    monkeypatch.setattr(prefill, "seen_logits", lambda *given: far.append(given[2]) or calibrate(*given))
    with attach(model, "restore_calibrated", CASES[name].tokens):
        model(**CASES[name].inputs())
    decoder = model.get_decoder()
    width, frequencies = decoder.layers[0].self_attn.head_dim, decoder.rotary_emb.inv_freq
    still = width - 2 * len(frequencies)
    assert still == (0 if name == "cohere2_vision" else width // 2)
    one = math.log(2 - (2 * float(frequencies.cos().sum()) + still) / width)  # of neighbours
    expected = [one, 0.0, one] if name == "cohere2_vision" else [one, one]
    assert [float(given[0, -1, -2]) for given in far] == pytest.approx(expected, abs=1e-6)
