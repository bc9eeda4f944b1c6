"""Models are made once, and whatever needs vLLM is skipped where it is not installed."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llava_consensus.serving.supported import installed


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Folder and model of a family."""
    import small

    @cache
    def make(family: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(family)
        return folder, small.FAMILIES[family](folder)

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if installed() is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make setup-vllm"))
