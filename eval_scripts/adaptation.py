"""Adapts the embedded model to fewer tokens with several methods, measures it before and after, and prints the tables.

    python -m eval_scripts.adaptation run --data-path playground/mini-train/conversations.json --out results/adaptation
    python -m eval_scripts.adaptation write --out results/adaptation

`run` trains one cell after the other, the most telling first, and evaluates each; whatever is complete is not done
again. `write` prints the tables of what is there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from eval_scripts.adaptation_tables import BUDGETS, CONTROL, METHODS, POSITIONS, asked, text

RATES = {"projector": 1e-3, "full": 3e-4}  # of the projector in LLaVA's pretraining; of the model's own last stage
MODEL, BENCHMARKS = Path("checkpoints/llava-mini"), (("textvqa", None), ("gqa", 200))


@dataclass(frozen=True)
class Cell:
    """One adaptation: what is tuned, with which method, to which budgets. The method `full` is the control: the same
    conversations, all tokens.
    """

    tune: str
    method: str
    positions: str
    tokens: str

    @property
    def name(self) -> str:
        """Of its folder."""
        if self.method == CONTROL:
            return f"llava-mini-{self.tune}-control"
        return f"llava-mini-{self.tune}-{self.method}-{self.positions}-{self.tokens.replace(' ', '+')}"

    @property
    def words(self) -> list[str]:
        """The methods it is measured with, each with its options in one word."""
        return [f"{method}:positions={positions}" for method, positions in asked(self.method, self.positions)]


def cells() -> list[Cell]:
    """All adaptations, the most telling first: one that serves both budgets for each method, positions and part, the
    control of each part, and single budgets, which say whether one hurts the other.
    """
    both = " ".join(map(str, BUDGETS))
    grid = [Cell("full", METHODS[0], p, both) for p in POSITIONS]
    grid += [Cell(tune, CONTROL, POSITIONS[0], "") for tune in RATES]
    grid += [Cell("projector", METHODS[0], p, both) for p in POSITIONS]
    grid += [Cell(tune, m, p, both) for p in POSITIONS for m in METHODS[1:] for tune in RATES]
    return grid + [Cell("full", METHODS[0], POSITIONS[0], str(budget)) for budget in BUDGETS]


def run(out: Path, data_path: Path, steps: int, batch: int) -> None:
    """Measures the model as it is, then trains and measures every cell; goes on where it was stopped."""
    evaluate(MODEL, [f"{method}:positions={positions}" for positions in POSITIONS for method in METHODS], out)
    for cell in cells():
        train(cell, out, data_path, steps, batch)
        evaluate(out / cell.name, cell.words, out)


def train(cell: Cell, out: Path, data_path: Path, steps: int, batch: int) -> None:
    """One adaptation, by the command line."""
    reduced = ("--option", f"positions={cell.positions}", "--tokens", cell.tokens) if cell.method != CONTROL else ()
    command(
        *("train", "--model", MODEL, "--data-path", data_path, "--images", data_path.parent / "images"),
        *("--out", out / cell.name, "--method", cell.method, *reduced),
        *("--tune", cell.tune, "--learning-rate", RATES[cell.tune]),
        *("--steps", steps, "--batch", batch, "--save-every", 20),
    )


def evaluate(model: Path, words: list[str], out: Path) -> None:
    """The model with all tokens and with these methods at both budgets."""
    for benchmark, sample in BENCHMARKS:
        command(
            *("sweep", "--bench", benchmark, "--model", model, "--methods", " ".join(words), "--no-progress"),
            *(
                "--tokens",
                " ".join(map(str, BUDGETS)),
                "--out",
                out / "runs",
                *(("--sample", sample) if sample else ()),
            ),
        )


def command(*arguments: object) -> None:
    """One command of the package, in a process of its own."""
    subprocess.run([sys.executable, "-m", "llava_consensus.cli", *map(str, arguments)], check=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "write"))
    parser.add_argument("--out", type=Path, default=Path("results/adaptation"), help="folder (%(default)s)")
    parser.add_argument("--data-path", type=Path, default=Path("playground/mini-train/conversations.json"))
    parser.add_argument("--steps", type=int, default=80, help="of each adaptation (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="conversations in a step (%(default)s)")
    given = parser.parse_args()
    if given.action == "run":
        run(given.out, given.data_path, given.steps, given.batch)
    else:
        print(text(given.out, [cell.name for cell in cells()]))


if __name__ == "__main__":
    main()
