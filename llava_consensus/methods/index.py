"""Description of a method for lists, read from its class. `make pages` keeps those of our methods in index.json, so
that `llava-consensus list` need not import torch; a test holds it fresh.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import SHAPES, account
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.options import allowed, annotations

SHAPE, TOKENS = "llava-1.5-7b", 64
ENTRY = re.compile(r"    (\w[\w, ]*): (.+)")
COUNTING = ("entering", "vision_tokens", "flops")


def describe(method: Method) -> list[Any]:
    """The row of a method in index.json: the fields of `methods.About`.

    Args:
        method: with the defaults of its options.
    """
    kind = type(method)
    texts = [inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]]
    texts += inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "").split("\n\n")
    paragraphs = [" ".join(text.split()) for text in texts]
    at = f"{kind.__module__}:{kind.__name__}"
    return [at, kind.title, method.place.value, paragraphs, list(_options(kind)), dict(_counted(kind)), cost(method)]


def _options(kind: type[Method]) -> Iterator[tuple[str, str, str, str]]:
    """Fields with their texts in the `Args` of the class, or of the nearest base that has them."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        texts |= dict(_arguments(one.__dict__.get("__doc__") or ""))
    kinds = annotations(kind)
    for field in (one for one in fields(kind) if one.name != "stages"):  # a composition's methods have their own
        default = field.default if isinstance(field.default, str) else json.dumps(field.default)
        yield field.name, default, texts.get(field.name, ""), allowed(kinds[field.name])


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    _, _, rest = inspect.cleandoc(docstring).partition("Args:\n")
    names: list[str] = []
    words: list[str] = []
    for line in rest.splitlines():
        if not line.startswith("    "):
            break
        entry = ENTRY.fullmatch(line)
        if entry:
            yield from ((name, " ".join(words)) for name in names)
            names, words = entry[1].split(", "), [entry[2]]
        else:
            words.append(line.strip())
    yield from ((name, " ".join(words)) for name in names)


def _counted(kind: type[Method]) -> Iterator[tuple[str, str]]:
    """The functions that count the cost of a method, but those it has from the bases; `flops` in any case."""
    for name in COUNTING:
        function = getattr(kind, name)
        if name == "flops" and kind.multiplies_nothing:
            yield name, "None: the method multiplies no matrices."
        elif name == "flops" or not function.__module__.startswith("llava_consensus.reduction."):
            words = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]  # without its `Raises`
            yield name, " ".join(words.split())


def cost(method: Method) -> str:
    found = account(method, Budget(TOKENS), SHAPES[SHAPE])
    if found.flops.method is None or found.flops.total is None:
        return f"on {SHAPE} at {TOKENS} tokens: not known ({found.note})"
    own, total = found.flops.method / 1e9, found.flops.total / 1e12
    return f"on {SHAPE} at {TOKENS} tokens: {own:.3g} GFLOP of its own, {total:.3g} TFLOP in all"
