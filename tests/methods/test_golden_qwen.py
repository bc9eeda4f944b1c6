"""VisionZip on Qwen2.5-VL against arrays its authors' own code for that model gave (tests/golden/README.md): the same
tiny tower, the whole way from pixels to the rows and positions that the language model reads.
"""

from functools import cache
from typing import Any

import pytest
import torch
from golden_cases import arrays
from hf_models import ALL, END, IMAGE, MROPE, QWEN2_5, START, TEXT, built, decoder_given

from llava_consensus import attach

GOLDEN = arrays("visionzip_qwen")
PATCH = 14
CASES = [f"{picture}-0.1+0.02" for picture in ("wide", "tall", "square")]
CASES += ["wide-0.65+0.05", "tall-0.45+0.05", "square-0.65+0.05"]


@cache
def model() -> Any:
    text = dict(TEXT, hidden_size=32, num_hidden_layers=1, rope_parameters={**MROPE, "mrope_section": [1, 1, 2]})
    made = built(
        "qwen2_5_vl", text_config=text, vision_config=QWEN2_5 | dict(out_hidden_size=32, window_size=112), **ALL
    )
    weights = {name[7:]: value.float() for name, value in GOLDEN.items() if name.startswith("visual/")}
    assert not any("inv_freq" not in name for name in made.model.visual.load_state_dict(weights, strict=False)[0])
    return made


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_visionzip_equals_the_official_code_for_qwen(case: str) -> None:
    own = {name.rpartition("/")[2]: value for name, value in GOLDEN.items() if name.startswith(f"{case}/")}
    grid, targets = own["grid"], own["targets"].long()
    tokens = int(grid.prod()) // 4
    pixels = (own["picture"].float() / 127.5 - 1)[:, :, None].expand(-1, -1, PATCH**2).flatten(1)
    ids = torch.tensor([[1, START, *[IMAGE] * tokens, END, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    inputs |= {"image_grid_thw": grid[None].long(), "mm_token_type_ids": (ids == IMAGE).int()}
    count = len(own["dominant"]) + len(targets)
    tiny = model()
    with attach(tiny, "visionzip", tokens=count, merged=len(targets)) as attached:
        seen = decoder_given(tiny, inputs)
    ((_, result),) = attached.outcomes[0].reductions
    assert torch.allclose(result.vision[0] * tokens * 4, own["attention"], atol=1e-5)  # theirs is a sum over rows
    assert result.kept[0].tolist() == own["dominant"].tolist()
    assert result.anchors[0].tolist() == targets.tolist()
    owner = torch.full((tokens,), -1).scatter(0, own["joining"].long(), targets[own["joined"].long()])
    owner[targets], owner[result.kept[0]] = targets, result.kept[0]
    assert result.source[0][result.owner[0]].tolist() == owner.tolist()
    features = seen["inputs_embeds"][0, 2:-3]
    assert (features - own["tokens"]).abs().max() <= 1e-5 * own["tokens"].abs().max()
    assert seen["position_ids"][-3:, 0].tolist() == own["positions"].tolist()
