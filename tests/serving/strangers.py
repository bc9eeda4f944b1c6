"""Random requests to a server, each followed by a question whose answer is known: what a stranger sends harms that
request alone. `PYTHONPATH=.:tests python tests/serving/strangers.py --count 5000 --state FILE` sends that many to each
of two servers of tiny models, in pieces of PIECE: the file has what was answered and the memory of each server, and
the same command goes on where it was stopped. `--minutes 3` stops by itself.
"""

import argparse
import base64
import io
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import requests
import small

from llava_consensus.evaluation.bench.serving import server

ARGUMENTS = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 4"
BOUND = 1e-4  # of log-probabilities
PIECE = 50  # requests
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 5, 9, 10, 576, 2**31, 2**40, 2**41, 2**63 - 1, 2**63, 10**30, 0.1, 0.5, 0.999, 1.0),
    *(1e-300, -0.5, 1e308, float("nan"), float("inf"), "", "64", "auto", "\ud800", "w7 " * 2000, [], [5], [[[]]], {}),
    *({"height": 112, "width": 112}, {"shortest_edge": 0}, {"image": {}}, {"visual_tokens": 5}),
]
KEYS = """visual_tokens question crop_size size do_resize do_center_crop do_normalize image_mean patch_size min_pixels
max_pixels num_additional_image_tokens vision_feature_select_strategy image_grid_pinpoints return_tensors padding
images_kwargs truncation llava_consensus_request reduction_budget image_reduction_tokens num_frames device"""
FIELDS = """max_tokens temperature top_p n logprobs top_logprobs prompt_logprobs echo stop seed logit_bias min_tokens
add_generation_prompt continue_final_message stream priority user truncate_prompt_tokens messages model
mm_processor_kwargs structured_outputs structured_outputs media_io_kwargs chat_template_kwargs documents cache_salt
return_token_ids"""
STRUCTURED: list[Any] = [
    *({"grammar": text} for text in ("root ::= (", 'root ::= "w7"')),
    *({"regex": text} for text in ("(", "w[0-9]", "(a+)+$")),
    *({"json": schema} for schema in ("x", {"type": 7}, {"type": "object"})),
    *({"choice": words} for words in (["w7", "w8"], [])),
    *({}, 5),
]
CHOICES = {"n": [0, 2, "2", 1.5, None], "structured_outputs": STRUCTURED}
SIDES = [1, 2, 13, 56, 57, 120, 500, 3000]
SHAPES = [(1, 12_000), (100_000, 1), (1, 51), (650, 13), (40, 4000), (4032, 3024), (1080, 1920), (640, 480)]
MODES = ["RGB", "L", "RGBA", "P", "1", "LA", "I", "I;16", "F", "CMYK"]


class Server:
    def __init__(self, url: str, name: str, log: Path, group: int = 0) -> None:
        self.url, self.name, self.log, self.group = url, name, log, group

    def memory(self) -> dict[str, int]:
        """MiB in memory of its processes by their names, what they share counted with each."""
        found = Counter[str]()
        for one in psutil.process_iter(["name", "memory_info"]):
            with suppress(OSError):  # it has ended
                if os.getpgid(one.pid) == self.group:
                    found[one.info["name"]] += one.info["memory_info"].rss >> 20
        return dict(found)

    def body(self, *pictures: bytes, words: str = "w7 w8 w9", **more: Any) -> dict[str, Any]:
        parts = [*map(content_of, pictures), {"type": "text", "text": words}]
        own = {"model": self.name, "messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}
        return {**own, "ignore_eos": True, **more}

    def post(self, body: Any, path: str = "chat/completions", timeout: float = 60) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = requests.post(f"{self.url}/v1/{path}", data, headers=headers, timeout=timeout)
        try:
            return answer.status_code, answer.json()
        except ValueError:
            return answer.status_code, answer.text

    def ask(self, *pictures: bytes, **more: Any) -> tuple[int, Any]:
        """Status and answer to one question about pictures."""
        return self.post(self.body(*pictures, **more))

    def known(self, **more: Any) -> list[tuple[str, float]]:
        """Tokens of a fixed question's answer, and their log-probabilities."""
        status, answer = self.ask(png(1), logprobs=True, **more)
        assert status == 200, (status, answer, self.log.read_text()[-3000:])
        return [(one["token"], one["logprob"]) for one in answer["choices"][0]["logprobs"]["content"]]


def content_of(picture: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def png(number: int, size: tuple[int, int] = (70, 60), mode: str = "RGB", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    small.picture(number, size).convert(mode).save(file, kind)
    return file.getvalue()


@contextmanager
def serving(folder: Path, words: str, vllm: str = ARGUMENTS) -> Iterator[Server]:
    serve = ["-m", "llava_consensus.cli", "serve", str(folder), *words.split(), "--vllm"]
    with server(lambda own: [*serve, f"{vllm} {own}"], small.ENVIRONMENT) as started:
        started.wait()
        yield Server(f"http://127.0.0.1:{started.port}", str(folder), started.log, started.process.pid)


def picture_file(dice: random.Random, whole: bool) -> bytes:
    """An image of a random size and mode, whole or damaged; or no picture."""
    size = dice.choice(SHAPES) if dice.random() < 0.3 else (dice.choice(SIDES), dice.choice(SIDES))
    mode = dice.choice(MODES)
    kind = {"CMYK": "TIFF", "F": "TIFF", "I": "TIFF"}.get(mode) or dice.choice(["PNG", "TIFF"])
    kind = dice.choice([kind, "JPEG", "GIF", "WEBP", "BMP"]) if mode == "RGB" and max(size) < 16_000 else kind
    if mode == "I;16":
        file = io.BytesIO()
        small.picture(dice.randrange(99), size).convert("I").convert("I;16").save(file, kind)
        data = file.getvalue()
    else:
        data = png(dice.randrange(99), size, mode, kind)
    damage = 3 if whole else dice.randrange(6)
    if damage == 0:
        data = data[: dice.randrange(len(data))]
    elif damage == 1:
        flipped = bytearray(data)
        for _ in range(dice.choice([1, 3, 30])):
            flipped[dice.randrange(len(flipped))] = dice.randrange(256)
        data = bytes(flipped)
    elif damage == 2 and dice.random() < 0.3:
        data = dice.randbytes(dice.choice([0, 1, 50, 5000]))
    return data


def stranger(server: Server, dice: random.Random) -> tuple[str, Any]:
    value, valid = lambda: dice.choice(VALUES), dice.random() < 0.5
    words = " ".join(f"w{dice.randrange(3, 500)}" for _ in range(dice.choice([0, 1, 5, 30, 300])))
    if dice.random() < 0.1:
        words += " <image>" * dice.randrange(3)
    pictures = [picture_file(dice, whole=valid) for _ in range(dice.choice([0, 1, 1, 1, 1, 2, 4]))]
    body = server.body(*pictures, words=words, max_tokens=dice.choice([1, 2, 6]))
    if valid:  # half of them reach the engine
        body["mm_processor_kwargs"] = {"visual_tokens": dice.choice([1, 2, 5, 6, 9, 0.1, 0.5, 0.9, "auto"])}
        return "chat/completions", body
    if dice.random() < 0.6:
        keys = dice.sample(KEYS.split(), dice.choice([1, 1, 2]))
        body["mm_processor_kwargs"] = {dice.choice(["visual_tokens", key]): value() for key in keys}
    if dice.random() < 0.15:
        body["media_io_kwargs"] = dice.choice([value(), {"image": {"image_mode": value()}}])
    for _ in range(dice.choice([0, 0, 1, 2])):
        name = dice.choice(FIELDS.split())
        body[name] = dice.choice(CHOICES.get(name, VALUES))
    shaped = isinstance(body["messages"], list) and body["messages"] and isinstance(body["messages"][0], dict)
    if shaped and dice.random() < 0.1:
        body["messages"][0]["content"] = dice.choice([words, value(), [value()], [{"type": value(), "text": value()}]])
    if shaped and dice.random() < 0.05:
        url = dice.choice(["file:///etc/passwd", "http://127.0.0.1:1/a", "data:image/png,x", "x"])
        body["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": url}}]
    path = dice.choice(["chat/completions"] * 8 + ["completions"])
    if path == "completions":
        body = {**body, "prompt": dice.choice([words, words + " <image>", value()])}
        body.pop("messages")
    if dice.random() < 0.03:
        return path, dice.choice([b"", b"{", b"[]", b"null", json.dumps(body).encode()[:-40]])
    return path, body


def fuzz(server: Server, count: int, seed: int = 0) -> Counter[int]:
    """Statuses of random requests. AssertionError where the server fails at one, or answers differently after it."""
    dice, before, statuses, failed = random.Random(seed), server.known(), Counter[int](), []
    for number in range(count):
        path, body = stranger(server, dice)
        what = f"request {number} of seed {seed}: {str(body)[-600:]}"
        try:
            status, answer = server.post(body, path, timeout=dice.choice([60, 60, 60, 0.01]))
        except OSError:  # a client that went away
            status, answer = 0, ""
        statuses[status] += 1
        if status >= 500:
            failed.append(f"{what}\n{status} {str(answer)[:600]}")
        after = server.known()
        assert [token for token, _ in after] == [token for token, _ in before], what
        assert all(abs(own - other) < BOUND for (_, own), (_, other) in zip(after, before, strict=True)), what
    assert not failed, "\n".join(failed)
    return statuses


def main() -> None:
    """Two servers, one whose method reads the prompt and one whose does not."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--count", type=int, default=500)
    reader.add_argument("--state", type=Path, default=Path("strangers.json"))
    reader.add_argument("--minutes", type=float, default=1e9)
    given = reader.parse_args()
    end = time.monotonic() + 60 * given.minutes
    state = json.loads(given.state.read_text()) if given.state.exists() else {}
    for family, words in (
        ("llava", "--method visionzip --tokens 5 --largest 9"),
        ("llava_next", "--method consensusdrop --tokens 6 --largest 0.9"),
    ):
        pieces = state.setdefault(f"{family} {words}", [])
        if PIECE * len(pieces) >= given.count or time.monotonic() > end:
            continue
        with tempfile.TemporaryDirectory() as folder:
            small.FAMILIES[family](Path(folder))
            with serving(Path(folder), words) as server:
                while PIECE * len(pieces) < given.count and time.monotonic() < end:
                    statuses = fuzz(server, PIECE, seed=len(pieces))
                    memory = sum(server.memory().values())
                    pieces.append({"statuses": dict(sorted(statuses.items())), "memory": memory})
                    given.state.write_text(json.dumps(state, indent=1))
    for name, pieces in state.items():
        total = sum((Counter(piece["statuses"]) for piece in pieces), Counter[str]())
        print(name, PIECE * len(pieces), dict(total), "MiB:", [piece["memory"] for piece in pieces], flush=True)


if __name__ == "__main__":
    main()
