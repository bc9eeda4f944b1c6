"""The embedded model end to end through the host: both stacks answer alike, batches answer like single questions."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_consensus import attach, load, make
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Loading, Prompt
from llava_consensus.reduction.budget import Budget

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
import make_mini_answers as golden  # noqa: E402


@pytest.fixture(scope="module")
def host() -> Any:
    return load(str(golden.ROOT / "checkpoints" / "llava-mini"), Loading("cpu"))


def test_ids_of_prompts_and_answers_are_the_same_on_both_stacks(host: Any) -> None:
    """In batches; `test_several_pictures_and_none` compares them with single prompts."""
    expected = json.loads((GOLDEN / "mini_answers.json").read_text())
    assert golden.prompt_ids(host) == expected["prompt_ids"]
    assert golden.answers(host, 13) == expected["answers"]


@torch.no_grad()
def test_full_budget_and_detach_are_bit_identical(host: Any) -> None:
    (path, text), *_ = golden.questions(1)
    ids = host.prompt_ids(Prompt(text))[None]
    pixels = host.image_processor.preprocess(open_image(path), return_tensors="pt")["pixel_values"]
    dense = host.model(ids, images=pixels).logits
    with attach(host.model, tokens=576):
        assert torch.equal(host.model(ids, images=pixels).logits, dense)
    with attach(host.model, tokens=64) as attached:
        assert host.model(ids, images=pixels).logits.shape[1] == dense.shape[1] - 512
        assert attached.outcomes[0][:4] == (0, 576, 64, 0)
    assert torch.equal(host.model(ids, images=pixels).logits, dense)


def test_the_tower_runs_once_for_all_questions_about_a_picture(host: Any) -> None:
    runs = []
    handle = host.model.get_vision_tower().register_forward_hook(lambda *_: runs.append(1))
    (path, _), *_ = golden.questions(1)
    with host.attach(make("consensusdrop"), Budget(64)):
        encoded = [host.encode([open_image(path)])]
        prompts = [Prompt(f"Is there a {name} in the image?", max_new_tokens=4) for name in ("dog", "cat", "bus")]
        answers = host.answer(encoded * 3, prompts)
    handle.remove()
    assert len(runs) == 1 and [(one.before, one.after) for one in answers] == [(576, 64)] * 3


def test_the_host_answers_with_nothing_attached_and_leaves_the_model_alone(host: Any) -> None:
    before = dict(vars(host.model))
    (path, text), *_ = golden.questions(1)
    (answer,) = host.answer([host.encode([open_image(path)])], [Prompt(text, max_new_tokens=4)])
    assert (answer.before, answer.after, answer.outcomes[0].reductions) == (576, 576, ())
    assert vars(host.model).keys() == before.keys()


def test_prompts_of_one_batch_must_agree_and_templates_must_exist(host: Any) -> None:
    (path, text), *_ = golden.questions(1)
    encoded = [host.encode([open_image(path)])]
    with pytest.raises(ValueError, match="one length"):
        host.answer(encoded * 2, [Prompt(text, max_new_tokens=4), Prompt(text, max_new_tokens=5)])
    with pytest.raises(OptionError, match="vicuna_v1"):
        host.answer(encoded, [Prompt(text, conversation="vicuna_v9")])


class Bomb:
    """What a pickled checkpoint must never get to run."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


def test_weights_are_never_executed_and_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(golden.ROOT)
    folder = tmp_path / "llava"
    source = golden.ROOT / "checkpoints" / "llava-mini"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".work", "README.md"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(DataError, match="cannot be loaded"):
        load(str(folder), Loading("cpu"))
    weights.unlink()
    torch.save((Bomb(), torch.zeros(10**6)), folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="cannot be loaded"):
        load(str(folder), Loading("cpu"))
    assert not Path("exploded").exists()


def test_several_pictures_and_none(host: Any) -> None:
    (path, text), (other, _), *_ = golden.questions(2)
    prompts = [Prompt(text, max_new_tokens=4)] * 4
    for method, tokens in (("full", 576), ("consensusdrop", 64), ("fastv", 64)):
        with host.attach(make(method), Budget(tokens)):
            one, two = host.encode([open_image(path), open_image(other)])
            together = host.answer([[one], [], [one, two], [one]], prompts)
            alone = [host.answer([own], prompts[:1])[0] for own in ([one], [], [one, two])]
        assert [answer.text for answer in together[:3]] == [answer.text for answer in alone]
        assert [answer.after for answer in together] == [tokens, 0, 2 * tokens, tokens]
