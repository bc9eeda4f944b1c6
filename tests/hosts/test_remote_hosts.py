"""Qwen-VL, CogVLM and InternVL-Chat as hosts, on doubles of their own code."""

import copy
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import remote_cases
import torch
from remote_cases import PICTURE, Double, double, generate, recorded
from remote_doubles.cogvlm import build_position_ids

from llava_consensus import attach
from llava_consensus.cli import main
from llava_consensus.errors import MissingDependency, OptionError
from llava_consensus.evaluation.models import Loading, Prompt, check, load
from llava_consensus.evaluation.models.remote import OWN_PROMPTS as OWN
from llava_consensus.hosts import HOSTS
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Place

NAMES = ("qwen_vl", "cogvlm", "internvl_chat")
NEW = 4
DATA = Path(__file__).parents[2] / "playground/mini"
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short path: Qwen-VL's prompts hold it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module", params=NAMES)
def case(request: Any, folder: Path) -> Double:
    return double(request.param, folder)


def kept(attached: Any) -> list[list[int]]:
    return [one.kept[0].tolist() for outcome in attached.outcomes for _, one in outcome.reductions]


def test_generate_as_the_user_calls_it(case: Double) -> None:
    inputs = case.inputs(case.rows)
    with attach(case.model, "consensusdrop", 16) as attached:
        said = generate(case.model, inputs)
    rows = range(len(case.rows))
    assert [(one.row, one.before, one.after) for one in attached.outcomes] == [(row, 64, 16) for row in rows]
    assert [one.structural for one in attached.outcomes] == [2 * (case.name == "cogvlm")] * len(case.rows)
    assert torch.equal(said[:, :-NEW], inputs["input_ids"])


@pytest.mark.parametrize("name", ["qwen_vl", "cogvlm"])  # InternVL-Chat takes no positions
def test_packed_prompts_are_refused(name: str, folder: Path) -> None:
    case = double(name, folder)
    inputs = case.inputs(case.rows[:1])
    size = inputs.pop("attention_mask").shape[1]
    positions = torch.cat((torch.arange(size - 2), torch.arange(2)))[None]
    with attach(case.model, "consensusdrop", 16), pytest.raises(OptionError, match="packed into one row"):
        case.model(**inputs, position_ids=positions)


@pytest.mark.parametrize("name", ["qwen_vl", "internvl_chat"])
def test_doubles_compute_what_the_authors_code_computes(name: str, folder: Path) -> None:
    """Same weights, same prompts: what the code in tests/golden/README.md gave, plain and with a method."""
    golden = numpy.load(GOLDEN / f"{name}.npz")
    for key, found in recorded(double(name, folder)).items():
        exact = golden[key].dtype.kind == "i"
        assert numpy.allclose(found, golden[key], rtol=0, atol=0 if exact else 1e-3), key


def test_a_batch_answers_like_single_prompts(case: Double) -> None:
    with attach(case.model, "consensusdrop", 16) as attached:
        said = generate(case.model, case.inputs(case.rows))[:, -NEW:]
        together = kept(attached)
        singles, apart = [], []
        for number, row in enumerate(case.rows):
            singles.append(generate(case.model, case.inputs([row], number))[:, -NEW:])
            apart += kept(attached)
    assert torch.equal(said, torch.cat(singles))
    assert together == apart


def test_copies_and_threads_do_not_meet(case: Double) -> None:
    inputs = [case.inputs([row], number) for number, row in enumerate(case.rows)]
    with attach(case.model, "consensusdrop", 16):
        twin = copy.deepcopy(case.model)
        expected = [generate(case.model, one) for one in inputs]
        with ThreadPoolExecutor(len(inputs)) as pool:
            assert all(map(torch.equal, pool.map(lambda one: generate(case.model, one), inputs), expected))
    plain = generate(case.model, inputs[0])
    assert torch.equal(generate(twin, inputs[0]), expected[0])
    assert not torch.equal(plain, expected[0])


@torch.no_grad()
def test_dropping_equals_masking_where_positions_stay(folder: Path) -> None:
    case = double("cogvlm", folder)
    inputs = case.inputs(case.rows)
    with attach(case.model, "consensusdrop", 16, merged=0, order="raster") as attached:
        reduced = case.model(**inputs).logits[:, -1]
        outcomes = attached.outcomes
    mask = inputs["attention_mask"].clone()
    positions = build_position_ids(inputs["token_type_ids"], mask)
    for outcome in outcomes:
        places = (inputs["token_type_ids"][outcome.row] == 1).nonzero()[1:-1, 0]
        stays = torch.zeros(len(places), dtype=torch.bool)
        stays[outcome.reductions[0][1].kept[0]] = True
        mask[outcome.row, places[~stays]] = 0
    masked = case.model(**{**inputs, "attention_mask": mask}, position_ids=positions).logits[:, -1]
    assert torch.allclose(masked, reduced, atol=1e-4)


def test_a_loss_counts_the_answer_alone(case: Double) -> None:
    inputs = case.inputs([case.rows[0]])
    labels = inputs["input_ids"].clone()
    labels[:, :-2] = -100
    with attach(case.model, "consensusdrop", 16, answer_rows=True):
        if case.name != "internvl_chat":
            with pytest.raises(OptionError, match="this model only answers"):
                case.model(**inputs, labels=labels)
            return
        output = case.model(**inputs, labels=labels)
    assert output.logits.shape[1] < inputs["input_ids"].shape[1] + 64 * (case.name == "internvl_chat")
    expected = torch.nn.functional.cross_entropy(output.logits[0, -3:-1], labels[0, -2:])
    assert torch.allclose(output.loss, expected, atol=1e-5)


def test_prompts_that_do_not_match_are_refused(case: Double) -> None:
    inputs = case.inputs([case.rows[0]])
    with attach(case.model, "consensusdrop", 16):
        if case.name == "internvl_chat":
            padded = {**inputs, "attention_mask": inputs["attention_mask"].clone().index_fill(1, torch.tensor([0]), 0)}
            with pytest.raises(OptionError, match="padded batch"):
                generate(case.model, padded)
            return
        stays = torch.arange(inputs["input_ids"].shape[1]) != 5
        wrong = {name: value[:, stays] for name, value in inputs.items() if name != "images"}
        with pytest.raises(OptionError, match="truncate nothing"):
            generate(case.model, {**inputs, **wrong})
        with pytest.raises(OptionError, match="input_ids"):
            case.model(inputs_embeds=torch.zeros(1, 4, 8))
        if case.name == "cogvlm":
            with pytest.raises(OptionError, match="0 images"):
                case.model(**{**inputs, "images": None})
    with pytest.raises(OptionError, match="attached already"), attach(case.model, "full", 1):
        attach(case.model, "full", 1)


def test_prompts_without_pictures(case: Double) -> None:
    row = [[part for part in case.rows[0] if part != PICTURE]]
    inputs = case.inputs(row)
    if case.name == "internvl_chat":
        del inputs["images"]
    plain = generate(case.model, inputs)
    with attach(case.model, "consensusdrop", 16) as attached:
        assert torch.equal(generate(case.model, inputs), plain)
        assert not attached.outcomes


def test_every_method_works_or_is_refused(case: Double) -> None:
    inputs = case.inputs([case.rows[0]])
    for method in METHODS:
        if METHODS[method].place is not Place.TOKENS:
            with pytest.raises(OptionError):
                attach(case.model, method, 16)
            continue
        try:
            attached = attach(case.model, method, 16)
        except OptionError as refusal:
            keeps = make(method).positions != "renumber"
            assert "needs" in str(refusal) or "block" in str(refusal) or (keeps and "position" in str(refusal))
            continue
        with attached:
            generate(case.model, inputs)
            assert attached.outcomes[0].after <= 64, method


# ---- the harness


@pytest.fixture
def host(case: Double) -> Any:
    return remote_cases.host_of(case)


def test_the_harness_answers_batches_and_counts(case: Double, host: Any) -> None:
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
    assert host.shape().available == case.tokens


def test_templates(tmp_path: Path) -> None:
    trusted = Loading(trust_remote_code=True)
    for name in ("qwen_vl", "cogvlm"):
        folder = remote_cases.checkpoint(name, tmp_path / name)
        with pytest.raises(OptionError, match="conversation"):
            check(str(folder), "vicuna_v1", trusted)
    assert check(str(tmp_path / "cogvlm"), "vqa", trusted) == {"conversation": "vqa"}
    host = load(str(tmp_path / "cogvlm"), trusted)
    words = [host.prompt_ids(Prompt("What?", template), 0).tolist() for template in (None, OWN, "chat", "vqa")]
    assert words[0] == words[1] == words[2] != words[3]
    assert check(str(tmp_path / "qwen_vl"), None, trusted) == {"conversation": OWN}
    host.tokenizer.eod_id = 7
    assert host.padding == 7


@pytest.mark.parametrize("name", ["qwen_vl", "cogvlm"])
def test_a_benchmark_runs_on_them(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = remote_cases.checkpoint(name, tmp_path / "model")
    asked = ["--limit", "2", "--tokens", "16", "--max-new-tokens", "2", "--no-progress"]
    places = ["--model", str(folder), "--data", str(DATA), "--out", str(tmp_path / "runs")]
    assert main(["eval", "gqa", "--trust-remote-code", *asked, *places]) == 0
    assert "visual tokens per question: 64 before, 16 after" in capsys.readouterr().out


def test_internvl_chat_is_told_from_llava_and_needs_its_own_package(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "OpenGVLab/InternViT-6B-224px"}'
    )
    with pytest.raises(OptionError, match="--trust-remote-code"):
        load(str(tmp_path))
    with pytest.raises(MissingDependency, match="internvl_chat_llava"):
        load(str(tmp_path), Loading(trust_remote_code=True))
    assert {name for name, entry in HOSTS.items() if entry.remote} == {"qwen-vl", "cogvlm", "internvl-chat"}
