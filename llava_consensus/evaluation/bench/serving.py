"""Requests a second, and times to the first token and between tokens, of servers with a method and of plain vLLM, asked
over HTTP as clients ask them. The servers of one run are all up and take turns; plain vLLM runs without the plugin.

Every request, or every chat of several, has a new image, so no image is a cache hit.
"""

import base64
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count, islice, product
from pathlib import Path
from typing import NamedTuple

import pandas
from PIL import ImageChops
from PIL.Image import Image

from llava_consensus.errors import ConsensusError
from llava_consensus.evaluation.bench.timing import in_rounds
from llava_consensus.evaluation.files import Record
from llava_consensus.serving.parent import PARENT, bind
from llava_consensus.serving.supported import ASKED, TOKENS

SPIN = 1.5  # seconds: a worker of vLLM that had work polls for more for one second, and would slow the next server
ENVIRONMENT = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}
LOOK = 5.0  # seconds between looks whether a server lives
PER_CLIENT = 8
TWO = 3  # one of this number of chats is about two images
PLAIN = ("-m", "vllm.entrypoints.openai.api_server", "--model")  # and the model


class ServedCase(NamedTuple):
    name: str  # plain, or of a method
    overrides: Record | None = None  # vLLM's `hf_overrides`; None: plain vLLM
    tokens: int | float | None = None  # of each image


class ServedQuestion(NamedTuple):
    """Prompt of one measurement: question, images, length of the answer."""

    question: str
    images: Sequence[Image]
    length: int  # tokens of each answer
    requests: int = 32  # of each load, at most PER_CLIENT for each at once
    turns: int = 1  # of several, a request is a chat with this system prompt
    system: str = ""


class Server(NamedTuple):
    port: int
    process: "subprocess.Popen[bytes]"
    log: Path

    def wait(self, patience: float = 900) -> None:
        """Waits until it answers. ConsensusError if it does not within these seconds."""
        end = time.monotonic() + patience
        while True:
            if self.process.poll() is not None or time.monotonic() > end:
                raise self.failed("it did not come up")
            try:
                return self.check()
            except OSError:
                time.sleep(0.5)

    def check(self) -> None:
        """OSError if it does not answer, for a dead engine too."""
        urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=60).close()

    def failed(self, why: str) -> ConsensusError:
        return ConsensusError(
            f"a server ended: {why}. Its log ends with:\n{self.log.read_text(errors='replace')[-4000:]}"
        )


@contextmanager
def server(command: Callable[[str], list[str]], environment: Record | None = None) -> Iterator[Server]:
    """A server that starts, and ends with the body: all of its processes, also one that is still starting. `command`
    gives the words after Python's own, of vLLM's arguments that say host and port.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, *command(f"--host 127.0.0.1 --port {port}")]

    def prepare() -> None:
        """In the new process, before it becomes the server: it ends with this one, and its engine with it."""
        os.environ.update({**ENVIRONMENT, **(environment or {}), PARENT: str(os.getpid())})
        bind()

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with (
            log.open("wb") as file,
            subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True, preexec_fn=prepare) as process,
        ):
            try:
                yield Server(port, process, log)
            finally:
                end_group(process)


def end_group(process: "subprocess.Popen[bytes]", patience: float = 20) -> None:
    """Ends a process that leads a process group. It has these seconds to end its children; the rest is killed."""
    with suppress(ProcessLookupError):  # nothing of the group is left
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        os.killpg(process.pid, signal.SIGKILL)


def measure(
    model: str,
    cases: Sequence[ServedCase],
    loads: Sequence[int],
    asked: ServedQuestion,
    repeats: int,
    arguments: str,
    done: Sequence[Record] = (),
) -> Iterator[Record]:
    """A record for each case and load (requests at once) in each round that is not `done`, after a round that does not
    count. Cases of one name share a server.
    """
    items, overrides = list(product(loads, cases)), {case.name: case.overrides for case in cases}
    places = [(case.name, case.tokens, f"{load} at once") for load, case in items]
    known = {(one["round"], places.index((one["case"], one["tokens"], one["load"]))) for one in done}
    if len(known) == repeats * len(items):
        return
    numbers = count()

    def command(name: str, where: str) -> list[str]:
        own = [] if overrides[name] is None else ["--hf-overrides", json.dumps(overrides[name])]
        return [*PLAIN, model, *arguments.split(), *where.split(), *own]

    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(server(partial(command, name), {"VLLM_PLUGINS": ""} if own is None else None))
            for name, own in overrides.items()
        }
        for one in servers.values():
            one.wait()

        def take(item: tuple[int, ServedCase]) -> Record:
            load, case = item
            fewer = min(asked.requests, -(-PER_CLIENT // asked.turns) * load)
            bodies = [_body(model, asked, visual, case.tokens) for visual in islice(numbers, fewer)]
            time.sleep(SPIN)
            return driven(servers[case.name], bodies, load, asked.turns)

        for turn, index, found in in_rounds(items, repeats, 1, known, take):
            name, tokens, load = places[index]
            yield {"round": turn, "case": name, "tokens": tokens, "load": load, **found}


def _body(model: str, asked: ServedQuestion, number: int, tokens: int | float | None) -> Record:
    """A question about a new image, in a third of the chats about two."""
    shown = [number, -1 - number] if asked.turns > 1 and number % TWO == 0 else [number]
    parts = [*(_part(asked.images, one) for one in shown), {"type": "text", "text": asked.question}]
    messages = [{"role": "system", "content": asked.system}] if asked.system else []
    body = {"model": model, "messages": [*messages, {"role": "user", "content": parts}], "max_tokens": asked.length}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    if tokens is not None:
        body["mm_processor_kwargs"] = {TOKENS: tokens, ASKED: asked.question}
    return body


def _part(images: Sequence[Image], number: int) -> Record:
    """An image: a given one, shifted by some pixels everywhere, since resizing may lose a smaller change."""
    image, file = images[number % len(images)], io.BytesIO()
    ImageChops.offset(image, 2 * number % image.width, 2 * number // image.width).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def driven(server: Server, bodies: Sequence[Record], at_once: int, turns: int = 1) -> Record:
    """Times in seconds of requests or chats, `at_once` of them at a time; `opening_p50` is of the first request of each
    chat. A server that fails at one, or dies, is ended, with ConsensusError.
    """
    start = time.perf_counter()

    def ask(body: Record) -> tuple[float, float, float]:
        """Seconds to the first token, from it to each further one, and from the start of all to the end."""
        begun = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=3600)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"status {answer.status}: {answer.read()[:500].decode(errors='replace')}")
        came = [(time.perf_counter(), line) for line in answer if line.startswith(b"data: ")]
        connection.close()
        timed = [(when, line) for when, line in came if b'"choices"' in line]  # a role, then tokens
        if [line for _, line in came[len(timed) :]] != [b"data: [DONE]\n"]:  # an error comes as a line too
            raise OSError(f"an answer broke off: {[line for _, line in came[-2:]]}")
        if turns > 1:
            deltas = (json.loads(line[6:])["choices"][0]["delta"] for _, line in timed)
            said = {"role": "assistant", "content": "".join(one.get("content") or "" for one in deltas)}
            body["messages"] += [said, {"role": "user", "content": body["messages"][-1]["content"][-1:]}]
        first, last = timed[0][0], timed[-1][0]
        return first - begun, (last - first) / max(len(timed) - 2, 1), last - start

    with ThreadPoolExecutor(at_once) as pool:
        asked = [pool.submit(lambda body: [ask(body) for _ in range(turns)], body) for body in bodies]
        try:
            for one in asked:
                while not wait([one], LOOK).done:
                    server.check()
            chats = [one.result() for one in asked]
        except BaseException as wrong:
            end_group(server.process)  # else the pool would wait for its answers
            if isinstance(wrong, OSError | http.client.HTTPException):
                raise server.failed(str(wrong)) from wrong
            raise
    firsts, steps, ends = map(sorted, zip(*(times for chat in chats for times in chat), strict=True))
    opening = sorted(chat[0][0] for chat in chats)
    return {
        "requests_per_second": len(ends) / ends[-1],
        "first_token_p50": firsts[len(firsts) // 2],
        "first_token_p99": firsts[min(len(firsts) - 1, round(0.99 * len(firsts)))],
        "opening_p50": opening[len(opening) // 2],
        "per_token": steps[len(steps) // 2],
    }


def lines(records: Sequence[Record]) -> Iterator[str]:
    """A table in Markdown: medians over rounds, in brackets those of the ratios to plain vLLM in the same round."""
    yield "| server | tokens | requests | requests/s | first token p50, p99 (ms) | per token (ms) |"
    yield f"| :-- |{' --: |' * 5}"
    frame = pandas.DataFrame([{**one, "tokens": str(one["tokens"] or "all")} for one in records]).set_index("round")
    measured = ["requests_per_second", "first_token_p50", "first_token_p99", "per_token"]
    for (load, case, tokens), own in frame.groupby(["load", "case", "tokens"], sort=False):
        plain = frame[(frame["case"] == "plain") & (frame["load"] == load)]
        rate, first, last, step = own[measured].median()
        ratios = (own[measured] / plain[measured]).median()
        yield (
            f"| {case} | {tokens} | {load} | {rate:.2f} ({ratios.iloc[0]:.2f}) | {1e3 * first:.0f}, {1e3 * last:.0f} "
            f"({ratios.iloc[1]:.2f}) | {1e3 * step:.1f} ({ratios.iloc[3]:.2f}) |"
        )
