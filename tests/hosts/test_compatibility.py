"""A third of `make compatibility`: types of the installed transformers that docs/compatibility.md calls working do."""

import re

import compatibility
import pytest
import torch

PAGE = compatibility.PAGE.read_text("utf-8")
LINES = re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE, re.MULTILINE)
WORKING = {kind: cells.split(" | ") for kind, cells in LINES if "works" in cells}
SLOW = {"deepseek_vl_hybrid", "got_ocr2", "pp_chart2table", "fast_vlm", "janus", "gemma3n", "muse_spark"}
# `make compatibility` tries the others too
THIRD = [kind for kind in WORKING if kind in compatibility.TYPES and kind not in SLOW][::3]


def test_the_page_has_its_versions() -> None:
    assert re.search(r"Last whole run: \d{4}-\d\d-\d\d, transformers 5\.\d+\.\d+, torch 2\.\d+", PAGE)
    assert len(LINES) > 90


@pytest.mark.parametrize("kind", THIRD)
@torch.no_grad()
def test_a_type_that_works(kind: str) -> None:
    row = compatibility.row(kind)
    if missing := next((state for state in row.cells.values() if "ModuleNotFoundError" in state), None):
        pytest.skip(missing)
    for found, told, name in zip(row.cells.values(), WORKING[kind], row.cells, strict=True):
        assert told != "works" or found == "works", f"{name}: {found}"
