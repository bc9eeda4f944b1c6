"""Help in one style: an example or two for each command, and how help is laid out. A test reads every example with the
parser of its command.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

EXAMPLES = {
    "eval": ("eval gqa --tokens 64", "eval pope --method visionzip --tokens 0.1 --limit 100 --json"),
    "sweep": ('sweep --bench "gqa pope" --methods "consensusdrop random" --tokens "192 64"',),
    "score": ("score gqa --answers answers.jsonl --data playground/data",),
    "export": ("export vqav2 --answers answers.jsonl --out upload.json --data playground/data",),
    "verify": ("verify results/gqa-consensusdrop-64-1a2b3c4d",),
    "check-data": ("check-data --data playground/data", "check-data gqa pope --data playground/data"),
    "download-data": ("download-data pope --data playground/data", "download-data all --yes"),
    "fetch-mini": ("fetch-mini", "fetch-mini --to ~/llava-mini"),
    "judge": ("judge mmvet --answers answers.jsonl --judge-model gpt-4-0613",),
    "ask": ('ask photo.jpg "What is on the table?" --tokens 64 --overlay kept.png',),
    "bench": ('bench --methods all --tokens "192 64"', "bench --shape llava-1.5-7b --dtype float16"),
    "report": ("report", "report --csv tables.csv --latex tables.tex"),
    "compare": ("compare gqa-consensusdrop-64 gqa-random-64",),
    "ablation": ("ablation alpha --limit 40",),
    "table": ("table t1 --limit 40",),
    "study": ("study --limit 40",),
    "positions": ("positions --bench textvqa --tokens 64",),
    "train": ("train --data-path train.json --images pictures --tokens '64 32' --out checkpoints/adapted",),
    "demo": ("demo", "demo --model llava-hf/llava-1.5-7b-hf --port 8000"),
    "paper": ("paper --limit 40",),
    "figures": ("figures --out results",),
    "claims": ("claims --out results",),
    "examples": ("examples --benchmark gqa --tokens 128 --by disagreement",),
    "gallery": ("gallery photographs --tokens 64",),
    "ledger": ("ledger --sort average",),
    "convert": ("convert checkpoints/llava-mini checkpoints/llava-mini-hf",),
    "check-host": ("check-host checkpoints/llava-mini",),
    "list": ("list", "list --hosts"),
    "methods": ("methods", "methods consensusdrop"),
    "completion": ("completion bash >> ~/.bash_completion", "completion zsh > ~/.zfunc/_llava-consensus"),
}


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions and examples as they are written."""


class Version(argparse.Action):
    """`--version`: this package, and what it would run on; nothing of it is imported."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="versions of this and what it runs on")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Prints and ends."""
        from importlib.metadata import PackageNotFoundError, version

        from llava_consensus import __version__

        lines = [f"llava-consensus {__version__}", f"python {sys.version.split()[0]}"]
        for name in ("torch", "transformers", "llava-torch"):
            try:
                lines.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                lines.append(f"{name} not installed")
        print("\n".join(lines))
        parser.exit()


def epilog(name: str) -> str | None:
    """The examples of a command."""
    shown = EXAMPLES.get(name)
    return "examples:\n" + "\n".join(f"  llava-consensus {line}" for line in shown) if shown else None
