"""The numbers of the pages, made again from the results that are in the repository.

    python -m eval_scripts.pages write             # `make pages`: README.md, four pages of docs/, costs.json
    python -m eval_scripts.pages pack results      # keeps a folder of results as docs/measured.tar.xz

What is kept of a run is its configuration, its metrics, and for every question whether it was answered right; of the
study the files that `llava-consensus paper study` leaves, and of vLLM what `bench --serve` wrote (docs/efficiency).
Runs in the folder `large` of the results are of the larger set, those in `positions` of `paper positions`, those in
`beds` of other embedded models (`beds.py`), those in `videos` and `composition` of `videos.py` and `composition.py`:
tables of their own. No model is loaded. `tests/project/test_pages.py`
fails where a page and the results differ.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from eval_scripts.beds import beds_table
from eval_scripts.compared import composition_table, videos_table
from eval_scripts.policies import ablations_table, budgets_table, layers_table
from llava_consensus import cli
from llava_consensus.cli.models import COSTS, comes_to
from llava_consensus.cli.report import known
from llava_consensus.evaluation.bench.serving import BLOCK, lines
from llava_consensus.evaluation.files import CONFIG, METRICS, SCORES, write_out
from llava_consensus.evaluation.report.results import in_sections, intervals, title
from llava_consensus.evaluation.report.rows import Row, read_rows
from llava_consensus.evaluation.report.section import Section, half, signed
from llava_consensus.evaluation.report.stats import compare
from llava_consensus.evaluation.report.table import markdown
from llava_consensus.methods import METHODS
from llava_consensus.paper.study.tables import scap_tables, study_tables

ROOT = Path(__file__).parents[1]
MEASURED = Path("docs/measured.tar.xz")
BESIDE = ("study.json", "scap.json")
BENCHES = ("docs/paper/bench.json", "docs/paper/bench-tradeoff.json")
SERVED = ("serving-mini", "serving-methods", "serving-1b")  # in docs/efficiency
# folders of runs beside those of the grid
LARGE, POLICIES, BEDS, VIDEOS, COMPOSITION = "large", "positions", "beds", "videos", "composition"
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
OF_BEDS, OF_VIDEOS, OF_COMPOSITION, OF_ABLATIONS, OF_BUDGETS = (
    (f"<!-- {name}:begin -->", f"<!-- {name}:end -->") for name in (BEDS, VIDEOS, COMPOSITION, "ablations", "budgets")
)
SHOWN = {  # of README: what stands in the first column, and the labels with positions closed up and kept
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
    beside = [*(results / name for name in BESIDE), *(results / BEDS).glob("*.json")]
    kept |= {path.relative_to(results).as_posix(): path.read_bytes() for path in beside if path.is_file()}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as archive:
        for name in sorted(kept, key=lambda name: (name.rsplit("/")[-1], name)):  # what is alike stands together
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
    """Every generated block of the pages of a folder that has README.md and docs/ as the repository does."""
    with unpacked() as out, redirect_stdout(io.StringIO()):
        for line in (
            ["report", "--out", str(out), "--preset", "results", "--format", "brief", "--write"],
            ["paper", "claims", "--out", str(out), "--write"],
        ):
            page = root / "docs" / ("results.md" if line[0] == "report" else "paper.md")
            if cli.main([*line, str(page)]):
                raise SystemExit(f"{page}: not written")
        found = {name: json.loads((out / name).read_text()) for name in BESIDE}
        tables = [*study_tables(found["study.json"]), *scap_tables(found["scap.json"])]
        replace(root / "docs/paper.md", "\n\n".join(map(markdown, tables)))
        replace(root / "docs/results.md", large_table(out / LARGE))
        replace(root / "docs/results.md", beds_table(out, out / BEDS), *OF_BEDS)
        replace(root / "docs/results.md", ablations_table(out), *OF_ABLATIONS)
        replace(root / "docs/positions.md", layers_table(read_rows(out / POLICIES, known())))
        replace(root / "docs/positions.md", budgets_table(read_rows(out, known())), *OF_BUDGETS)
        replace(root / "docs/results.md", videos_table(out / VIDEOS), *OF_VIDEOS)
        replace(root / "docs/results.md", composition_table(out / COMPOSITION), *OF_COMPOSITION)
        replace(root / "docs/serving.md", "\n\n".join(map(served_table, SERVED)))
        replace(root / "README.md", readme_table(out))
        for name in BESIDE:
            write_out(root / "docs/paper" / name, (out / name).read_bytes())
    costs = {name: comes_to(name) for name in METHODS}
    write_out(root / "llava_consensus" / COSTS, (json.dumps(costs, indent=1) + "\n").encode())


def replace(page: Path, block: str, begin: str = BEGIN, end: str = END) -> None:
    """Puts a block between the markers of a page."""
    head, rest = page.read_text(encoding="utf-8").split(begin)
    write_out(page, f"{head}{begin}\n{block}\n{end}{rest.split(end)[1]}".encode())


def readme_table(out: Path) -> str:
    """Scores at 64 tokens with positions closed up and kept, and how far ConsensusDrop's two are apart."""
    found = [one for one in in_sections(read_rows(out)) if one.full]
    section = max(found, key=lambda one: len(one.rows))
    names = [name for name in ("textvqa", "gqa", "pope", "vqav2") if name in section.names]
    assert section.full is not None
    of_full = [section.full.runs[name] for name in names]
    about = [
        f"{row.facts.title} ({row.metrics['questions']} questions, {row.pictures} pictures)"
        for row in of_full
        if row.metrics
    ]
    lines = ["| | " + " | ".join(about) + " |", "|---" + "|--:" * len(names) + "|"]
    lines.append("| all 576 tokens | " + " | ".join(f"{row.score:.1f}{half(row.bounds)}" for row in of_full) + " |")
    for words, label in SHOWN.items():
        cells = [
            " → ".join(_score(_at(section, label, name, policy)) for policy in ("renumber", "keep")) for name in names
        ]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    tests = []
    for name in names:
        kept, closed = (_at(section, "ConsensusDrop", name, policy) for policy in ("keep", "renumber"))
        test = None if kept is None or closed is None else compare(kept, closed)
        tests.append("-" if test is None else signed(test.difference, test.bounds))
    lines.append(f"| kept less closed up, ConsensusDrop | {' | '.join(tests)} |")
    return "\n".join(lines)


def served_table(name: str) -> str:
    """What `bench --serve` measured, under a line that says of what and where."""
    found = json.loads((ROOT / "docs/efficiency" / f"{name}.json").read_text())
    of = Counter((one["case"], one["tokens"], one["load"]) for one in found["measured"] if one["case"] != "plain")
    (rounds,) = set(of.values())  # the same for all
    machine = found["machine"]
    about = (
        f"**{Path(found['model']).name}**, {found['settings']['dtype']}, {found['blocks']} blocks of "
        f"{BLOCK} rows, {rounds} round{'s' * (rounds > 1)}, {machine['threads']} core of an {machine['processor']}"
    )
    return "\n".join((about, "", *lines(found["measured"])))


def large_table(out: Path) -> str:
    """Scores with intervals of the runs on the larger set."""
    section = max(in_sections(read_rows(out, known())), key=lambda one: len(one.rows))
    return f"{title(section)}\n\n{markdown(intervals(section))}"


def _at(section: Section, label: str, name: str, policy: str) -> Row | None:
    for line in section.reduced:
        row = line.runs.get(name)
        if (
            line.tokens == 64
            and row is not None
            and row.variant == label
            and row.config["options"]["positions"] == policy
        ):
            return row
    return None


def _score(row: Row | None) -> str:
    if row is None or row.score is None:
        return "-"
    return f"{row.score:.1f}" + ("" if row.spread is None else f" ({row.spread:.1f})")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write", help="the pages anew")
    commands.add_parser("pack", help="keeps a folder of results").add_argument("results", type=Path)
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.results)
    else:
        write()


if __name__ == "__main__":
    main()
