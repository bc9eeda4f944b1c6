"""Operations that a method adds to a prefill of LLaVA-1.5's shape, views not counted: on a GPU each is a launch, and
launches are most of a method's cost. The bounds hold for the pinned torch and transformers.
"""

from collections import Counter
from functools import cache
from importlib.metadata import version
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from llava_consensus import METHODS, attach
from llava_consensus.errors import ConsensusError

PINNED = {"torch": "2.13", "transformers": "5.23"}
VIEWS = {
    *("view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "t", "split"),
    *("detach", "alias", "as_strided", "_unsafe_view", "unbind", "split_with_sizes", "lift_fresh", "chunk", "diagonal"),
}
BOUNDS = {"uniform_grid": 14, "visionzip": 53, "consensusdrop": 144, "divprune": 159, "fastv": 84, "restore": 335}
MOST = 350  # of any other method; SCOPE takes 5 for each of 64 tokens
# ToMe takes 17 in each of 23 blocks; RESTORE 4 for each of 68 rounds, and behind the tower 1 in each of 32 layers
BOUNDS |= {"tome": 416, "restore_calibrated": 445}

pytestmark = pytest.mark.skipif(
    any(not version(name).startswith(of) for name, of in PINNED.items()), reason=f"counted with {PINNED}"
)


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[function.name().split("::")[1].split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


@cache
def model_and_inputs() -> tuple[Any, dict[str, Any]]:
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, num_hidden_layers=24, image_size=336, patch_size=14),
        text_config=transformers.LlamaConfig(**sizes, num_hidden_layers=32, num_key_value_heads=4, vocab_size=320),
        image_token_index=300,
        vision_feature_layer=-2,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[1, 5, 6, *[300] * 576, *range(10, 40)]])
    return model, dict(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=torch.randn(1, 3, 336, 336))


def launches() -> int:
    model, inputs = model_and_inputs()
    with Count() as count:
        model(**inputs, logits_to_keep=1)
    return sum(number for name, number in count.seen.items() if name not in VIEWS)


@cache
def plain() -> int:
    return launches()


@pytest.mark.parametrize("method", list(METHODS))
def test_a_prefill_with_a_method(method: str) -> None:
    plain()
    try:
        with attach(model_and_inputs()[0], method, tokens=64):
            launches()  # what is learnt or cached at the first image does not count
            more = launches() - plain()
    except ConsensusError as error:
        pytest.skip(str(error))
    assert more <= BOUNDS.get(method, MOST)


def test_the_probe_projects_queries_of_the_rows_that_ask_and_one_value() -> None:
    model, inputs = model_and_inputs()
    rows: dict[str, list[int]] = {"q_proj": [], "k_proj": [], "v_proj": []}
    attention = model.model.language_model.layers[0].self_attn
    hooks = [
        getattr(attention, name).register_forward_hook(lambda _, args, output, own=own: own.append(args[0].shape[1]))
        for name, own in rows.items()
    ]
    with attach(model, "consensusdrop", tokens=64):
        model(**inputs)
    for hook in hooks:
        hook.remove()
    assert rows == {"q_proj": [30, 97], "k_proj": [609, 97], "v_proj": [1, 97]}
    assert not attention.q_proj._forward_pre_hooks and not attention.q_proj._forward_hooks
