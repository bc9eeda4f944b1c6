"""Models of the hub: taken from the cache by commit, described by content, and a line where they cannot be had."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from fakes import config, make_place
from huggingface_hub import constants
from loopback import Loopback, Silent
from tiny_data import mini_checkpoint

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.checksums import IDENTITY
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.models.loading import check_checkpoint
from llava_consensus.evaluation.runs.configuration import prepare

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lay_out(cache: Path, name: str, files: dict[str, str | Path]) -> Path:
    """A model in a cache as the hub's own library lays it out; the folder of its snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file, content in files.items():
        if isinstance(content, Path):
            (snapshot / file).symlink_to(content.resolve())
        else:
            (snapshot / file).write_text(content)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


LLAVA = {"config.json": '{"architectures": ["LlavaLlamaForCausalLM"]}', "model.safetensors": "weights"}


def test_a_model_in_the_cache_is_described_by_commit_and_content(cache: Path, tmp_path: Path) -> None:
    data = make_place(tmp_path / "data")
    snapshot = lay_out(cache, "owner/llava-tiny", LLAVA)
    first = prepare(config(data, Path("owner/llava-tiny")))
    assert first.model == "owner/llava-tiny" and first.loading.revision == COMMIT
    assert first.description["loading"] == {"revision": COMMIT}
    named = prepare(config(data, Path("owner/llava-tiny"), loading=Loading("cpu", revision=COMMIT)))
    assert named.description == first.description
    (snapshot / "model.safetensors").write_text("other weights")
    changed = prepare(config(data, Path("owner/llava-tiny"))).description
    assert changed["weights"] != first.description["weights"]
    (snapshot / "pytorch_model.bin").write_text("the same in a format that is not read")
    assert prepare(config(data, Path("owner/llava-tiny"))).description == changed
    (snapshot / IDENTITY).write_text(json.dumps({"name": "of its parts", "checksum": changed["weights"]}))
    assert prepare(config(data, Path("owner/llava-tiny"))).description == changed | {"weights": "of its parts"}
    (snapshot / "model.safetensors").write_text("weights of no known parts")
    assert prepare(config(data, Path("owner/llava-tiny"))).description["weights"] != "of its parts"


def test_a_type_no_host_adapts_and_weights_that_are_not_there_are_told(cache: Path) -> None:
    lay_out(cache, "owner/flamingo", {"config.json": '{"model_type": "flamingo"}'})
    with pytest.raises(OptionError, match=r"'owner/flamingo' is a flamingo .*Adapted: llava_llama, .*qwen2_5_vl"):
        models.check("owner/flamingo")
    lay_out(cache, "owner/nothing", {"config.json": "{}"})
    with pytest.raises(DataError, match="neither architectures nor model_type"):
        models.check("owner/nothing")
    snapshot = lay_out(cache, "owner/llava-half", {"config.json": LLAVA["config.json"]})
    with pytest.raises(DataError, match="lacks weight files"):
        models.find("owner/llava-half").files()
    (snapshot / "pytorch_model.bin").write_text("weights")
    assert len(models.find("owner/llava-half").files()) == 2


def test_what_is_not_there_is_never_asked_for(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"'owner/absent': .*hf auth login"):
        models.check("owner/absent")
    with pytest.raises(DataError, match=r"no config\.json"):
        check_checkpoint(str(tmp_path))
    with pytest.raises(OptionError, match="only models of the hub have revisions"):
        models.find("checkpoints/llava-mini", "main")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="'checkpoints/llava-mini': no such folder"):
        check_checkpoint("checkpoints/llava-mini")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", asked := Mock(side_effect=OSError("no file")))
    with pytest.raises(DataError, match=r"'owner/away': http://127.0.0.1:9 cannot be reached, and there is no copy"):
        models.check("owner/away")
    assert asked.call_args.kwargs["local_files_only"] is True


class Refusing(Silent):
    """A hub at which every model is gated, missing, or that fails."""

    def do_HEAD(self) -> None:
        name = self.path.split("/")[1]
        codes = {"gated": (401, "GatedRepo"), "missing": (401, "RepoNotFound"), "revised": (404, "RevisionNotFound")}
        status, code = codes.get(name, (200, ""))
        self.head(status, ({"X-Error-Code": code} if code else {}) | {"Content-Length": "0"})

    do_GET = do_HEAD


@pytest.mark.parametrize(
    ("name", "why"), [("gated", "hf auth login"), ("missing", "hf auth login"), ("revised", "Revision Not Found")]
)
def test_one_line_within_seconds(tmp_path: Path, name: str, why: str) -> None:
    own = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "llava_consensus.cli", "eval", "gqa", "--model", f"{name}/model"]
    with Loopback(Refusing) as server:
        told = {"capture_output": True, "text": True, "env": {**os.environ, **own, "HF_ENDPOINT": server.url}}
        done: Any = subprocess.run([*command, "--revision", "v2"], timeout=60, **told)  # most of them start Python
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 3 and why in done.stderr and len(lines) == 1, done.stderr


def test_a_vision_tower_of_the_hub_is_taken_from_the_cache(cache: Path, tmp_path: Path) -> None:
    mini, folder = Path("checkpoints/llava-mini"), tmp_path / "llava-mini"
    shutil.rmtree(mini_checkpoint(folder, mm_vision_tower="owner/clip-tiny") / "vision_tower")
    with pytest.raises(DataError, match=r"'owner/clip-tiny': .*hf auth login"):
        models.check(str(folder))
    files = [file for file in (mini / "vision_tower").iterdir() if file.is_file()]
    snapshot = lay_out(cache, "owner/clip-tiny", {file.name: file for file in files})
    assert models.check(str(folder))["tower"] == COMMIT
    host: Any = models.load(str(folder), Loading("cpu"))
    assert host.model.get_vision_tower().vision_tower_name == str(snapshot)


def test_a_run_on_a_model_of_the_cache(cache: Path, tmp_path: Path) -> None:
    from llava_consensus import cli

    converted = tmp_path / "converted"
    assert cli.main(["model", "convert", "checkpoints/llava-mini", str(converted)]) == 0
    shutil.rmtree(converted / "official")
    lay_out(cache, "owner/tiny", {file.name: file for file in converted.iterdir()})
    told = ["--model", "owner/tiny", "--device", "cpu", "--attn", "eager", "--limit", "2", "--no-progress"]
    assert cli.main(["eval", "gqa", *told, "--out", str(tmp_path / "out")]) == 0
    (run,) = (tmp_path / "out").glob("*/config.json")
    stored = json.loads(run.read_text())
    assert stored["model"] == "owner/tiny" and stored["loading"] == {"attention": "eager", "revision": COMMIT}
