"""FastV, SparseVLM and PyramidDrop against their authors' code on a tiny seeded Llama of 32 layers: the same tokens at
every cut, the same logits to 1e-5, cached decode steps included (tests/golden/README.md).
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import BareModel, one_picture
from transformers import LlamaConfig, LlamaForCausalLM

from llava_consensus.hosts.attachment import Attachment
from llava_consensus.methods import make, sparsevlm
from llava_consensus.reduction.budget import Budget

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
from tiny_decoder import AFTER, BEFORE, CONFIG, STEPS, fill, inputs  # noqa: E402

TOLERANCE = 1e-5


def cases(name: str) -> list[str]:
    """Names of the cases in a golden file."""
    return sorted(key.removesuffix("_logits") for key in np.load(GOLDEN / f"{name}.npz") if key.endswith("_logits"))


@pytest.fixture(scope="module")
def model() -> Any:
    return fill(LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="sdpa")))


def run(model: Any, method: Any, visual: int, tokens: int, seed: int, steps: int = STEPS) -> tuple[list[Any], Any]:
    """The cuts chosen, and logits after the prompt and after every row decoded from the cache: [1 + steps, 64]."""
    cuts, select = [], type(method).select

    def recording(self: Any, view: Any, watch: Any) -> Any:
        cuts.append(select(self, view, watch))
        return cuts[-1]

    prompt, answer = inputs(visual, seed)
    attached = Attachment(BareModel(model), method, Budget(tokens))
    type(method).select = recording
    try:
        attached.arm(attached.current(), attached.layout(one_picture(BEFORE, visual, AFTER)), prompt)
        out = model(inputs_embeds=prompt, use_cache=steps > 0)
        logits = [out.logits[0, -1]]
        for step in range(steps):
            row = answer[:, step : step + 1]
            out = model(inputs_embeds=row, past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0, -1])
    finally:
        type(method).select = select
        attached.detach()
    return cuts, torch.stack(logits)


def golden(name: str, case: str) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens kept at each cut, and logits, by the authors' code."""
    stored = np.load(GOLDEN / f"{name}.npz")
    kept = [stored[f"{case}_kept{number}"].tolist() for number in range(4) if f"{case}_kept{number}" in stored]
    return kept, torch.from_numpy(stored[f"{case}_logits"])


@pytest.mark.parametrize("case", cases("pyramiddrop"))
@torch.no_grad()
def test_pyramiddrop_equals_the_authors_code(model: Any, case: str) -> None:
    visual, tokens, seed = map(int, case.split("_"))
    kept, logits = golden("pyramiddrop", case)
    cuts, ours = run(model, make("pyramiddrop"), visual, tokens, seed)
    assert [cut.kept[0].tolist() for cut in cuts] == kept
    assert torch.allclose(ours, logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", cases("sparsevlm"))
@torch.no_grad()
def test_sparsevlm_equals_the_authors_code(model: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """With their own noise in the densities, which decides ties; their schedules are applied to any n, ours to 576."""
    version, visual, tokens, seed = case.split("_")
    kept, logits = golden("sparsevlm", case)
    stored, densities = np.load(GOLDEN / "sparsevlm.npz"), sparsevlm.densities
    noise = [torch.from_numpy(stored[f"{case}_noise{n}"]) for n in range(3) if f"{case}_noise{n}" in stored]

    def noisy(distance: torch.Tensor, count: int) -> torch.Tensor:
        return densities(distance, count) + noise.pop(0)[None] * 1e-6

    monkeypatch.setattr(sparsevlm, "PATCHES", int(visual))
    monkeypatch.setattr(sparsevlm, "densities", noisy)
    cuts, ours = run(model, make("sparsevlm", version=version), int(visual), int(tokens), int(seed))
    assert [cut.kept[0].tolist() for cut in cuts] == kept and not noise
    assert torch.allclose(ours, logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", cases("fastv"))
@torch.no_grad()
def test_fastv_equals_the_authors_code(model: Any, case: str) -> None:
    """Their in-place variant has no cache, so there are no decoded rows to compare."""
    visual, tokens, seed = map(int, case.split("_"))
    kept, logits = golden("fastv", case)
    cuts, ours = run(model, make("fastv"), visual, tokens, seed, steps=0)
    assert [cut.kept[0].tolist() for cut in cuts] == kept
    assert torch.allclose(ours, logits, rtol=0, atol=TOLERANCE)
