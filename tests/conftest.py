"""Fixtures every test may use: a tiny vision tower, a tiny LLaVA and a prompt. No files from a hub, no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.pop("COLUMNS", None)  # pytest-xdist says 80 to its workers, and lists would be laid out for that

import signal
from importlib.metadata import version
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

# Tests in which no model runs: files, sums, tables, figures. They run on the main stack alone, because nothing they
# call differs on LLaVA's own pins.
NO_MODEL = (
    *("benchmarks", "choice_scorers", "mmbench", "official_files", "scorers", "sqa", "vqav2"),
    *("graders", "judge", "judged_benchmarks", "judged_scorers", "secret"),
    *("claims", "figures", "ledger", "presets", "results", "stats"),
    *("data_commands", "docs", "fuzz", "imports", "mini_benchmarks", "playground", "site"),
)
# Tests of what becomes of a run's files and processes, whichever model answers; test_loop.py, test_store.py and
# test_execution.py ask it on the pins too.
FILES_AND_PROCESSES = (
    *("against_official", "checkpoint", "demo", "files", "configuration", "front_door"),
    *("newlines", "outside", "overlay", "sweep", "workers"),
)
MAIN_ALONE = [f"*/test_{name}.py" for name in (*NO_MODEL, *FILES_AND_PROCESSES)]  # in whichever folder
collect_ignore_glob = [] if int(version("transformers").split(".")[0]) >= 5 else MAIN_ALONE


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mini benchmarks where they are not made yet, once for all workers.

    Programs that tests start hear signals even where pytest was started by `nohup` or in the background, whose children
    ignore them.
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
    """A prompt with one picture: five ids before it, seven after."""
    torch.manual_seed(3)
    ids = torch.tensor([[1, 5, 6, 7, 8, -200, 9, 10, 11, 12, 13, 14, 15]])
    return SimpleNamespace(ids=ids, images=torch.randn(1, 3, IMAGE, IMAGE))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ConsensusDrop is handed."""
    found: list[Any] = []
    original = ConsensusDrop.reduce

    def spy(self: Any, tokens: Any, budget: Any) -> Any:
        found.append(tokens)
        return original(self, tokens, budget)

    monkeypatch.setattr(ConsensusDrop, "reduce", spy)
    return found
