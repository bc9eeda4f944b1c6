"""SIGKILL real commands at random moments, let them go on each time, and compare with undisturbed ones.

Run: `python tools/kill_test.py eval --limit 40 --kills 20`, and the same with sweep, workers or judge. Ends with
one JSON line; exit code 1 if anything was lost or asked twice, or if a file differs. Of several processes the
driver is killed, or one of the others and then the driver.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from llava_consensus.evaluation.runs import DATA, MODEL

GROWING = ("*/answers.jsonl", "replies.jsonl")
SAME = ("config.json", "answers.jsonl", "errors.jsonl", "scores.jsonl")
PASSING = ("timing", "environment", "replies")  # of metrics: other in every run
WAYS = ("eval", "sweep", "workers", "judge")


class Judge(BaseHTTPRequestHandler):
    """Grades by the length of what it is asked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """One reply, after a moment."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.2)
        message = {"role": "assistant", "content": f"0.{len(body) % 10}"}
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "j", "choices": [choice]})
        content = json.dumps({**json.loads(reply), "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    """Asked by processes that die."""

    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Who asked is dead."""


def command(given: argparse.Namespace, out: Path) -> list[str]:
    """The command line that is killed."""
    start = [sys.executable, "-m", "llava_consensus.cli"]
    place = ["--data", given.data, "--out", str(out), "--no-progress"]
    if given.way == "judge":
        asked = ["judge", "mmvet", "--answers", str(given.answers), "--judge-model", "j", "--concurrency", "2"]
        return [*start, *asked, "--judge-url", given.url, *place]
    asked = [
        "--model",
        given.model,
        "--limit",
        str(given.limit),
        "--batch",
        str(given.batch),
        "--device",
        "cpu",
        *place,
    ]
    if given.way == "sweep":
        return [*start, "sweep", "--bench", given.benchmark, "--methods", "random", "--tokens", "64 32", *asked]
    workers = ["--workers", "2"] if given.way == "workers" else []
    return [*start, "eval", given.benchmark, "--tokens", "64", *workers, *asked]


def begin(given: argparse.Namespace, out: Path) -> "subprocess.Popen[bytes]":
    """Starts it."""
    return subprocess.Popen(command(given, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def written(out: Path) -> int:
    """Bytes of answers so far."""
    return sum(path.stat().st_size for pattern in GROWING for path in out.glob(pattern) if path.exists())


def complete(given: argparse.Namespace, out: Path) -> bool:
    """Whether the last file is there."""
    return len(list(out.glob("*/metrics.json"))) == (3 if given.way == "sweep" else 1)


def others(driver: int) -> Iterator[int]:
    """Processes that ask for the driver."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if _parent(path.name) == driver and b"spawn_main" in (path / "cmdline").read_bytes():
                yield int(path.name)
        except OSError:  # ended meanwhile
            continue


def _parent(process: str) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def disturb(given: argparse.Namespace, out: Path, moments: random.Random) -> int:
    """Starts the command and kills it soon after its first new answers, one time in four at any moment. Returns how
    many processes were killed.
    """
    before, child, killed = written(out), begin(given, out), 0
    if moments.random() < 0.75:
        while child.poll() is None and written(out) == before:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, given.span))
    else:
        time.sleep(moments.uniform(0, given.start))
    if moments.random() < 0.3:
        for process in sorted(others(child.pid))[:1]:
            subprocess.run(["kill", "-9", str(process)], check=False, stderr=subprocess.DEVNULL)
            killed += 1
            time.sleep(moments.uniform(0, given.span))
    if child.poll() is None:
        child.send_signal(signal.SIGKILL)
        killed += 1
    child.communicate()
    return killed


def content(out: Path) -> dict[str, Any]:
    """Every file that must be the same, and metrics without what is of one run alone."""
    found: dict[str, Any] = {
        f"{path.parent.name}/{name}": path.read_bytes() for name in SAME for path in out.glob(f"*/{name}")
    }
    for path in out.glob("*/metrics.json"):
        metrics = json.loads(path.read_bytes())
        found[f"{path.parent.name}/metrics.json"] = {
            name: value for name, value in metrics.items() if name not in PASSING
        }
    return found


def asked(out: Path) -> Counter[Any]:
    """How often every question was answered."""
    found: Counter[Any] = Counter()
    for path in out.glob("*/answers.jsonl"):
        found.update((path.parent.name, json.loads(line)["metadata"]["index"]) for line in path.open())
    for path in out.glob("replies.jsonl"):
        found.update(line["key"] for line in map(json.loads, path.open()))
    return found


def main() -> int:
    """Kills, finishes, compares; as often as it takes for so many kills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--benchmark", default="gqa")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", default=DATA)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--span", type=float, default=0.5, help="seconds after the first new answers, at most")
    parser.add_argument("--start", type=float, default=15, help="seconds a start may take")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    server = Server(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    given.url = f"http://127.0.0.1:{server.server_port}/v1"
    with tempfile.TemporaryDirectory() as folder:
        given.answers = Path(folder) / "answers.jsonl"
        if given.way == "judge":
            questions = (Path(given.data) / "eval/mm-vet/llava-mm-vet.jsonl").read_text().splitlines()
            rows = ({"question_id": json.loads(line)["question_id"], "text": f"a {len(line)}"} for line in questions)
            given.answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
        report = compare(given, Path(folder))
    print(json.dumps(report))
    return int(bool(report["lost"] or report["twice"] or report["different"]))


def compare(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Rounds of kills, each held against the undisturbed command."""
    moments, report = random.Random(given.seed), Counter[str]({"kills": 0, "rounds": 0})
    whole = folder / "whole"
    finish(given, whole)
    expected, questions = content(whole), asked(whole)
    different = set()
    while report["kills"] < given.kills:
        out = folder / f"killed{report['rounds']}"
        report["rounds"] += 1
        while report["kills"] < given.kills and not complete(given, out):
            report["kills"] += disturb(given, out, moments)
            print(f"kill {report['kills']}: {written(out)} bytes of answers", file=sys.stderr, flush=True)
        finish(given, out)
        found, answers = content(out), asked(out)
        report["lost"] += len(questions.keys() - answers.keys())
        report["twice"] += sum(count - 1 for count in answers.values())
        different |= {name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)}
    return {"way": given.way, "lost": 0, "twice": 0, **report, "questions": len(questions), "different": [*different]}


def finish(given: argparse.Namespace, out: Path) -> None:
    """Runs the command to its end."""
    child = begin(given, out)
    message = child.communicate()[1].decode()
    if child.returncode or not complete(given, out):
        raise SystemExit(message)


if __name__ == "__main__":
    sys.exit(main())
