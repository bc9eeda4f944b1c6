"""Models of transformers in the harness: what it answers is what a user's own `generate` answers with the same method
attached, for every processor: one that repeats its placeholder, and one that writes between tiles.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_checkpoints import CLIPS, FAMILIES, FILMING, PROCESSORS, host_of
from hf_models import CASES
from PIL import Image

from llava_consensus import make
from llava_consensus.errors import QuestionError
from llava_consensus.evaluation.media import Clip
from llava_consensus.evaluation.models import Prompt
from llava_consensus.hosts.images import decoder_of
from llava_consensus.hosts.tower import block_lists
from llava_consensus.methods import METHODS
from llava_consensus.reduction.budget import Budget

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")
NEW = 5
KINDS = ("llava_next", "gemma3", "qwen3_vl")  # of prompt
TEXTS = ("What is on the table?", "How many?", "Is there a dog?\nAnswer with yes or no.")
SIZES = ((240, 160), (120, 220), (224, 224))


def pictures() -> list[Image.Image]:
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randint(0, 256, (height, width, 3), generator=generator) for width, height in SIZES]
    return [Image.fromarray(one.byte().numpy()) for one in noise]


def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return request.param, host_of(request.param, tmp_path_factory.mktemp("hub") / request.param)


family = pytest.fixture(made, scope="module", params=FAMILIES)
loaded = pytest.fixture(made, scope="module", params=KINDS)


def method(name: str, kind: str) -> tuple[Any, Budget]:
    options = {"tile_budget": "global"} if "tile_budget" in METHODS[kind].__dataclass_fields__ else {}
    return make(kind, **options), Budget(CASES[name].tokens)


def users_own(host: Any, shown: Image.Image | Clip, text: str) -> str:
    """What the model's own processor and `generate` say of an image or a clip."""
    kind, given = "image", {"images": [shown]}
    if isinstance(shown, Clip):
        metadata = transformers.video_utils.VideoMetadata(
            total_num_frames=32, fps=10.0, duration=3.2, frames_indices=list(shown.places)
        )
        kind, given = "video", {"videos": [list(shown.frames)], "video_metadata": [metadata], "do_sample_frames": False}
    turns = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}]
    prompt = host.processor.apply_chat_template(turns, add_generation_prompt=True)
    made = host.processor(text=[prompt], return_tensors="pt", **given)
    output = host.model.generate(**made, max_new_tokens=NEW, do_sample=False)
    return host.tokenizer.decode(output[0, made["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def answers_as_the_users_own_call(name: str, host: Any, kind: str, shown: list[Any]) -> None:
    with host.attach(*method(name, kind)) as attached:
        encoded = host.encode(shown)
        prompts = [Prompt(text, max_new_tokens=NEW) for text in TEXTS]
        together = host.answer([[one] for one in encoded], prompts)
        alone = [host.answer([[one]], [prompt])[0] for one, prompt in zip(encoded, prompts, strict=True)]
        expected = []
        for one, text, answer in zip(shown, TEXTS, together, strict=True):
            expected.append(users_own(host, one, text))
            (outcome,) = attached.outcomes
            assert (outcome.before, outcome.after) == (answer.before, answer.after)
            assert answer.after == answer.before if kind == "full" else answer.after < answer.before
            assert not isinstance(one, Clip) or answer.after == CASES[name].tokens  # one video under one budget
    assert [answer.text for answer in together] == expected
    assert [answer.text for answer in alone] == expected
    assert len(set(expected)) > 1


def test_the_harness_answers_as_the_users_own_call(family: tuple[str, Any]) -> None:
    """Of one model of each kind of prompt also without a method, and with cuts."""
    for kind in (*(("full", "fastv") if family[0] in KINDS else ()), "consensusdrop"):
        answers_as_the_users_own_call(*family, kind, pictures())


@pytest.mark.parametrize("name", CLIPS)
def test_so_it_does_of_clips(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    noise = torch.randint(0, 256, (3, 8, 64, 90, 3), generator=torch.Generator().manual_seed(1)).byte().numpy()
    places = tuple(range(0, 32, 4))
    clips = [Clip(tuple(Image.fromarray(frame) for frame in one), places, 32, 10.0) for one in noise]
    answers_as_the_users_own_call(name, host_of(name, tmp_path / name), "consensusdrop", clips)


def test_many_questions_about_one_picture_run_the_tower_once(loaded: tuple[str, Any]) -> None:
    name, host = loaded
    with host.attach(*method(name, "consensusdrop")):
        (one,) = host.encode(pictures()[:1])
        runs: list[Any] = []
        name, count = max(block_lists(host.view.inner, decoder_of(host.model)), key=lambda found: found[1])
        block = host.view.inner.get_submodule(name)[count - 1]
        with block.register_forward_hook(lambda *_: runs.append(1)):
            prompts = [Prompt(text, max_new_tokens=NEW) for text in TEXTS]
            together = host.answer([[one]] * 3, prompts)
            assert [answer.text for answer in together] == [host.answer([[one]], [ask])[0].text for ask in prompts]
    assert not runs


def test_a_word_that_stands_for_a_picture_is_refused_in_a_question(loaded: tuple[str, Any]) -> None:
    _, host = loaded
    encoded = host.encode(pictures()[:1])
    with pytest.raises(QuestionError, match="stands for an image"):
        host.answer([encoded], [Prompt(f"What is {host.processor.image_token}?", max_new_tokens=NEW)])
    assert host.reserved and host.answer([encoded], [Prompt("What is <picture>?", max_new_tokens=NEW)])


# ---- the front page


def test_the_lines_of_the_readme_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny random weights in place of the hub's, and where torchvision is missing, without which transformers
    loads no processor of Qwen2.5-VL, with the processor from memory.
    """
    hub_name = "Qwen/Qwen2.5-VL-7B-Instruct"
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if hub_name in block)
    assert len(code.splitlines()) <= 10
    processor = PROCESSORS["qwen2_5_vl"]()
    processor.image_processor.size = {"shortest_edge": 256 * 28**2, "longest_edge": 400 * 28**2}
    model = CASES["qwen2_5_vl"].build()
    model.save_pretrained(tmp_path / "model")
    if FILMING:
        processor.save_pretrained(tmp_path / "model")
    else:
        monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *_, **__: processor)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code.replace(hub_name, str(tmp_path / "model")), names)
    (outcome,) = names["attached"].outcomes
    assert outcome.before > outcome.after == 64 and not names["attached"].active
