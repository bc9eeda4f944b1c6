"""FastV, SparseVLM and PyramidDrop against their authors' code on a tiny seeded Llama of 32 layers: the same tokens at
every cut, the same logits to 1e-5, cached decode steps included (tests/golden/README.md); and the choice of IVC-Prune.
"""

import zlib
from typing import Any

import pytest
import torch
from golden_cases import arrays as golden
from models import BareLanguage
from transformers import LlamaConfig, LlamaForCausalLM
from units import WATCH

from llava_consensus.hosts.attachment import Attachment
from llava_consensus.methods import make, sparsevlm
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import Cut, DecoderView
from llava_consensus.reduction.tokens import TextProbe

WIDTH = 128
SIZES = dict(hidden_size=WIDTH, intermediate_size=160, num_hidden_layers=32, num_attention_heads=16, vocab_size=64)
BEFORE, AFTER = 35, 20  # text rows around the image
STEPS = 3  # rows decoded after the prompt
TOLERANCE = 1e-5  # of their float32; ours is float64 but for rotary angles, which differ by CPU


CASES = [
    (name, key.removesuffix("_logits"))
    for name in ("pyramiddrop", "sparsevlm", "fastv")
    for key in golden(name)
    if key.endswith("_logits")
]


@pytest.fixture(scope="module")
def model() -> Any:
    """Weights from the names of the parameters: matrices normal with deviation 0.1, norms one."""
    given = dict(max_position_embeddings=4096, rms_norm_eps=1e-5, pad_token_id=0, attn_implementation="sdpa")
    made = LlamaForCausalLM(LlamaConfig(**SIZES, **given))
    for name, parameter in made.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data = values if parameter.ndim > 1 else torch.ones_like(parameter)
    return made.eval().double()


def run(model: Any, method: Any, visual: int, tokens: int, seed: int, steps: int) -> tuple[list[Any], Any]:
    """The cuts chosen, and logits after the prompt and after every row decoded from the cache: [1 + steps, 64]."""
    cuts, select = [], type(method).select

    def recording(self: Any, view: Any, watch: Any) -> Any:
        cuts.append(select(self, view, watch))
        return cuts[-1]

    generator = torch.Generator().manual_seed(1000 * seed + visual)
    rows = torch.randn(1, BEFORE + visual + AFTER + STEPS, WIDTH, generator=generator).double()
    prompt, answer = rows[:, :-STEPS], rows[:, -STEPS:]
    attached: Any = Attachment(model, method, Budget(tokens), entrance=BareLanguage)
    with attached, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "select", recording)
        attached.entrance.show(prompt, BEFORE, visual)
        out = model(inputs_embeds=prompt, use_cache=steps > 0)
        logits = [out.logits[0, -1]]
        for step in range(steps):
            row = answer[:, step : step + 1]
            out = model(inputs_embeds=row, past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0, -1])
    return cuts, torch.stack(logits).float()


@pytest.mark.parametrize(("name", "case"), CASES)
@torch.no_grad()
def test_equals_the_authors_code(model: Any, monkeypatch: pytest.MonkeyPatch, name: str, case: str) -> None:
    """SparseVLM with its authors' noise in the densities, which decides ties, and their schedule for any n, which ours
    applies to 576. FastV without decoded rows: their in-place variant has no cache.
    """
    *version, visual, tokens, seed = case.split("_")
    stored, densities = golden(name), sparsevlm.densities
    kept = [stored[f"{case}_kept{n}"].tolist() for n in range(4) if f"{case}_kept{n}" in stored]
    noise = [stored[f"{case}_noise{n}"] for n in range(3) if f"{case}_noise{n}" in stored]

    def noisy(distance: torch.Tensor, count: int) -> torch.Tensor:
        return densities(distance, count) + noise.pop(0)[None] * 1e-6

    monkeypatch.setattr(sparsevlm, "PATCHES", int(visual))
    monkeypatch.setattr(sparsevlm, "densities", noisy)
    method = make(name, **({"version": version[0]} if version else {}))
    cuts, ours = run(model, method, int(visual), int(tokens), int(seed), steps=0 if name == "fastv" else STEPS)
    assert [cut.kept[0].tolist() for cut in cuts] == kept and not noise
    assert torch.allclose(ours, stored[f"{case}_logits"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("case", [key.removeprefix("kept_") for key in golden("ivcprune") if "kept_" in key])
def test_ivcprune_chooses_as_the_official_code_for_qwen(case: str) -> None:
    """From the values of a layer and the angles of three axes; text is all rows after the image but the first two."""
    stored = {key: golden("ivcprune")[f"{key}_{case}"] for key in ("values", "angle", "front", "kept")}
    (size, tokens), front = map(int, case.split("_")), int(stored["front"])
    values = stored["values"].float().transpose(0, 1)[None]  # [1, H, S, d]
    rows = torch.arange(front + size + 2, values.shape[2])[None]
    angle = stored["angle"].float()
    cos, sin = (function(angle).mean(0)[None] for function in (torch.cos, torch.sin))
    real = torch.ones(1, values.shape[2]) > 0
    probe = TextProbe(values[:, :, rows[0]], values, cos, sin, values.shape[3] ** -0.5, rows, rows >= 0, real)
    columns, none = torch.arange(front, front + size)[None], torch.zeros(1, size, 1)
    view = DecoderView(tokens, Cut(16, tokens), none, none, columns, probe, none, none, lambda states: states)
    assert torch.equal(make("ivcprune").select(view, WATCH).kept[0], stored["kept"].long())
    kept = make("ivcprune", coordinates=1.0, seeds=0.25).select(view, WATCH).kept[0]
    for part in (cos, sin):  # each has half of what the seeds leave
        extreme = part[0, columns[0]].mean(-1).topk((tokens - round(tokens / 4)) // 2).indices
        assert torch.isin(extreme, kept).all()
