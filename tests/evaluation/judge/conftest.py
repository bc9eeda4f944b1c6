"""A judge's key in the environment, and nothing else there that leads to a server."""

import os
from collections.abc import Iterator

import pytest
from judge_server import Act, Server
from judged_data import SECRET


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("OPENAI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)


@pytest.fixture
def good() -> Iterator[Server]:
    with Server(lambda text, number: Act()) as server:
        yield server
