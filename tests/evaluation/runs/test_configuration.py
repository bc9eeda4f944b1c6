"""A run is another one where labels, weights, images or a version of answers changed, and not where source did."""

from pathlib import Path

import pytest
from fakes import config, make_place
from tiny_data import make_mme

from llava_consensus.evaluation import checksums
from llava_consensus.evaluation.benchmarks import make
from llava_consensus.evaluation.runs import configuration
from llava_consensus.evaluation.runs.configuration import prepare
from llava_consensus.evaluation.runs.store import run_name
from llava_consensus.hosts import HOSTS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llava-consensus" / "digests"


def test_a_changed_label_in_a_folder_of_labels_is_another_run(tmp_path: Path) -> None:
    data = make_place(tmp_path / "data")
    make_mme(data)
    asked = config(data, data / "model", benchmark=make("mme"))
    before = prepare(asked).description
    label = sorted((data / "eval" / "MME").rglob("*.txt"))[0]
    label.write_text(label.read_text().replace("Yes", "No", 1))
    assert prepare(asked).description["questions"] != before["questions"]


def test_a_large_file_counts_and_is_read_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "LARGE", 100)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1000))
    before = checksums.checksum_of([weights])
    weights.write_bytes(bytes(500) + b"\1" + bytes(499))
    after = checksums.checksum_of([weights])
    assert after != before and len(list(cache.iterdir())) == 1
    monkeypatch.setattr(checksums, "digest", lambda *_: pytest.fail("read again"))
    assert checksums.checksum_of([weights]) == after


@pytest.mark.parametrize("raised", ["method", "benchmark", "host", "reduction"])
def test_a_raised_answer_version_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str) -> None:
    data = make_place(tmp_path / "data")
    asked = config(data, data / "model")
    before = run_name(prepare(asked).description)
    if raised == "reduction":
        monkeypatch.setattr(configuration, "REDUCTION", 2)
    elif raised == "host":
        for name, entry in HOSTS.items():
            monkeypatch.setitem(HOSTS, name, entry._replace(answer_version=entry.answer_version + 1))
    else:
        monkeypatch.setattr(type(getattr(asked, raised)), "answer_version", 2)
    assert run_name(prepare(asked).description) != before
