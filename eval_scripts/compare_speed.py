"""Questions per second of this harness and of LLaVA's own loop, on the same questions, model, threads and machine.

Run it: python eval_scripts/compare_speed.py [--limit 240 --batch 32]. Both sides answer with all 576 visual tokens, one
after the other, `--repeats` times; texts are compared question by question. The last line of standard output is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from llava_consensus.runs import DATA, MODEL


def official(questions: Path, images: Path, folder: Path, given: argparse.Namespace) -> tuple[float, list[str]]:
    """Seconds and texts of LLaVA's own loop."""
    answers = folder / "official.jsonl"
    files = ["--question-file", questions, "--image-folder", images, "--answers-file", answers]
    fixed = ["--temperature", "0", "--conv-mode", "vicuna_v1", "--max_new_tokens", given.max_new_tokens]
    command = [sys.executable, "eval_scripts/official_loop.py", "--model-path", given.model, *map(str, files + fixed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.strip().split("\n")[-1])["seconds"], texts(answers)


def ours(folder: Path, given: argparse.Namespace) -> tuple[float, list[str]]:
    """Seconds and texts of this harness, with every token."""
    command = [sys.executable, "-m", "llava_consensus.cli", "eval", "gqa", "--method", "full", "--model", given.model]
    command += ["--data", given.data, "--out", str(folder), "--limit", str(given.limit), "--batch", str(given.batch)]
    command += ["--max-new-tokens", str(given.max_new_tokens)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (run,) = folder.glob("gqa-full-*")
    return json.loads((run / "metrics.json").read_text())["timing"]["seconds"], texts(run / "answers.jsonl")


def texts(answers: Path) -> list[str]:
    """The answers of an answer file, in order."""
    return [json.loads(line)["text"] for line in answers.read_text().splitlines()]


def main() -> None:
    """Measures both sides in turn and prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", default=DATA)
    parser.add_argument("--limit", type=int, default=240)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    gqa = Path(given.data) / "eval" / "gqa"
    seconds: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        questions = Path(temporary) / "questions.jsonl"
        lines = (gqa / "llava_gqa_testdev_balanced.jsonl").read_text().splitlines()[: given.limit]
        questions.write_text("\n".join(lines) + "\n")
        for repeat in range(given.repeats):
            folder = Path(temporary) / str(repeat)
            folder.mkdir()
            theirs, said = official(questions, gqa / "data" / "images", folder, given)
            own, answered = ours(folder, given)
            same = sum(a == b for a, b in zip(said, answered, strict=True))
            print(
                f"LLaVA's loop {theirs:.1f} s, ours {own:.1f} s: {theirs / own:.2f} x, {same}/{len(said)} texts equal"
            )
            seconds.append((theirs, own))
    ratio = statistics.median(theirs / own for theirs, own in seconds)
    rates = [given.limit / statistics.median(column) for column in zip(*seconds, strict=True)]
    print(json.dumps({"questions": given.limit, "official_per_s": rates[0], "ours_per_s": rates[1], "ratio": ratio}))


if __name__ == "__main__":
    main()
