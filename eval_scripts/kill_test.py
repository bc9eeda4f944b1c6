"""SIGKILL a real evaluation at random moments, let it go on each time, and compare with an undisturbed run.

Run: `python eval_scripts/kill_test.py gqa --limit 400 --kills 20`. Ends with one JSON line; exit code 1 if any question
was lost or asked twice, or if answers or metrics differ.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from llava_consensus.runs import DATA, MODEL


def evaluate(arguments: argparse.Namespace, out: Path) -> subprocess.Popen[bytes]:
    """Starts one evaluation."""
    command = [sys.executable, "-m", "llava_consensus.cli", "eval", arguments.benchmark, "--no-progress"]
    command += ["--model", arguments.model, "--data", arguments.data, "--out", str(out)]
    command += ["--limit", str(arguments.limit)]
    command += ["--tokens", str(arguments.tokens), "--batch", str(arguments.batch)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def written(out: Path) -> int:
    """Bytes of answers so far."""
    return sum(path.stat().st_size for path in out.glob("*/answers.jsonl"))


def complete(out: Path) -> bool:
    """Whether the run wrote its last file."""
    return bool(list(out.glob("*/metrics.json")))


def disturb(arguments: argparse.Namespace, out: Path, moments: random.Random) -> bool:
    """Starts the run and kills it soon after its first new answers; one time in four at any moment from its start."""
    before, child = written(out), evaluate(arguments, out)
    if moments.random() < 0.75:
        while child.poll() is None and written(out) == before:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, arguments.span))
    else:
        time.sleep(moments.uniform(0, 15))
    killed = child.poll() is None
    if killed:
        child.send_signal(signal.SIGKILL)
    child.communicate()
    return killed


def outcome(out: Path) -> tuple[list[tuple[int, str, str]], dict[str, Any]]:
    """Answers in the order they stand in, and metrics without times."""
    run = next(out.glob("*/metrics.json")).parent
    lines = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    metrics = json.loads((run / "metrics.json").read_text())
    steady = {key: value for key, value in metrics.items() if key not in ("timing", "environment")}
    return [(one["metadata"]["index"], one["prompt"], one["text"]) for one in lines], steady


def main() -> int:
    """Kills, finishes, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", nargs="?", default="gqa")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", default=DATA)
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--span", type=float, default=0.5, help="seconds after the first new answers, at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    moments, kills, cut = random.Random(arguments.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        killed, whole = Path(folder) / "killed", Path(folder) / "undisturbed"
        while kills < arguments.kills and not complete(killed):
            kills += disturb(arguments, killed, moments)
            cut += any(path.read_bytes()[-1:] not in (b"", b"\n") for path in killed.glob("*/answers.jsonl"))
            print(f"kill {kills}: {written(killed)} bytes of answers", file=sys.stderr)
        for out in (killed, whole):
            message = evaluate(arguments, out).communicate()[1].decode()
            if not complete(out):
                print(message, file=sys.stderr)
                return 1
        (answers, metrics), (expected, reference) = outcome(killed), outcome(whole)
    asked = [index for index, _, _ in answers]
    report = {
        "kills": kills,
        "cut_lines": cut,
        "questions": len(expected),
        "lost": len({index for index, _, _ in expected} - set(asked)),
        "twice": len(asked) - len(set(asked)),
        "same_answers": answers == expected,
        "same_metrics": metrics == reference,
    }
    print(json.dumps(report))
    return 0 if report["same_answers"] and report["same_metrics"] else 1


if __name__ == "__main__":
    sys.exit(main())
