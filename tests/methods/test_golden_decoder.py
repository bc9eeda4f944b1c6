"""FastV, SparseVLM and PyramidDrop against their authors' code on a tiny seeded Llama of 32 layers: the same tokens at
every cut, the same logits to 1e-5, cached decode steps included (tests/golden/README.md); and the choice of IVC-Prune.
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import BareLanguage
from transformers import LlamaConfig, LlamaForCausalLM

from llava_consensus.hosts.attachment import Attachment
from llava_consensus.methods import make, sparsevlm
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import Cut, DecoderView
from llava_consensus.reduction.tokens import Stopwatch, TextProbe

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIG = dict(
    hidden_size=128,
    intermediate_size=160,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=64,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
BEFORE, AFTER = 35, 20  # text rows around the image
STEPS = 3  # rows decoded after the prompt
TOLERANCE = 1e-5  # of their float32; ours is float64 but for rotary angles, which differ by CPU


def cases(name: str) -> list[str]:
    return sorted(key.removesuffix("_logits") for key in np.load(GOLDEN / f"{name}.npz") if key.endswith("_logits"))


def fill(model: torch.nn.Module) -> Any:
    """Weights from the names of the parameters: matrices normal with deviation 0.1, norms one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(values if parameter.ndim > 1 else torch.ones_like(parameter))
    return model.float().eval()


def inputs(visual: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of a prompt [1, 35 + visual + 20, 128] and of the rows decoded after it [1, 3, 128]."""
    generator = torch.Generator().manual_seed(1000 * seed + visual)
    rows = torch.randn(1, BEFORE + visual + AFTER + STEPS, CONFIG["hidden_size"], generator=generator)
    return rows[:, :-STEPS], rows[:, -STEPS:]


@pytest.fixture(scope="module")
def model() -> Any:
    return fill(LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="sdpa"))).double()


def run(model: Any, method: Any, visual: int, tokens: int, seed: int, steps: int = STEPS) -> tuple[list[Any], Any]:
    """The cuts chosen, and logits after the prompt and after every row decoded from the cache: [1 + steps, 64]."""
    cuts, select = [], type(method).select

    def recording(self: Any, view: Any, watch: Any) -> Any:
        cuts.append(select(self, view, watch))
        return cuts[-1]

    prompt, answer = (rows.double() for rows in inputs(visual, seed))
    attached: Any = Attachment(model, method, Budget(tokens), entrance=BareLanguage)
    type(method).select = recording
    try:
        attached.entrance.show(prompt, BEFORE, visual)
        out = model(inputs_embeds=prompt, use_cache=steps > 0)
        logits = [out.logits[0, -1]]
        for step in range(steps):
            row = answer[:, step : step + 1]
            out = model(inputs_embeds=row, past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0, -1])
    finally:
        type(method).select = select
        attached.detach()
    return cuts, torch.stack(logits).float()


def golden(name: str, case: str) -> tuple[list[list[int]], torch.Tensor]:
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
    assert torch.allclose(ours, logits, rtol=TOLERANCE, atol=TOLERANCE)


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
    assert torch.allclose(ours, logits, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("case", cases("fastv"))
@torch.no_grad()
def test_fastv_equals_the_authors_code(model: Any, case: str) -> None:
    """Their in-place variant has no cache, so there are no decoded rows to compare."""
    visual, tokens, seed = map(int, case.split("_"))
    kept, logits = golden("fastv", case)
    cuts, ours = run(model, make("fastv"), visual, tokens, seed, steps=0)
    assert [cut.kept[0].tolist() for cut in cuts] == kept
    assert torch.allclose(ours, logits, rtol=TOLERANCE, atol=TOLERANCE)


IVC = [key.removeprefix("kept_") for key in np.load(GOLDEN / "ivcprune.npz") if "kept_" in key]


@pytest.mark.parametrize("case", IVC)
def test_ivcprune_chooses_as_the_official_code_for_qwen(case: str) -> None:
    """From the values of a layer and the angles of three axes; text is all rows after the image but the first two."""
    arrays = np.load(GOLDEN / "ivcprune.npz")
    stored = {key: torch.from_numpy(arrays[f"{key}_{case}"]) for key in ("values", "angle", "front", "kept")}
    (size, tokens), front = map(int, case.split("_")), int(stored["front"])
    values = stored["values"].float().transpose(0, 1)[None]  # [1, H, S, d]
    rows = torch.arange(front + size + 2, values.shape[2])[None]
    angle = stored["angle"].float()
    cos, sin = (function(angle).mean(0)[None] for function in (torch.cos, torch.sin))
    real = torch.ones(1, values.shape[2]) > 0
    probe = TextProbe(values[:, :, rows[0]], values, cos, sin, values.shape[3] ** -0.5, rows, rows >= 0, real)
    columns, none = torch.arange(front, front + size)[None], torch.zeros(1, size, 1)
    view = DecoderView(tokens, Cut(16, tokens), none, none, columns, probe, none, none, lambda states: states)
    chosen = make("ivcprune").select(view, Stopwatch(torch.device("cpu")))
    assert torch.equal(chosen.kept[0], stored["kept"].long())
    kept = make("ivcprune", coordinates=1.0, seeds=0.25).select(view, Stopwatch(torch.device("cpu"))).kept[0]
    for part in (cos, sin):  # each has half of what the seeds leave
        extreme = part[0, columns[0]].mean(-1).topk((tokens - round(tokens / 4)) // 2).indices
        assert torch.isin(extreme, kept).all()
