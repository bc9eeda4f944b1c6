"""Tests of hosts answer without gradients, as `generate` does, unless `torch.enable_grad` decorates them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short path: Qwen-VL's prompts hold it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
