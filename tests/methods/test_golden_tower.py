"""Methods against arrays their authors' code produced (tests/golden/README.md says how): equal indices, equal tokens
to 1e-5.
"""

from typing import Any

import pytest
import torch
from golden_cases import arrays as golden
from golden_cases import seen

from llava_consensus.hosts.open_tower import EncoderRun, OpenTower
from llava_consensus.methods import make
from llava_consensus.methods.divprune import spread_out
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.tokens import ClipSides

TOLERANCE = 1e-5
TOME = ["576_192", "576_128", "576_64", "576_32", "1152_128", "225_33", "576_64_plain"]
DIVPRUNE = [(576, 192), (576, 128), (576, 64), (576, 32), (333, 47)]
CDPRUNER = [(576, 128), (576, 64), (1152, 128), (333, 47)]


def clip_tower(arrays: dict[str, torch.Tensor], side: int) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    weight = {name.removeprefix("weight_"): value for name, value in arrays.items() if name.startswith("weight_")}
    depth, width = weight["q"].shape[:2]
    sizes = dict(hidden_size=width, intermediate_size=weight["fc1"].shape[1], num_hidden_layers=depth)
    config = CLIPVisionConfig(
        **sizes, num_attention_heads=2, image_size=2 * side, patch_size=2, hidden_act="gelu", layer_norm_eps=1e-5
    )
    model = CLIPVisionModel(config).eval()
    inner: Any = getattr(model, "vision_model", model)
    values = {
        "embeddings.class_embedding": weight["cls"],
        "embeddings.patch_embedding.weight": weight["patch"],
        "embeddings.position_embedding.weight": arrays[f"positions_{side}"],
        "pre_layrnorm.weight": weight["pre"],
        "pre_layrnorm.bias": weight["pre_bias"],
    }
    modules = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj"}
    for layer in range(depth):
        front = f"encoder.layers.{layer}."
        for short, module in (modules | {"fc1": "mlp.fc1", "fc2": "mlp.fc2"}).items():
            values |= {f"{front}{module}.weight": weight[short][layer]}
            values |= {f"{front}{module}.bias": weight[f"{short}_bias"][layer]}
        for number in range(2):
            values |= {f"{front}layer_norm{number + 1}.weight": weight["ln"][layer, number]}
            values |= {f"{front}layer_norm{number + 1}.bias": weight["ln_bias"][layer, number]}
    missing = inner.load_state_dict(values, strict=False)
    assert not missing.unexpected_keys and all("post_layernorm" in key or "ids" in key for key in missing.missing_keys)
    return model


@pytest.mark.parametrize("case", TOME)
@torch.no_grad()
def test_tome(case: str) -> None:
    """A ViT of timm with CLIP weights, patched by the authors; in 1152 two tiles as one batch. Every patch must be in
    the token where the authors have it. Ours stand in raster order of first patches, theirs as merging leaves them.
    """
    arrays, (total, tokens) = golden("tome"), map(int, case.split("_")[:2])
    side = 15 if total == 225 else 24
    images = arrays[f"images_{side}"] if total == 1152 else arrays[f"images_{side}"][:1]
    method = make("tome", proportional="plain" not in case)
    budget = Budget(tokens // len(images))
    tower, project = clip_tower(arrays, side), torch.nn.Identity()
    opened = OpenTower(tower, project, method, -2, tower.config.num_hidden_layers - 2)
    run = EncoderRun([budget.tokens] * len(images), (side, side), False)
    opened.install()
    with opened.running(run):
        spread = project(tower(images).hidden_states[-2][:, 1:])
    slot: Any = run.slot
    assert torch.equal(slot, arrays[f"owner_{case}"].long())
    reduction = method.reduce(seen(spread)._replace(slot=slot), budget)
    assert reduction.tokens.shape[1] * len(images) == tokens
    assert torch.equal(reduction.tokens, spread.gather(1, reduction.source[..., None].expand_as(reduction.tokens)))
    theirs = arrays[f"tokens_{case}"].gather(1, slot[..., None].expand_as(spread))
    assert (spread - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize(("size", "count"), DIVPRUNE)
def test_divprune(size: int, count: int) -> None:
    """The same tokens in the same order of picking; what is kept stands in the image's order in both. Where tokens
    repeat, ours must differ: test_selections.py says how.
    """
    points, theirs = golden("divprune")[f"tokens_{size}"][None], golden("divprune")[f"picks_{size}_{count}"].long()
    assert torch.equal(spread_out(points, count)[0], theirs)
    assert torch.equal(make("divprune").reduce(seen(points), Budget(count)).tokens[0], points[0, theirs.sort().values])


@pytest.mark.parametrize(("size", "count"), CDPRUNER)
def test_cdpruner(size: int, count: int) -> None:
    """The same tokens of every tile of one picture: in 1152 two tiles share one scale of relevance, as in the authors'
    batch. Past the rank of the kernel ours must differ: tests/methods/test_cdpruner.py.
    """
    arrays = golden("cdpruner")
    given, theirs = seen(arrays[f"tokens_{size}"]), arrays[f"kept_{size}_{count}"].long()
    text = arrays[f"text_{size}"].expand(len(theirs), -1, -1)
    sides = ClipSides(arrays[f"patches_{size}"], text, torch.ones(text.shape[:2], dtype=torch.bool))
    together = given.whole._replace(image=torch.zeros(len(theirs), dtype=torch.long))
    reduction = make("cdpruner").reduce(given._replace(clip=sides, whole=together), Budget(theirs.shape[1]))
    assert torch.equal(reduction.kept, theirs)
    kept = theirs[..., None].expand_as(reduction.tokens)
    assert torch.equal(reduction.tokens, given.projected.gather(1, kept))


@pytest.mark.parametrize("case", [key.removeprefix("kept_") for key in golden("pixelprune") if "kept_" in key])
def test_pixelprune_equals_the_official_code(case: str) -> None:
    """The cells that stay, and that what stands for each cell is as near as the threshold says."""
    stored = golden("pixelprune")
    cells, (threshold, measure) = stored[f"cells_{case}"], stored[f"rule_{case}"]
    method = make("pixelprune", threshold=float(threshold), measure=("max", "mae", "rmse")[int(measure)])
    stand_ins = method.stand_ins(cells).flatten()
    kept = (stand_ins == torch.arange(len(stand_ins))).nonzero()[:, 0]
    assert kept.tolist() == stored[f"kept_{case}"].tolist()
    flat = cells.flatten(0, 1)
    assert bool(method._equal(flat, flat[stand_ins]).all())
