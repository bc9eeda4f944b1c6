"""Pages of the site that are made of what the package itself says: its lists of methods, hosts and benchmarks, its
docstrings, and the notebook. Each function gives Markdown.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.hosts import HOSTS
from llava_consensus.hosts.matrix import cells as matrix_cells
from llava_consensus.methods import METHODS, about

API = {  # sections of the page, and what is shown in each
    "Attach": (
        "attach",
        "hosts.attachment.Attachment",
        "hosts.outcomes.ImageOutcome",
        "evaluation.bench.timing",
        "errors",
    ),
    "Load and ask": (
        "evaluation.models.load",
        "evaluation.models.loading.Loading",
        "evaluation.models.base.Runner",
        "evaluation.models.base.Prompt",
        "evaluation.models.base.Answer",
    ),
    "Budgets": ("reduction.budget.Budget", "reduction.budget.Share", "reduction.costs.account"),
    "Methods": ("methods.make", "reduction.method", "reduction.decoder.InDecoder"),
    "What a method reads and returns": ("reduction.tokens",),
    "Parts of ConsensusDrop": ("reduction.saliency", "reduction.selection", "reduction.merging"),
    "Models, for new hosts": ("hosts.HostEntry", "hosts.images.Family", "hosts.remote.entrances.RemoteModel"),
    "Benchmarks and runs": (
        "evaluation.benchmarks.make",
        "evaluation.benchmarks.base.Benchmark",
        "evaluation.runs.configuration.RunConfig",
        "evaluation.runs.configuration.prepare",
        "evaluation.runs.loop.run",
    ),
    "Drawings": ("evaluation.report.overlay.overlay", "evaluation.report.overlay.contact_sheet"),
}


SERVICE = """
## In a service

```python
from llava_consensus import attach, timed

print(timed(model, lambda: model.generate(**inputs, max_new_tokens=20), tokens=64))
attached = attach(model, method="consensusdrop", tokens=64)  # until attached.detach(), or as a `with` block
```

The first lines print what the method gains with this model, on this machine:

```text
visual tokens 576 -> 64
first token   394.1 -> 226.2 ms (1.74 times as fast)
whole call    423.5 -> 248.2 ms (1.71 times as fast)
medians of 5 rounds in turns, after one that does not count
```

(The embedded model, one thread on a busy machine.)

**Gain.** `timed`, as above. `attached.outcomes` says of each image of the last call how many tokens there were and
are, `attached.milliseconds()` what the reduction alone took.

**Threads.** Attach before threads begin, detach when they have ended. Calls in several threads or asynchronous tasks
never meet, and `outcomes` are those of the thread's own last call. A model has one method at a time. Each process
attaches its own model.

**Errors.** What you can mend is a `ConsensusError`, in one line with the remedy: an `OptionError` (also a `ValueError`)
from `attach` where method, budget and model do not go together, and from a call whose inputs cannot be reduced; a
`NonFiniteError` where the model's numbers are NaN. The next call does not notice.

**Costs.** No weights are copied and no attention map is made. ConsensusDrop computes the first layer's keys, and the
queries of the question, once more: `llava-consensus list METHOD` says the FLOPs, [Speed](efficiency.md) the times.
Where the budget covers all tokens, the model runs as without us, bit for bit.

**Servers.** [vLLM](serving.md) takes the same methods.
"""


def methods() -> str:
    """Every method: what it does and its source, its options with defaults and bounds, its cost."""
    summary = [(f"[`{name}`](#{_anchor(name)})", METHODS[name].place.value, METHODS.line(name)) for name in METHODS]
    parts = [
        "# Methods",
        "What follows is made of the methods' own files, as `llava-consensus list NAME` prints it. An option is "
        "given as `--option alpha=1.0`, or in Python as `attach(model, method, alpha=1.0)`; a value outside its bound "
        "is refused before weights load. How cost is counted: [One account of tokens](accounting.md). How far each "
        "method is that of its authors: [Peer methods against their authors' code](faithfulness.md).",
        table(("method", "acts", "what it does"), summary),
    ]
    return "\n\n".join([*parts, *(part for name in METHODS for part in _method(name))])


def _method(name: str) -> Iterator[str]:
    """The section of a method."""
    told = about(name)
    yield f"## {METHODS.title(name)} {{ #{_anchor(name)} }}"
    yield f"`{name}`, acts here: {told.place}"
    yield from told.paragraphs
    if told.options:
        rows = [(f"`{one.name}`", f"`{one.default}`", one.values, one.text) for one in told.options]
        yield table(("option", "default", "values", "meaning"), rows)
    yield "Cost of one image in FLOPs, two for each multiply-add:"
    for function in told.counted:
        yield f"```python\n{textwrap.dedent(inspect.getsource(getattr(METHODS[name], function)))}```"
    yield f"{told.cost[0].upper()}{told.cost[1:]}."


def hosts() -> str:
    """Every host, and which method works on which."""
    cells = matrix_cells()
    notes = list(dict.fromkeys(reason for host in cells.values() for reason in host.values() if reason))
    marks = {reason: f"[{number}](#why-not)" for number, reason in enumerate(notes, 1)} | {"": "✓"}
    about = [
        (f"`{name}`", host.line, ", ".join(f"`{one}`" for one in host.classes), _host_options(name))
        for name, host in HOSTS.items()
    ]
    matrix = [
        (f"[`{method}`](methods.md#{_anchor(method)})", *(marks[cells[host][method]] for host in cells))
        for method in METHODS
    ]
    return "\n\n".join(
        [
            "# Hosts",
            "A host adapts a family of models; a model is told apart by its configuration, so that any checkpoint or "
            "loaded model of these classes can be used. Whether a host fits the model you have says "
            "`llava-consensus model check MODEL`. How a family is added: [Add a model](adding.md#add-a-model).",
            table(("host", "models", "classes", "options, the default first"), about),
            "## Which method works where",
            "As `llava-consensus list --host NAME` prints it, for the usual checkpoints of each family. A number leads "
            "to the reason for a refusal. Every other type of transformers is in "
            "[the compatibility page](compatibility.md).",
            table(("method", *(f"`{host}`" for host in cells)), matrix),
            "## Why not",
            "\n".join(f"{number}. {reason}" for number, reason in enumerate(notes, 1)),
        ]
    )


def _host_options(name: str) -> str:
    written = [f"`{option}={' | '.join(values)}`" for option, values in HOSTS[name].options.items()]
    return "; ".join([*written, *(["needs `--trust-remote-code`"] if HOSTS[name].remote else [])])


def benchmarks() -> str:
    """Every benchmark: what it asks, its number, its size, its options and the licence of its data."""
    rows, details = [], []
    for name, benchmark in BENCHMARKS.items():
        one = benchmark()
        judged = f", or by a judge (`judge {name}`)" if benchmark.judge else ""
        numbers = f"{one.count:,}" if one.count else "-", f"{one.paper or '-'}"
        rows.append((f"`{name}`", benchmark.line, f"`{benchmark.metric}`{judged}", *numbers))
        chosen = [
            f"`{option.name}={' | '.join(option.metadata['values'])}`: {option.metadata['line']}"
            for option in fields(benchmark)
        ]
        details.append((f"`{name}`", "; ".join(chosen) or "none", benchmark.licence or "-"))
    return "\n\n".join(
        [
            "# Benchmarks",
            "Questions, prompts, files and scores are LLaVA's own, so that `make eval-NAME TOKENS=64` gives the number "
            "which LLaVA's scripts give. Each benchmark has a small twin of generated scenes in the repository, which "
            "is the default. Where real files come from and where they go: [Real benchmark files](data.md). How one is "
            "added: [Add a benchmark](adding.md#add-a-benchmark).",
            table(("benchmark", "what it asks", "headline", "official questions", "LLaVA-1.5-7B, as published"), rows),
            "## Options and licences",
            table(("benchmark", "options, the default first", "licence of the data"), details),
        ]
    )


def api() -> str:
    """Signatures and docstrings of what other code may call."""
    sections = [
        f"## {title}\n\n" + "\n\n".join(f"::: llava_consensus.{name}" for name in names) for title, names in API.items()
    ]
    return "\n\n".join(
        [
            "# API",
            SERVICE,
            "Shapes are written as `[B, N, D]`; the letters are explained under "
            "[what a method reads and returns](#what-a-method-reads-and-returns).",
            *sections,
        ]
    )


GENERATED: dict[str, Callable[[], str]] = {
    "methods.md": methods,
    "hosts.md": hosts,
    "benchmarks.md": benchmarks,
    "api.md": api,
}


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as it was last executed: Markdown, and its images by name."""
    from nbconvert import MarkdownExporter

    body, resources = MarkdownExporter().from_filename(str(path))
    return body, resources["outputs"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(_line(cells) for cells in (head, ["---"] * len(head), *rows))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(_escaped(cell).split()) for cell in cells) + " |"


def _escaped(cell: str) -> str:
    """Bars of a cell, which would end it; those inside code do not."""
    parts = cell.split("`")
    return "`".join(part if number % 2 else part.replace("|", "\\|") for number, part in enumerate(parts))


def _anchor(name: str) -> str:
    return name.replace("+", "-plus")
