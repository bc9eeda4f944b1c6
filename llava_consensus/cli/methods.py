"""The command `methods`: what methods there are; of one its idea, paper, options with defaults and bounds, cost."""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llava_consensus.cli.arguments import Command

if TYPE_CHECKING:
    from llava_consensus.reduction.method import Method

SHAPE, TOKENS, WIDTH = "llava-1.5-7b", 64, 100
BASE = "llava_consensus.reduction."  # what a method does not write itself, it has from there


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("methods", methods, "methods; of one its options with defaults and bounds, its cost, its paper")
    parser.add_argument("name", nargs="?", metavar="METHOD", help="all of them, a line each, by default")


def methods(given: argparse.Namespace) -> Iterator[str]:
    """A line for each method, or everything about one."""
    from llava_consensus.methods import known_methods, method_class

    if given.name is None:
        yield from (f"{name:14} {line}" for name, line in known_methods().items())
        return
    method = method_class(given.name)
    yield from about(given.name, method)
    yield ""
    yield from _options(given.name, method)
    yield ""
    yield from _cost(method)


def about(name: str, method: "type[Method]") -> Iterator[str]:
    """What a method does, as its file says: idea, paper, and what differs."""
    yield f"{name}, acts here: {method.place.value}"
    for paragraph in paragraphs(method):
        yield ""
        yield textwrap.fill(paragraph, WIDTH)


def paragraphs(method: "type[Method]") -> Iterator[str]:
    """The summary of a method's class, then the paragraphs of its file, a line each."""
    summary = inspect.cleandoc(method.__doc__ or "").split("\n\n")[0]
    page = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
    for paragraph in (summary, *page.split("\n\n")):
        yield " ".join(paragraph.split())


def _options(name: str, method: "type[Method]") -> Iterator[str]:
    from llava_consensus.methods.options import options

    found = options(method)
    yield "options, each with its default:" if found else "options: none"
    for one in found:
        text = textwrap.fill(one.text, WIDTH, initial_indent="      ", subsequent_indent="      ")
        yield f"  {one.name}={one.default}\n{text}"
    if found:
        yield f"give them as: --method {name} --option {found[0].name}={found[0].default}"


def _cost(method: "type[Method]") -> Iterator[str]:
    """The method's own formulas, and what they come to on the model of the paper."""
    yield "cost of one picture, FLOPs, two for each multiply-add (docs/accounting.md):"
    for name, text, body in formulas(method):
        yield textwrap.indent(f"{name}: {text}\n{textwrap.indent(body, '    ')}", "  ")
    yield comes_to(method)


def formulas(method: "type[Method]") -> Iterator[tuple[str, str, str]]:
    """What a method says of its cost: name of the function, what it is, and its lines as they are written."""
    for name in ("entering", "vision_tokens", "flops"):
        function = getattr(method, name)
        if not function.__module__.startswith(BASE) or name == "flops":
            yield _formula(function)


def comes_to(method: "type[Method]") -> str:
    """The formulas on the model of the paper, in a line."""
    from llava_consensus.reduction.budget import Budget
    from llava_consensus.reduction.costs import SHAPES, account

    found = account(method(), Budget(TOKENS), SHAPES[SHAPE])
    if found.flops.method is None or found.flops.total is None:
        return f"on {SHAPE} at {TOKENS} tokens: not known ({found.note})"
    own, total = found.flops.method / 1e9, found.flops.total / 1e12
    return f"on {SHAPE} at {TOKENS} tokens: {own:.3g} GFLOP of its own, {total:.3g} TFLOP in all"


def _formula(function: object) -> tuple[str, str, str]:
    """A function as it is written, without its docstring's `Raises`."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body  # type: ignore[arg-type]
    assert isinstance(node, ast.FunctionDef)
    text = (ast.get_docstring(node) or "").split("\n\n")[0]
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return node.name, " ".join(text.split()), "\n".join(ast.unparse(line) for line in body)
