"""Time to the first token and peak memory of official implementations, of ours and of the full model, in one run.

    python -m eval_scripts.against_official --pinned .venv-pinned/bin/python --current .venv/bin/python \\
        --visionzip DIR --vispruner DIR --fastv DIR --sparsevlm DIR --shape mini --rounds 5 --out FILE

A directory is a checkout of the official repository; what is not given is left out, and said. `--pinned` is an
interpreter with LLaVA's own pins, under which official code, ours beside it and the full model run; `--current` is one
with current transformers, for Hugging Face's `generate` without us and for ours as it is installed. Every side is a
process of its own (`official_side.py`), on one thread, and one of them measures at a time. Rounds go forwards and
backwards in turn, so that a busy machine hits all sides; a ratio is made within a round. Processes wait for the next
round; with `--fresh` each round starts them anew, which takes less memory and more time. Sides are compared only where
every layer of the language model reads equally many visual tokens.

`--shape clip-l` writes a model of random weights (`random_llava.py`) into `--work`, which keeps it.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eval_scripts.official_side import MARK, PATCHES, SOURCES, Task

ROOT = Path(__file__).parents[1]
BASIS = "official/visionzip"  # what ConsensusDrop is compared with
Folders = tuple[Path, Path, Path]  # the model in the official layout, in that of Hugging Face, and its tower
Rows = dict[tuple[str, int], list[dict[str, Any]]]  # of each side and budget, one of each round


class Ratio(NamedTuple):
    """One side over another in each round; none with the reason where they cannot be compared."""

    side: str
    other: str
    tokens: int
    rounds: tuple[float, ...]
    refused: str = ""

    def text(self) -> str:
        """A line of the report."""
        start = f"{self.side} / {self.other} at {self.tokens}: "
        if not self.rounds:
            return f"{start}not compared: {self.refused}"
        return f"{start}{statistics.median(self.rounds):.2f} ({min(self.rounds):.2f} to {max(self.rounds):.2f})"


@dataclass(frozen=True)
class Given:
    """Paths and numbers of the command line."""

    pinned: str
    current: str
    checkouts: Mapping[str, str]
    shape: str
    work: Path
    tokens: tuple[int, ...]
    repeats: int
    warmup: int = 3


def sides(given: Given) -> list[str]:
    """Every side that can be measured; prints which cannot."""
    for name in SOURCES:
        if name not in given.checkouts:
            print(f"left out: official/{name} (no --{name})")
    methods = [*given.checkouts, "consensusdrop"]
    names = ["full", "tower", *(f"official/{name}" for name in given.checkouts), *(f"ours/{name}" for name in methods)]
    if given.current:
        return [*names, *(f"current/{name}" for name in methods), "hf", "hf-ours/consensusdrop"]
    print("left out: hf, hf-ours and current (no --current)")
    return names


def models(given: Given) -> Folders:
    """The folders of the model; what is missing is made."""
    given.work.mkdir(parents=True, exist_ok=True)
    if given.shape == "mini":
        model, tower = ROOT / "checkpoints" / "llava-mini", given.work / "clip-tower"  # VisPruner goes by this name
        if not tower.exists():
            tower.symlink_to(model / "vision_tower")
    else:
        model = given.work / "llava-clip-l"
        tower = model / "clip-tower"
        if not model.exists():
            called([given.pinned, "-m", "eval_scripts.random_llava", str(model)])
    layout = given.work / f"{given.shape}-hf"
    if (given.current or "fastv" in given.checkouts) and not layout.exists():
        called(
            [given.current or given.pinned, "-m", "llava_consensus.cli", "model", "convert", str(model), str(layout)]
        )
    return model, layout, tower


def called(command: Sequence[str]) -> None:
    """Runs a command from the repository to its end."""
    subprocess.run(command, cwd=ROOT, env=environment(), check=True)


def environment() -> dict[str, str]:
    """Of a process that computes on one thread and asks no hub."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE"), "1")
    return {**os.environ, **one, "PYTHONPATH": str(ROOT)}


class Worker:
    """The process of one side, started at its first turn."""

    def __init__(self, name: str, given: Given, folders: Folders) -> None:
        model, layout, tower = folders
        kind, _, method = name.partition("/")
        folder = layout if kind in ("hf", "hf-ours") or name == "official/fastv" else model
        checkout = given.checkouts[method] if kind == "official" else ""
        task = Task(name, str(folder), str(tower), checkout, given.tokens, given.warmup, given.repeats)
        interpreter = given.current if kind in ("hf", "hf-ours", "current") else given.pinned
        self.name, self.command = name, [interpreter, "-m", "eval_scripts.official_side", task.text()]
        self.process: subprocess.Popen[str] | None = None
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open until this object goes

    def turn(self) -> dict[str, Any]:
        """What the side measures now. ChildProcessError with its last words where it does not run."""
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
            self.process = subprocess.Popen(self.command, cwd=ROOT, env=environment(), text=True, **pipes)  # type: ignore[call-overload]
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("measure\n")
            process.stdin.flush()
        for line in process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        process.wait()
        self.errors.seek(0)
        raise ChildProcessError((self.errors.read().strip().splitlines() or ["it said nothing"])[-1])

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.communicate()
        self.process = None


def ratio(rows: Rows, side: str, other: str, tokens: int, key: str = "ttft_ms") -> Ratio | None:
    """Median of `side` over that of `other`, round by round; None where one of them was not measured.

    Args:
        rows: of each side and budget; full models and the tower have the budget of all tokens.
        key: field with the samples.
    """
    above, below = (rows.get((name, tokens)) or rows.get((name, PATCHES)) for name in (side, other))
    if not above or not below:
        return None
    if side != "tower" and other not in ("full", "hf") and above[0]["layers"] != below[0]["layers"]:
        reason = f"visual tokens of each layer are {above[0]['layers']} and {below[0]['layers']}"
        return Ratio(side, other, tokens, (), reason)
    of_round = {row["round"]: row[key] for row in below}
    pairs = [(row[key], of_round[row["round"]]) for row in above if row["round"] in of_round]
    found = tuple(statistics.median(one) / statistics.median(two) for one, two in pairs)
    return Ratio(side, other, tokens, found, "" if found else "no round has both")


def ratios(rows: Rows, key: str = "ttft_ms") -> list[Ratio]:
    """All comparisons: ours with official code of the same method, ConsensusDrop with official VisionZip, every side
    with the full model, those on the model of transformers with that one; and the tower alone with official code.
    """
    wanted = []
    for side, tokens in rows:
        kind, _, method = side.partition("/")
        if kind in ("ours", "current"):
            wanted.append((side, BASIS if method == "consensusdrop" else f"official/{method}", tokens))
        if kind == "official":
            wanted.append(("tower", side, tokens))
        if method:
            wanted.append((side, "hf" if kind == "hf-ours" else "full", tokens))
    found = (ratio(rows, *one, key) for one in wanted)
    return [one for one in found if one is not None]


def table(rows: Rows) -> list[str]:
    """Lines of Markdown: medians over rounds of the rounds' medians, with their range, and memory."""
    head = ["side", "tokens", "rows of each layer", "first token (ms)", "range", "processor (ms)", "peak (MiB)"]
    lines = [f"| {' | '.join([*head, 'of the answer (MiB)'])} |", "|---|--:|---|--:|--:|--:|--:|--:|"]
    for (side, tokens), found in rows.items():
        times = [statistics.median(row["ttft_ms"]) for row in found]
        spent = statistics.median(statistics.median(row["processor_ms"]) for row in found)
        sizes = [statistics.median(row[key] or 0 for row in found) / 2**20 for key in ("peak_bytes", "answer_bytes")]
        numbers = [statistics.median(times), spent, *sizes]
        first, *others = [f"{number:.0f}" for number in numbers]
        cells = [side, str(tokens), steps(found[0]["layers"]), first, f"{min(times):.0f} to {max(times):.0f}", *others]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def steps(layers: Sequence[int]) -> str:
    """Visual tokens of each layer, runs of equal numbers as one: `2 x 576, 10 x 64`."""
    runs: list[list[int]] = []
    for count in layers:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return ", ".join(f"{length} x {count}" for length, count in runs)


def one_round(number: int, workers: Sequence[Worker], fresh: bool, rows: Rows, failed: dict[str, str]) -> None:
    """Adds a round of every side that has not failed."""
    for worker in workers if number % 2 == 0 else workers[::-1]:
        if worker.name in failed:
            continue
        try:
            found = worker.turn()
        except ChildProcessError as error:
            failed[worker.name] = str(error)
            print(f"{worker.name}: does not run here: {error}", flush=True)
            continue
        finally:
            if fresh:
                worker.close()
        for row in found["rows"]:
            about = {"round": number, "load": found["load"], "versions": found["versions"]}
            rows.setdefault((worker.name, row["tokens"]), []).append({**row, **about})
            if number == 0:
                print(f"{worker.name}: {row['how']}; visual tokens of each layer: {steps(row['layers'])}", flush=True)


def save(out: str, shape: str, rows: Rows, failed: Mapping[str, str]) -> None:
    """Writes all samples, where a file was named."""
    if out:
        samples = [{"side": side, **row} for (side, _), found in rows.items() for row in found]
        Path(out).write_text(json.dumps({"shape": shape, "failed": failed, "samples": samples}, indent=1) + "\n")


def report(rows: Rows, failed: Mapping[str, str]) -> None:
    """Prints the table, the ratios, and what did not run."""
    print("\n".join(["", *table(rows), "", "First token, median of the rounds and their range:"]))
    print("\n".join(one.text() for one in ratios(rows)))
    print("Processor time, the same:")
    print("\n".join(one.text() for one in ratios(rows, "processor_ms")))
    print("\n".join(f"{name}: does not run here: {reason}" for name, reason in failed.items()))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pinned", default=sys.executable, help="interpreter with LLaVA's pins")
    parser.add_argument("--current", default="", help="interpreter with current transformers")
    for name in SOURCES:
        parser.add_argument(f"--{name}", default="", help="checkout of the official repository")
    parser.add_argument("--shape", choices=("mini", "clip-l"), default="mini")
    parser.add_argument("--tokens", default="192 64 32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3, help="answers of a round that do not count, at each budget")
    parser.add_argument("--repeats", type=int, default=3, help="answers of a round that count, at each budget")
    parser.add_argument("--fresh", action="store_true", help="start the processes anew in each round")
    parser.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "against-official"))
    parser.add_argument("--only", default="", help="names of sides; all others are left out")
    parser.add_argument("--out", default="", help="file for all samples, as JSON")
    return parser.parse_args()


def main() -> None:
    """Measures round by round, and writes what there is after each."""
    told = arguments()
    checkouts = {name: str(Path(getattr(told, name)).resolve()) for name in SOURCES if getattr(told, name)}
    budgets, work = tuple(int(word) for word in told.tokens.split()), Path(told.work).resolve()
    given = Given(told.pinned, told.current, checkouts, told.shape, work, budgets, told.repeats, told.warmup)
    folders, names = models(given), sides(given)
    workers = [Worker(name, given, folders) for name in names if not told.only or name in told.only.split()]
    rows: Rows = {}
    failed: dict[str, str] = {}
    try:
        for number in range(told.rounds):
            one_round(number, workers, told.fresh, rows, failed)
            save(told.out, given.shape, rows, failed)
            print(f"round {number + 1} of {told.rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
    finally:
        for worker in workers:
            worker.close()
    report(rows, failed)


if __name__ == "__main__":
    main()
