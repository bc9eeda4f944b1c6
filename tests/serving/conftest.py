"""Whatever needs vLLM is skipped where it is not installed."""

import pytest

from llava_consensus.serving.supported import installed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if installed() is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make setup-vllm"))
