"""Generates the numbers of the pages from the results that are in the repository.

    python -m tools.pages write             # `make pages`: docs/, results.csv, the blocks of README.md, index.json
    python -m tools.pages pack results      # keeps a folder of results as docs/measured.tar.xz
    python -m tools.pages pack FOLDER --photo    # those of the photograph model as docs/measured-photo.tar.xz

Of a run an archive keeps its configuration, its metrics, and for every question whether it was answered right. What
`llava-consensus paper study` left is in docs/paper, of the photograph model in docs/paper/photo; of the drawn model's
no answers were kept, so that it has no p.
`docs/measured.sha256` has the hash of each archive; another one is refused.
What `bench --serve` wrote is in docs/efficiency. No model is loaded.

The pages of `TEMPLATES` are wholly made of tools/templates: prose with expressions, in which no number stands
(`tests/project/test_pages.py`); what others printed comes out of tools/templates/sources.json with its source.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from llava_consensus.cli.report import known
from llava_consensus.evaluation.files import CONFIG, METRICS, SCORES, write_out
from llava_consensus.evaluation.report.efficiency import LABELS, bench_tables
from llava_consensus.evaluation.report.rows import FULL, Row, compare, read_rows
from llava_consensus.evaluation.report.section import Section, half, signed
from llava_consensus.evaluation.report.stats import LEVEL, SIGNIFICANT, sign_flips
from llava_consensus.evaluation.report.table import csv_text, markdown
from llava_consensus.methods import INDEX, METHODS, written
from llava_consensus.paper import preset
from llava_consensus.paper.results import claims, read
from llava_consensus.paper.study.results import study_csv
from tools.photo import BENCHMARKS, Photo, p_value

ROOT = Path(__file__).parents[1]
MEASURED, PHOTO = Path("docs/measured.tar.xz"), Path("docs/measured-photo.tar.xz")
HASHES = Path("docs/measured.sha256")  # as sha256sum writes them, seen from docs/
NAMED, NAMED_UNSEEN = Path("docs/paper/named.json"), Path("docs/paper/named-unseen.json")
FOLDER = Path("tools/templates")
TEMPLATES = ("results.md", "paper.md", "positions.md", "efficiency.md")
BESIDE = ("study.json", "scap.json", "bench.json", "bench-tradeoff.json")  # in the folder of an archive's other results
FOLDERS = {MEASURED.name: "docs/paper", PHOTO.name: "docs/paper/photo"}
TIMED = "llava-1.5-1b.json"  # in docs/efficiency
ON_GPU = "llava-1.5-7b.json"  # there
AGAINST = "against-official-mini.json"  # there
SERVED = "serve-llava-1.5-0.1b.json"  # there
WITNESS = "serve-witness.json"  # there: the same servers, asked by `vllm bench serve`
SERVED_COLUMNS = (  # of it: key, title, factor, digits
    ("requests_per_second", "plain: requests/s", 1, 2),
    ("first_token_p50", "plain: first token, p50 (ms)", 1000, 0),
    ("per_token", "plain: a token after it (ms)", 1000, 1),
)
SCORES_OF_PHOTO = "docs/paper/photo-scores.json"  # with all tokens, for `paper verify --published`
SERVING = "docs/serving.md"
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"  # of the table of README and of SERVING
SPAN = re.compile(r"(<!--(photo|time|served)-->).*?(<!--/-->)", re.DOTALL)  # of its sentences


def pack(results: Path, file: Path = ROOT / MEASURED) -> None:
    """Keeps the finished runs of a folder of results, and the hash of what keeps them; the same bytes for the same
    results.
    """
    kept: dict[str, bytes] = {}
    for config in sorted([*results.glob(f"*/{CONFIG}"), *results.glob(f"*/*/{CONFIG}")]):
        folder = config.parent
        if (folder / METRICS).is_file():
            place = folder.relative_to(results).as_posix()
            kept |= {f"{place}/{name}": (folder / name).read_bytes() for name in (CONFIG, METRICS, SCORES)}
    kept |= {path.relative_to(results).as_posix(): path.read_bytes() for path in results.glob("*/*.json")}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as archive:
        for name in sorted(kept, key=lambda name: (name.rsplit("/")[-1], name)):  # similar files compress together
            entry = tarfile.TarInfo(name)
            entry.size = len(kept[name])
            archive.addfile(entry, io.BytesIO(kept[name]))
    write_out(file, out.getvalue())
    if file.parent == ROOT / HASHES.parent:
        hashes = {**kept_hashes(), file.name: hashlib.sha256(out.getvalue()).hexdigest()}
        lines = [f"{value}  {name}\n" for name, value in sorted(hashes.items())]
        write_out(ROOT / HASHES, "".join(lines).encode())


def kept_hashes() -> dict[str, str]:
    """Hash of each archive by the name of its file."""
    lines = (ROOT / HASHES).read_text("utf-8").splitlines() if (ROOT / HASHES).is_file() else []
    return {name: value for value, name in (line.split() for line in lines)}


@contextmanager
def unpacked(file: Path = ROOT / MEASURED) -> Iterator[Path]:
    """A folder of these results, with what the study and `bench` left beside them. SystemExit for other bytes than
    those that were packed.
    """
    content = file.read_bytes()
    if kept_hashes().get(file.name) != hashlib.sha256(content).hexdigest():
        raise SystemExit(f"{file}: not what {HASHES} says. Take both from one commit, or pack again")
    with tempfile.TemporaryDirectory() as place, tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(place, filter="data")
        for name in BESIDE:
            left = ROOT / FOLDERS[file.name] / name
            if left.is_file():
                (Path(place) / name).write_bytes(left.read_bytes())
        yield Path(place)


def write(root: Path = ROOT) -> None:
    """Writes every generated file of a folder that has README.md and docs/ as the repository does."""
    for name, text in pages(root / "README.md").items():
        write_out(root / name, text.encode())
    with unpacked() as out, unpacked(ROOT / PHOTO) as photo:
        write_out(root / "docs/results.csv", csv_text(every_run({"": out, "photo": photo})).encode())
    write_out(root / INDEX.relative_to(ROOT), written().encode())


def pages(readme: Path) -> dict[str, str]:
    """Every generated page by its name, and the README with its blocks, as they must read."""
    with unpacked() as out, unpacked(ROOT / PHOTO) as runs:
        photo, section = Photo(runs, ROOT / NAMED), of_preset(out)
        drawn = drawn_facts(section)
        on_gpu = json.loads((ROOT / "docs/efficiency" / ON_GPU).read_text())
        given = {
            "photo": photo,
            "unseen": Photo(runs / "unseen", ROOT / NAMED_UNSEEN),
            "second": Photo(runs / "seed1", ROOT / NAMED),
            "drawn": drawn,
            "claims": [markdown(table) for folder in (runs, out) for table in claims(read(folder))[0]],
            "against": against_table(ROOT / "docs/efficiency" / AGAINST),
            "timed": markdown(bench_tables(json.loads((ROOT / "docs/efficiency" / TIMED).read_text()))[0]),
            "seven": {(row["method"], row["tokens"]): row for row in on_gpu["rows"]},
            "gpu": on_gpu["machine"]["device"],
            "source": json.loads((ROOT / FOLDER / "sources.json").read_text("utf-8")),
            "level": f"{LEVEL:g} %",
            "significant": SIGNIFICANT,
            "flips": lambda one, other: p_value(sign_flips(np.repeat([1.0, -1.0], [one, other]))),
        }
        loader = jinja2.FileSystemLoader(ROOT / FOLDER)
        made = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        found = {f"docs/{name}": made.get_template(name).render(given) for name in TEMPLATES}
        servers = Servers(json.loads((ROOT / "docs/efficiency" / SERVED).read_text()))
        spans = {"photo": photo.sentence, "time": first_token(), "served": servers.sentence}
        text = with_table(readme, photo.front_table())
        found["README.md"] = SPAN.sub(lambda span: span[1] + spans[span[2]] + span[3], text)
        witness = Servers(json.loads((ROOT / "docs/efficiency" / WITNESS).read_text()))
        found[SERVING] = with_table(readme.parent / SERVING, f"{servers.table}\n\n{witness.beside}")
        scores = {name: row.score for name in BENCHMARKS if (row := photo.run(name, FULL)) is not None}
        found[SCORES_OF_PHOTO] = json.dumps(scores, indent=1) + "\n"
        for folder, place in ((out, MEASURED), (runs, PHOTO)):
            study = json.loads((folder / "study.json").read_text())
            found[f"{FOLDERS[place.name]}/study.csv"] = csv_text(study_csv(study))
        return found


def against_table(file: Path) -> str:
    """Processor time of a first token by official code and by ours: the median and the bounds of its ratios within a
    round. The file has the wall clock too, which a busy machine disturbs more.
    """
    found: dict[tuple[str, int], dict[int, float]] = {}
    layers: dict[tuple[str, int], Any] = {}
    for one in json.loads(file.read_text())["samples"]:
        key = one["side"], one["tokens"]
        found.setdefault(key, {})[one["round"]] = float(np.median(one["processor_ms"]))
        layers[key] = one["layers"]
    lines = ["| ours / official | tokens | rounds | processor time (least to most) |", "|---|--:|--:|--:|"]
    for (side, tokens), ours in found.items():
        kind, _, method = side.partition("/")
        other = f"official/{'visionzip' if method == 'consensusdrop' else method}", tokens
        rounds = sorted(ours.keys() & found.get(other, {}).keys())
        if kind != "ours" or not rounds or layers[side, tokens] != layers[other]:
            continue
        ratios = [ours[one] / found[other][one] for one in rounds]
        names = method if other[0].endswith(method) else f"{method} / {other[0].partition('/')[2]}"
        cells = f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {names} | {tokens} | {len(rounds)} | {cells} |")
    return "\n".join(lines)


def first_token() -> str:
    """The README's sentence about time, from the bench of a real-sized model."""
    bench = json.loads((ROOT / "docs/efficiency" / TIMED).read_text())
    rows = {(row["method"], row["tokens"]): row for row in bench["rows"]}
    full, own = rows["full", 576], rows["consensusdrop", 57]
    machine, times = bench["machine"], [f"{row['ttft_ms'] / 1000:.1f} s" for row in (own, full)]
    where = f"{machine['threads']} core of an {machine['processor']}"
    return (
        f"{bench['model']} ({bench['weights']}), {where}: first token after {times[0]} from 57 tokens, {times[1]} from "
        f"576 (median of {len(own['samples'])}; [all rows](docs/efficiency.md))."
    )


def of_preset(out: Path) -> Section:
    """The runs of the preset `results` on the model that has most of them."""
    chosen = preset.read("results")
    return preset.sections(chosen, read_rows(out, known()))[0]


class Servers:
    """Measurements of servers over HTTP, which alternate with plain vLLM.

    Args:
        bench: what `bench --serve` wrote.
    """

    def __init__(self, bench: dict[str, Any]) -> None:
        self.bench, self.measured = bench, bench["measured"]

    def _rows(self, load: str, case: str, tokens: int | None) -> dict[int, Any]:
        wanted = load, case, tokens
        return {row["round"]: row for row in self.measured if (row["load"], row["case"], row["tokens"]) == wanted}

    def median(self, key: str, load: str, case: str, tokens: int | None = None) -> float:
        """Median over rounds."""
        return float(np.median([row[key] for row in self._rows(load, case, tokens).values()]))

    def ratio(self, key: str, load: str, case: str, tokens: int | None) -> float:
        """Median of the ratios to plain vLLM in the same round."""
        plain = self._rows(load, "plain", None)
        return float(np.median([row[key] / plain[at][key] for at, row in self._rows(load, case, tokens).items()]))

    @property
    def sentence(self) -> str:
        """The README's."""
        load, case, tokens = "32 at once", "consensusdrop", 64
        keys = "requests_per_second", "first_token_p50"
        requests, first = (self.ratio(key, load, case, tokens) for key in keys)
        machine = self.bench["machine"]
        where = f"{self.bench['model']}, {self.bench['weights']}, {machine['processors']} cores"
        return (
            f"in vLLM with {load}, {tokens} tokens: {self.median(keys[0], load, case, tokens):.2f} requests a second, "
            f"{requests:.2f} of plain vLLM's, the first token after {first:.2f} of its time ({where}; "
            "[all rows](docs/serving.md))."
        )

    @property
    def table(self) -> str:
        """The table of SERVING, with what it was measured on."""
        loads, budgets = (list(dict.fromkeys(row[key] for row in self.measured)) for key in ("load", "tokens"))
        budgets.remove(None)
        head = f"from {', '.join(map(str, budgets))} tokens; at once"
        lines = [[head, *(load.removesuffix(" at once") for load in loads)], [":--", *["--:"] * len(loads)]]
        for key, title, scale, digits in SERVED_COLUMNS:
            lines.append([title, *(f"{scale * self.median(key, load, 'plain'):.{digits}f}" for load in loads)])
            for case, label in self.methods.items():
                ratios = [", ".join(f"{self.ratio(key, load, case, one):.2f}" for one in budgets) for load in loads]
                lines.append([label, *ratios])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n\nMedians of {self.rounds}."

    @property
    def beside(self) -> str:
        """The sentence below it, of another client's measurements with one budget."""
        loads = list(dict.fromkeys(row["load"] for row in self.measured))
        (tokens,) = {row["tokens"] for row in self.measured} - {None}
        parts = []
        for case, label in self.methods.items():
            requests, first = (
                ", ".join(f"{self.ratio(key, load, case, tokens):.2f}" for load in loads)
                for key in ("requests_per_second", "first_token_p50")
            )
            parts.append(f"{label} {requests} of plain's requests a second, first token {first}")
        return (
            f"`vllm bench serve` beside it, {tokens} tokens, {self.bench['requests']} pictures of noise, {self.rounds} "
            f"([samples](efficiency/{WITNESS})), {' and '.join(loads)}: {'; '.join(parts)}."
        )

    @property
    def methods(self) -> dict[str, str]:
        """The servers but plain's, as tables name them."""
        cases = dict.fromkeys(row["case"] for row in self.measured)
        return {case: LABELS.get(case) or METHODS.title(case) for case in cases if case != "plain"}

    @property
    def rounds(self) -> str:
        """How many there were, and how busy the machine was."""
        busy = [row["load_average"] for row in self.measured]
        count = len({row["round"] for row in self.measured})
        return f"{count} rounds, at a load average of {min(busy):.1f} to {max(busy):.1f}"


def with_table(page: Path, table: str) -> str:
    """The text of a page with its table in place of the one it has."""
    head, rest = page.read_text("utf-8").split(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def drawn_facts(section: Section) -> dict[str, str]:
    """What the pages say of the drawn model, from its runs on TextVQA."""
    assert section.full is not None
    full = section.full.runs["textvqa"]
    at_64 = [line.runs["textvqa"] for line in section.reduced if line.tokens == 64 and "textvqa" in line.runs]
    runs = {(row.variant, row.config["options"]["positions"]): row for row in at_64}
    own = {way: runs["ConsensusDrop", way] for way in ("renumber", "keep")}
    test = compare(own["keep"], own["renumber"])
    assert test is not None and full.metrics is not None
    numbers = {way: f"{row.score:.1f}{half(row.bounds)}" for way, row in own.items()}
    grid = runs["uniform grid", "renumber"]
    return {
        "full": f"{full.score:.1f}",
        "grid": f"{grid.score:.1f}{half(grid.bounds)}",
        "positions": signed(test.difference, test.bounds),
        "sentence": f"It reads {full.score:.1f}{half(full.bounds)} % of {full.metrics['questions']} drawn signs from "
        f"all 576 tokens, {numbers['keep']} % from 64 that keep their positions, and {numbers['renumber']} % from 64 "
        "that are renumbered.",
    }


def every_run(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """A line for each model, benchmark, method and budget of the kept runs, positions as two columns.

    Args:
        folders: of results, by the first part of `set`.
    """
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for first, out in folders.items():
        for folder in sorted({out, *(path.parents[1] for path in out.glob(f"*/*/{CONFIG}"))}):
            name = "/".join(filter(None, (first, folder.relative_to(out).as_posix()))).removesuffix("/.")
            for row in read_rows(folder, known()):
                about, own = csv_cells(row, name)
                key = tuple(about.values())
                lines[key] = {**about, **dict.fromkeys(SCORED), **lines.get(key, {}), **own}
    return list(lines.values())


SCORED = ("score", "low", "high", "kept_score", "kept_low", "kept_high")


def csv_cells(row: Row, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a line of the csv is about, and what a run adds to it."""
    config, (low, high) = row.config, row.bounds or (None, None)
    way = config["options"].get("positions")
    changed = {key: value for key, value in config["changed"].items() if key != "positions" or value == "mean"}
    about = {
        "set": folder,
        "model": Path(config["model"]).name,
        "data": config["data"],
        "benchmark": row.benchmark,
        "method": config["method"],
        "options": ",".join(f"{key}={value}" for key, value in sorted(changed.items())),
        "tokens": config["tokens"],
        "merged": config["merged"],
        "part": row.part,
        "questions": row.metrics and row.metrics["questions"],
        "pictures": row.pictures,
    }
    return about, dict(zip(SCORED[3:] if way == "keep" else SCORED[:3], (row.score, low, high), strict=True))


def main(words: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write", help="generate the pages")
    packing = commands.add_parser("pack", help="keep a folder of results")
    packing.add_argument("results", type=Path)
    packing.add_argument("--photo", action="store_true", help="as those of the photograph model")
    given = parser.parse_args(words)
    if given.command == "pack":
        pack(given.results, ROOT / (PHOTO if given.photo else MEASURED))
    else:
        write()


if __name__ == "__main__":
    main()
