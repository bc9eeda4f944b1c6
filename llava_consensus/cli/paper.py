"""The commands `paper ...`: the paper's tables, study, figures, claims and examples, made again with any model.

A table is a preset: the name of a file in `llava_consensus/paper/presets`, or a file like those. Its grid is run, and
its table printed with the paper's numbers beside; Markdown, LaTeX and CSV are left in `DIR/tables`. Every command that
runs a grid resumes where it was stopped.
"""

import argparse
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llava_consensus.cli import arguments, terminal
from llava_consensus.cli.arguments import arg, command
from llava_consensus.cli.ask import PICTURES
from llava_consensus.cli.evaluate import carry_out, folders, loaded_once
from llava_consensus.cli.report import CHANGED, check_results, known
from llava_consensus.errors import ConsensusError, DataError, ImageError, Interrupted, OptionError
from llava_consensus.evaluation.files import misread, read_text, write_out
from llava_consensus.evaluation.runs import knows_drawings_alone

if TYPE_CHECKING:
    from PIL.Image import Image

    from llava_consensus.evaluation.models import Runner
    from llava_consensus.evaluation.report.table import Table
    from llava_consensus.evaluation.runs.loop import RunnerLoader
    from llava_consensus.evaluation.runs.sweep import Cell
    from llava_consensus.paper.examples import KeptPatches
    from llava_consensus.paper.ledger import Cost
    from llava_consensus.paper.preset import Preset
    from llava_consensus.reduction.budget import Budget, Share
    from llava_consensus.reduction.method import Method, Shape

PATCHES, FRAMES = 256, 8  # of a clip of Video-LLaVA, frames as tiles of one picture
SUSTAINED = 1e14  # FLOP/s: a third of what an A100 can in float16
TABLES = "tables"  # folder in that of results
STUDY = {  # what the paper's controlled study asks
    "bench": "pope mme mmbench mmbench_cn textvqa gqa",
    "retention": "0.25 0.5 0.12 0.06 0.03",
    "rates": "0.1 0.3 0.5",
    "layer": None,
    "scap_bench": "gqa",
}
BUDGETS = "288 128 64 32"  # of the last part of an example
GALLERY = "consensusdrop consensusdrop:alpha=1.0 consensusdrop:alpha=0.0 visionzip vispruner divprune random"
CAUTION = (
    "The embedded llava-mini looked: its tower was trained on drawn scenes of emoji and signs alone and has never "
    "seen a photograph, so this shows where methods look through its eyes, not what a real model would keep."
)
FORMAT = arg("--format", default="markdown", choices=terminal.FORMATS, help="form of what is printed (%(default)s)")
ONLY = arg("--bench", metavar="NAMES", help="only these benchmarks (those of each table)")
AT = arg("--tokens", metavar="NUMBERS", help="only these budgets, such as 64 (those of the table)")
POSITIONS = arg("--positions", choices=("keep",), help="every row with positions kept (closed up, as the paper does)")


class Part(NamedTuple):
    """One part of the paper: what it is, where it will be, what makes it, and why it cannot be made if so."""

    title: str
    file: Path
    lines: Callable[[], Iterator[str]]
    why: str = ""


@command(
    "paper all",
    "every table of the paper that one model can give, then the study, and which weights the others need",
    ONLY,
    *arguments.LOADED,
    *arguments.RUN,
    examples=("paper all --sample 40",),
)
def everything(given: argparse.Namespace) -> Iterator[str]:
    """The output of every part, then a line for each part: its file, or what it needs.

    A run that fails leaves its cell blank, is named at the end, and does not keep the rest back.

    Raises:
        ConsensusError: the first error of a part that failed, when all others are done.
    """
    _check_bench(given.bench)
    became, errors = {}, []
    for part in _parts(given):
        became[part.title] = part.why or str(part.file)
        try:
            yield from () if part.why else part.lines()
        except Interrupted:
            raise
        except ConsensusError as error:
            became[part.title] = f"failed ({error})"
            errors.append(error)
    yield from (f"{title}: {what}" for title, what in became.items())
    if errors:
        raise errors[0]


def _check_bench(names: str | None) -> None:
    """Raises OptionError for a benchmark that no part of the paper asks."""
    from llava_consensus.paper import preset as presets

    known = dict.fromkeys(name for one in presets.names() for name in presets.read(one).benchmarks)
    known |= dict.fromkeys(str(STUDY["bench"]).split())
    if names is not None and (not names.split() or not set(names.split()) <= known.keys()):
        raise OptionError(f"--bench {names!r}: must be of {', '.join(known)}, which the tables and the study ask")


def _parts(given: argparse.Namespace) -> Iterator[Part]:
    """The tables, then the study, each with the requested benchmarks."""
    from llava_consensus.paper import preset as presets

    def asked(benchmarks: Iterable[str]) -> tuple[argparse.Namespace, str]:
        names = [name for name in benchmarks if given.bench is None or name in given.bench.split()]
        own = {**STUDY, **vars(given), "bench": " ".join(names), "tokens": None, "format": "markdown"}
        return argparse.Namespace(**own), "" if names else f"asks none of {given.bench}"

    load = loaded_once(given)
    for preset in map(presets.read, presets.names()):
        if preset.printed:
            own, why = asked(preset.benchmarks)
            lines = partial(_measured, preset, own, load)
            yield Part(preset.title, given.out / TABLES / f"{preset.name}.md", lines, why or _unfit(preset, given))
    own, why = asked(str(STUDY["bench"]).split())
    yield Part("The controlled study", given.out / "study.md", partial(study, own), why)


def _of_preset(given: argparse.Namespace) -> Iterator[str]:
    """A line for every run, then the tables."""
    from llava_consensus.paper.preset import keeping_positions, read

    preset = read(given.name)
    why = _unfit(preset, given)
    if why:
        raise OptionError(f"{preset.name}: {why}")
    yield from _measured(keeping_positions(preset) if vars(given).get("positions") == "keep" else preset, given)


for _name, _line, _presets, _own in (
    ("table", "a main table", "results, t1, t2, t3, t4-qwen-vl, t4-internvl-chat, t4-cogvlm, positions", ()),
    ("ablation", "an ablation", "alpha, temperature, recovery, anchors, score", (POSITIONS,)),
):
    command(
        f"paper {_name}",
        f"{_line} of the paper, ours and the paper's numbers side by side",
        arg("name", metavar="NAME", help=f"{_presets}, or a file like theirs"),
        ONLY,
        AT,
        *_own,
        FORMAT,
        *arguments.LOADED,
        *arguments.RUN,
        examples=(f"paper {_name} {'t1 --tokens 64' if _name == 'table' else 'alpha'} --sample 40",),
    )(_of_preset)


def _unfit(preset: "Preset", given: argparse.Namespace) -> str:
    """Why a preset cannot be run on the model; nothing where it can."""
    from llava_consensus.evaluation import models

    needs = (
        f"needs weights of {preset.weights}, for example {preset.model}"
        if preset.weights
        else "cannot be run on this model"
    )
    try:
        name = models.name_of(given.model, arguments.loading(given))
        options = {**preset.host_options, **arguments.host_options(given)}
        models.check(given.model, loading=arguments.loading(given), host_options=options)
    except ConsensusError as error:
        return f"{needs} ({error})"
    return f"{needs} (--model {given.model} is of host {name})" if preset.hosts and name not in preset.hosts else ""


def _measured(preset: "Preset", given: argparse.Namespace, load: "RunnerLoader | None" = None) -> Iterator[str]:
    """Runs a preset and writes its tables; runs that fail are blank there, and the first error is raised at the end."""
    from llava_consensus.evaluation.report.rows import read_row, with_grades
    from llava_consensus.evaluation.report.table import write
    from llava_consensus.paper import preset_tables as report
    from llava_consensus.paper.material import benches
    from llava_consensus.paper.preset import at_budgets, with_benchmarks

    preset = at_budgets(with_benchmarks(preset, given.bench), given.tokens)
    preset, left_out = _available(preset, given)
    yield from (f"{name} is left out: {error}" for name, error in left_out.items())
    places, errors, runs = _plan(preset, given), [], {}
    for place, (line, cell) in zip(places, carry_out(list(places.values()), given, load=load), strict=True):
        yield line
        if cell.result:
            runs[place] = read_row(cell.result.path)
        elif cell.error:
            errors.append(cell.error)
    results = report.Results(preset, with_grades(runs, given.out), benches(given.out))
    tables, rows = report.preset_tables(results), report.csv_rows(results)
    files = write(given.out / TABLES, preset.name, tables, rows)
    yield from terminal.written(given.format, tables, rows)
    yield f"written: {', '.join(map(str, files))}"
    if errors:
        raise errors[0]


@command(
    "paper plan",
    "the runs of a table: how many, what each needs, and the command; nothing is loaded",
    arg("name", metavar="NAME", nargs="?", default="t1", help="a table, as of `paper table` (%(default)s)"),
    ONLY,
    AT,
    arg("--model", help="checkpoint that will be asked (one that the table is about)"),
    arg("--data", default="playground/data", type=Path, metavar="DIR", help="folder of the benchmarks (%(default)s)"),
    examples=("paper plan t1 --tokens 64", "paper plan t1 --model liuhaotian/llava-v1.5-13b"),
)
def plan(given: argparse.Namespace) -> Iterator[Any]:
    """A line for each benchmark, what is missing, and the command that runs them."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.benchmarks.check import ANSWERING, check, uses
    from llava_consensus.evaluation.report.table import ABSENT, Group, Table
    from llava_consensus.paper.preset import at_budgets, read, with_benchmarks
    from llava_consensus.paper.verify import expected
    from llava_consensus.reduction.costs import SHAPES

    preset = at_budgets(with_benchmarks(read(given.name), given.bench), given.tokens)
    model, lines, unready, flops = given.model or preset.model, [], [], 0.0
    of_clip = SHAPES["llava-1.5-7b"]._replace(patches=PATCHES, tiles=FRAMES)
    shapes = {"llava_next_7b": SHAPES["llava-next-7b"], "video_llava": of_clip, "other_vlms": None, "": None}
    prompt_flops = partial(_prompt_flops, shapes.get(preset.printed, SHAPES["llava-1.5-7b"]))
    for name in preset.benchmarks:
        benchmark = benchmarks.make(name)
        runs = 1 + sum(name in preset.asked_at(row.tokens) for row in preset.rows)
        findings = list(check(benchmark, given.data))
        unready += [name] if uses(benchmark, given.data, findings)[ANSWERING] == "not ready" else []
        needs, elsewhere = ["files"] if name in unready else [], benchmark.scored_by(given.data)
        if any(one.state == "other" for one in findings):
            needs.append(f"the official files, not a part or another version (llava-consensus data check {name})")
        if elsewhere:
            how = f"judge {name}" if benchmark.judge else f"score {name} --export FILE"
            needs.append(f"{elsewhere} (llava-consensus {how})")
        flops += sum(map(prompt_flops, [None, *(row.tokens for row in preset.rows)])) * (benchmark.count or 0)
        wide = ABSENT if benchmark.paper is None or not benchmark.count else expected(benchmark)
        lines.append((name, f"{benchmark.count or 0:,}", str(runs), wide, ", ".join(needs) or "nothing"))
    budgets = ", ".join(dict.fromkeys(f"{row.tokens:g}" for row in preset.rows))
    head = ("benchmark", "questions", "runs", "expected ± at all, 1,000, 300", "still needs")
    yield terminal.drawn(Table(f"{preset.title}, at {budgets} tokens", head, (Group("", tuple(lines)),)))
    hours = f"{flops / SUSTAINED / 3600:.1f} hours at {1e-12 * SUSTAINED:.0f} TFLOP/s sustained"
    ours = f"{1e-15 * flops:,.0f} PFLOP of prefills, {hours}; decoding comes on top, shared pictures are encoded once"
    yield f"cost: {ours if flops else 'unknown, no account of this model is here'}"
    yield f"weights: {model}" + (f", of {preset.weights}" if preset.weights else "")
    if unready:
        yield f"first: llava-consensus data download {' '.join(unready)} --data {given.data}"
    own = " --trust-remote-code" * preset.remote_code
    asked = "".join(f" --{one} '{value}'" for one in ("bench", "tokens") if (value := getattr(given, one)))
    yield f"then:  llava-consensus paper table {given.name}{asked} --model {model}{own} --data {given.data}"


def _prompt_flops(shape: "Shape | None", tokens: int | float | None) -> float:
    """FLOPs of tower and prefill with a budget, None for all tokens, as a cut before the language model costs; 0
    without a shape.
    """
    from llava_consensus.reduction.costs import llm_flops, vision_flops

    if shape is None:
        return 0.0
    kept = shape.available if tokens is None else min(shape.available, round(tokens))
    return llm_flops(shape, [kept] * shape.layers) + vision_flops(shape, [shape.patches] * shape.feature_blocks)


def _available(preset: "Preset", given: argparse.Namespace) -> "tuple[Preset, dict[str, DataError]]":
    """A preset with the benchmarks whose files are there, and what is missing of the others. Raises the first error
    where there are none.
    """
    from llava_consensus.evaluation import benchmarks

    missing: dict[str, DataError] = {}
    for name in preset.benchmarks:
        try:
            benchmarks.make(name).load(given.data)
        except DataError as error:
            missing[name] = error
    there = {name: column for name, column in preset.benchmarks.items() if name not in missing}
    if not there:
        raise next(iter(missing.values()))
    return replace(preset, benchmarks=there), missing


def _plan(preset: "Preset", given: argparse.Namespace) -> "dict[tuple[str, str], Cell]":
    """Every run of a preset by its place in the tables, each checked: all tokens, then its rows, on each benchmark."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.runs.configuration import prepare
    from llava_consensus.evaluation.runs.sweep import Cell
    from llava_consensus.methods import make
    from llava_consensus.paper.preset_tables import key
    from llava_consensus.reduction.budget import budget

    made = {row: (arguments.one_word_method(row.method), budget(row.tokens, row.merged)) for row in preset.rows}
    cells = {}
    for name in preset.benchmarks:
        config = arguments.config(given, benchmarks.make(name), make("full"))
        sample = config.sample or (None if config.limit else preset.samples.get(name))
        full = prepare(replace(config, sample=sample, host_options={**preset.host_options, **config.host_options}))
        cells[key(None, name)] = Cell(full)
        for row, (method, tokens) in made.items():
            if name not in preset.asked_at(row.tokens):
                continue
            cells[key(row, name)] = Cell(full.reduced_by(method, tokens, given.match))
    return cells


def _check_layer(layer: int | None, model: str, revision: str | None) -> None:
    """Raises OptionError for a layer beyond `num_hidden_layers` of the model's configuration."""
    from llava_consensus.evaluation.files import read_json
    from llava_consensus.evaluation.models import find

    config = read_json(find(model, revision).folder / "config.json", "Fetch the checkpoint again", dict)
    inner = config.get("text_config")
    layers = (inner if isinstance(inner, dict) else config).get("num_hidden_layers")
    if layer is not None and isinstance(layers, int) and not 1 <= layer < layers:
        raise OptionError(f"--layer {layer}: must be in 1..{layers - 1}, {model} has {layers} decoder layers")


@command(
    "paper study",
    "selection inside the language model by vision, by the question, by both; the model's decoder must allow cuts",
    arg("--bench", default=STUDY["bench"], metavar="NAMES", help="benchmarks (%(default)s)"),
    arg("--retention", default=STUDY["retention"], metavar="SHARES", help="shares of tokens kept (%(default)s)"),
    arg("--rates", default=STUDY["rates"], metavar="SHARES", help="what recovery adds of the other side (%(default)s)"),
    arg("--layer", type=int, help="decoder layers that see everything (2, less in shallow models)"),
    arg(
        "--scap-bench",
        default=STUDY["scap_bench"],
        metavar="NAME",
        help="benchmark on which SCAP is compared with every layer; none leaves that out (%(default)s)",
    ),
    *arguments.LOADED,
    *arguments.RUN,
    examples=("paper study --sample 40",),
)
def study(given: argparse.Namespace) -> Iterator[str]:
    """A line for every run, then the tables; `paper/study/results.py` says what is in the files it leaves."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.methods import make
    from llava_consensus.paper.study import results
    from llava_consensus.paper.study import tables as report

    retentions, rates = _shares(given.retention), _rates(given.rates)
    _check_layer(given.layer, given.model, given.revision)
    full = [arguments.config(given, benchmarks.make(name), make("full")) for name in given.bench.split()]
    cells, probed = results.grid(full, retentions, rates, given.layer), []
    if given.scap_bench != "none":
        config = arguments.config(given, benchmarks.make(given.scap_bench), make("full"))
        probed = [results.probing(config, retentions[0])]
    reduced = [cell for cell in cells if cell.plan.method.reduces]
    whole = [cell for cell in cells if cell not in reduced]
    groups = (whole, given.out), (reduced + probed, given.out / results.RUNS)
    found = yield from _all_run(groups, given, loaded_once(given))
    content = results.study(found[: len(cells)])
    yield from _left(given.out / results.STUDY, content, report.study_tables(content), report.study_csv(content))
    if probed:
        scap = results.scap(found[-1])
        yield from _left(given.out / results.SCAP, scap, [], scap["layers"])


def _all_run(
    groups: "Iterable[tuple[Sequence[Cell], Path]]", given: argparse.Namespace, load: "RunnerLoader | None"
) -> Generator[str, None, list[Path]]:
    """Runs groups of cells, each into a folder of its own; a line for each, and their folders at the end."""
    done = []
    for group, out in groups:
        for line, cell in carry_out(group, given, out, load):
            yield line
            done.append(cell)
    return folders(done)


def _left(
    file: Path, content: Mapping[str, Any], tables: "Sequence[Table]", rows: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Writes what was found, and its tables beside it under the same name; prints the tables."""
    from llava_consensus.evaluation.files import write_json
    from llava_consensus.evaluation.report.table import write

    write_json(file, content)
    write(file.parent, file.stem, tables, rows)
    yield from terminal.written("markdown", tables, [])
    yield f"written: {file}"


def _shares(text: str) -> "list[Share]":
    from llava_consensus.reduction.budget import Share

    shares = [budget for budget in arguments.budgets(text) if isinstance(budget, Share)]
    if not shares or len(shares) < len(text.split()):
        raise OptionError(f"--retention {text!r}: must be shares of the tokens, such as '0.25 0.5'")
    return shares


def _rates(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split()]
    except ValueError:
        raise OptionError(f"--rates {text!r}: must be numbers from 0 to 1, such as '0.1 0.3 0.5'") from None


@command(
    "paper verify",
    "before any method is judged: prompts against official LLaVA's, and scores with all tokens against published ones",
    arg("--bench", metavar="NAMES", help="benchmarks (gqa pope textvqa; with --answers, all that were published)"),
    arg("--published", type=Path, metavar="FILE", help="scores by benchmark, as JSON (LLaVA-1.5-7B's)"),
    arg("--answers", action="store_true", help="ask no model: score LLaVA's own answer files (eval.zip) under --data"),
    *arguments.LOADED,
    *arguments.RUN,
    examples=(
        "paper verify --bench pope --published scores.json --sample 300",
        "paper verify --answers --data playground/data",
    ),
)
def verify(given: argparse.Namespace) -> Iterator[Any]:
    """What is pinned of the checkpoint, the table of prompts, a line for every run, then the table of scores.

    Raises:
        DataError: a prompt is another one, or a score differs by more than its sampling error.
    """
    from llava_consensus.evaluation import benchmarks, models
    from llava_consensus.evaluation.files import read_json
    from llava_consensus.evaluation.models.llava import LlavaRunner
    from llava_consensus.evaluation.report.rows import read_row
    from llava_consensus.evaluation.runs.configuration import prepare
    from llava_consensus.evaluation.runs.sweep import Cell, LoadedOnce
    from llava_consensus.methods import make
    from llava_consensus.paper import official
    from llava_consensus.paper.verify import verify_table

    asked = given.bench or " ".join(official.ANSWERS if given.answers else ("gqa", "pope", "textvqa"))
    made = [benchmarks.make(name) for name in asked.split()]
    if given.answers:
        yield terminal.drawn(official.answers_table(made, given.data))
        return
    known = {one.name: one.paper for one in made if one.paper is not None}
    published = read_json(given.published, "Give benchmark: score", dict) if given.published else known
    plans = [prepare(arguments.config(given, one, make("full"))) for one in made]
    yield from official.revision_lines(given.model, plans[0].description["weights"])
    load = LoadedOnce(models.load)
    runner = load(plans[0].model, plans[0].loading, plans[0].host_options)
    if isinstance(runner, LlavaRunner):
        yield terminal.drawn(official.prompts_table(plans, runner, models.find(plans[0].model).folder))
    else:
        yield "prompts are not compared: this checkpoint is not in official LLaVA's layout"
    found = yield from _all_run([(list(map(Cell, plans)), given.out)], given, load if given.workers == 1 else None)
    runs = [read_row(folder) for folder in found]
    yield terminal.drawn(verify_table(runs, published, {one.name: one.count for one in made}))


@command(
    "paper ledger",
    "published results with their budgets as entering, kept, layer mean and FLOPs",
    arg("--sort", default="average", metavar="COLUMN", help="one of the CSV's columns (%(default)s)"),
    FORMAT,
    arguments.JSON,
    examples=("paper ledger --sort average", "paper ledger --json"),
)
def ledger(given: argparse.Namespace) -> Iterator[str]:
    """The table of all entries."""
    from llava_consensus.paper import ledger as published
    from llava_consensus.reduction.costs import SHAPES

    depths = {name: shape.layers for name, shape in SHAPES.items()}
    rows = [published.account(entry, depths.get(entry.model, 0), price) for entry in published.entries()]
    rows = published.ordered(rows, given.sort)
    if given.json:
        yield json.dumps(published.cells(rows), indent=1)
        return
    yield from terminal.written(given.format, [published.ledger_table(rows)], published.cells(rows))


def price(model: str, layers: Sequence[int]) -> "Cost":
    """FLOPs and cache of a prompt on a model by our account, with the paper's 66 rows of text."""
    from llava_consensus.paper.ledger import Cost
    from llava_consensus.reduction.costs import SHAPES, kv_bytes, llm_flops

    return Cost(llm_flops(SHAPES[model], layers), kv_bytes(SHAPES[model], layers))


@command(
    "paper figures",
    "every figure of the paper from result files, as PNG and SVG",
    arguments.OUT_DIR,
    arg("--to", type=Path, metavar="FOLDER", help="where they are written (DIR/figures)"),
    examples=("paper figures --out results",),
)
def figures(given: argparse.Namespace) -> Iterator[str]:
    """Draws what there are results for; names what there are none for, and what makes them.

    Raises:
        DataError: no such folder, or a damaged file in it.
    """
    from llava_consensus.paper import figures as drawings

    check_results(given.out)
    folder = _made(given.to or given.out / "figures")
    count = 0
    with misread(f"{given.out}: a file of results", CHANGED):
        for drawn in drawings.draw(drawings.read(given.out, known()), folder):
            count += bool(drawn.files)
            if drawn.files:
                yield f"{drawn.figure.name}: {drawn.figure.title}"
            else:
                yield f"{drawn.figure.name}: not drawn, {drawn.missing}. It comes with: {drawn.figure.makes}"
    yield f"{count} of {len(drawings.FIGURES)} figures are drawn: {folder}"


def _made(folder: Path) -> Path:
    """A folder, made where it is missing. DataError where its place is taken by a file."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file, and pictures are written to a folder. Give another name")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@command(
    "paper claims",
    "the paper's claims, judged by result files",
    arguments.OUT_DIR,
    arg("--write", type=Path, metavar="FILE", help="update FILE between its markers"),
    examples=("paper claims --out results",),
)
def claims(given: argparse.Namespace) -> Iterator[str]:
    """The paper's claims, each judged by what is in the folder of results.

    Raises:
        DataError: no such folder, a damaged file in it, or a page without markers.
    """
    from llava_consensus.evaluation.report.table import replace_block
    from llava_consensus.paper import claims as judged
    from llava_consensus.paper import figures as drawings

    check_results(given.out)
    with misread(f"{given.out}: a file of results", CHANGED):
        text = judged.claims_table(drawings.read(given.out, known()))
    if given.write:
        write_out(given.write, replace_block(read_text(given.write), text, str(given.write)).encode())
    yield text


@command(
    "paper examples",
    "pictures on which the two signals disagree, gain or lose, drawn",
    arg(
        "--benchmark",
        default="gqa",
        metavar="NAME",
        names="benchmarks",
        help="whose questions are searched (%(default)s)",
    ),
    arg(
        "--by",
        default="disagreement",
        help="disagreement of the signals; gained, lost: answers that both together turned right, wrong; questions: "
        "two about one picture that keep the least in common (%(default)s)",
    ),
    arg("--count", default=4, type=int, help="pictures (%(default)s)"),
    arg("--tokens", default=128, type=int, help="budget of the comparison (%(default)s)"),
    arg("--budgets", default=BUDGETS, metavar="NUMBERS", help="budgets in the last part of a drawing (%(default)s)"),
    arg("--limit", default=200, type=int, help="search the first questions only (%(default)s)"),
    arg("--to", type=Path, metavar="FOLDER", help="where they are written (DIR/examples)"),
    *arguments.LOADED,
    arguments.DATA_DIR,
    arguments.OUT_DIR,
    arguments.BENCHMARK_OPTION,
    examples=("paper examples --benchmark gqa --tokens 128 --by disagreement",),
)
def examples(given: argparse.Namespace) -> Iterator[str]:
    """Searches, asks what was found again with every budget, and draws."""
    from llava_consensus.evaluation import models
    from llava_consensus.evaluation.runs.configuration import prepare
    from llava_consensus.methods import make
    from llava_consensus.paper import example_search as search
    from llava_consensus.paper import examples as drawings
    from llava_consensus.paper.figures import style
    from llava_consensus.reduction.budget import Budget, amount
    from llava_consensus.reduction.options import choose

    choose("by", given.by, search.WAYS)
    if given.count < 1:
        raise OptionError(f"count={given.count} must be at least 1")
    more = [amount(one) for one in arguments.budgets(given.budgets)]
    whole = [one for one in more if isinstance(one, int)]
    if len(whole) < len(more):
        raise OptionError(f"--budgets {given.budgets!r}: must be whole numbers, such as '{BUDGETS}'")
    budgets = sorted({Budget(given.tokens).tokens, *whole}, reverse=True)
    with style.sheet():  # without matplotlib this ends before anything is asked
        folder = _made(given.to or given.out / "examples")
    plan = prepare(arguments.config(given, arguments.benchmark(given.benchmark, given), make("full")))
    if plan.benchmark.frames:
        raise OptionError(f"--benchmark {given.benchmark}: asks about videos, and examples are drawn of pictures")
    runner = models.load(plan.model, plan.loading, plan.host_options)
    questions = search.search(plan, runner, given.by, given.count, given.tokens)
    if not questions:
        yield f"{plan.benchmark.name}: no such question among the first {len(plan.questions)}"
        return
    found = search.examples(plan, runner, questions, budgets)
    name = f"{given.benchmark}-{given.tokens}-{given.by}"
    with style.sheet():
        style.save_all(drawings.rows(found, given.tokens), folder, name)
        for number, one in enumerate(found, 1):
            style.save_all(drawings.whole(one, given.tokens), folder, f"{name}-{number}")
    for question, one in zip(questions, found, strict=True):
        yield f"question {question.question_id}: disagreement {100 * (one.disagreement or 0):.0f} %, {one.question}"
    yield f"{len(found)} examples: {folder}/{name}*"


@command(
    "paper gallery",
    "what methods keep of a folder of photographs",
    arg("folder", type=Path, metavar="FOLDER", help="photographs"),
    arg("--question", default="What is in the picture?", help="asked about each (%(default)s)"),
    arg("--methods", default=GALLERY, metavar="NAMES", help="each NAME or NAME:key=value,... (%(default)s)"),
    arg("--tokens", default=64, type=int, help="budget of every method (%(default)s)"),
    arg("--to", type=Path, default=Path("results/gallery"), metavar="DIR", help="folder of the sheets (%(default)s)"),
    *arguments.LOADED,
    examples=("paper gallery photographs --tokens 64",),
)
def gallery(given: argparse.Namespace) -> Iterator[str]:
    """A sheet for every photograph: what each method keeps of it.

    Raises:
        DataError: no folder, no picture in it, or at the end pictures that cannot be read.
        OptionError: sheets would lie among the photographs.
    """
    from llava_consensus.evaluation.report.rows import Catalogue, Row
    from llava_consensus.evaluation.runs.configuration import describe_reduction
    from llava_consensus.paper import examples as drawings
    from llava_consensus.paper.figures import style
    from llava_consensus.reduction.budget import Budget

    if not given.folder.is_dir():
        raise DataError(f"{given.folder}: no such folder of photographs")
    paths = [path for path in sorted(given.folder.iterdir()) if path.suffix.lower() in PICTURES]
    if not paths:
        raise DataError(f"{given.folder}: no .png, .jpg or .webp in it")
    if given.to.resolve() == given.folder.resolve():
        raise OptionError(f"--to {given.to}: is the folder of the photographs. Give another")
    budget, methods = Budget(given.tokens), {}
    for method in map(arguments.one_word_method, given.methods.split()):
        config = describe_reduction(method, budget)
        titles = Catalogue({config["method"]: method.title or config["method"]})
        methods[Row(config, None, 0, Path(), titles).label.split(" (alpha")[0]] = method
    with style.sheet():
        folder = _made(given.to)
    runner = arguments.load(given)
    caution = CAUTION if knows_drawings_alone(given.model) else f"Looked at by {given.model}."
    unread = []
    for path in paths:
        try:
            image, chosen = _look(runner, path, methods, budget, given.question)
        except ImageError as error:
            unread.append(str(error))
            continue
        name = f"{path.stem}-{path.suffix[1:]}"  # a.jpg and a.png have a sheet each
        with style.sheet():
            side, words = round(runner.visual_tokens**0.5), f"Asked: {given.question} {caution}"
            style.save_all(drawings.methods(image, side, chosen, words), folder, name)
        yield f"{path.name}: {folder / name}.png"
    if unread:
        raise DataError(f"{len(unread)} of {len(paths)} pictures have no sheet: {'; '.join(unread)}")


def _look(
    runner: "Runner", path: Path, methods: "dict[str, Method]", budget: "Budget", question: str
) -> "tuple[Image, dict[str, KeptPatches]]":
    """One photograph, and what each method, by its title, keeps of it."""
    from llava_consensus.evaluation.media import open_image
    from llava_consensus.evaluation.models import Prompt
    from llava_consensus.paper.example_search import selection

    image = open_image(path, upright=True)
    if runner.grid_columns(image.size):
        raise OptionError("gallery: a picture in tiles is drawn by `llava-consensus ask --overlay`")
    prompt = replace(Prompt(question), max_new_tokens=1)
    chosen = {}
    for title, method in methods.items():
        with runner.attach(method, budget):
            _, answer = runner.ask([image], prompt)
        chosen[title] = replace(selection(runner, answer, budget.tokens), answer="")
    return image, chosen
