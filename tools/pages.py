"""Generates the numbers of the pages from the results that are in the repository.

    python -m tools.pages write             # `make pages`: docs/, results.csv, the blocks of README.md, index.json
    python -m tools.pages check             # what is not as these results say, and statements without a source
    python -m tools.pages pack results      # keeps a folder of results as docs/measured.tar.xz
    python -m tools.pages pack FOLDER --photo    # those of the photograph model as docs/measured-photo.tar.xz
    python -m tools.pages pack FOLDER --gpu      # those of `sweep --preset gpu-hour` as docs/measured-gpu.tar.xz

Of a run an archive keeps its configuration, its metrics, and for every question whether it was answered right. What
`llava-consensus paper study` left is in docs/paper, of the photograph model in docs/paper/photo; of the drawn model's
no answers were kept, so that it has no p.
`docs/measured.sha256` has the hash of each archive; another one is refused.
What `bench --serve` wrote is in docs/efficiency. No model is loaded.

The pages of `TEMPLATES` are wholly made of tools/templates: prose with expressions, in which no number stands
(`tests/project/test_pages.py`); what others printed comes out of tools/templates/sources.json with its source.
In the pages of tools/templates/statements.json every sentence with a number or a verdict that no result fills has its
source there, word for word.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from llava_consensus.evaluation.bench.break_even import Point, sentence
from llava_consensus.evaluation.files import CONFIG, METRICS, SCORES, write_out
from llava_consensus.evaluation.report.efficiency import csv_rows, protocol
from llava_consensus.evaluation.report.rows import FULL, compare, one_word, policy, read_rows
from llava_consensus.evaluation.report.section import half, signed
from llava_consensus.evaluation.report.stats import LEVEL, SIGNIFICANT, sign_flips
from llava_consensus.evaluation.report.table import csv_text, markdown, p_value
from llava_consensus.methods import INDEX, METHODS, about, written
from llava_consensus.paper import preset
from llava_consensus.paper.results import Results, claims, matches, read
from llava_consensus.paper.study.results import study_csv
from tools.photo import BENCHMARKS, Photo

ROOT = Path(__file__).parents[1]
MEASURED, PHOTO = Path("docs/measured.tar.xz"), Path("docs/measured-photo.tar.xz")
GPU = Path("docs/measured-gpu.tar.xz")  # of published models, if somebody has run the preset
PAPER = ROOT / "llava_consensus/evaluation/report/paper.json"  # numbers as the paper prints them
EVIDENCE = Path("llava_consensus/evidence.csv")  # for `recommend`
LEDGER = Path("llava_consensus/paper/ledger.json")  # published results
SCENES = "our run of llava-photo (157 M) on composed scenes"
HASHES = Path("docs/measured.sha256")  # as sha256sum writes them, seen from docs/
NAMED, NAMED_UNSEEN = Path("docs/paper/named.json"), Path("docs/paper/named-unseen.json")
NAMED_CROWDED = Path("docs/paper/named-crowded.json")
FOLDER = Path("tools/templates")
TEMPLATES = ("results.md", "paper.md", "positions.md", "efficiency.md")
BESIDE = ("study.json", "scap.json", "bench.json", "bench-tradeoff.json")  # in the folder of an archive's other results
FOLDERS = {MEASURED.name: "docs/paper", PHOTO.name: "docs/paper/photo"}
TIMED = "llava-1.5-1b.json"  # in docs/efficiency
ON_GPU = "llava-1.5-7b.json"  # there
AGAINST = "against-official-mini.json"  # there
SERVED = "serve-llava-1.5-0.1b.json"  # there
WITNESS = "serve-witness.json"  # there: the same servers, asked by `vllm bench serve`
SERVED_COLUMNS = (  # of both: key, title, factor, digits
    ("requests_per_second", "requests/s", 1, 2),
    ("opening_p50", "first token, p50 of first questions (ms)", 1000, 0),
    ("first_token_p50", "p50 of all (ms)", 1000, 0),
    ("per_token", "further token (ms)", 1000, 1),
)
PLACED = {"consensusdrop": "renumbered", "consensusdrop+": "kept"}  # methods of both files: position ids
SHOWN_BUDGETS = (576, 288, 144, 57)  # those that both bench files have
PAYS = "docs/efficiency/break-even-1b.json"
WHOLE = "docs/paper/photo-whole.json"  # counted by playground.photo.whole
SCORES_OF_PHOTO = "docs/paper/photo-scores.json"  # with all tokens, for `paper verify --published`
SERVING = "docs/serving.md"
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"  # of the table of SERVING
SPAN = re.compile(r"(<!--([\w-]+)-->).*?(<!--/-->)", re.DOTALL)  # numbers in sentences of README and model cards
CARDS = ("checkpoints/llava-mini/README.md", "checkpoints/llava-photo/README.md")
PLOT = "docs/images/accuracy.png"
STATED = FOLDER / "statements.json"  # page: source: sentences
LOOSE = re.compile(  # what makes a sentence a statement: a number, who measured, on what, how it came out
    r"\d|\b(?:we|us|ours?|measured|ran|run|[tT]ested|significant\w*|faster|slower|better|worse|best|equal|GPUs?|CPUs?)\b"
)


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
        for name in BESIDE if file.name in FOLDERS else ():
            left = ROOT / FOLDERS[file.name] / name
            if left.is_file():
                (Path(place) / name).write_bytes(left.read_bytes())
        yield Path(place)


def write(root: Path = ROOT) -> None:
    """Writes every generated file of a folder that has README.md and docs/ as the repository does."""
    with unpacked() as out, unpacked(ROOT / PHOTO) as photo:
        for name, text in _pages(root / "README.md", out, photo).items():
            write_out(root / name, text.encode())
        runs = every_run({"": out, "photo": photo})
        if (ROOT / GPU).is_file():
            with unpacked(ROOT / GPU) as published:
                runs += every_run({"gpu": published})
        write_out(root / PLOT, Photo(photo, ROOT / NAMED).front_plot())
        write_out(root / "docs/results.csv", csv_text(runs).encode())
        write_out(root / EVIDENCE, csv_text(evidence(runs)).encode())
    write_out(root / INDEX.relative_to(ROOT), written().encode())


def pages(readme: Path) -> dict[str, str]:
    """Every generated page by its name, and the README with its blocks, as they must read."""
    with unpacked() as out, unpacked(ROOT / PHOTO) as runs:
        return _pages(readme, out, runs)


def _pages(readme: Path, out: Path, runs: Path) -> dict[str, str]:
    """The same from the unpacked runs of the drawn model and of the photograph model."""
    photo = Photo(runs, ROOT / NAMED)
    on_gpu = json.loads((ROOT / "docs/efficiency" / ON_GPU).read_text())
    given = {
        "photo": photo,
        "unseen": Photo(runs / "unseen", ROOT / NAMED_UNSEEN),
        "crowded": Photo(runs / "crowded", ROOT / NAMED_CROWDED),
        "second": Photo(runs / "seed1", ROOT / NAMED),
        "spans": Photo(runs / "spans", ROOT / NAMED),
        "drawn": drawn_facts(out),
        "claims": claims_table({"photo": runs, "drawn": out}),
        "whole": whole_table(ROOT / WHOLE),
        "published": published_tables(ROOT / GPU),
        "pays": sentence([Point(**row) for row in json.loads((ROOT / PAYS).read_text())["rows"]]),
        "against": against_table(ROOT / "docs/efficiency" / AGAINST),
        "timed": timed_table(json.loads((ROOT / "docs/efficiency" / TIMED).read_text())),
        "gpu": timed_table(on_gpu),
        "source": json.loads((ROOT / FOLDER / "sources.json").read_text("utf-8")),
        "level": f"{LEVEL:g} %",
        "significant": SIGNIFICANT,
        "flips": lambda one, other: p_value(sign_flips(np.repeat([1.0, -1.0], [one, other]))),
    }
    loader = jinja2.FileSystemLoader(ROOT / FOLDER)
    made = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    found = {f"docs/{name}": made.get_template(name).render(given) for name in TEMPLATES}
    servers = Servers(json.loads((ROOT / "docs/efficiency" / SERVED).read_text()))
    spans = readme_numbers(photo, on_gpu, servers)
    found["README.md"] = SPAN.sub(lambda span: span[1] + spans[span[2]] + span[3], readme.read_text("utf-8"))
    numbers = card_numbers(out, photo, given["unseen"])
    for card in CARDS:
        text = (readme.parent / card).read_text("utf-8")
        found[card] = SPAN.sub(lambda span: span[1] + numbers[span[2]] + span[3], text)
    witness = Servers(json.loads((ROOT / "docs/efficiency" / WITNESS).read_text()))
    found[SERVING] = with_table(readme.parent / SERVING, f"{servers.table(photo)}\n\n{witness.beside}")
    scores = {name: row.score for name in BENCHMARKS if (row := photo.run(name, FULL)) is not None}
    found[SCORES_OF_PHOTO] = json.dumps(scores, indent=1) + "\n"
    for folder, place in ((out, MEASURED), (runs, PHOTO)):
        study = json.loads((folder / "study.json").read_text())
        found[f"{FOLDERS[place.name]}/study.csv"] = csv_text(study_csv(study))
    return found


def whole_table(file: Path) -> str:
    """Right answers about whole photographs, of the model that was trained on scenes."""
    frame = pd.DataFrame(json.loads(file.read_text())).map(lambda count: f"{count[0]} of {count[1]}").T
    return frame.to_markdown(colalign=("left", *["right"] * frame.shape[1]))


def published_tables(file: Path) -> str:
    """The tables of `sweep --preset gpu-hour` for each model in an archive; that there is none if nobody has run it."""
    if not file.is_file():
        return "No result of it is kept yet."
    tables = []
    with unpacked(file) as out:
        for runs in matches(preset.read("gpu-hour"), read_rows(out)):
            asked = tuple(dict.fromkeys(row for row, _ in runs if row))
            one = replace(preset.read("gpu-hour"), rows=asked)
            model = next(iter(runs.values())).config["model"]
            tables.append("\n\n".join([f"### {model}", *map(markdown, Results(one, runs).tables())]))
    return "\n\n".join(tables)


def claims_table(folders: Mapping[str, Path]) -> str:
    """The claims of the paper by model and position policy: significant differences, their number, and the least."""
    cells: dict[str, dict[str, str]] = {}
    for model, folder in folders.items():
        frame = pd.DataFrame(claims(read(folder))[1])
        for (claim, positions), family in frame.groupby(["claim", "positions"], sort=False):
            real = family[family["p_corrected"].astype(float) < SIGNIFICANT]["difference"]
            least = family.sort_values("difference").iloc[0]
            counts = f"+{(real > 0).sum()} -{(real < 0).sum()}" if family["p"].notna().any() else "no p"
            text = f"{counts} of {len(family)}; {signed(least['difference'], (least['low'], least['high']))}"
            for kind in ("renumber", "keep") if positions == "any" else (positions,):
                cells.setdefault(claim, {})[f"{model}, {kind}"] = text
    table = pd.DataFrame(cells).T.rename_axis("claim").fillna("")
    return table.to_markdown(disable_numparse=True, colalign=("left", *["right"] * table.shape[1]))


def timed_table(content: dict[str, Any]) -> str:
    """Times of a bench file at `SHOWN_BUDGETS` in milliseconds, and how they were measured."""
    frame = pd.DataFrame(csv_rows(content))
    frame = frame[frame["tokens"].isin(SHOWN_BUDGETS)]
    quartiles = frame["ttft_ms_quartiles"].map(lambda bounds: f"{bounds[0]:.1f}-{bounds[1]:.1f}")
    columns = {
        "tokens": frame["tokens"].astype(str),
        "method": frame["method"],
        "first token (quartiles)": frame["ttft_ms"].map("{:.1f}".format) + " (" + quartiles + ")",
        "speed-up": frame["speedup"].map("{:.2f}".format),
        "tower": frame["tower_ms"].map("{:.1f}".format),
        "reduction": frame["reduction_ms"].map("{:.1f}".format),
        "prefill": frame["prefill_ms"].map("{:.1f}".format),
        "further token": frame["tpot_ms"].map("{:.1f}".format),
        "KV (MiB)": (frame["kv_bytes"] / 2**20).map("{:.1f}".format),
    }
    table = pd.DataFrame(columns).to_markdown(
        index=False, disable_numparse=True, colalign=("right", "left", *["right"] * 7)
    )
    return f"{table}\n\nTimes in ms; {protocol(content).split(' Peak:')[0]}"


def against_table(file: Path) -> str:
    """Processor time of a first token by official code and by ours: the median and the bounds of its ratios within a
    round. The file has the wall clock too, which a busy machine disturbs more.
    """
    frame = pd.DataFrame(json.loads(file.read_text())["samples"])
    frame["ms"] = frame["processor_ms"].map(np.median)
    frame[["kind", "method"]] = frame["side"].str.split("/", expand=True)
    official = frame[frame["kind"] == "official"].set_index(["method", "tokens", "round"])
    ours = frame[frame["kind"] == "ours"].sort_index()
    cells: dict[str, dict[str, str]] = {}
    for (method, tokens), own in ours.groupby(["method", "tokens"], sort=False):
        other = "visionzip" if method == "consensusdrop" else method
        pairs = [
            (row, official.loc[key])
            for row in own.itertuples()
            if (key := (other, tokens, row.round)) in official.index
        ]
        ratios = [row.ms / beside["ms"] for row, beside in pairs if row.layers == beside["layers"]]
        if ratios:
            names = method if other == method else f"{method} / {other}"
            text = f"{np.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            cells.setdefault(names, {})[f"{tokens} tokens"] = text
    table = pd.DataFrame(cells).T.rename_axis("ours / official")
    return table.to_markdown(disable_numparse=True, colalign=("left", *["right"] * table.shape[1]))


def readme_numbers(photo: Photo, on_gpu: dict[str, Any], servers: Servers) -> dict[str, str]:
    """The numbers in README's sentences, by the name of their mark. `full` is not counted as a method."""
    cpu = json.loads((ROOT / "docs/efficiency" / TIMED).read_text())
    slow = {(row["method"], row["tokens"]): row["ttft_ms"] / 1000 for row in cpu["rows"]}
    fast = {(row["method"], row["tokens"]): row["ttft_ms"] for row in on_gpu["rows"]}
    reduced = [time for (_, tokens), time in fast.items() if tokens == 57]
    printed = {(row["method"], row["tokens"]): row for row in json.loads(PAPER.read_text())["tables"]["llava_1_5_7b"]}
    own, full = printed["ConsensusDrop", 64], printed["LLaVA-1.5-7B", 576]
    sooner = f"{own['ttft_ms']} instead of {full['ttft_ms']} ms"
    busy, single = (servers.against(load) for load in ("32 at once", "1 at once"))
    return {
        "methods": str(len(METHODS) - 1),
        "cpu": f"{slow['full', 576]:.1f} s from 576 tokens and {slow['consensusdrop', 57]:.1f} s from 57",
        "gpu": f"{fast['full', 576]:.0f} ms with all tokens and {min(reduced):.0f} to {max(reduced):.0f} ms with 57",
        "paper": f"{own['rel_percent']} % of its accuracy stays and the first token comes after {sooner}",
        "busy": busy,
        "single": single,
        "full": photo.score("gqa", FULL),
        "own": photo.score("gqa", "consensusdrop:positions=keep"),
        "own-renumber": photo.score("gqa", "consensusdrop"),
        "ahead": str(len(photo.ahead("keep"))),
    }


def card_numbers(out: Path, photo: Photo, unseen: Photo) -> dict[str, str]:
    """The numbers of the model cards, by the name of their mark."""
    drawn = drawn_facts(out)
    found = {"mini-textvqa": drawn["full"], "mini-renumber": drawn["renumber"], "mini-keep": drawn["keep"]}
    for mark, folder, name in (
        ("mini-gqa", out, "gqa"),
        ("mini-pope", out, "pope"),
        ("mini-vqav2", out, "vqav2"),
        ("mini-seed", out, "seed"),
        ("mini-large", out / "large", "textvqa"),
    ):
        row = next(row for row in read_rows(folder) if row.benchmark == name and row.full and row.complete)
        found[mark] = f"{row.score:.1f}{half(row.bounds)}"
    found |= {f"photo-{name}": photo.score(name, FULL) for name in (*BENCHMARKS, "textvqa")}
    counts = json.loads((ROOT / WHOLE).read_text())["full"]
    named, there = counts["name"], counts["existence, present"]
    words = {"photo-name": f"{named[0]} of {named[1]}", "photo-present": f"{there[0]} of {there[1]}"}
    return found | words | {"photo-unseen": unseen.score("gqa", FULL)}


class Servers:
    """Measurements of servers over HTTP, which alternate with plain vLLM.

    Args:
        bench: what `bench --serve` wrote.
    """

    def __init__(self, bench: dict[str, Any]) -> None:
        self.bench, frame = bench, pd.DataFrame(bench["measured"])
        keys = [key for key, *_ in SERVED_COLUMNS if key in frame]
        plain = frame[frame["case"] == "plain"].set_index(["load", "round"])[keys]
        others = frame[frame["case"] != "plain"].set_index(["load", "round"])
        others[keys] = others[keys] / plain.reindex(others.index)
        self.plain = plain.groupby("load").median()
        self.ratios = others.groupby(["load", "case"])[keys].median()  # within a round
        self.loads = list(dict.fromkeys(frame["load"]))
        busy = frame["load_average"]
        self.rounds = f"{frame['round'].nunique()} rounds, at a load average of {busy.min():.1f} to {busy.max():.1f}"

    def against(self, load: str) -> str:
        """Ratios of ConsensusDrop to plain vLLM, in a sentence."""
        keys = ("requests_per_second", "opening_p50", "first_token_p50")
        rate, opening, first = (f"{self.ratios.loc[(load, 'consensusdrop'), key]:.2f}" for key in keys)
        return (
            f"{rate} times plain vLLM's requests per second, with the first token after {opening} of its time for "
            f"first questions and {first} at the median of all"
        )

    def table(self, photo: Photo) -> str:
        """The table of SERVING, with what it was measured on."""
        lines = [["at once", "positions", *(title for _, title, *_ in SERVED_COLUMNS), "right (%)"]]
        lines.append(["--:", ":--", *["--:"] * (len(lines[0]) - 2)])
        for load in self.loads:
            times = [f"{scale * self.plain.loc[load, key]:.{digits}f}" for key, _, scale, digits in SERVED_COLUMNS]
            lines.append([load.split()[0], "plain vLLM", *times, photo.score("gqa", FULL)])
            for case, placed in PLACED.items():
                ratios = [f"{self.ratios.loc[(load, case), key]:.2f}" for key, *_ in SERVED_COLUMNS]
                right = photo.score("gqa", "consensusdrop" + ":positions=keep" * (placed == "kept"))
                lines.append([load.split()[0], placed, *ratios, right])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n\nMedians of {self.rounds}."

    @property
    def beside(self) -> str:
        """The sentence below it, of another client's measurements of single questions under one load."""
        (load,), parts = self.loads, []
        for case, placed in PLACED.items():
            row = self.ratios.loc[load, case]
            rate, first = row["requests_per_second"], row["first_token_p50"]
            parts.append(f"{placed} {rate:.2f} and {first:.2f}")
        return (
            f"`vllm bench serve`, single questions {load}, {self.rounds} "
            f"([samples](efficiency/{WITNESS})): requests/s and first token {'; '.join(parts)}."
        )


def statements(text: str) -> list[str]:
    """The sentences, table rows and comments of code on a page that state something and are not filled from results."""
    text = SPAN.sub(r"\1", text)
    text = re.sub(f"{BEGIN}.*?{END}", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", lambda code: "\n\n".join(re.findall("# .*", code[0])), text, flags=re.DOTALL)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=[-|#] ?|\d+\. )", text):
        for part in re.split(r"(?<=[^\d][.!?]) (?=\S)", " ".join(block.split())):
            if LOOSE.search(re.sub(r"`[^`]*`|\]\([^)]*\)|<!--[\w-]+-->", "", part)):
                found.append(part)
    return found


def loose(texts: Mapping[str, str]) -> list[str]:
    """What pages state without a source, and what has a source and is not stated any more. Of the changelog only the
    last entry counts.

    Args:
        texts: of pages, in place of those in the repository.
    """
    faults = []
    for name, sourced in json.loads((ROOT / STATED).read_text("utf-8")).items():
        text = texts.get(name, (ROOT / name).read_text("utf-8"))
        stated = statements(text.split("\n## ")[1] if name == "CHANGELOG.md" else text)
        known = [line for lines in sourced.values() for line in lines]
        faults += [f"{name}: no source in {STATED}: {line}" for line in stated if line not in known]
        faults += [f"{name}: {STATED} has what it does not say: {old}" for old in known if old not in stated]
    return faults


def with_table(page: Path, table: str) -> str:
    """The text of a page with its table in place of the one it has."""
    head, rest = page.read_text("utf-8").split(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def drawn_facts(out: Path) -> dict[str, str]:
    """Scores of the drawn model on TextVQA: of all tokens, of 64 with each position policy, and of a uniform grid."""
    rows = [row for row in read_rows(out) if row.benchmark == "textvqa" and row.complete and row.tokens in (0, 64)]
    runs = {(one_word(row.config["method"], row.config["changed"]), policy(row.config)): row for row in rows}
    chosen = {
        "full": runs[FULL, None],
        "grid": runs["uniform_grid", "renumber"],
        "renumber": runs["consensusdrop", "renumber"],
        "keep": runs["consensusdrop", "keep"],
    }
    test = compare(chosen["keep"], chosen["renumber"])
    assert test is not None
    scores = {name: f"{row.score:.1f}{half(row.bounds)}" for name, row in chosen.items()}
    return {**scores, "tokens": "64", "positions": signed(test.difference, test.bounds)}


def every_run(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Every kept run as a line.

    Args:
        folders: of results, by the first part of `set`.
    """
    lines = []
    for first, out in folders.items():
        for folder in sorted({out, *(path.parents[1] for path in out.glob(f"*/*/{CONFIG}"))}):
            name = "/".join(filter(None, (first, folder.relative_to(out).as_posix()))).removesuffix("/.")
            for row in read_rows(folder):
                config, (low, high) = row.config, row.bounds or (None, None)
                account = (row.metrics or {}).get("account") or {}
                lines.append(
                    {
                        "set": name,
                        "model": Path(config["model"]).name,
                        "data": config["data"],
                        "benchmark": row.benchmark,
                        "method": one_word(config["method"], config["changed"]),
                        "positions": policy(config),
                        "seed": config["changed"].get("seed"),
                        "tokens": config["tokens"],
                        "merged": config["merged"],
                        "part": row.part,
                        "questions": row.metrics and row.metrics["questions"],
                        "images": row.images,
                        **{
                            key: _rounded(value, 4)
                            for key, value in (("score", row.score), ("low", low), ("high", high))
                        },
                        "tokens_per_layer": _rounded(account.get("average"), 4),
                        "flops": _rounded((account.get("flops") or {}).get("total")),
                    }
                )
    return lines


def _rounded(value: float | None, digits: int | None = None) -> float | None:
    return None if value is None else round(value, digits)


def evidence(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that `recommend` knows: published results, those of the paper, and of our runs the photograph model on the
    benchmarks that can move, methods as published.
    """
    found, ledger = [], json.loads((ROOT / LEDGER).read_text("utf-8"))
    for entry in ledger["entries"]:
        name = entry["method"]
        positions = {"positions renumbered": "renumber", "positions kept": "keep"}.get(name, "")
        own = {"family": entry.get("model", "llava-1.5-7b"), "method": titles().get(name.lower(), name)}
        own |= {"tokens": entry["tokens"], "source": ledger["sources"][entry["source"]], "positions": positions}
        found += [own | {"benchmark": benchmark, "score": score} for benchmark, score in entry["results"].items()]
    columns = {"rel_percent": "relative", "gqa": "gqa", "textvqa": "textvqa"}
    for table, number, family in (("llava_1_5_7b", 1, "llava-1.5-7b"), ("llava_next_7b", 2, "llava-next-7b")):
        for row in json.loads(PAPER.read_text())["tables"][table]:
            method = titles().get(row["method"].lower(), row["method"])
            own = {"family": family, "method": method, "tokens": row["tokens"], "positions": ""}
            own["source"] = f"ConsensusDrop, table {number}"
            scores = {benchmark: row.get(column) for column, benchmark in columns.items()}
            found += [own | {"benchmark": name, "score": score} for name, score in scores.items() if score is not None]
    for run in runs:
        known = run["set"] == "photo" and run["benchmark"] in ("gqa", "refcoco") and run["merged"] is None
        if known and run["seed"] is None and ":" not in run["method"] and run["questions"] == 300:
            tokens = 576 if run["method"] == "full" else run["tokens"]
            own = {"family": "scenes", "source": SCENES, "tokens": tokens}
            own |= {name: round(run[name], 2) for name in ("score", "low", "high")}
            found.append(own | {name: run[name] for name in ("benchmark", "method", "positions", "questions")})
    order = ("family", "method", "tokens", "benchmark", "score", "source", "positions", "questions", "low", "high")
    return [{name: row.get(name) for name in order} for row in found]


def titles() -> dict[str, str]:
    """Name of each method of this package by its title in papers, in lower case."""
    # a title such as "IDPruner, untrained" says that this is not the method of the published rows
    return {(about(name).title or name).lower(): name for name in METHODS} | {"pdrop": "pyramiddrop"}


def main(words: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write", help="generate the pages")
    commands.add_parser("check", help="compare the pages with the kept results and the sources")
    packing = commands.add_parser("pack", help="keep a folder of results")
    packing.add_argument("results", type=Path)
    packing.add_argument("--photo", action="store_true", help="as those of the photograph model")
    packing.add_argument("--gpu", action="store_true", help="as those of published models")
    given = parser.parse_args(words)
    if given.command == "pack":
        pack(given.results, ROOT / (PHOTO if given.photo else GPU if given.gpu else MEASURED))
    elif given.command == "check":
        made = pages(ROOT / "README.md")
        faults = [
            f"{name}: make pages, then commit it" for name in made if (ROOT / name).read_bytes().decode() != made[name]
        ]
        raise SystemExit("\n".join([*faults, *loose({})]) or None)
    else:
        write()


if __name__ == "__main__":
    main()
