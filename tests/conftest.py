"""Fixtures every test may use: a tiny vision tower, a tiny LLaVA and a prompt. No files from a hub, no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.pop("COLUMNS", None)  # pytest-xdist says 80 to its workers, and lists would be laid out for that

import signal
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import IMAGE, tiny_llava, write_tower

from llava_consensus.methods.consensusdrop import ConsensusDrop
from playground.mini.build import build
from playground.mini.paths import MINI

torch.set_num_threads(1)
if find_spec("hypothesis"):  # not in the venv of vLLM
    from hypothesis import HealthCheck, settings

    # how fast examples are drawn depends on what else the machine does
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
CACHES = tempfile.TemporaryDirectory()  # no test finds what an earlier one left
os.environ["XDG_CACHE_HOME"] = CACHES.name

# What is tested on LLaVA's own pins (transformers 4) too: official LLaVA as a host, methods on its parts, and the
# evaluation, training and commands that call them. Nothing else differs there.
ON_PINS = (
    *("hosts/test_attachment.py", "hosts/test_llava_host.py", "hosts/test_tiles.py"),
    *("methods/test_decoder_methods.py", "methods/test_golden_decoder.py", "methods/test_golden_tower.py"),
    *("methods/test_methods_before_projector.py", "methods/test_tower_methods.py"),
    *("evaluation/bench/test_bench.py", "evaluation/models/test_loading.py", "evaluation/runs/test_loop.py"),
    *("evaluation/runs/test_pictures.py", "evaluation/test_account.py", "project/test_mini_model.py"),
    *("training/test_training.py", "training/test_training_input.py"),
)
PINS = int(version("transformers").split(".")[0]) < 5


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what LLaVA's own pins cannot change."""
    test = collection_path.name.startswith("test_") and collection_path.is_file()
    return True if PINS and test and not any(collection_path.match(f"tests/{one}") for one in ON_PINS) else None


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mini benchmarks once for all workers. Programs that tests start hear signals even if pytest was started
    by `nohup` or in the background, whose children ignore them.
    """
    if not hasattr(config, "workerinput") and not (MINI / "eval" / ".complete").exists():
        build()
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@pytest.fixture(scope="session")
def tower_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP tower of four blocks, 4 x 4 patches and a class token, saved to disk as LLaVA's loader wants it."""
    folder = tmp_path_factory.mktemp("tower")
    write_tower(folder)
    return folder


@pytest.fixture(scope="session")
def llava_model(tower_folder: Path) -> Any:
    """One tiny Llama LLaVA for the tests that leave it as they found it."""
    return tiny_llava(tower_folder)


@pytest.fixture
def prompt() -> SimpleNamespace:
    """A prompt with one image: five ids before it, seven after."""
    torch.manual_seed(3)
    ids = torch.tensor([[1, 5, 6, 7, 8, -200, 9, 10, 11, 12, 13, 14, 15]])
    return SimpleNamespace(ids=ids, images=torch.randn(1, 3, IMAGE, IMAGE))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    original = ConsensusDrop.reduce

    def spy(self: Any, tokens: Any, budget: Any) -> Any:
        found.append(tokens)
        return original(self, tokens, budget)

    monkeypatch.setattr(ConsensusDrop, "reduce", spy)
    return found
