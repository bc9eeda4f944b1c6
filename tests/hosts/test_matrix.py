"""The registry of hosts. The matrix of hosts and methods says the truth: a tiny random model refuses every method for
the reason that its cell gives, and answers with a method for each place if the cell says that it works.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import remote_doubles
import torch
import transformers
from hf_models import CASES, IMAGE, SQUARE, noise, prompts, vip_llava
from models import IMAGE as SIDE
from models import tiny_llava, write_clip
from remote_cases import double, generate

from llava_consensus import attach, cli, entry_points, hosts
from llava_consensus.errors import OptionError
from llava_consensus.hosts import FACTS, HOSTS, HostEntry, images, known_hosts, matrix
from llava_consensus.hosts.images import Call, Family, runs
from llava_consensus.hosts.remote.cogvlm import CogVLM
from llava_consensus.hosts.remote.entrances import RemoteModel
from llava_consensus.methods import METHODS
from llava_consensus.reduction.method import Place

DERIVED = [name for name, host in HOSTS.items() if host.line.endswith("(derived)")]
CLASSES = {name: host.classes[0] for name, host in HOSTS.items() if host.kind == "hf" and name not in DERIVED}
PLACES = ("full", "consensusdrop", "consensusdrop+", "prumerge", "tome", "resize", "sparsevlm")  # tried where they work
SAME = 40  # letters of a reason; numbers of layers may follow


def assert_refused(model: Any, method: str, refusal: str) -> None:
    with pytest.raises(OptionError) as caught:
        attach(model, method, tokens=0.5)
    reason = str(caught.value).replace(METHODS[method].__name__, "the method")
    assert reason.replace(type(model).__name__, "the model")[:SAME] == refusal[:SAME], method


@pytest.fixture(scope="module")
def cells() -> dict[str, dict[str, str]]:
    return matrix.cells()


@pytest.mark.parametrize("host", CLASSES)
def test_every_cell_of_a_host_of_transformers(cells: dict[str, dict[str, str]], host: str) -> None:
    key = {"llava-hf": "llava", "qwen2.5-vl": "qwen25vl"}.get(host, host.replace("-", ""))
    (case,) = (case for name, case in CASES.items() if not case.clips and name.replace("_", "") == key)
    model = case.build()
    assert type(model).__name__ == CLASSES[host]
    inputs = prompts([1, 7, case.picture(0), 8, 9], [1, case.picture(2), 5])
    for method, refusal in cells[host].items():
        if refusal:
            assert_refused(model, method, refusal)
        if refusal or method not in PLACES:
            continue
        with attach(model, method, tokens=0.5) as attached:
            answer = model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert answer.shape[1] == inputs["input_ids"].shape[1] + 2
        reduced = [outcome.after < outcome.before for outcome in attached.outcomes]
        assert len(reduced) == 2 and all(reduced) == (method != "full"), (host, method)


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny LLaVA whose tower is a whole CLIP model's."""
    folder = tmp_path_factory.mktemp("clip")
    write_clip(folder, SQUARE)
    size = {"height": SIDE, "width": SIDE}
    transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size).save_pretrained(folder)
    return tiny_llava(folder)


def test_every_cell_of_official_llava(cells: dict[str, dict[str, str]], official: Any, prompt: SimpleNamespace) -> None:
    for method, refusal in cells["llava"].items():
        if METHODS[method].place is Place.CELLS:
            assert "tower of Qwen3-VL" in refusal
            continue
        assert refusal == "", method
        with attach(official, method, tokens=0.5) as attached, attached.asking(["what?"]):
            official.generate(prompt.ids, images=prompt.images, max_new_tokens=2, min_new_tokens=2, do_sample=False)
        (outcome,) = attached.outcomes
        assert (outcome.after < outcome.before) == (method != "full"), method


@pytest.mark.parametrize("host", [name for name, entry in HOSTS.items() if entry.remote])
def test_every_cell_of_a_host_of_remote_code(cells: dict[str, dict[str, str]], host: str, folder: Path) -> None:
    works = {method for method, refusal in cells[host].items() if refusal == matrix.UNTRIED}
    assert {"full", "consensusdrop", "vispruner", "divprune", "random"} <= works
    case = double(host.replace("-", "_"), folder)
    inputs = case.inputs([case.rows[0]])
    for method, refusal in cells[host].items():
        if method not in works:
            assert_refused(case.model, method, refusal)
            continue
        assert METHODS[method].place is Place.TOKENS
        with attach(case.model, method, 16) as attached:
            generate(case.model, inputs)
        assert (attached.outcomes[0].after < 64) == (method != "full"), method


def test_the_list_shows_it(capsys: pytest.CaptureFixture[str], cells: dict[str, dict[str, str]]) -> None:
    assert list(cells) == list(HOSTS) and all(list(row) == list(METHODS) for row in cells.values())
    assert cli.main(["list", "--hosts"]) == 0
    assert f"qwen3-vl         {len(METHODS) - 1} of {len(METHODS)} methods without tome\n" in capsys.readouterr().out
    assert cli.main(["list", "--host", "gemma-3n"]) == 0
    out = capsys.readouterr().out
    assert all(reason in out for reason in cells["gemma-3n"].values() if reason) and "positions:" not in out
    assert cli.main(["list", "--host", "qwen2.5-vl"]) == 0
    assert "positions: kept, as they have three axes" in capsys.readouterr().out


# ---- models of other packages

REFUSED = ("tome", "resize", "pixelprune")  # it is not known how the tower takes fewer patches


def register(monkeypatch: pytest.MonkeyPatch, place: str, **names: Any) -> None:
    """A package whose module has these names and registers one of them."""
    module = ModuleType("outside_host")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "outside_host", module)
    monkeypatch.setattr(images, "TABLE", dict(images.TABLE))  # to which the entry adds its types
    own = entry_points.registered
    monkeypatch.setattr(hosts, "registered", lambda group: {"outside": place} if group == hosts.GROUP else own(group))
    monkeypatch.setattr(entry_points, "registered", hosts.registered)


def halves(call: Call) -> list[Any]:
    """The tiles of every image: two runs of placeholders with a word between them."""
    lengths = [length for _, _, length in runs(call)]
    return [lengths[start : start + 2] for start in range(0, len(lengths), 2)]


def test_every_method_runs_on_a_model_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry says how its processor writes images. Without it each half of an image has a budget of its own."""
    model, image = vip_llava(), [*[IMAGE] * 16, 61, *[IMAGE] * 16]
    rows = [[5, 6, *image, 7, 8, 9], [5, 11, *image, 13, *image, 14], [21, *image, 22, 23]]
    pixels = noise(8, 3, 56, 56, seed=0)
    inputs = prompts(*rows) | {"pixel_values": pixels}
    own = pixels.split((2, 4, 2))
    singles = [prompts(row) | {"pixel_values": part} for row, part in zip(rows, own, strict=True)]
    dense = model(**inputs).logits

    def answer(given: dict[str, Any]) -> torch.Tensor:
        return model.generate(**given, max_new_tokens=4, do_sample=False)[:, -4:]

    with attach(model, "random", 6) as attached:
        model(**inputs)
        assert [one.before for one in attached.outcomes] == [16] * 8
    types = {"types": ("vipllava",), "family": "outside_host:FAMILY"}
    entry = HostEntry(FACTS, "hf", ("VipLlavaForConditionalGeneration",), "a model of another package", **types)
    register(monkeypatch, "outside_host:ENTRY", ENTRY=entry, FAMILY=Family(halves, mapped=True))
    assert list(known_hosts()) == [*HOSTS, "outside"]
    for name in METHODS:
        if name in REFUSED:
            with pytest.raises(OptionError, match="not known how the tower"):
                attach(model, name, 6)
            continue
        with attach(model, name, 6) as attached:
            said, outcomes = answer(inputs), attached.outcomes
            assert torch.equal(said, torch.cat([answer(one) for one in singles])), f"{name}: a batch answers like these"
        assert [(one.row, one.before) for one in outcomes] == [(0, 32), (1, 32), (1, 32), (2, 32)], name
        assert {one.after for one in outcomes} == {32 if name == "full" else 6}, name
        with attach(model, name, 32):
            assert torch.equal(model(**inputs).logits, dense), name


def test_a_model_with_code_of_its_own_has_a_view_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Outside(CogVLM):
        """The same under another name."""

    model = remote_doubles.cogvlm()
    model.__class__ = type("OutsideModel", type(model).__bases__, dict(vars(type(model))))
    with pytest.raises(OptionError, match="has no host"):
        attach(model, "random", 16)
    entry = HostEntry("outside_host:Outside", "remote", ("OutsideModel",), "a host of another package")
    register(monkeypatch, "outside_host:ENTRY", ENTRY=entry, Outside=Outside)
    assert issubclass(Outside, RemoteModel) and matrix.refusals("outside")["random"] == ""
    with attach(model, "random", 16) as attached:
        assert attached.entrance.view is Outside


@pytest.mark.parametrize(
    ("place", "why"), [("outside_host:OTHER", "must be a HostEntry"), ("outside_host:MISSING", "cannot be imported")]
)
def test_what_is_no_host_is_named(monkeypatch: pytest.MonkeyPatch, place: str, why: str) -> None:
    register(monkeypatch, place, OTHER=object())
    with pytest.raises(OptionError, match=f"host 'outside' of {place}: {why}"):
        known_hosts()
