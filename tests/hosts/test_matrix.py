"""The matrix of hosts and methods says the truth: a tiny random model refuses every method for the reason that its
cell gives, and answers with a method for each place where the cell says that it works.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from models import IMAGE, tiny_llava, write_clip

from llava_consensus import attach, cli
from llava_consensus.errors import OptionError
from llava_consensus.hosts import HOSTS, matrix
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.method import Place

CURRENT = int(transformers.__version__.split(".")[0]) >= 5
DERIVED = [name for name, host in HOSTS.items() if host.line.endswith("(derived)")]
CLASSES = {name: host.classes[0] for name, host in HOSTS.items() if host.kind == "hf" and name not in DERIVED}
PLACES = ("full", "consensusdrop", "consensusdrop+", "prumerge", "tome", "resize", "sparsevlm")  # tried where they work
SAME = 40  # letters of a reason; numbers of layers may follow


def reason_of(error: Exception, method: str, model: Any) -> str:
    named = str(error).replace(METHODS[method].__name__, "the method")
    return named.replace(type(model).__name__, "the model")


@pytest.fixture(scope="module")
def cells() -> dict[str, dict[str, str]]:
    return matrix.cells()


def test_every_host_and_method_has_a_cell(cells: dict[str, dict[str, str]]) -> None:
    assert list(cells) == list(HOSTS) and all(list(row) == list(METHODS) for row in cells.values())


@pytest.mark.skipif(not CURRENT, reason="models of transformers need version 5.19 or later")
@pytest.mark.parametrize("host", CLASSES)
def test_every_cell_of_a_host_of_transformers(cells: dict[str, dict[str, str]], host: str) -> None:
    from hf_models import CASES, prompts

    found = [case for name, case in CASES.items() if not case.clips and name.replace("_", "") == host_key(host)]
    (case,) = found
    model = case.build()
    assert type(model).__name__ == CLASSES[host]
    inputs = prompts([1, 7, case.picture(0), 8, 9], [1, case.picture(2), 5])
    for method, refusal in cells[host].items():
        if refusal:
            with pytest.raises(OptionError) as caught:
                attach(model, method, tokens=0.5)
            assert reason_of(caught.value, method, model)[:SAME] == refusal[:SAME], (host, method)
            continue
        if method not in PLACES:
            continue
        with attach(model, method, tokens=0.5) as attached:
            answer = model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert answer.shape[1] == inputs["input_ids"].shape[1] + 2
        reduced = [outcome.after < outcome.before for outcome in attached.outcomes]
        assert len(reduced) == 2 and all(reduced) == (method != "full"), (host, method)


def host_key(host: str) -> str:
    return {"llava-hf": "llava", "qwen2.5-vl": "qwen25vl"}.get(host, host.replace("-", ""))


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny LLaVA whose tower is a whole CLIP model's."""
    folder = tmp_path_factory.mktemp("clip")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    write_clip(folder, dict(**sizes, image_size=IMAGE, patch_size=14))
    size = {"height": IMAGE, "width": IMAGE}
    transformers.CLIPImageProcessor(size={"shortest_edge": IMAGE}, crop_size=size).save_pretrained(folder)
    return tiny_llava(folder)


def test_every_cell_of_official_llava(cells: dict[str, dict[str, str]], official: Any, prompt: SimpleNamespace) -> None:
    for method, refusal in cells["llava"].items():
        if METHODS[method].place is Place.CELLS:
            assert "tower of Qwen3-VL" in refusal
            continue
        if not CURRENT and METHODS[method].place is not Place.DECODER and make(method).positions != "renumber":
            assert "needs transformers >= 5" in refusal
            continue
        assert refusal == "", method
        if not CURRENT and method == "restore_calibrated":  # refused when it cuts a prompt
            continue
        with attach(official, method, tokens=0.5) as attached, attached.asking(["what?"]):
            official.generate(prompt.ids, images=prompt.images, max_new_tokens=2, min_new_tokens=2, do_sample=False)
        (outcome,) = attached.outcomes
        assert (outcome.after < outcome.before) == (method != "full"), method


@pytest.mark.parametrize("host", [name for name, entry in HOSTS.items() if entry.remote])
def test_every_refusal_of_a_host_of_remote_code_is_what_its_double_meets(
    cells: dict[str, dict[str, str]], host: str
) -> None:
    import remote_doubles

    model = getattr(remote_doubles, host.replace("-", "_"))()
    refused = {method: refusal for method, refusal in cells[host].items() if refusal != matrix.UNTRIED}
    for method, refusal in refused.items():
        with pytest.raises(OptionError) as caught:
            attach(model, method, tokens=0.5)
        assert reason_of(caught.value, method, model)[:SAME] == refusal[:SAME], (host, method)
    places = {METHODS[method].place for method in refused}
    assert places >= {Place.TOWER, Place.IMAGE, Place.DECODER}
    works = [method for method, refusal in cells[host].items() if refusal == matrix.UNTRIED]
    assert {"full", "consensusdrop", "vispruner", "divprune", "random"} <= set(works)


def test_the_list_shows_it(capsys: pytest.CaptureFixture[str], cells: dict[str, dict[str, str]]) -> None:
    assert cli.main(["list", "--hosts"]) == 0
    assert f"qwen3-vl         {len(METHODS) - 1} of {len(METHODS)} methods without tome\n" in capsys.readouterr().out
    assert cli.main(["list", "--host", "gemma-3n"]) == 0
    out = capsys.readouterr().out
    assert all(reason in out for reason in cells["gemma-3n"].values() if reason)
