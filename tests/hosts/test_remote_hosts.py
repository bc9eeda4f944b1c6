"""Qwen-VL, CogVLM and InternVL-Chat as hosts, on doubles of their own code."""

import copy
import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import remote_cases
import torch
from remote_cases import Double, double, generate, recorded
from torch import Tensor

from llava_consensus import attach
from llava_consensus.cli import main
from llava_consensus.errors import MissingDependency, OptionError
from llava_consensus.evaluation.models import Loading, Prompt, check, load
from llava_consensus.evaluation.models.remote import OWN_PROMPTS as OWN
from llava_consensus.hosts import HOSTS
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.saliency import class_saliency, text_attention

NAMES = ("qwen_vl", "cogvlm", "internvl_chat")
NEW = 4
DATA = Path(__file__).parents[2] / "playground/mini"
GOLDEN = Path(__file__).parents[1] / "golden"
cogvlm: Any = importlib.import_module("remote_doubles.cogvlm")  # the package has a function of this name


@pytest.fixture(scope="module", params=NAMES)
def case(request: Any, folder: Path) -> Double:
    return double(request.param, folder)


def kept(attached: Any) -> list[list[int]]:
    return [one.kept[0].tolist() for outcome in attached.outcomes for _, one in outcome.reductions]


@pytest.mark.parametrize("name", ["qwen_vl", "internvl_chat"])
def test_doubles_compute_what_the_authors_code_computes(name: str, folder: Path) -> None:
    """Same weights, same prompts: what the code in tests/golden/README.md gave, plain and with a method."""
    golden = numpy.load(GOLDEN / f"{name}.npz")
    for key, found in recorded(double(name, folder)).items():
        exact = golden[key].dtype.kind == "i"
        assert numpy.allclose(found, golden[key], rtol=0, atol=0 if exact else 1e-3), key


def test_a_batch_answers_like_single_prompts(case: Double) -> None:
    """And like the plain model where all tokens are kept."""
    inputs = case.inputs(case.rows)
    plain = generate(case.model, inputs)
    with attach(case.model, "consensusdrop", 16) as attached:
        said, together = generate(case.model, inputs), kept(attached)
        ends = 2 * (case.name == "cogvlm")
        assert [one[:4] for one in attached.outcomes] == [(row, 64, 16, ends) for row in range(len(case.rows))]
        singles, apart = [], []
        for number, row in enumerate(case.rows):
            singles.append(generate(case.model, case.inputs([row], number))[:, -NEW:])
            apart += kept(attached)
    assert torch.equal(said, torch.cat((inputs["input_ids"], torch.cat(singles)), 1)) and together == apart
    with attach(case.model, "consensusdrop", 64):
        assert torch.equal(generate(case.model, inputs), plain)


def test_copies_and_threads_do_not_meet(case: Double) -> None:
    inputs = [case.inputs([row], number) for number, row in enumerate(case.rows)]
    with attach(case.model, "consensusdrop", 16):
        copied = copy.deepcopy(case.model)
        expected = [generate(case.model, one) for one in inputs]
        with ThreadPoolExecutor(len(inputs)) as pool:
            assert all(map(torch.equal, pool.map(lambda one: generate(case.model, one), inputs), expected))
    assert torch.equal(generate(copied, inputs[0]), expected[0])
    assert not torch.equal(generate(case.model, inputs[0]), expected[0])


def test_a_method_reads_what_cogvlm_computes(folder: Path, seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Features and attention of the tower's last block, and attention of the first layer of the language model."""
    case, maps = double("cogvlm", folder), []
    kernel = cogvlm.scaled_dot_product_attention

    def note(query: Tensor, key: Tensor, value: Tensor, mask: Any = 0, **options: Any) -> Tensor:
        maps.append((query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + mask).softmax(-1).mean(1))
        return kernel(query, key, value, **({} if isinstance(mask, int) else {"attn_mask": mask}), **options)

    monkeypatch.setattr(cogvlm, "scaled_dot_product_attention", note)
    states, inputs = [], case.inputs(case.rows[:1])
    with case.model.model.vision.transformer.layers[-1].register_forward_hook(lambda *given: states.append(given[2])):
        case.model(**inputs)
    with attach(case.model, "consensusdrop", 16):
        case.model(**inputs)
    (tokens,) = seen
    assert torch.allclose(tokens.features, states[0][:, 1:], atol=1e-5)
    assert torch.allclose(class_saliency(tokens.attention), maps[2][:, 0, 1:], atol=1e-6)  # of three blocks
    assert torch.allclose(text_attention(tokens.probe)[0], maps[3][0, tokens.probe.rows[0]], atol=1e-5)


def test_dropping_equals_masking_where_positions_stay(folder: Path) -> None:
    case = double("cogvlm", folder)
    inputs = case.inputs(case.rows)
    with attach(case.model, "consensusdrop", 16, merged=0, order="raster") as attached:
        reduced = case.model(**inputs).logits[:, -1]
        outcomes = attached.outcomes
    mask = inputs["attention_mask"].clone()
    positions = cogvlm.build_position_ids(inputs["token_type_ids"], mask)
    for outcome in outcomes:
        places = (inputs["token_type_ids"][outcome.row] == 1).nonzero()[1:-1, 0]
        stays = torch.zeros(len(places), dtype=torch.bool)
        stays[outcome.reductions[0][1].kept[0]] = True
        mask[outcome.row, places[~stays]] = 0
    masked = case.model(**{**inputs, "attention_mask": mask}, position_ids=positions).logits[:, -1]
    assert torch.allclose(masked, reduced, atol=1e-4)


@torch.enable_grad()
def test_a_loss_counts_the_answer_alone(folder: Path) -> None:
    case = double("internvl_chat", folder)
    inputs = case.inputs([case.rows[0]])
    labels = inputs["input_ids"].clone()
    labels[:, :-2] = -100
    with attach(case.model, "consensusdrop", 16, answer_rows=True):
        output = case.model(**inputs, labels=labels)
    assert output.logits.shape[1] == labels.shape[1] - 1 + 16
    expected = torch.nn.functional.cross_entropy(output.logits[0, -3:-1], labels[0, -2:])
    assert torch.allclose(output.loss, expected, atol=1e-5)


def test_what_cannot_be_reduced_says_why(case: Double) -> None:
    inputs = case.inputs([case.rows[0]])
    size = inputs["input_ids"].shape[1]
    uncut = torch.arange(size) != 5
    cut = {name: value[:, uncut] for name, value in inputs.items() if name != "images"}
    packed = torch.cat((torch.arange(size - 2), torch.arange(2)))[None]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**inputs, **cut}, "truncate nothing"),
        ({**inputs, "labels": inputs["input_ids"]}, "this model only answers"),
        ({**inputs, "attention_mask": None, "position_ids": packed}, "packed into one row"),
        ({"inputs_embeds": torch.zeros(1, 4, 8)}, "input_ids"),
    ]
    if case.name == "cogvlm":
        wrong.append(({**inputs, "images": None}, "0 images"))
    if case.name == "internvl_chat":  # it takes no positions, and answers prompts of embeddings as LLaVA does
        wrong = [({**inputs, "attention_mask": torch.arange(size)[None].clamp(max=1)}, "padded batch")]
    with attach(case.model, "consensusdrop", 16):
        for given, why in wrong:
            with pytest.raises(OptionError, match=why):
                case.model(**given)
        with pytest.raises(OptionError, match="attached already"):
            attach(case.model, "full", 1)
    model = copy.deepcopy(case.model)
    if case.name == "internvl_chat":
        model.get_vision_tower().vision_tower = torch.nn.Identity()
    options: dict[str, Any] = {"cogvlm": {"vision_layer": -1}, "qwen_vl": {"newlines": "drop"}}.get(case.name, {})
    with pytest.raises(OptionError, match=r"block after the features|^newlines=drop|^vision tower Identity"):
        attach(model, "prumerge", 16, **options)


def test_prompts_without_pictures(case: Double) -> None:
    inputs = case.inputs([remote_cases.without(case.rows[0])])
    if case.name == "internvl_chat":
        del inputs["images"]
    plain = generate(case.model, inputs)
    with attach(case.model, "consensusdrop", 16) as attached:
        assert torch.equal(generate(case.model, inputs), plain)
        assert not attached.outcomes


# ---- the harness


def test_the_harness_answers_batches_and_counts(case: Double) -> None:
    host = remote_cases.host_of(case)
    prompts = [Prompt(text, max_new_tokens=3) for text in ("What?", "What is in this picture?", "Where?")]
    with host.attach(make("consensusdrop"), Budget(16)):
        pictures = host.encode([remote_cases.picture(0), remote_cases.picture(1)])
        asked = [[pictures[0]], [pictures[1]], []]
        answers = host.answer(asked, prompts)
        singles = [host.answer([one], [prompt])[0] for one, prompt in zip(asked, prompts, strict=True)]
    assert [(one.text, one.before) for one in answers] == [(one.text, one.before) for one in singles]
    assert [one.after for one in answers] == [16, 16, 0]
    for answer, prompt, count in zip(answers, prompts, (1, 1, 0), strict=True):
        rows, behind = host.rows(prompt, count)
        rows += answer.structural
        assert (answer.prefill.text, answer.prefill.question) == (rows, behind)
        assert set(answer.prefill.entering) == {answer.after}
        shape = host.shape()
        position = 2 * shape.kv_heads * shape.head_width * shape.number_bytes
        assert set(answer.prefill.kv_bytes) == {(rows + answer.after) * position}
    assert host.shape().available == remote_cases.TOKENS


@pytest.mark.parametrize(("name", "templates"), [("qwen_vl", [OWN]), ("cogvlm", [OWN, "chat", "vqa"])])
def test_a_benchmark_runs_on_them(
    name: str, templates: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trusted, folder = Loading(trust_remote_code=True), str(remote_cases.checkpoint(name, tmp_path / "model"))
    with pytest.raises(OptionError, match="conversation"):
        check(folder, "vicuna_v1", trusted)
    assert [check(folder, one, trusted) for one in templates] == [{"conversation": one} for one in templates]
    host = load(folder, trusted)
    words = [host.prompt_ids(Prompt("What?", template), 0).tolist() for template in (None, *templates)]
    assert words[0] == words[1] and [one == words[0] for one in words[2:]] == [True, False][: len(templates) - 1]
    host.tokenizer.eod_id = 7
    assert host.padding == 7
    asked = ["--limit", "2", "--tokens", "16", "--max-new-tokens", "2", "--no-progress", "--trust-remote-code"]
    assert main(["eval", "gqa", *asked, "--model", folder, "--data", str(DATA), "--out", str(tmp_path / "runs")]) == 0
    assert "visual tokens per question: 64 before, 16 after" in capsys.readouterr().out


def test_internvl_chat_is_told_from_llava_and_needs_its_own_package(tmp_path: Path) -> None:
    config = {"architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "OpenGVLab/InternViT-6B-224px"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match="--trust-remote-code"):
        load(str(tmp_path))
    with pytest.raises(MissingDependency, match="internvl_chat_llava"):
        load(str(tmp_path), Loading(trust_remote_code=True))
    assert {name for name, entry in HOSTS.items() if entry.remote} == {"qwen-vl", "cogvlm", "internvl-chat"}
