"""Families that have a file, read by derivation too: both read the same of tower and language model, so that the same
tokens stay and the model answers alike.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.19")

from hf_models import CASES, prompts  # noqa: E402

from llava_consensus import make  # noqa: E402
from llava_consensus.hosts import view_of  # noqa: E402
from llava_consensus.hosts.attachment import Attachment  # noqa: E402
from llava_consensus.hosts.derived.model import DerivedModel  # noqa: E402
from llava_consensus.reduction.budget import Share  # noqa: E402


@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "internvl", "gemma3", "mistral_3"])
def test_derivation_reads_what_the_file_reads(name: str) -> None:
    case = CASES[name]
    model = case.build()
    inputs = prompts([1, 7, case.picture(0), 8, 9], [1, case.picture(2), 5])
    found = []
    for view in (view_of(model), DerivedModel(model, {})):
        method = make("consensusdrop", tile_budget=case.tile_budget)
        with Attachment(view, method, Share(0.5)) as attached, torch.no_grad():
            answer = model.generate(**inputs, max_new_tokens=4, do_sample=False)
            found.append((answer, [reduction for one in attached.outcomes for _, reduction in one.reductions]))
    (answer, reductions), (other, others) = found
    assert torch.equal(answer, other)
    for ours, theirs in zip(reductions, others, strict=True):
        assert torch.equal(ours.kept, theirs.kept) and torch.equal(ours.owner, theirs.owner)
        torch.testing.assert_close(ours.vision, theirs.vision, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.cross, theirs.cross, rtol=0, atol=1e-6)
