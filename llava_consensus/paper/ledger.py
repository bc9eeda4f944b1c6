"""Published results of other papers (`ledger.json`), each with its source and the schedule of its budget."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def ledger() -> dict[str, Any]:
    """`sources` (what each is), `methods` (schedules: [first layer, tokens], `T` the budget, `N` all), `entries`."""
    text = (resources.files("llava_consensus.paper") / "ledger.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content
