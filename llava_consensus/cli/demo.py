"""The command `demo`: a page in the browser on which two reductions are compared, question by question.

llava-consensus demo                                      the embedded model, on http://127.0.0.1:7860
llava-consensus demo --model llava-hf/llava-1.5-7b-hf --port 8000
"""

import argparse
import threading
from collections.abc import Iterator
from importlib.util import find_spec

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.errors import OptionError, missing_extra

LOCAL = "127.0.0.1"
PORTS = 65535


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("demo", demo, "a page to play with: two methods or two questions side by side")
    arguments.add_model(parser)
    arguments.add_data(parser)
    parser.add_argument("--port", type=int, help="(the first free one from 7860 on)")
    line = "who may open the page: 127.0.0.1 is this machine alone, 0.0.0.0 everybody who reaches it (%(default)s)"
    parser.add_argument("--address", default=LOCAL, help=line)
    parser.add_argument("--max-upload", default=20.0, type=float, metavar="MB", help="of a picture (%(default)s)")


def demo(given: argparse.Namespace) -> Iterator[str]:
    """Serves the page until it is stopped.

    Raises:
        MissingDependency: without gradio.
    """
    from llava_consensus import hosts

    if given.port is not None and not 1 <= given.port <= PORTS:
        raise OptionError(f"port={given.port} must be in 1..{PORTS}")
    if not given.max_upload > 0:
        raise OptionError(f"max-upload={given.max_upload} must be above 0")
    if find_spec("gradio") is None:
        raise missing_extra("the page (gradio)", "demo")
    loading, options = arguments.loading(given), arguments.host_options(given)
    hosts.check(given.model, None, loading, host_options=options)
    host = hosts.load(given.model, loading, options)
    from llava_consensus.demo import app, samples

    blocks = app.build(host, given.model, samples.samples(given.data), given.max_upload)
    try:
        yield f"open {app.launch(blocks, given.address, given.port, given.max_upload)} (Ctrl-C ends it)"
        if given.address != LOCAL:
            yield f"everybody who reaches {given.address} may use it: there is no password"
        threading.Event().wait()
    finally:
        blocks.close()
