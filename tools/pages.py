"""Generates the numbers of the pages from the results that are in the repository.

    python -m tools.pages write             # `make pages`: blocks of README.md and docs/, docs/results.csv, index.json
    python -m tools.pages pack results      # keeps a folder of results as docs/measured.tar.xz

Of a run the archive keeps its configuration, its metrics, and for every question whether it was answered right; of the
study what `llava-consensus paper study` leaves. What `bench --serve` wrote is in docs/efficiency. No model is loaded.
`tests/project/test_pages.py` fails where a page and the results differ.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from llava_consensus import cli
from llava_consensus.cli.arguments import one_word_method
from llava_consensus.cli.report import known
from llava_consensus.evaluation.files import CONFIG, METRICS, SCORES, write_out
from llava_consensus.evaluation.report.efficiency import bench_tables
from llava_consensus.evaluation.report.rows import Row, compare, read_rows
from llava_consensus.evaluation.report.section import Section, half, signed
from llava_consensus.evaluation.report.table import csv_text, markdown
from llava_consensus.evaluation.runs.configuration import describe_reduction
from llava_consensus.methods import INDEX, written
from llava_consensus.paper import preset
from llava_consensus.paper.study.tables import study_csv
from llava_consensus.reduction.budget import budget

ROOT = Path(__file__).parents[1]
MEASURED = Path("docs/measured.tar.xz")
BESIDE = ("study.json", "scap.json")
BENCHES = ("docs/paper/bench.json", "docs/paper/bench-tradeoff.json")
TIMED = "llava-1.5-1b.json"  # in docs/efficiency
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
BENCHMARKS = ("textvqa", "gqa", "pope", "vqav2")
FRONT = {  # of README: first column, and the variant whose runs stand in the row
    "**ConsensusDrop** → **ConsensusDrop+**": "ConsensusDrop",
    "VisPruner": "VisPruner",
    "CDPruner (`relevance=cosine`)": "CDPruner, relevance=cosine",
    "DivPrune": "DivPrune",
    "FastV (which keeps positions by default)": "FastV",
    "random, mean of five seeds (sd)": "random",
}


def pack(results: Path, file: Path = ROOT / MEASURED) -> None:
    """Keeps the finished runs of a folder of results; the same bytes for the same results."""
    kept: dict[str, bytes] = {}
    for config in sorted([*results.glob(f"*/{CONFIG}"), *results.glob(f"*/*/{CONFIG}")]):
        folder = config.parent
        if (folder / METRICS).is_file():
            place = folder.relative_to(results).as_posix()
            kept |= {f"{place}/{name}": (folder / name).read_bytes() for name in (CONFIG, METRICS, SCORES)}
    beside = [*(results / name for name in BESIDE), *results.glob("*/*.json")]
    kept |= {path.relative_to(results).as_posix(): path.read_bytes() for path in beside if path.is_file()}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as archive:
        for name in sorted(kept, key=lambda name: (name.rsplit("/")[-1], name)):  # similar files compress together
            entry = tarfile.TarInfo(name)
            entry.size = len(kept[name])
            archive.addfile(entry, io.BytesIO(kept[name]))
    write_out(file, out.getvalue())


@contextmanager
def unpacked(file: Path = ROOT / MEASURED) -> Iterator[Path]:
    """A folder of these results, with the bench files of docs/paper beside them."""
    with tempfile.TemporaryDirectory() as place, tarfile.open(file) as archive:
        archive.extractall(place, filter="data")
        for bench in BENCHES:
            (Path(place) / Path(bench).name).write_bytes((ROOT / bench).read_bytes())
        yield Path(place)


def write(root: Path = ROOT) -> None:
    """Writes every generated block and file of a folder that has README.md and docs/ as the repository does."""
    docs = root / "docs"
    with unpacked() as out, redirect_stdout(io.StringIO()):
        if cli.main(["paper", "claims", "--out", str(out), "--write", str(docs / "paper.md")]):
            raise SystemExit("docs/paper.md: not written")
        section = of_preset(out)
        replace(root / "README.md", scores_table(section, FRONT))
        labels = dict.fromkeys(row.variant for row in at_64(section))
        replace(docs / "results.md", scores_table(section, {label: label for label in labels}))
        timed = json.loads((ROOT / "docs/efficiency" / TIMED).read_text())
        replace(docs / "efficiency.md", markdown(bench_tables(timed)[0]))
        write_out(docs / "results.csv", csv_text(every_run(out)).encode())
        study = json.loads((out / "study.json").read_text())
        write_out(docs / "paper/study.csv", csv_text(study_csv(study)).encode())
        for name in BESIDE:
            write_out(docs / "paper" / name, (out / name).read_bytes())
    write_out(root / INDEX.relative_to(ROOT), written().encode())


def of_preset(out: Path) -> Section:
    """The runs of the preset `results` on the model that has most of them."""
    chosen = preset.read("results")
    made = ((one_word_method(row.method), budget(row.tokens, row.merged)) for row in chosen.rows)
    return preset.sections(chosen, [describe_reduction(*one) for one in made], read_rows(out, known()))[0]


def replace(page: Path, block: str) -> None:
    """Puts a block between the markers of a page."""
    head, rest = page.read_text(encoding="utf-8").split(BEGIN)
    write_out(page, f"{head}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}".encode())


def scores_table(section: Section, shown: dict[str, str]) -> str:
    """Scores at 64 tokens with positions renumbered and kept, and the difference of ConsensusDrop's two.

    Args:
        section: the runs of one model.
        shown: first column of each row -> variant whose runs stand in it.
    """
    names = [name for name in BENCHMARKS if name in section.names]
    assert section.full is not None
    of_full = [section.full.runs[name] for name in names]
    lines = ["| | " + " | ".join(map(about, of_full)) + " |", "|---" + "|--:" * len(names) + "|"]
    lines.append("| all 576 tokens | " + " | ".join(f"{row.score:.1f}{half(row.bounds)}" for row in of_full) + " |")
    runs = {(row.variant, row.benchmark, row.config["options"]["positions"]): row for row in at_64(section)}
    for words, label in shown.items():
        cells = [" → ".join(_score(runs.get((label, name, way))) for way in ("renumber", "keep")) for name in names]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    tests = [compare(runs["ConsensusDrop", name, "keep"], runs["ConsensusDrop", name, "renumber"]) for name in names]
    cells = ["-" if test is None else signed(test.difference, test.bounds) for test in tests]
    return "\n".join([*lines, f"| kept less renumbered, ConsensusDrop | {' | '.join(cells)} |"])


def at_64(section: Section) -> list[Row]:
    """Runs of a section at 64 tokens."""
    return [row for line in section.reduced if line.tokens == 64 for row in line.runs.values()]


def every_run(out: Path) -> list[dict[str, Any]]:
    """A line for each kept run: what was asked of which model with which method, and the score with its interval."""
    lines = []
    for folder in sorted({out, *(path.parents[1] for path in out.glob(f"*/*/{CONFIG}"))}):
        for row in read_rows(folder, known()):
            config, (low, high) = row.config, row.bounds or (None, None)
            changed = ",".join(f"{key}={value}" for key, value in sorted(config["changed"].items()))
            lines.append(
                {
                    "set": folder.relative_to(out).as_posix(),
                    "model": Path(config["model"]).name,
                    "data": config["data"],
                    "benchmark": row.benchmark,
                    "method": config["method"],
                    "options": changed,
                    "positions": config["options"].get("positions"),
                    "tokens": config["tokens"],
                    "merged": config["merged"],
                    "part": row.part,
                    "questions": row.metrics and row.metrics["questions"],
                    "pictures": row.pictures,
                    "score": row.score,
                    "low": low,
                    "high": high,
                }
            )
    return lines


def about(row: Row) -> str:
    """The benchmark of a run with its numbers of questions and pictures."""
    assert row.metrics is not None
    return f"{row.facts.title} ({row.metrics['questions']} questions, {row.pictures} pictures)"


def _score(row: Row | None) -> str:
    if row is None or row.score is None:
        return "-"
    return f"{row.score:.1f}" + ("" if row.spread is None else f" ({row.spread:.1f})")


def main(words: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write", help="generate the pages")
    commands.add_parser("pack", help="keep a folder of results").add_argument("results", type=Path)
    given = parser.parse_args(words)
    if given.command == "pack":
        pack(given.results)
    else:
        write()


if __name__ == "__main__":
    main()
